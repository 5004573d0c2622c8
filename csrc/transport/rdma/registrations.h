// Registered memory of one domain, found again by interval. Where freed memory can be seen
// (platform/memory_monitor.h) a registration is kept for the next use; where it cannot, it lasts as
// long as someone uses it, since the same address may mean other pages a moment later.
#pragma once

#include <atomic>
#include <list>
#include <map>
#include <memory>

#include "platform/memory_monitor.h"
#include "platform/verbs.h"

namespace pycomm::transport::rdma {

// Bytes that all domains of a process hold registered; what the kernel locks counts against
// RLIMIT_MEMLOCK.
class RegistrationBudget {
 public:
  explicit RegistrationBudget(std::uint64_t bytes_max) : bytes_max_(bytes_max) {}
  bool take(std::uint64_t bytes) {
    std::uint64_t held = held_.load();
    do {
      if (bytes > bytes_max_ || held > bytes_max_ - bytes) return false;
    } while (!held_.compare_exchange_weak(held, held + bytes));
    return true;
  }
  void give_back(std::uint64_t bytes) { held_.fetch_sub(bytes); }
  // Asks all domains to let go of what they keep: it may be there at the next try.
  void want() { num_wants_.fetch_add(1); }
  std::uint64_t num_wants() const { return num_wants_.load(std::memory_order_relaxed); }
  std::uint64_t bytes_max() const { return bytes_max_; }
  std::uint64_t held() const { return held_.load(); }

 private:
  const std::uint64_t bytes_max_;
  std::atomic<std::uint64_t> held_{0};
  std::atomic<std::uint64_t> num_wants_{0};
};

struct RegistrationCounters {
  std::uint64_t registrations = 0;
  std::uint64_t cache_hits = 0;
  std::uint64_t evictions = 0;
  std::uint64_t refusals = 0;  // the bytes went through a buffer instead
};

class Registered {
 public:
  Registered(std::unique_ptr<platform::verbs::Memory> memory, std::uintptr_t begin,
             std::uint64_t bytes, unsigned access, std::shared_ptr<RegistrationBudget> budget)
      : memory_(std::move(memory)),
        begin_(begin),
        bytes_(bytes),
        access_(access),
        budget_(std::move(budget)) {}
  ~Registered() {
    memory_.reset();
    if (budget_) budget_->give_back(bytes_);
  }
  Registered(const Registered&) = delete;
  Registered& operator=(const Registered&) = delete;

  std::uint32_t local_key() const { return memory_->local_key(); }
  std::uint32_t remote_key() const { return memory_->remote_key(); }
  std::uintptr_t begin() const { return begin_; }
  std::uintptr_t end() const { return begin_ + bytes_; }
  unsigned access() const { return access_; }

 private:
  std::unique_ptr<platform::verbs::Memory> memory_;
  const std::uintptr_t begin_;
  const std::uint64_t bytes_;
  const unsigned access_;
  const std::shared_ptr<RegistrationBudget> budget_;
};

class Registrations {
 public:
  // `monitor` may be null: then nothing is kept.
  Registrations(platform::verbs::Domain& domain, std::shared_ptr<RegistrationBudget> budget,
                platform::MemoryMonitor* monitor)
      : domain_(domain), budget_(std::move(budget)), monitor_(monitor) {}

  // Memory that covers [data, data + bytes) with at least this access. Errors: kSystem (memlock,
  // the NIC's limits): the caller then copies.
  Result<std::shared_ptr<Registered>> acquire(const void* data, std::uint64_t bytes,
                                              unsigned access);
  // A registration that nobody else is handed, and that ends with its last use.
  Result<std::shared_ptr<Registered>> acquire_apart(const void* data, std::uint64_t bytes,
                                                    unsigned access);
  // Lets go of what nobody uses, if another domain of this process is short of memory.
  void heed_others() {
    if (wants_seen_ == budget_->num_wants()) return;
    wants_seen_ = budget_->num_wants();
    while (evict_one()) {
    }
  }
  // Memory of a GPU; never kept.
  Result<std::shared_ptr<Registered>> acquire_device(const void* data, std::uint64_t bytes,
                                                     unsigned access);
  const RegistrationCounters& counters() const { return counters_; }

 private:
  struct Kept {
    std::shared_ptr<Registered> registered;
    std::list<std::uintptr_t>::iterator age;
  };
  void drop_freed();
  void drop(std::multimap<std::uintptr_t, Kept>::iterator it);
  bool evict_one();
  Result<std::shared_ptr<Registered>> make(const void* data, std::uint64_t bytes, unsigned access);
  std::shared_ptr<Registered> find(std::uintptr_t begin, std::uintptr_t end, unsigned access);

  platform::verbs::Domain& domain_;
  const std::shared_ptr<RegistrationBudget> budget_;
  platform::MemoryMonitor* const monitor_;
  std::uint64_t seen_ = 0;                    // of the monitor's events
  std::multimap<std::uintptr_t, Kept> kept_;  // by begin
  std::list<std::uintptr_t> ages_;            // begins, the least recently used first
  std::uint64_t wants_seen_ = 0;
  std::uint64_t bytes_longest_ = 0;  // of any kept one
  RegistrationCounters counters_;
};

}  // namespace pycomm::transport::rdma

#include "transport/rdma/registrations.h"

#include <algorithm>

namespace pycomm::transport::rdma {
namespace {

constexpr std::size_t kKeptMax = 4096;

}  // namespace

void Registrations::drop(std::multimap<std::uintptr_t, Kept>::iterator it) {
  ages_.erase(it->second.age);
  kept_.erase(it);
}

// Whoever still uses one keeps it alive; nobody new finds it.
void Registrations::drop_freed() {
  platform::MemoryMonitor::Freed freed[64];
  for (;;) {
    bool all = false;
    const int count = monitor_->freed_since(&seen_, freed, 64, &all);
    if (all) {
      ages_.clear();
      kept_.clear();
    }
    for (int i = 0; i < count; ++i) {
      const std::uintptr_t reach = std::min<std::uintptr_t>(freed[i].begin, bytes_longest_);
      auto it = kept_.lower_bound(freed[i].begin - reach);
      while (it != kept_.end() && it->first < freed[i].end) {
        const auto next = std::next(it);
        if (it->second.registered->end() > freed[i].begin) drop(it);
        it = next;
      }
    }
    if (count < 64) return;
  }
}

bool Registrations::evict_one() {
  for (const std::uintptr_t begin : ages_) {
    auto [it, last] = kept_.equal_range(begin);
    for (; it != last; ++it) {
      if (it->second.registered.use_count() > 1) continue;
      drop(it);
      ++counters_.evictions;
      return true;
    }
  }
  return false;
}

std::shared_ptr<Registered> Registrations::find(std::uintptr_t begin, std::uintptr_t end,
                                                unsigned access) {
  auto it = kept_.upper_bound(begin);
  while (it != kept_.begin()) {
    --it;
    if (begin - it->first > bytes_longest_) return nullptr;
    Kept& kept = it->second;
    if (kept.registered->end() >= end && (kept.registered->access() & access) == access) {
      ages_.splice(ages_.end(), ages_, kept.age);
      return kept.registered;
    }
  }
  return nullptr;
}

Result<std::shared_ptr<Registered>> Registrations::acquire_device(const void* data,
                                                                  std::uint64_t bytes,
                                                                  unsigned access) {
  // The host's memory is not locked by it: nothing counts against the budget.
  auto memory = domain_.register_device_memory(data, bytes, access);
  if (!memory.is_ok()) return memory.status();
  ++counters_.registrations;
  return std::make_shared<Registered>(
      std::move(memory).value(), reinterpret_cast<std::uintptr_t>(data), bytes, access, nullptr);
}

Result<std::shared_ptr<Registered>> Registrations::make(const void* data, std::uint64_t bytes,
                                                        unsigned access) {
  const auto refuse = [&](Status status) -> Result<std::shared_ptr<Registered>> {
    ++counters_.refusals;
    return status;
  };
  while (!budget_->take(bytes)) {
    if (evict_one()) continue;
    budget_->want();
    return refuse(Status::error(StatusCode::kSystem, "more registered memory than the " +
                                                         std::to_string(budget_->bytes_max()) +
                                                         " bytes that may be locked (ulimit -l)"));
  }
  auto memory = domain_.register_memory(data, bytes, access);
  while (!memory.is_ok() && evict_one()) memory = domain_.register_memory(data, bytes, access);
  if (!memory.is_ok()) {
    budget_->give_back(bytes);
    budget_->want();
    return refuse(memory.status());
  }
  ++counters_.registrations;
  return std::make_shared<Registered>(
      std::move(memory).value(), reinterpret_cast<std::uintptr_t>(data), bytes, access, budget_);
}

Result<std::shared_ptr<Registered>> Registrations::acquire_apart(const void* data,
                                                                 std::uint64_t bytes,
                                                                 unsigned access) {
  return make(data, bytes, access);
}

Result<std::shared_ptr<Registered>> Registrations::acquire(const void* data, std::uint64_t bytes,
                                                           unsigned access) {
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  if (monitor_ == nullptr) return make(data, bytes, access);
  drop_freed();
  if (auto found = find(begin, begin + bytes, access)) {
    ++counters_.cache_hits;
    return found;
  }
  // Watched first: what is freed between the two is seen.
  const bool is_watched = monitor_->watch(data, bytes);
  auto made = make(data, bytes, access);
  if (!made.is_ok() || !is_watched) return made;
  if (kept_.size() >= kKeptMax) evict_one();
  bytes_longest_ = std::max(bytes_longest_, bytes);
  ages_.push_back(begin);
  kept_.emplace(begin, Kept{made.value(), std::prev(ages_.end())});
  return made;
}

}  // namespace pycomm::transport::rdma

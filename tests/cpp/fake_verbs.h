// A simulated NIC behind platform/verbs.h: reliable connections between ports of one process, under
// a seed. It holds its user to the rules (keys, access, queue depths, posted receives) and breaks
// what a test asks it to: a port that carries nothing, an acknowledgement that is lost after the
// work was done, any call that is to fail.
#pragma once

#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <set>

#include "base/rng.h"
#include "platform/verbs.h"

namespace pycomm::test {

namespace verbs = platform::verbs;

class FakePair;
class FakeDomain;

// What all simulated ports have in common: the wire.
struct Fabric {
  explicit Fabric(std::uint64_t seed) : rng(seed) {}
  base::Rng rng;
  std::map<std::uint32_t, FakePair*> pairs;
  std::uint32_t next_pair = 1, next_key = 1, next_gid = 1;
  std::set<std::string> dead_ports;
  std::set<std::string> silent_ports;  // nothing moves, and nobody is told
  int acks_to_lose = 0;                // the work is done, and its requester hears of a failure
  int num_calls = 0;                   // that may fail
  int call_to_fail = -1;
  std::uint64_t num_atomics = 0, num_writes = 0, num_sends = 0, num_registered = 0;
  std::uint64_t bytes_lockable = UINT64_MAX, bytes_locked = 0;

  bool fails() { return num_calls++ == call_to_fail; }
  static Status refuse(const char* call) {
    return Status::error(StatusCode::kSystem, std::string(call) + ": refused by the test");
  }
  void step();
};

class FakeMemory final : public verbs::Memory {
 public:
  FakeMemory(FakeDomain& domain, const void* data, std::uint64_t bytes, unsigned access);
  ~FakeMemory() override;
  std::uint32_t local_key() const override { return key; }
  std::uint32_t remote_key() const override { return key | 0x80000000u; }
  bool covers(const void* at, std::uint64_t count, unsigned wanted) const {
    const auto* from = static_cast<const std::byte*>(at);
    return from >= begin && count <= bytes && from + count <= begin + bytes &&
           (access & wanted) == wanted;
  }

  FakeDomain& domain;
  const std::byte* const begin;
  const std::uint64_t bytes;
  const unsigned access;
  const std::uint32_t key;
};

class FakeDomain final : public verbs::Domain {
 public:
  FakeDomain(std::shared_ptr<Fabric> wire, verbs::PortInfo info, int num_completions)
      : fabric(std::move(wire)), info_(std::move(info)), capacity(num_completions) {}
  ~FakeDomain() override {
    if (!memories.empty()) std::abort();  // a registration outlived its domain
  }
  const verbs::PortInfo& port() const override { return info_; }
  Result<std::unique_ptr<verbs::Memory>> register_memory(const void* data, std::uint64_t bytes,
                                                         unsigned access) override {
    if (fabric->fails()) return Fabric::refuse("ibv_reg_mr");
    if (fabric->bytes_locked + bytes > fabric->bytes_lockable) {
      return Status::error(StatusCode::kSystem, "ibv_reg_mr: Cannot allocate memory");
    }
    ++fabric->num_registered;
    return std::unique_ptr<verbs::Memory>(new FakeMemory(*this, data, bytes, access));
  }
  Result<std::unique_ptr<verbs::Pair>> create_pair(const verbs::PairLimits& limits) override;
  int poll(verbs::Completion* out, int count) override;
  int fd() const override { return -1; }
  Status arm() override { return Status(); }
  void clear_events() override {}

  void complete(const verbs::Completion& completion) {
    if (static_cast<int>(completions.size()) >= capacity) std::abort();  // the queue overran
    completions.push_back(completion);
  }
  const FakeMemory* find(std::uint32_t key) const {
    const auto it = memories.find(key);
    return it == memories.end() ? nullptr : it->second;
  }

  const std::shared_ptr<Fabric> fabric;
  const verbs::PortInfo info_;
  const int capacity;
  std::map<std::uint32_t, FakeMemory*> memories;
  std::deque<verbs::Completion> completions;
};

inline FakeMemory::FakeMemory(FakeDomain& owner, const void* data, std::uint64_t count,
                              unsigned granted)
    : domain(owner),
      begin(static_cast<const std::byte*>(data)),
      bytes(count),
      access(granted),
      key(owner.fabric->next_key++) {
  domain.fabric->bytes_locked += bytes;
  domain.memories[key] = this;
}
inline FakeMemory::~FakeMemory() {
  domain.fabric->bytes_locked -= bytes;
  domain.memories.erase(key);
}

class FakePair final : public verbs::Pair {
 public:
  FakePair(FakeDomain& domain, const verbs::PairLimits& limits)
      : domain_(domain), limits_(limits), number_(domain.fabric->next_pair++) {
    psn_ = static_cast<std::uint32_t>(fabric().rng.below(1 << 24));
    fabric().pairs[number_] = this;
  }
  ~FakePair() override { fabric().pairs.erase(number_); }

  verbs::PairAddress address() const override {
    verbs::PairAddress address;
    address.gid = domain_.info_.gid;
    address.number = number_;
    address.first_psn = psn_;
    address.mtu_code = 3;
    address.max_reads = 4;
    return address;
  }
  std::uint32_t inline_bytes_max() const override { return 128; }
  Status connect(const verbs::PairAddress& theirs, const RdmaOptions&) override {
    if (fabric().fails()) return Fabric::refuse("ibv_modify_qp");
    theirs_ = theirs;
    is_connected_ = true;
    return Status();
  }
  void break_off() override { to_error(); }
  Status post_receive(std::uint64_t id, void* data, std::uint32_t bytes,
                      std::uint32_t key) override {
    if (fabric().fails()) return Fabric::refuse("ibv_post_recv");
    if (receives_.size() >= limits_.num_receives) return Fabric::refuse("a full receive queue");
    receives_.push_back({id, static_cast<std::byte*>(data), bytes, key});
    if (has_failed_) flush();
    return Status();
  }
  Status post_send(const verbs::SendRequest& request) override {
    if (fabric().fails()) return Fabric::refuse("ibv_post_send");
    if (sends_.size() + unreaped_.size() >= limits_.num_sends) {
      return Fabric::refuse("a full send queue");
    }
    Send send{request, {}};
    if (request.is_inline) {
      const auto* data = static_cast<const std::byte*>(request.data);
      send.copy.assign(data, data + request.bytes);
    }
    sends_.push_back(std::move(send));
    if (has_failed_) flush();
    return Status();
  }

  bool has_work() const { return !sends_.empty() && (is_connected_ || has_failed_); }
  // Carries out the oldest request, if it can be.
  void execute();
  void reap(std::uint64_t id) {
    while (!unreaped_.empty() && unreaped_.front() <= id) unreaped_.pop_front();
  }

 private:
  struct Receive {
    std::uint64_t id;
    std::byte* data;
    std::uint32_t bytes;
    std::uint32_t key;
  };
  struct Send {
    verbs::SendRequest request;
    std::vector<std::byte> copy;
  };
  Fabric& fabric() const { return *domain_.fabric; }
  void to_error() {
    has_failed_ = true;
    flush();
  }
  void complete_send(const verbs::SendRequest& request, int status) {
    unreaped_.push_back(request.id);
    if (status == 0 && !request.is_signalled) return;
    verbs::Completion c;
    c.id = request.id;
    c.pair = number_;
    c.status = status;
    domain_.complete(c);
  }
  void flush() {
    for (; !sends_.empty(); sends_.pop_front()) {
      complete_send(sends_.front().request, verbs::kStatusFlushed);
    }
    for (; !receives_.empty(); receives_.pop_front()) {
      verbs::Completion c;
      c.id = receives_.front().id;
      c.pair = number_;
      c.status = verbs::kStatusFlushed;
      domain_.complete(c);
    }
  }
  void fail_front(int status) {
    const verbs::SendRequest request = sends_.front().request;
    sends_.pop_front();
    complete_send(request, status);
    to_error();
  }
  // 0, or the status that the requester sees; -1: not yet.
  int carry_out(FakePair& remote, const Send& send);

  FakeDomain& domain_;
  const verbs::PairLimits limits_;
  const std::uint32_t number_;
  std::uint32_t psn_;
  verbs::PairAddress theirs_;
  bool is_connected_ = false, has_failed_ = false;
  std::deque<Send> sends_;
  std::deque<Receive> receives_;
  std::deque<std::uint64_t> unreaped_;  // done, and not known to be
};

inline int FakePair::carry_out(FakePair& remote, const Send& send) {
  using Kind = verbs::SendRequest::Kind;
  const verbs::SendRequest& r = send.request;
  const bool lands_here = r.kind == Kind::kRead || r.kind == Kind::kFetchAdd;
  const std::byte* source = r.is_inline ? send.copy.data() : static_cast<const std::byte*>(r.data);
  if (!r.is_inline && r.bytes > 0) {
    const FakeMemory* memory = domain_.find(r.local_key);
    const bool is_mine =
        memory != nullptr && memory->covers(r.data, r.bytes, lands_here ? verbs::kLocalWrite : 0u);
    if (!is_mine) return 4;  // local protection error
  }
  const bool takes_receive = r.kind == Kind::kSend || r.kind == Kind::kWriteWithImmediate;
  if (takes_receive && remote.receives_.empty()) return -1;
  auto* target = reinterpret_cast<std::byte*>(r.remote_address);
  if (r.kind != Kind::kSend) {
    const unsigned wanted = r.kind == Kind::kRead       ? verbs::kRemoteRead
                            : r.kind == Kind::kFetchAdd ? verbs::kRemoteAtomic
                                                        : verbs::kRemoteWrite;
    const FakeMemory* memory = remote.domain_.find(r.remote_key & 0x7fffffffu);
    const bool may = memory != nullptr && (r.remote_key & 0x80000000u) != 0 &&
                     memory->covers(target, r.bytes, wanted);
    if (!may) {
      remote.to_error();
      return verbs::kStatusRemoteAccess;
    }
  }
  switch (r.kind) {
    case Kind::kSend: {
      const Receive& into = remote.receives_.front();
      const FakeMemory* memory = remote.domain_.find(into.key);
      if (memory == nullptr || !memory->covers(into.data, r.bytes, verbs::kLocalWrite) ||
          r.bytes > into.bytes) {
        std::abort();  // a receive that its user took away
      }
      if (r.bytes > 0) std::memcpy(into.data, source, r.bytes);
      ++fabric().num_sends;
      break;
    }
    case Kind::kWrite:
    case Kind::kWriteWithImmediate:
      if (r.bytes > 0) std::memcpy(target, source, r.bytes);
      ++fabric().num_writes;
      break;
    case Kind::kRead: std::memcpy(const_cast<void*>(r.data), target, r.bytes); break;
    case Kind::kFetchAdd: {
      std::uint64_t old;
      std::memcpy(&old, target, sizeof old);
      std::memcpy(const_cast<void*>(r.data), &old, sizeof old);
      old += r.add;
      std::memcpy(target, &old, sizeof old);
      ++fabric().num_atomics;
      break;
    }
  }
  if (takes_receive) {
    verbs::Completion c;
    c.id = remote.receives_.front().id;
    c.pair = remote.number_;
    c.is_receive = true;
    c.has_immediate = r.kind == Kind::kWriteWithImmediate;
    c.immediate = r.immediate;
    c.bytes = r.bytes;
    remote.receives_.pop_front();
    remote.domain_.complete(c);
  }
  return 0;
}

inline void FakePair::execute() {
  if (has_failed_) return flush();
  const auto it = fabric().pairs.find(theirs_.number);
  const bool is_dead = fabric().dead_ports.contains(domain_.info_.name());
  FakePair* remote = it == fabric().pairs.end() ? nullptr : it->second;
  const bool is_there = remote != nullptr && !remote->has_failed_ &&
                        remote->psn_ == theirs_.first_psn &&
                        (!remote->is_connected_ || remote->theirs_.number == number_) &&
                        !fabric().dead_ports.contains(remote->domain_.info_.name());
  if (fabric().silent_ports.contains(domain_.info_.name())) return;
  if (is_dead || !is_there) return fail_front(verbs::kStatusRetryExceeded);
  if (!remote->is_connected_) return;
  const Send send = sends_.front();
  const int status = carry_out(*remote, send);
  if (status < 0) return;
  if (status > 0) return fail_front(status);
  if (fabric().acks_to_lose > 0) {
    --fabric().acks_to_lose;
    return fail_front(verbs::kStatusRetryExceeded);
  }
  sends_.pop_front();
  complete_send(send.request, 0);
}

inline void Fabric::step() {
  if (pairs.empty()) return;
  for (std::uint64_t turns = rng.below(4); turns > 0; --turns) {
    auto it = pairs.begin();
    std::advance(it, static_cast<std::ptrdiff_t>(rng.below(pairs.size())));
    if (it->second->has_work()) it->second->execute();
  }
}

inline Result<std::unique_ptr<verbs::Pair>> FakeDomain::create_pair(
    const verbs::PairLimits& limits) {
  if (fabric->fails()) return Fabric::refuse("ibv_create_qp");
  return std::unique_ptr<verbs::Pair>(new FakePair(*this, limits));
}

inline int FakeDomain::poll(verbs::Completion* out, int count) {
  fabric->step();
  int n = 0;
  while (n < count && !completions.empty()) {
    out[n++] = completions.front();
    completions.pop_front();
    const auto it = fabric->pairs.find(out[n - 1].pair);
    if (it != fabric->pairs.end() && !out[n - 1].is_receive) it->second->reap(out[n - 1].id);
  }
  return n;
}

class FakePort final : public verbs::Port {
 public:
  FakePort(std::shared_ptr<Fabric> fabric, const std::string& device) : fabric_(std::move(fabric)) {
    info_.device = device;
    info_.has_atomics = true;
    info_.max_reads = 4;
    info_.gid[15] = static_cast<std::uint8_t>(fabric_->next_gid++);
  }
  const verbs::PortInfo& info() const override { return info_; }
  Result<std::unique_ptr<verbs::Domain>> create_domain(int num_completions) override {
    if (fabric_->fails()) return Fabric::refuse("ibv_alloc_pd");
    return std::unique_ptr<verbs::Domain>(new FakeDomain(fabric_, info_, num_completions));
  }
  std::vector<int> fds() const override { return {}; }

 private:
  const std::shared_ptr<Fabric> fabric_;
  verbs::PortInfo info_;
};

}  // namespace pycomm::test

#include "communicator/shard_barrier.h"

#include <algorithm>
#include <new>

#include "platform/system.h"

namespace pycomm::communicator {
namespace {

using base::TimeNs;
using platform::real_clock;

constexpr int kLooks = 2'000;
constexpr TimeNs kYieldNs = 200'000;
constexpr std::int64_t kNapNs = 50'000;
constexpr TimeNs kInterruptNs = 50'000'000;
constexpr TimeNs kFarewellNs = 200'000'000;
// Names of transfers, apart from those of collectives and messages.
constexpr std::uint64_t kBarrierOp = std::uint64_t{3} << 61;

std::uint64_t region_of(std::uint64_t group, std::uint64_t index) {
  return (std::uint64_t{1} << 63) | (group ^ ((index + 1) * 0x9E3779B97F4A7C15ull));
}

}  // namespace

Status ShardBarrierImpl::open(std::uint64_t index) {
  region_ = region_of(group_->context.group, index);
  const std::uint64_t bytes = sizeof(Counter) * static_cast<std::uint64_t>(num_shards_);
  own_memory_ = std::make_unique<Counter[]>(static_cast<std::size_t>(num_shards_));
  mine_ = own_memory_.get();
  std::byte* shared = nullptr;
  for (Rank rank = 0; rank < group_->context.world_size; ++rank) {
    auto* link =
        static_cast<transport::CoreLink*>(group_->context.links[static_cast<std::size_t>(rank)]);
    if (link == nullptr) continue;
    Peer peer;
    peer.rank = rank;
    peer.link = link->shared_from_this();
    std::byte* exposed;
    if (link->remote_memory()->can_map()) {
      if (shared == nullptr) {
        // Peers may look at it as long as their group lives: it is given back with the segment.
        auto memory = engine_->host()->allocate_segment(bytes);
        if (!memory.is_ok()) return memory.status();
        shared = memory.value();
        mine_ = reinterpret_cast<Counter*>(shared);
        for (int i = 0; i < num_shards_; ++i) new (&mine_[i]) Counter;
      }
      exposed = shared;
    } else {
      all_are_mapped_ = false;
      peer.arrivals = std::make_unique<Counter[]>(static_cast<std::size_t>(num_shards_));
      peer.is_doubtful.assign(static_cast<std::size_t>(num_shards_), false);
      exposed = reinterpret_cast<std::byte*>(peer.arrivals.get());
    }
    PYCOMM_RETURN_IF_ERROR(engine_->expose(*link, region_, exposed, bytes));
    peers_.push_back(std::move(peer));
  }
  if (!all_are_mapped_) engine_->with_lock([&] { engine_->add_tended(this); });
  return Status();
}

Status ShardBarrierImpl::attach() {
  const std::uint64_t bytes = sizeof(Counter) * static_cast<std::uint64_t>(num_shards_);
  const TimeNs deadline = base::deadline_after(real_clock().now_ns(), group_->timeout_ms.load());
  for (Peer& peer : peers_) {
    if (peer.arrivals) continue;
    std::byte* mapped;
    while ((mapped = engine_->map(*peer.link, region_, bytes)) == nullptr) {
      if (group_->has_failed()) return group_->failure();
      if (real_clock().now_ns() > deadline) {
        return Status::error(StatusCode::kTimeout,
                             "rank " + std::to_string(peer.rank) + " shows no counters", peer.rank);
      }
      platform::sleep_ns(kNapNs);
    }
    peer.theirs = reinterpret_cast<const Counter*>(mapped);
  }
  return Status();
}

// ---------------------------------------------------------------- arriving

void ShardBarrierImpl::add(Peer& peer, int shard, std::uint64_t delta) {
  Word& word = words_.emplace_back();
  word.peer = &peer;
  word.shard = shard;
  word.transfer.id = {group_->context.group, kBarrierOp + next_word_++, 0,
                      static_cast<std::uint32_t>(shard), 0};
  word.transfer.data = reinterpret_cast<std::byte*>(&word.value);
  word.transfer.bytes = sizeof word.value;
  peer.link->remote_memory()->fetch_add(word.transfer, region_,
                                        static_cast<std::uint64_t>(shard) * sizeof(Counter), delta);
  peer.link->flush();
}

void ShardBarrierImpl::look(Peer& peer, int shard) {
  Word& word = words_.emplace_back();
  word.peer = &peer;
  word.shard = shard;
  word.is_look = true;
  word.transfer.id = {group_->context.group, kBarrierOp + next_word_++, 0,
                      static_cast<std::uint32_t>(shard), 1};
  word.transfer.data = reinterpret_cast<std::byte*>(&word.value);
  word.transfer.bytes = sizeof word.value;
  peer.link->remote_memory()->read(word.transfer, region_,
                                   static_cast<std::uint64_t>(shard) * sizeof(Counter));
}

// What has ended. An addition of unknown fate is looked into once no other is under way: its
// counter has no other writer, so what is there says all.
void ShardBarrierImpl::tend() {
  for (auto it = words_.begin(); it != words_.end();) {
    Word& word = *it;
    if (!word.transfer.is_finished()) {
      ++it;
      continue;
    }
    Peer& peer = *word.peer;
    const auto shard = static_cast<std::size_t>(word.shard);
    const bool can_look = peer.link->remote_memory()->can_read() && peer.link->failure().is_ok();
    if (word.transfer.state == TransferState::kFailed) {
      peer.is_doubtful[shard] = can_look;
    } else if (word.is_look) {
      const std::uint64_t wanted = mine_[word.shard].value.load();
      if (word.value < wanted) add(peer, word.shard, wanted - word.value);
    }
    it = words_.erase(it);
  }
  for (Peer& peer : peers_) {
    for (std::size_t shard = 0; shard < peer.is_doubtful.size(); ++shard) {
      if (!peer.is_doubtful[shard]) continue;
      const bool is_busy = std::any_of(words_.begin(), words_.end(), [&](const Word& word) {
        return word.peer == &peer && word.shard == static_cast<int>(shard);
      });
      if (is_busy) continue;
      peer.is_doubtful[shard] = false;
      look(peer, static_cast<int>(shard));
    }
  }
}

Status ShardBarrierImpl::check(int shard) const {
  if (generation_ != fork_generation()) {
    return Status::error(StatusCode::kInvalidUsage, "a forked child has no group");
  }
  if (shard >= 0 && shard < num_shards_) return Status();
  return Status::error(
      StatusCode::kInvalidUsage,
      "shard " + std::to_string(shard) + " of a barrier of " + std::to_string(num_shards_));
}

Status ShardBarrierImpl::arrive(int shard) {
  PYCOMM_RETURN_IF_ERROR(check(shard));
  if (group_->has_failed()) return group_->failure();
  mine_[shard].value.fetch_add(1, std::memory_order_release);
  if (all_are_mapped_) return Status();
  engine_->with_lock([&] {
    for (Peer& peer : peers_) {
      if (peer.arrivals) add(peer, shard, 1);
    }
  });
  return Status();
}

bool ShardBarrierImpl::is_complete(int shard) {
  if (!check(shard).is_ok()) return false;
  const std::uint64_t mine = mine_[shard].value.load(std::memory_order_relaxed);
  return std::all_of(peers_.begin(), peers_.end(),
                     [&](const Peer& peer) { return count_of(peer, shard) >= mine; });
}

// ---------------------------------------------------------------- waiting

Status ShardBarrierImpl::late(int shard, std::int64_t timeout_ms) const {
  const std::uint64_t mine = mine_[shard].value.load();
  std::string ranks;
  Rank first = kNoRank;
  for (const Peer& peer : peers_) {
    if (count_of(peer, shard) >= mine) continue;
    ranks += (ranks.empty() ? "" : ", ") + std::to_string(peer.rank);
    if (first == kNoRank) first = peer.rank;
  }
  return Status::error(StatusCode::kTimeout,
                       "shard " + std::to_string(shard) + " of a barrier of group '" +
                           group_->context.name + "' on rank " +
                           std::to_string(group_->context.rank) + ": rank " + ranks +
                           " did not arrive within " + std::to_string(timeout_ms) + " ms",
                       first);
}

Status ShardBarrierImpl::wait(int shard, std::int64_t timeout_ms) {
  PYCOMM_RETURN_IF_ERROR(check(shard));
  if (timeout_ms < 0) timeout_ms = group_->timeout_ms.load();
  const int looks = engine_->crowding().is_crowded() ? 1 : kLooks;
  for (int i = 0; i < looks; ++i) {
    if (is_complete(shard)) return Status();
    base::spin_pause();
  }
  const TimeNs start = real_clock().now_ns();
  const TimeNs deadline = base::deadline_after(start, timeout_ms);
  TimeNs ask_at = start + kInterruptNs;
  while (!is_complete(shard)) {
    const bool moved = engine_->move();
    if (is_complete(shard)) break;
    if (group_->has_failed()) return group_->failure();
    const TimeNs now = real_clock().now_ns();
    if (now > deadline) return late(shard, timeout_ms);
    if (now > ask_at) {
      ask_at = now + kInterruptNs;
      if (group_->is_interrupted && group_->is_interrupted()) {
        return Status::error(StatusCode::kAborted, "interrupted while waiting");
      }
    }
    if (moved || now - start < kYieldNs) {
      engine_->crowding().yield();
    } else {
      platform::sleep_ns(kNapNs);
    }
  }
  return Status();
}

ShardBarrierImpl::~ShardBarrierImpl() {
  if (generation_ != fork_generation()) {
    for (Peer& peer : peers_) static_cast<void>(peer.arrivals.release());
    static_cast<void>(own_memory_.release());
    return;
  }
  const TimeNs deadline = real_clock().now_ns() + kFarewellNs;
  const auto is_busy = [&] { return engine_->with_lock([&] { return !words_.empty(); }); };
  while (is_busy() && real_clock().now_ns() < deadline) {
    if (!engine_->move()) platform::sleep_ns(kNapNs);
  }
  engine_->with_lock([&] {
    engine_->remove_tended(this);
    for (Word& word : words_) {
      if (!word.transfer.is_finished()) word.peer->link->cancel(word.transfer);
    }
    for (Peer& peer : peers_) {
      if (peer.arrivals) peer.link->remote_memory()->withdraw(region_);
    }
  });
}

}  // namespace pycomm::communicator

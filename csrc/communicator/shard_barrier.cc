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
      peer.told.resize(static_cast<std::size_t>(num_shards_));
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

ShardBarrierImpl::Word& ShardBarrierImpl::begin_word(Peer& peer, int shard) {
  Word& word = words_.emplace_back();
  word.peer = &peer;
  word.shard = shard;
  word.transfer.id = {group_->context.group, kBarrierOp + next_word_++, 0,
                      static_cast<std::uint32_t>(shard), 0};
  word.transfer.data = reinterpret_cast<std::byte*>(&word.value);
  word.transfer.bytes = sizeof word.value;
  ++peer.told[static_cast<std::size_t>(shard)].num_under_way;
  return word;
}

// Brings the peer's counter up to date. In doubt it is looked at first, once nothing else is under
// way: it has no other writer, so what is there says all.
void ShardBarrierImpl::tell(Peer& peer, int shard) {
  Told& told = peer.told[static_cast<std::size_t>(shard)];
  RemoteMemory& memory = *peer.link->remote_memory();
  const std::uint64_t offset = static_cast<std::uint64_t>(shard) * sizeof(Counter);
  if (told.is_doubtful) {
    if (told.num_under_way > 0) return;
    Word& word = begin_word(peer, shard);
    word.is_look = true;
    memory.read(word.transfer, region_, offset);
  } else if (told.added < told.wanted) {
    Word& word = begin_word(peer, shard);
    const std::uint64_t delta = told.wanted - told.added;
    told.added = told.wanted;
    if (memory.can_fetch_add()) {
      memory.fetch_add(word.transfer, region_, offset, delta);
    } else {
      word.value = told.wanted;
      memory.write(word.transfer, region_, offset);
    }
  }
  peer.link->flush();
}

void ShardBarrierImpl::tend() {
  for (auto it = words_.begin(); it != words_.end();) {
    Word& word = *it;
    if (!word.transfer.is_finished()) {
      ++it;
      continue;
    }
    Peer& peer = *word.peer;
    const int shard = word.shard;
    Told& told = peer.told[static_cast<std::size_t>(shard)];
    --told.num_under_way;
    if (word.transfer.state == TransferState::kFailed) {
      // Only what may or may not have happened is looked into; a peer that is gone is gone.
      told.is_doubtful = word.transfer.status.code() == StatusCode::kSystem &&
                         peer.link->remote_memory()->can_read();
    } else if (word.is_look) {
      told.is_doubtful = false;
      told.added = word.value;
    }
    it = words_.erase(it);
    tell(peer, shard);
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
      if (!peer.arrivals) continue;
      ++peer.told[static_cast<std::size_t>(shard)].wanted;
      tell(peer, shard);
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

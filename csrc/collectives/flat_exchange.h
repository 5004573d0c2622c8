// The flat exchange: every rank writes a small message into a slot of its own shared memory and
// reads everybody's. One cache line each way carries up to 40 bytes; one exchange is an all_reduce,
// an all_gather, a broadcast or a barrier. It is also how larger operations compare signatures.
//
// Invariant: slots alternate. A rank that finished exchange k has seen everyone's slot of k, so
// everyone had finished k - 1, so the slot of k - 1 is free for k + 1: two slots suffice.
// Trust: slots of others are read-only here; the signature and each payload byte are read once.
// Thread: the owner of the group. No allocation, lock, clock or system call.
#pragma once

#include <atomic>
#include <cstddef>
#include <vector>

#include "base/spin.h"
#include "collectives/local_mark.h"
#include "collectives/select.h"
#include "pycomm/operation.h"

namespace pycomm::collectives {

struct alignas(base::kCacheLineBytes) FlatSlot {
  static constexpr std::uint64_t kSmallBytes = 40;
  std::atomic<std::uint64_t> sequence;
  Signature signature;
  std::uint64_t bytes;
  std::byte small[kSmallBytes];
  alignas(base::kCacheLineBytes) std::byte large[kFlatBytesMax];
};

// What one rank lays out for a group.
struct FlatArea {
  FlatSlot slots[2];
  LocalMark mark;                        // of operations that do not fit a slot
  std::atomic<std::uint32_t> is_closed;  // its rank has left the group and reads nothing any more
};

class FlatExchange {
 public:
  // areas[p] is rank p's FlatArea as mapped here, zeros at first; areas[rank] is mine.
  FlatExchange(Rank rank, const std::vector<std::byte*>& areas);

  // Opens the next exchange with my message; bytes <= kFlatBytesMax.
  void publish(Signature signature, const void* payload, std::uint64_t bytes);

  bool has_arrived(Rank peer) const {
    return slot(peer).sequence.load(std::memory_order_acquire) == sequence();
  }
  // The word that changes when `peer` arrives, and the value that it then has; for sleeping on.
  const std::atomic<std::uint64_t>* arrival_word(Rank peer) const { return &slot(peer).sequence; }
  const std::atomic<std::uint64_t>* my_word() const { return &slot(rank_).sequence; }
  std::uint64_t sequence() const { return sequence_.load(std::memory_order_relaxed); }

  // Of a peer that has arrived.
  Signature signature(Rank peer) const { return slot(peer).signature; }
  const std::byte* payload(Rank peer, std::uint64_t bytes) const {
    const FlatSlot& s = slot(peer);
    return bytes <= FlatSlot::kSmallBytes ? s.small : s.large;
  }

  Rank rank() const { return rank_; }
  int world_size() const { return static_cast<int>(areas_.size()); }

 private:
  const FlatSlot& slot(Rank peer) const {
    return areas_[static_cast<std::size_t>(peer)]->slots[sequence() & 1];
  }

  const Rank rank_;
  std::vector<const FlatArea*> areas_;
  FlatArea* mine_;
  std::atomic<std::uint64_t> sequence_{0};  // read by others only to wake sleepers
};

// Publishes what `request` contributes, and, once all have arrived, writes its result.
// collect() errors: kInvalidUsage naming both ranks and both signatures if they differ.
void publish_request(FlatExchange& flat, const OpRequest& request, Signature signature);
Status collect_result(const FlatExchange& flat, const OpRequest& request, Signature signature,
                      std::uint64_t op_number);
// In words: what two ranks call as the same operation.
std::string describe_difference(std::uint64_t op, Rank rank, Signature mine, Rank peer,
                                Signature theirs);
// The check alone; the first rank that differs.
Status compare_signatures(const FlatExchange& flat, Signature signature, std::uint64_t op);

}  // namespace pycomm::collectives

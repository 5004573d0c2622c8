// A barrier for each shard of a gradient: ranks arrive at a shard when their part of it is ready,
// in any order of shards, and see when all have. Counted, so that it is used again without a reset.
//
// Each pair of ranks has a counter of its own for each shard, with one writer, so that a path that
// breaks under an arrival leaves no doubt: the writer reads its counter and goes on from there.
// Between hosts with RDMA an arrival is one atomic at each peer, done by the NIC; among ranks that
// share memory it is one store; elsewhere the receiving engine counts.
#pragma once

#include <cstdint>

#include "pycomm/status.h"

namespace pycomm {

class ShardBarrier {
 public:
  // Peers that still wait for this rank fail when their timeout is over.
  virtual ~ShardBarrier() = default;
  virtual int num_shards() const = 0;

  // This rank's part of `shard` is ready, once more. Does not wait. Thread: any.
  // Errors: kInvalidUsage (no such shard), what ended the group.
  virtual Status arrive(int shard) = 0;
  // Whether every rank has arrived there as often as this one. Cost: one load for each rank.
  virtual bool is_complete(int shard) = 0;
  // Until it is. Errors: kTimeout, naming the ranks that are late; kPeerLost; kAborted (a signal).
  virtual Status wait(int shard, std::int64_t timeout_ms) = 0;
};

}  // namespace pycomm

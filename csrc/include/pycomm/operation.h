// One collective operation: what is asked for, and the handle on one that is under way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "pycomm/types.h"

namespace pycomm {

// Memory stays valid until the operation has ended; what `keepalive` holds is kept until no peer
// can touch it any more, which after a failure may be longer.
struct OpRequest {
  OpKind kind = OpKind::kBarrier;
  DType dtype = DType::kUInt8;
  ReduceOp op = ReduceOp::kSum;
  Rank root = 0;
  const std::byte* input = nullptr;
  std::byte* output = nullptr;   // all_gather: world_size * count elements; may equal input
  std::uint64_t count = 0;       // elements of one rank's contribution
  std::int64_t timeout_ms = -1;  // -1: the group's
  std::shared_ptr<void> keepalive;
  std::uint64_t op_number = 0;  // set by the group

  std::uint64_t bytes() const { return count * dtype_bytes(dtype); }
  double scale(int world_size) const { return op == ReduceOp::kAvg ? 1.0 / world_size : 1.0; }
  Signature signature() const { return make_signature(kind, dtype, op, root, count); }
};

// Thread: any. Kept by shared_ptr; dropping it does not stop the operation.
class Operation {
 public:
  virtual ~Operation() = default;
  virtual bool is_done() const = 0;
  // Of one that is done.
  virtual Status status() const = 0;
  // Blocks until done, or, with timeout_ms >= 0, at most that long (kTimeout; it goes on).
  virtual Status wait(std::int64_t timeout_ms = -1) = 0;
  // Runs `callback` on a completion thread, once, after the operation is done. It may wait for
  // other operations, and for their callbacks.
  virtual void on_done(std::function<void()> callback) = 0;
  virtual std::uint64_t op_number() const = 0;
};

}  // namespace pycomm

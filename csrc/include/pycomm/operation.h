// One collective operation: what is asked for, and the handle on one that is under way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "pycomm/types.h"

namespace pycomm {

// Of an uneven all_to_all: elements that go to, and come from, each rank. Both lie one after the
// other in input and output, in rank order.
struct Splits {
  std::vector<std::uint64_t> send;
  std::vector<std::uint64_t> recv;
};

// Parts that lie apart, by rank: instead of one input, or output, that holds them in a row.
using Parts = std::vector<std::byte*>;

inline constexpr Rank kAnySource = -2;

// Memory stays valid until the operation has ended; what `keepalive` holds is kept until no peer
// can touch it any more, which after a failure may be longer.
//
// Elements at input and output, n ranks, `count` of one rank's part:
//   all_reduce, broadcast    count, count     (in place: equal pointers)
//   reduce                   count, count     (output at the root only)
//   all_gather, gather       count, n count   (in place: input is this rank's part of output)
//   reduce_scatter, scatter  n count, count   (in place: output is this rank's part of input)
//   all_to_all               n count, n count (uneven: the sums of splits)
//   send; recv               count, 0; 0, count
// Other overlaps of input and output are refused.
struct OpRequest {
  OpKind kind = OpKind::kBarrier;
  DType dtype = DType::kUInt8;
  ReduceOp op = ReduceOp::kSum;
  Rank root = 0;  // of send and recv: the other rank, or kAnySource
  const std::byte* input = nullptr;
  std::byte* output = nullptr;
  std::uint64_t count = 0;
  std::uint32_t tag = 0;                      // of send and recv
  std::shared_ptr<const Splits> splits;       // of an uneven all_to_all
  std::shared_ptr<const Parts> input_parts;   // where input has a part for each rank
  std::shared_ptr<const Parts> output_parts;  // where output has one
  std::int64_t timeout_ms = -1;               // -1: the group's
  std::shared_ptr<void> keepalive;
  std::uint64_t op_number = 0;  // set by the group

  std::uint64_t bytes() const { return count * dtype_bytes(dtype); }
  // Where element `offset` of all parts in a row lies; the rest of its part follows there.
  std::byte* input_at(std::uint64_t offset) const {
    // An input is only read, also where transfers are handed one.
    if (!input_parts) return const_cast<std::byte*>(input) + offset * dtype_bytes(dtype);
    return at(*input_parts, splits ? &splits->send : nullptr, offset);
  }
  std::byte* output_at(std::uint64_t offset) const {
    if (!output_parts) return output + offset * dtype_bytes(dtype);
    return at(*output_parts, splits ? &splits->recv : nullptr, offset);
  }
  double scale(int world_size) const { return op == ReduceOp::kAvg ? 1.0 / world_size : 1.0; }
  // A receiver signs as the sender that it expects. Counts of an uneven all_to_all differ by pair.
  Signature signature() const {
    if (is_point_to_point(kind))
      return make_signature(OpKind::kSend, dtype, ReduceOp::kSum, 0, count);
    return make_signature(kind, dtype, op, root, splits ? 0 : count);
  }

 private:
  std::byte* at(const Parts& parts, const std::vector<std::uint64_t>* counts,
                std::uint64_t offset) const {
    std::size_t part = 0;
    for (;; ++part) {
      const std::uint64_t size = counts != nullptr ? (*counts)[part] : count;
      if (offset < size || part + 1 == parts.size()) break;
      offset -= size;
    }
    return parts[part] + offset * dtype_bytes(dtype);
  }
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
  // Of one that is done: nanoseconds since its start.
  virtual std::int64_t duration_ns() const = 0;
  // Of a recv that is done: who sent.
  virtual Rank source() const = 0;
};

}  // namespace pycomm

// The nouns of a collective: element types, reductions, kinds of operation, and its signature.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "pycomm/status.h"

namespace pycomm {

enum class DType : std::uint8_t {
  kFloat64,
  kFloat32,
  kFloat16,
  kBFloat16,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kUInt8,
  kBool,
  kComplex64,
  kComplex128,
};
inline constexpr int kNumDTypes = 12;

enum class ReduceOp : std::uint8_t { kSum, kAvg, kProduct, kMin, kMax, kBitAnd, kBitOr, kBitXor };
inline constexpr int kNumReduceOps = 8;

enum class OpKind : std::uint8_t {
  kBarrier,
  kAllReduce,
  kBroadcast,
  kAllGather,
  kReduce,
  kReduceScatter,
  kGather,
  kScatter,
  kAllToAll,
  kAllToAllUneven,  // a count for every pair; OpRequest::splits
  kSend,            // to one rank, outside the order of the collectives
  kRecv,
};
inline constexpr int kNumOpKinds = 12;
inline constexpr int kNumCollectives = 10;  // those that every rank takes part in

constexpr bool is_point_to_point(OpKind kind) { return kind >= OpKind::kSend; }
constexpr bool reduces(OpKind kind) {
  return kind == OpKind::kAllReduce || kind == OpKind::kReduce || kind == OpKind::kReduceScatter;
}
constexpr bool has_root(OpKind kind) {
  return kind == OpKind::kBroadcast || kind == OpKind::kReduce || kind == OpKind::kGather ||
         kind == OpKind::kScatter;
}

constexpr std::size_t dtype_bytes(DType dtype) {
  constexpr std::uint8_t kBytes[kNumDTypes] = {8, 4, 2, 2, 1, 2, 4, 8, 1, 1, 8, 16};
  return kBytes[static_cast<int>(dtype)];
}
const char* to_string(DType dtype);
const char* to_string(ReduceOp op);
const char* to_string(OpKind kind);

// Whether `op` is defined on `dtype`: no bit operations on floats, no order on complex numbers.
constexpr bool is_reducible(DType dtype, ReduceOp op) {
  const bool is_float = dtype <= DType::kBFloat16;
  const bool is_complex = dtype >= DType::kComplex64;
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kProduct: return true;
    case ReduceOp::kAvg: return is_float || is_complex;
    case ReduceOp::kMin:
    case ReduceOp::kMax: return !is_complex;
    default: return !is_float && !is_complex;
  }
}

// What every rank must agree on for one operation, in 64 bits: kind 4, dtype 5, reduction 4,
// root 14, count 37. It travels in every header, so that a mismatch is an error that can print
// both sides. Equal signatures mean equal operations; nothing is hashed.
using Signature = std::uint64_t;
inline constexpr std::uint64_t kCountMax = (std::uint64_t{1} << 37) - 1;
inline constexpr Rank kRootMax = (1 << 14) - 1;

constexpr Signature make_signature(OpKind kind, DType dtype, ReduceOp op, Rank root,
                                   std::uint64_t count) {
  return (static_cast<std::uint64_t>(kind) << 60) | (static_cast<std::uint64_t>(dtype) << 55) |
         (static_cast<std::uint64_t>(op) << 51) |
         ((static_cast<std::uint64_t>(root) & kRootMax) << 37) | (count & kCountMax);
}

// For people: "all_reduce(sum, float32, 1024 elements)".
std::string describe_signature(Signature signature);

}  // namespace pycomm

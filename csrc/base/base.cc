// Bodies of status.h, types.h and check.h.
#include <atomic>
#include <cstdio>
#include <cstdlib>

#include "base/check.h"
#include "pycomm/types.h"

namespace pycomm {

const char* to_string(StatusCode code) {
  switch (code) {
    case StatusCode::kOk: return "ok";
    case StatusCode::kInvalidUsage: return "invalid usage";
    case StatusCode::kSystem: return "system error";
    case StatusCode::kTimeout: return "timeout";
    case StatusCode::kPeerLost: return "peer lost";
    case StatusCode::kAborted: return "aborted";
    case StatusCode::kInternal: return "internal error";
  }
  return "unknown";
}

Status Status::error(StatusCode code, std::string message, Rank rank) {
  PYCOMM_CHECK(code != StatusCode::kOk);
  Status status;
  status.rep_ = new Rep{1, code, rank, std::move(message)};
  return status;
}

void Status::release() {
  if (rep_->num_owners.fetch_sub(1, std::memory_order_acq_rel) == 1) delete rep_;
}

const std::string& Status::message() const {
  static const std::string empty;
  return rep_ ? rep_->message : empty;
}

std::string Status::to_string() const {
  if (is_ok()) return "ok";
  return std::string(pycomm::to_string(rep_->code)) + ": " + rep_->message;
}

namespace {
constexpr const char* kDTypeNames[kNumDTypes] = {"float64", "float32", "float16",   "bfloat16",
                                                 "int8",    "int16",   "int32",     "int64",
                                                 "uint8",   "bool",    "complex64", "complex128"};
constexpr const char* kReduceOpNames[kNumReduceOps] = {"sum", "avg",  "product", "min",
                                                       "max", "band", "bor",     "bxor"};
constexpr const char* kOpKindNames[kNumOpKinds] = {
    "barrier", "all_reduce", "broadcast",  "all_gather",        "reduce", "reduce_scatter",
    "gather",  "scatter",    "all_to_all", "all_to_all_uneven", "send",   "recv"};
}  // namespace

const char* to_string(DType dtype) { return kDTypeNames[static_cast<int>(dtype)]; }
const char* to_string(ReduceOp op) { return kReduceOpNames[static_cast<int>(op)]; }
const char* to_string(OpKind kind) { return kOpKindNames[static_cast<int>(kind)]; }

std::string describe_signature(Signature s) {
  const auto kind = static_cast<unsigned>(s >> 60);
  const auto dtype = static_cast<unsigned>(s >> 55) & 31;
  const auto op = static_cast<unsigned>(s >> 51) & 15;
  const auto root = static_cast<unsigned>(s >> 37) & kRootMax;
  if (kind >= kNumOpKinds || dtype >= kNumDTypes || op >= kNumReduceOps) {
    return "an unknown operation";
  }
  std::string text = kOpKindNames[kind];
  const auto which = static_cast<OpKind>(kind);
  if (which == OpKind::kBarrier) return text + "()";
  text += "(";
  if (reduces(which)) text += std::string(kReduceOpNames[op]) + ", ";
  if (has_root(which)) text += "root " + std::to_string(root) + ", ";
  // Its counts belong to pairs: a header between two ranks carries theirs.
  if (which == OpKind::kAllToAllUneven && (s & kCountMax) == 0) {
    return text + kDTypeNames[dtype] + ")";
  }
  return text + kDTypeNames[dtype] + ", " + std::to_string(s & kCountMax) + " elements)";
}

namespace base {

void check_failed(const char* file, int line, const char* expression) {
  std::fprintf(stderr, "pycomm: check failed at %s:%d: %s\n", file, line, expression);
  std::abort();
}

}  // namespace base
}  // namespace pycomm

#include "collectives/validate.h"

#include <algorithm>
#include <numeric>

namespace pycomm::collectives {
namespace {

Status invalid(std::string text) {
  return Status::error(StatusCode::kInvalidUsage, std::move(text));
}

bool reads_input(const OpRequest& request, Rank rank) {
  switch (request.kind) {
    case OpKind::kBarrier:
    case OpKind::kRecv: return false;
    case OpKind::kBroadcast:
    case OpKind::kScatter: return request.root == rank;
    default: return true;
  }
}

bool writes_output(const OpRequest& request, Rank rank) {
  switch (request.kind) {
    case OpKind::kBarrier:
    case OpKind::kSend: return false;
    case OpKind::kReduce:
    case OpKind::kGather: return request.root == rank;
    default: return true;
  }
}

std::uint64_t total(const std::vector<std::uint64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), std::uint64_t{0});
}

}  // namespace

Sizes sizes_of(const OpRequest& request, int world_size) {
  const std::uint64_t element = dtype_bytes(request.dtype);
  const std::uint64_t one = request.bytes();
  const std::uint64_t all = one * static_cast<std::uint64_t>(world_size);
  switch (request.kind) {
    case OpKind::kAllGather:
    case OpKind::kGather: return {one, all};
    case OpKind::kReduceScatter:
    case OpKind::kScatter: return {all, one};
    case OpKind::kAllToAll: return {all, all};
    case OpKind::kAllToAllUneven:
      return {total(request.splits->send) * element, total(request.splits->recv) * element};
    default: return {one, one};
  }
}

namespace {

// Input and output lie apart, or where an operation in place has them.
bool overlaps_badly(const OpRequest& request, const Sizes& sizes, Rank rank) {
  const std::byte* in = request.input;
  const std::byte* out = request.output;
  if (in + sizes.input <= out || out + sizes.output <= in) return false;
  const std::uint64_t mine = static_cast<std::uint64_t>(rank) * request.bytes();
  switch (request.kind) {
    case OpKind::kAllGather:
    case OpKind::kGather: return in != out + mine;
    case OpKind::kReduceScatter:
    case OpKind::kScatter: return out != in + mine;
    case OpKind::kAllToAll:
    case OpKind::kAllToAllUneven: return true;
    default: return in != out;
  }
}

std::string find_fault(const OpRequest& request, Rank rank, int world_size) {
  const auto n = static_cast<std::size_t>(world_size);
  if (is_point_to_point(request.kind)) {
    const bool is_any = request.kind == OpKind::kRecv && request.root == kAnySource;
    if (world_size == 1) return "nobody else is in a group of one";
    if (request.root == rank) return "rank " + std::to_string(rank) + " cannot talk to itself";
    if (!is_any && (request.root < 0 || request.root >= world_size)) {
      return "rank " + std::to_string(request.root) + " is not in a group of " +
             std::to_string(world_size);
    }
  } else if (request.root < 0 || request.root >= world_size) {
    return "root " + std::to_string(request.root) + " is not in a group of " +
           std::to_string(world_size);
  }
  const bool is_uneven = request.kind == OpKind::kAllToAllUneven;
  if (is_uneven != (request.splits != nullptr)) return "splits are for an uneven all_to_all";
  if (is_uneven && (request.splits->send.size() != n || request.splits->recv.size() != n)) {
    return "splits need a count for each of " + std::to_string(n) + " ranks";
  }
  const auto self = static_cast<std::size_t>(rank);
  if (is_uneven && request.splits->send[self] != request.splits->recv[self]) {
    return "rank " + std::to_string(rank) + " sends " + std::to_string(request.splits->send[self]) +
           " elements to itself, but expects " + std::to_string(request.splits->recv[self]);
  }
  std::uint64_t most = request.count;
  if (is_uneven) {
    for (const auto* counts : {&request.splits->send, &request.splits->recv}) {
      for (const std::uint64_t count : *counts) most = std::max(most, count);
    }
  }
  if (most > kCountMax) return "too many elements";
  if (reduces(request.kind) && !is_reducible(request.dtype, request.op)) {
    return std::string(to_string(request.op)) + " is not defined on " + to_string(request.dtype);
  }
  const Sizes sizes = sizes_of(request, world_size);
  const bool reads = reads_input(request, rank) && sizes.input > 0;
  const bool writes = writes_output(request, rank) && sizes.output > 0;
  const auto are_wrong = [&](const std::shared_ptr<const Parts>& parts, std::uint64_t bytes) {
    const bool has_parts = is_uneven || world_size == 1 || bytes > request.bytes();
    return parts && (parts->size() != n || (bytes > 0 && !has_parts));
  };
  if (are_wrong(request.input_parts, sizes.input) ||
      are_wrong(request.output_parts, sizes.output)) {
    return "parts are for what has one for every rank";
  }
  if ((reads && request.input == nullptr && !request.input_parts) ||
      (writes && request.output == nullptr && !request.output_parts)) {
    return "no memory given";
  }
  if (request.input_parts || request.output_parts) return "";  // their overlaps are the caller's
  if (reads && writes && overlaps_badly(request, sizes, rank)) {
    return "input and output overlap, other than for an operation in place";
  }
  return "";
}

}  // namespace

Status validate(const OpRequest& request, Rank rank, int world_size) {
  // The common case, without a call.
  const bool is_plain =
      request.kind <= OpKind::kBroadcast && request.count <= kCountMax && request.root >= 0 &&
      request.root < world_size && !request.splits && !request.input_parts &&
      !request.output_parts && request.input == request.output &&
      (request.input != nullptr || request.count == 0) &&
      (request.kind != OpKind::kAllReduce || is_reducible(request.dtype, request.op));
  if (__builtin_expect(is_plain, 1)) return Status();
  const std::string fault = find_fault(request, rank, world_size);
  if (fault.empty()) return Status();
  return invalid(std::string(to_string(request.kind)) + ": " + fault);
}

}  // namespace pycomm::collectives

#include "collectives/local_plan.h"

#include <numeric>

namespace pycomm::collectives {
namespace {

std::uint64_t sum_below(const std::vector<std::uint64_t>& counts, Rank r) {
  return std::accumulate(counts.begin(), counts.begin() + r, std::uint64_t{0});
}

}  // namespace

Span LocalPlan::given(Rank from, Rank to) const {
  if (!is_giver(from)) return {0, 0};
  const auto at = static_cast<std::uint64_t>(to);
  switch (kind) {
    case OpKind::kAllReduce:
    case OpKind::kReduce:
    case OpKind::kReduceScatter: return folded(to);
    case OpKind::kGather: return {0, to == root ? count : 0};
    case OpKind::kAllGather:
    case OpKind::kBroadcast: return {0, count};
    case OpKind::kScatter:
    case OpKind::kAllToAll: return {at * count, count};
    case OpKind::kAllToAllUneven:
      if (from == rank) return {sum_below(splits->send, to), splits->send[at]};
      // Only windows move uneven parts: where the giver has it is the giver's to know.
      return {0, splits->recv[static_cast<std::size_t>(from)]};
    default: return {0, 0};
  }
}

std::uint64_t LocalPlan::taken_at(Rank from) const {
  const auto at = static_cast<std::uint64_t>(from);
  switch (kind) {
    case OpKind::kAllReduce:
    case OpKind::kReduce: return folded(from).offset;
    case OpKind::kAllGather:
    case OpKind::kGather:
    case OpKind::kAllToAll: return at * count;
    case OpKind::kAllToAllUneven: return sum_below(splits->recv, from);
    default: return 0;
  }
}

Span LocalPlan::folded(Rank r) const {
  if (swaps) return {0, count};
  if (kind == OpKind::kReduceScatter) return {static_cast<std::uint64_t>(r) * count, count};
  // Of two ranks the root takes everything: the other one's copy and its fold overlap.
  if (kind == OpKind::kReduce && world_size == 2 && !pushes) return {0, r == root ? count : 0};
  return part_of(count, world_size, r, align);
}

Span LocalPlan::own(std::uint64_t* at) const {
  const bool is_root = rank == root;
  const auto mine = static_cast<std::uint64_t>(rank) * count;
  *at = 0;
  switch (kind) {
    case OpKind::kBroadcast: return {0, is_root ? count : 0};
    case OpKind::kAllGather: *at = mine; return {0, count};
    case OpKind::kGather: *at = mine; return {0, is_root ? count : 0};
    case OpKind::kScatter: return {mine, is_root ? count : 0};
    case OpKind::kAllToAll: *at = mine; return {mine, count};
    case OpKind::kAllToAllUneven:
      *at = sum_below(splits->recv, rank);
      return {sum_below(splits->send, rank), splits->send[static_cast<std::size_t>(rank)]};
    default: return {0, 0};
  }
}

std::uint64_t LocalPlan::longest() const {
  if (has_results()) {
    // Parts are cut in order, none longer than the first but for the root's whole.
    return world_size == 2 && kind == OpKind::kReduce && !pushes ? count : folded(0).count;
  }
  return count;
}

}  // namespace pycomm::collectives

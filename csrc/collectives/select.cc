#include "collectives/select.h"

namespace pycomm::collectives {
namespace {

Schedule plan_all_reduce(const GroupShape& shape, const PlanRequest& request) {
  const std::uint64_t bytes = request.count * request.element_bytes;
  const auto others = static_cast<std::uint64_t>(request.world_size - 1);
  if (shape.shares_memory || request.in_rank_order) {
    // One hop of everything, or two of a part: the crossover is where the second hop's latency is
    // worth the bytes that it saves.
    const bool is_small = others * bytes <= 2 * shape.recursive_bytes_max;
    return is_small ? plan_swap_all_reduce(request) : plan_direct_all_reduce(request);
  }
  // Two ranks swap whole buffers in one step where a ring would take two of half the size.
  if (bytes <= shape.recursive_bytes_max) return plan_recursive_all_reduce(request);
  return plan_ring_all_reduce(request);
}

}  // namespace

Schedule plan_over_messages(const GroupShape& shape, const PlanRequest& request) {
  const std::uint64_t bytes = request.count * request.element_bytes;
  switch (request.kind) {
    case OpKind::kAllReduce: return plan_all_reduce(shape, request);
    case OpKind::kReduceScatter: return plan_direct_reduce_scatter(request);
    case OpKind::kReduce:
      if (request.world_size == 2 || bytes <= shape.recursive_bytes_max) {
        return plan_direct_reduce(request);
      }
      return plan_scattered_reduce(request);
    case OpKind::kBroadcast:
      return shape.shares_memory ? plan_direct_broadcast(request) : plan_tree_broadcast(request);
    case OpKind::kAllGather:
      return shape.shares_memory ? plan_direct_all_gather(request) : plan_ring_all_gather(request);
    case OpKind::kGather: return plan_direct_gather(request);
    case OpKind::kScatter: return plan_direct_scatter(request);
    case OpKind::kAllToAll:
    case OpKind::kAllToAllUneven: return plan_direct_all_to_all(request);
    default: return plan_barrier(request);
  }
}

}  // namespace pycomm::collectives

#include "collectives/select.h"

namespace pycomm::collectives {

Schedule plan_over_messages(const GroupShape& shape, const PlanRequest& request) {
  const std::uint64_t bytes = request.count * request.element_bytes;
  switch (request.kind) {
    case OpKind::kBarrier: return plan_barrier(request);
    case OpKind::kBroadcast: return plan_tree_broadcast(request);
    case OpKind::kAllGather: return plan_ring_all_gather(request);
    case OpKind::kAllReduce: break;
  }
  // Two ranks swap whole buffers in one step where a ring would take two of half the size; the
  // crossover is where the saved latency is worth the doubled bytes.
  if (bytes <= shape.recursive_bytes_max) return plan_recursive_all_reduce(request);
  return plan_ring_all_reduce(request);
}

}  // namespace pycomm::collectives

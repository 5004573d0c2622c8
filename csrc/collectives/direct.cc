// Schedules in which every rank deals with every other directly: the expansions of the fused
// steps, and a one-step choice for small messages among few ranks.
#include "collectives/schedule.h"

namespace pycomm::collectives {
namespace {

// Lanes of stage 0: everyone sends `mine` of its output to each peer and receives theirs.
void add_swap(Schedule& schedule, const PlanRequest& request, Step send, Step recv) {
  for (Rank p = 0; p < request.world_size; ++p) {
    if (p == request.rank) continue;
    schedule.begin_lane(0);
    send.kind = StepKind::kSend;
    send.peer = p;
    schedule.add(send);
  }
  for (Rank p = 0; p < request.world_size; ++p) {
    if (p == request.rank) continue;
    schedule.begin_lane(0);
    recv.kind = StepKind::kRecv;
    recv.peer = p;
    recv.offset = static_cast<std::uint64_t>(p) * recv.scratch_stride;
    schedule.add(recv);
  }
}

Schedule plan_flat_all_reduce(const PlanRequest& request) {
  Schedule schedule{.name = "flat", .fused = Fused::kFlat};
  Step whole{.kind = StepKind::kSend};
  whole.count = request.count;
  Step recv = whole;
  recv.buffer = BufferId::kScratch;
  recv.scratch_stride = request.count;
  add_swap(schedule, request, whole, recv);
  schedule.begin_lane(1);
  Step fold = recv;
  fold.kind = StepKind::kFold;
  fold.offset = 0;
  schedule.add(fold);
  schedule.scratch_elements = request.count * static_cast<std::uint64_t>(request.world_size);
  return schedule;
}

Schedule plan_flat_all_gather(const PlanRequest& request) {
  Schedule schedule{.name = "flat", .fused = Fused::kFlat};
  Step send{.kind = StepKind::kSend};
  send.offset = static_cast<std::uint64_t>(request.rank) * request.count;
  send.count = request.count;
  Step recv = send;
  recv.scratch_stride = request.count;
  add_swap(schedule, request, send, recv);
  return schedule;
}

// Everyone hears from everyone, which is a barrier; the root's message carries the bytes.
Schedule plan_flat_broadcast(const PlanRequest& request) {
  Schedule schedule{.name = "flat", .fused = Fused::kFlat};
  for (Rank p = 0; p < request.world_size; ++p) {
    if (p == request.rank) continue;
    Step step{.kind = StepKind::kSend, .peer = p};
    step.count = request.rank == request.root ? request.count : 0;
    schedule.begin_lane(0);
    schedule.add(step);
    step.kind = StepKind::kRecv;
    step.count = p == request.root ? request.count : 0;
    schedule.begin_lane(0);
    schedule.add(step);
  }
  return schedule;
}

}  // namespace

Schedule plan_flat(const PlanRequest& request) {
  if (request.world_size == 1) return Schedule{.name = "flat", .fused = Fused::kFlat};
  switch (request.kind) {
    case OpKind::kAllReduce: return plan_flat_all_reduce(request);
    case OpKind::kAllGather: return plan_flat_all_gather(request);
    case OpKind::kBroadcast:
    case OpKind::kBarrier: break;
  }
  return plan_flat_broadcast(request);
}

// Rank r folds part r of everyone's tensor and gives it to everyone.
Schedule plan_shared_all_reduce(const PlanRequest& request) {
  Schedule schedule{.name = "shared", .fused = Fused::kShared};
  const int n = request.world_size;
  if (n == 1 || request.count == 0) return schedule;
  const std::uint64_t align = 4096 / request.element_bytes;
  const Part mine = part_of(request.count, n, request.rank, align);
  for (Rank p = 0; p < n; ++p) {
    const Part part = part_of(request.count, n, p, align);
    if (p == request.rank || part.count == 0) continue;
    Step send{.kind = StepKind::kSend, .peer = p};
    send.offset = part.offset;
    send.count = part.count;
    schedule.begin_lane(0);
    schedule.add(send);
  }
  for (Rank p = 0; p < n && mine.count > 0; ++p) {
    if (p == request.rank) continue;
    Step recv{.kind = StepKind::kRecv, .buffer = BufferId::kScratch, .peer = p};
    recv.offset = static_cast<std::uint64_t>(p) * mine.count;
    recv.count = mine.count;
    schedule.begin_lane(0);
    schedule.add(recv);
  }
  if (mine.count > 0) {
    Step fold{.kind = StepKind::kFold};
    fold.offset = mine.offset;
    fold.count = mine.count;
    fold.scratch_stride = mine.count;
    schedule.begin_lane(1);
    schedule.add(fold);
    schedule.scratch_elements = mine.count * static_cast<std::uint64_t>(n);
  }
  for (Rank p = 0; p < n; ++p) {
    if (p == request.rank) continue;
    const Part part = part_of(request.count, n, p, align);
    Step spread{.kind = StepKind::kSend, .peer = p, .step = 1};
    spread.offset = mine.offset;
    spread.count = mine.count;
    if (mine.count > 0) {
      schedule.begin_lane(2);
      schedule.add(spread);
    }
    if (part.count > 0) {
      spread.kind = StepKind::kRecv;
      spread.offset = part.offset;
      spread.count = part.count;
      schedule.begin_lane(2);
      schedule.add(spread);
    }
  }
  return schedule;
}

}  // namespace pycomm::collectives

#include "collectives/schedule_run.h"

#include <algorithm>

#include "base/check.h"
#include "kernels/reduce.h"

namespace pycomm::collectives {
namespace {

// Lanes in flight. A ring needs all world_size shards of its oldest chunk at once, or it
// deadlocks (tests/cpp/schedule_run_test.cc); the rest fills the pipe.
std::size_t lanes_in_flight(int world_size) { return 2 * static_cast<std::size_t>(world_size) + 8; }

bool needs_scratch(StepKind kind) {
  return kind == StepKind::kRecvCombine || kind == StepKind::kExchangeCombine;
}

}  // namespace

ScheduleRun::ScheduleRun(GroupContext& group, const OpRequest& request, Schedule schedule)
    : group_(group),
      request_(request),
      schedule_(std::move(schedule)),
      element_bytes_(dtype_bytes(request.dtype)),
      lanes_max_(std::max(lanes_in_flight(group.world_size),
                          schedule_.fused == Fused::kNo ? 0 : schedule_.lanes.size())) {
  for (const Step& step : schedule_.steps) {
    if (needs_scratch(step.kind))
      scratch_bytes_ = std::max(scratch_bytes_, step.count * element_bytes_);
  }
  scratch_bytes_ = std::max(scratch_bytes_, group.chunk_bytes);
  fold_scratch_.resize(schedule_.scratch_elements * element_bytes_);
}

ScheduleRun::~ScheduleRun() { cancel(); }

bool ScheduleRun::advance() {
  bool moved = start_lanes();
  for (auto it = active_.begin(); it != active_.end() && failure_.is_ok();) {
    moved |= advance_lane(*it);
    if (failure_.is_ok() && is_lane_done(*it) && it == active_.begin()) {
      it = active_.erase(it);  // erasing at the front moves no other lane
    } else {
      ++it;
    }
  }
  return moved;
}

bool ScheduleRun::start_lanes() {
  bool moved = false;
  while (next_lane_ < schedule_.lanes.size()) {
    const Lane& lane = schedule_.lanes[next_lane_];
    // Lanes are retired from the front only, so the oldest open one may hold finished ones.
    const auto open = std::count_if(active_.begin(), active_.end(),
                                    [&](const ActiveLane& a) { return !is_lane_done(a); });
    if (static_cast<std::size_t>(open) >= lanes_max_) break;
    if (open > 0 && active_.back().lane->stage != lane.stage) break;
    active_.emplace_back();
    active_.back().lane = &lane;
    ++next_lane_;
    moved = true;
  }
  return moved;
}

bool ScheduleRun::advance_lane(ActiveLane& lane) {
  bool moved = false;
  while (!is_lane_done(lane)) {
    const Step& step = step_of(lane);
    if (!lane.issued) {
      issue(lane, step);
      lane.issued = true;
      moved = true;
    }
    if (lane.send.state == TransferState::kPending || lane.recv.state == TransferState::kPending) {
      look_for_departed(lane, step);
    }
    if (lane.send.state == TransferState::kFailed) {
      fail(step.peer, lane.send);
      return true;
    }
    if (lane.recv.state == TransferState::kFailed) {
      fail(step.kind == StepKind::kExchange ? step.from : step.peer, lane.recv);
      return true;
    }
    if (lane.send.state == TransferState::kPending || lane.recv.state == TransferState::kPending) {
      return moved;
    }
    complete(lane, step);
    lane.send.state = TransferState::kIdle;
    lane.recv.state = TransferState::kIdle;
    lane.issued = false;
    ++lane.at;
    moved = true;
  }
  return moved;
}

// A rank that left the group needs nothing more, and sends nothing more.
void ScheduleRun::look_for_departed(ActiveLane& lane, const Step& step) {
  const auto link = [&](Rank peer) { return group_.links[static_cast<std::size_t>(peer)]; };
  if (lane.send.state == TransferState::kPending && group_.has_departed(step.peer)) {
    link(step.peer)->cancel(lane.send);
    lane.send.state = TransferState::kDone;
  }
  const Rank from = step.kind == StepKind::kExchange ? step.from : step.peer;
  if (lane.recv.state == TransferState::kPending && group_.has_departed(from)) {
    link(from)->cancel(lane.recv);
    lane.recv.status = Status::error(StatusCode::kPeerLost, "it left the group");
  }
}

void ScheduleRun::prepare(Transfer& transfer, const Step& step, std::byte* data) {
  transfer.id = {group_.group, request_.op_number, group_.epoch, step.step, step.chunk};
  transfer.signature = request_.signature();
  transfer.data = data;
  transfer.bytes = step.count * element_bytes_;
}

void ScheduleRun::issue(ActiveLane& lane, const Step& step) {
  const auto link = [&](Rank peer) { return group_.links[static_cast<std::size_t>(peer)]; };
  if (needs_scratch(step.kind)) lane.scratch = group_.scratch.take(scratch_bytes_);
  switch (step.kind) {
    case StepKind::kSend:
      prepare(lane.send, step, output_at(step.offset));
      link(step.peer)->send(lane.send);
      break;
    case StepKind::kRecv:
      prepare(lane.recv, step,
              step.buffer == BufferId::kScratch
                  ? fold_scratch_.data() + step.offset * element_bytes_
                  : output_at(step.offset));
      link(step.peer)->post(lane.recv);
      break;
    case StepKind::kRecvCombine:
      prepare(lane.recv, step, lane.scratch.get());
      link(step.peer)->post(lane.recv);
      break;
    case StepKind::kExchange:
      prepare(lane.recv, step, output_at(step.offset));
      link(step.from)->post(lane.recv);
      prepare(lane.send, step, output_at(step.offset));
      link(step.peer)->send(lane.send);
      break;
    case StepKind::kExchangeCombine:
      prepare(lane.recv, step, lane.scratch.get());
      link(step.peer)->post(lane.recv);
      prepare(lane.send, step, output_at(step.offset));
      link(step.peer)->send(lane.send);
      break;
    case StepKind::kFold:
    case StepKind::kScale: break;
  }
}

void ScheduleRun::complete(ActiveLane& lane, const Step& step) {
  const kernels::ReduceKernels& kernels = kernels::reduce_kernels();
  std::byte* mine = output_at(step.offset);
  if (step.kind == StepKind::kRecvCombine) {
    kernels.combine(mine, lane.scratch.get(), mine, step.count, request_.dtype, request_.op);
  } else if (step.kind == StepKind::kExchangeCombine) {
    const std::byte* low = group_.rank < step.peer ? mine : lane.scratch.get();
    const std::byte* high = group_.rank < step.peer ? lane.scratch.get() : mine;
    kernels.combine(mine, low, high, step.count, request_.dtype, request_.op);
  } else if (step.kind == StepKind::kScale) {
    const double factor = scales_first(request_) ? 1.0 : request_.scale(group_.world_size);
    if (factor != 1.0) kernels.scale(mine, step.count, request_.dtype, factor);
  } else if (step.kind == StepKind::kFold) {
    fold(step);
  }
  if (lane.scratch) group_.scratch.give_back(std::move(lane.scratch), scratch_bytes_);
}

void ScheduleRun::fold(const Step& step) {
  const std::byte* inputs[kFlatWorldMax];
  PYCOMM_CHECK(group_.world_size <= kFlatWorldMax);
  std::byte* mine = output_at(step.offset);
  for (Rank p = 0; p < group_.world_size; ++p) {
    inputs[p] = p == group_.rank ? mine
                                 : fold_scratch_.data() + static_cast<std::uint64_t>(p) *
                                                              step.scratch_stride * element_bytes_;
  }
  kernels::fold(&mine, 1, inputs, group_.world_size, step.count, request_.dtype, request_.op,
                request_.scale(group_.world_size));
}

void ScheduleRun::fail(Rank peer, const Transfer& transfer) {
  const Status& status = transfer.status;
  const std::string who = "rank " + std::to_string(peer);
  std::string text;
  if (status.code() == StatusCode::kPeerLost) {
    text = who + " was lost: " + status.message();
  } else if (status.code() == StatusCode::kInvalidUsage) {
    text =
        "rank " + std::to_string(group_.rank) + " and " + who + " disagree on " + status.message();
  } else {
    text = "transfer with " + who + ": " + status.message();
  }
  failure_ = Status::error(status.code(), text, peer);
}

Rank ScheduleRun::waits_for() const {
  for (const ActiveLane& lane : active_) {
    if (is_lane_done(lane)) continue;
    const Step& step = step_of(lane);
    if (lane.recv.state == TransferState::kPending) {
      return step.kind == StepKind::kExchange ? step.from : step.peer;
    }
    if (lane.send.state == TransferState::kPending) return step.peer;
  }
  return kNoRank;
}

void ScheduleRun::cancel() {
  for (ActiveLane& lane : active_) {
    if (is_lane_done(lane)) continue;
    const Step& step = step_of(lane);
    if (lane.send.state == TransferState::kPending) {
      group_.links[static_cast<std::size_t>(step.peer)]->cancel(lane.send);
    }
    if (lane.recv.state == TransferState::kPending) {
      const Rank from = step.kind == StepKind::kExchange ? step.from : step.peer;
      group_.links[static_cast<std::size_t>(from)]->cancel(lane.recv);
    }
  }
  active_.clear();
}

}  // namespace pycomm::collectives

#include "collectives/schedule_run.h"

#include <algorithm>

#include "base/check.h"
#include "kernels/reduce.h"

namespace pycomm::collectives {
namespace {

// Lanes in flight. A ring needs all world_size shards of its oldest chunk at once, and an
// all_to_all both directions of every pair, or they deadlock; the rest fills the pipe.
std::size_t lanes_in_flight(int world_size) { return 2 * static_cast<std::size_t>(world_size) + 8; }

std::uint64_t scratch_elements(const Step& step, int world_size) {
  const auto others = static_cast<std::uint64_t>(world_size - 1);
  if (folds(step.kind)) return step.count * (step.buffer == BufferId::kLane ? others + 1 : others);
  const bool combines =
      step.kind == StepKind::kRecvCombine || step.kind == StepKind::kExchangeCombine;
  return combines ? step.count : 0;
}

}  // namespace

ScheduleRun::ScheduleRun(GroupContext& group, const OpRequest& request, Schedule schedule)
    : group_(group),
      request_(request),
      schedule_(std::move(schedule)),
      element_bytes_(dtype_bytes(request.dtype)),
      lanes_max_(lanes_in_flight(group.world_size)),
      scratch_bytes_(group.chunk_bytes) {
  for (const Step& step : schedule_.steps) {
    scratch_bytes_ =
        std::max(scratch_bytes_, scratch_elements(step, group.world_size) * element_bytes_);
  }
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
    if (!is_settled(lane)) return moved || !failure_.is_ok();
    complete(lane, step);
    lane.send.state = TransferState::kIdle;
    lane.recv.state = TransferState::kIdle;
    lane.with_all.reset();
    lane.issued = false;
    ++lane.at;
    moved = true;
  }
  return moved;
}

template <class Body>
void ScheduleRun::for_each_open(const ActiveLane& lane, Body&& body) const {
  const Step& step = step_of(lane);
  auto& mutable_lane = const_cast<ActiveLane&>(lane);
  const auto visit = [&](Transfer& transfer, Rank peer, bool is_receive) {
    const bool is_open =
        transfer.state == TransferState::kPending || transfer.state == TransferState::kFailed;
    return !is_open || body(transfer, peer, is_receive);
  };
  if (!lane.with_all) {
    const Rank from = step.kind == StepKind::kExchange ? step.from : step.peer;
    if (visit(mutable_lane.recv, from, true)) visit(mutable_lane.send, step.peer, false);
    return;
  }
  for (std::size_t i = 0; i < 2 * num_ranks(); ++i) {
    const auto peer = static_cast<Rank>(i % num_ranks());
    if (!visit(lane.with_all[i], peer, i < num_ranks())) return;
  }
}

bool ScheduleRun::is_settled(ActiveLane& lane) {
  bool settled = true;
  for_each_open(lane, [&](Transfer& transfer, Rank peer, bool is_receive) {
    if (transfer.state == TransferState::kPending) look_for_departed(transfer, peer, is_receive);
    if (transfer.state == TransferState::kFailed) fail(peer, transfer);
    settled &= transfer.state == TransferState::kDone;
    return failure_.is_ok();
  });
  return settled && failure_.is_ok();
}

// A rank that left the group needs nothing more, and sends nothing more.
void ScheduleRun::look_for_departed(Transfer& transfer, Rank peer, bool is_receive) {
  if (!group_.has_departed(peer)) return;
  link(peer).cancel(transfer);
  if (is_receive) {
    transfer.state = TransferState::kFailed;
    transfer.status = Status::error(StatusCode::kPeerLost, "it left the group");
  } else {
    transfer.state = TransferState::kDone;
  }
}

void ScheduleRun::prepare(Transfer& transfer, const Step& step, Rank peer, bool is_receive,
                          std::byte* data) {
  transfer.id = {group_.group, request_.op_number, group_.epoch, step.step, step.chunk};
  transfer.signature = request_.signature();
  if (request_.splits) {  // what a pair exchanges is between the two
    const auto& counts = is_receive ? request_.splits->recv : request_.splits->send;
    transfer.signature = make_signature(request_.kind, request_.dtype, request_.op, 0,
                                        counts[static_cast<std::size_t>(peer)]);
  }
  transfer.data = data;
  transfer.bytes = step.count * element_bytes_;
}

std::byte* ScheduleRun::slot(const ActiveLane& lane, const Step& step, Rank rank) const {
  const auto index = static_cast<std::uint64_t>(rank < group_.rank ? rank : rank - 1);
  return lane.scratch.get() + index * step.count * element_bytes_;
}

std::byte* ScheduleRun::at(const ActiveLane& lane, BufferId buffer, std::uint64_t offset,
                           std::uint64_t count) const {
  switch (buffer) {
    case BufferId::kInput: return request_.input_at(offset);
    case BufferId::kOutput: return request_.output_at(offset);
    case BufferId::kLane: break;
  }
  return lane.scratch.get() + (num_ranks() - 1) * count * element_bytes_;
}

void ScheduleRun::issue(ActiveLane& lane, const Step& step) {
  if (!lane.scratch && scratch_elements(step, group_.world_size) > 0) {
    lane.scratch = group_.scratch.take(scratch_bytes_);
  }
  if (is_with_all(step.kind)) return issue_with_all(lane, step);
  if (step.kind == StepKind::kScale) return;
  std::byte* span = at(lane, step.buffer, step.offset, step.count);
  const bool combines =
      step.kind == StepKind::kRecvCombine || step.kind == StepKind::kExchangeCombine;
  if (step.kind != StepKind::kSend) {
    const Rank from = step.kind == StepKind::kExchange ? step.from : step.peer;
    prepare(lane.recv, step, from, true, combines ? lane.scratch.get() : span);
    link(from).post(lane.recv);
  }
  if (step.kind != StepKind::kRecv && step.kind != StepKind::kRecvCombine) {
    prepare(lane.send, step, step.peer, false, span);
    link(step.peer).send(lane.send);
  }
}

void ScheduleRun::issue_with_all(ActiveLane& lane, const Step& step) {
  lane.with_all = std::make_unique<Transfer[]>(2 * num_ranks());
  std::byte* span = at(lane, step.buffer, step.offset, step.count);
  for (Rank k = 1; k < group_.world_size; ++k) {
    const Rank peer = (group_.rank + k) % group_.world_size;
    const auto index = static_cast<std::size_t>(peer);
    if (folds(step.kind)) {
      Transfer& recv = lane.with_all[index];
      prepare(recv, step, peer, true, slot(lane, step, peer));
      link(peer).post(recv);
    }
    if (step.kind != StepKind::kGatherFold) {
      Transfer& send = lane.with_all[num_ranks() + index];
      prepare(send, step, peer, false, span);
      link(peer).send(send);
    }
  }
}

void ScheduleRun::complete(ActiveLane& lane, const Step& step) {
  const kernels::ReduceKernels& kernels = kernels::reduce_kernels();
  std::byte* mine = at(lane, step.buffer, step.offset, step.count);
  if (step.kind == StepKind::kRecvCombine) {
    kernels.combine(mine, lane.scratch.get(), mine, step.count, request_.dtype, request_.op);
  } else if (step.kind == StepKind::kExchangeCombine) {
    const std::byte* low = group_.rank < step.peer ? mine : lane.scratch.get();
    const std::byte* high = group_.rank < step.peer ? lane.scratch.get() : mine;
    kernels.combine(mine, low, high, step.count, request_.dtype, request_.op);
  } else if (step.kind == StepKind::kScale) {
    const double factor = request_.scale(group_.world_size);
    if (factor != 1.0) kernels.scale(mine, step.count, request_.dtype, factor);
  } else if (folds(step.kind)) {
    fold(lane, step);
  }
  // Last in, first out keeps it warm for the next lane, unless this one still has its result there.
  const bool is_last = lane.at + 1 == lane.lane->count;
  const bool holds_result = !is_last && (&step)[1].buffer == BufferId::kLane;
  if (lane.scratch && !holds_result) {
    group_.scratch.give_back(std::move(lane.scratch), scratch_bytes_);
  }
}

void ScheduleRun::fold(ActiveLane& lane, const Step& step) {
  std::vector<const std::byte*> inputs;
  const bool is_swap = step.kind == StepKind::kSwapFold;
  for (Rank p = 0; p < group_.world_size; ++p) {
    if (p != group_.rank) {
      inputs.push_back(slot(lane, step, p));
    } else if (is_swap) {
      inputs.push_back(at(lane, step.buffer, step.offset, step.count));
    } else {
      inputs.push_back(at(lane, step.own, step.own_offset, step.count));
    }
  }
  std::byte* out = at(lane, step.buffer, step.offset, step.count);
  kernels::fold({&out, 1}, inputs.data(), group_.world_size, step.count, request_.dtype,
                request_.op, request_.scale(group_.world_size));
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

std::vector<Rank> ScheduleRun::waits_for() const {
  std::vector<Rank> ranks;
  for (const ActiveLane& lane : active_) {
    if (is_lane_done(lane)) continue;
    for_each_open(lane, [&](const Transfer& transfer, Rank peer, bool) {
      if (transfer.state == TransferState::kPending) ranks.push_back(peer);
      return true;
    });
  }
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

void ScheduleRun::cancel() {
  for (ActiveLane& lane : active_) {
    if (is_lane_done(lane)) continue;
    for_each_open(lane, [&](Transfer& transfer, Rank peer, bool) {
      if (transfer.state == TransferState::kPending) link(peer).cancel(transfer);
      return true;
    });
  }
  active_.clear();
}

}  // namespace pycomm::collectives

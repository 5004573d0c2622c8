// Runs a schedule over links: a bounded number of lanes at once, each a small state machine around
// one posted and one sent transfer.
#pragma once

#include <deque>

#include "collectives/execution.h"

namespace pycomm::collectives {

// Whether an average divides the inputs before it adds them: sums of halves overflow at 65504,
// which the average need not. Their owners do it before the schedule runs.
inline bool scales_first(const OpRequest& request) {
  return request.op == ReduceOp::kAvg && request.dtype == DType::kFloat16;
}

class ScheduleRun {
 public:  // The request's input has been copied to where the schedule works on it, in output.
  ScheduleRun(GroupContext& group, const OpRequest& request, Schedule schedule);
  ~ScheduleRun();

  bool advance();
  bool is_done() const { return active_.empty() && next_lane_ == schedule_.lanes.size(); }
  // Ok, or the first transfer that failed, told with its peer's rank.
  const Status& failure() const { return failure_; }
  Rank waits_for() const;
  // Withdraws every transfer from its link.
  void cancel();

 private:
  struct ActiveLane {
    const Lane* lane = nullptr;
    std::uint32_t at = 0;
    bool issued = false;
    Transfer send;
    Transfer recv;
    ScratchPool::Buffer scratch;
  };

  bool start_lanes();
  bool advance_lane(ActiveLane& lane);
  bool is_lane_done(const ActiveLane& lane) const { return lane.at == lane.lane->count; }
  const Step& step_of(const ActiveLane& lane) const {
    return schedule_.steps[lane.lane->first + lane.at];
  }
  void look_for_departed(ActiveLane& lane, const Step& step);
  void issue(ActiveLane& lane, const Step& step);
  void complete(ActiveLane& lane, const Step& step);
  void fold(const Step& step);
  void prepare(Transfer& transfer, const Step& step, std::byte* data);
  void fail(Rank peer, const Transfer& transfer);
  std::byte* output_at(std::uint64_t offset) const {
    return request_.output + offset * element_bytes_;
  }

  GroupContext& group_;
  const OpRequest& request_;
  const Schedule schedule_;
  const std::uint64_t element_bytes_;
  const std::size_t lanes_max_;
  std::uint64_t scratch_bytes_ = 0;
  std::size_t next_lane_ = 0;
  std::deque<ActiveLane> active_;  // a deque: transfers must not move
  std::vector<std::byte> fold_scratch_;
  Status failure_;
};

}  // namespace pycomm::collectives

// Runs a schedule over links: a bounded number of lanes at once, each a small state machine around
// the transfers of its current step.
#pragma once

#include <deque>

#include "collectives/execution.h"

namespace pycomm::collectives {

class ScheduleRun {
 public:
  // What a rank gives itself is in place (schedule.h).
  ScheduleRun(GroupContext& group, const OpRequest& request, Schedule schedule);
  ~ScheduleRun();

  bool advance();
  bool is_done() const { return active_.empty() && next_lane_ == schedule_.lanes.size(); }
  // Ok, or the first transfer that failed, told with its peer's rank.
  const Status& failure() const { return failure_; }
  // The ranks whose transfers are open, in order.
  std::vector<Rank> waits_for() const;
  // Withdraws every transfer from its link.
  void cancel();

 private:
  struct ActiveLane {
    const Lane* lane = nullptr;
    std::uint32_t at = 0;
    bool issued = false;
    Transfer send;
    Transfer recv;
    // Of a step with all ranks: by rank, first what comes from them, then what goes to them.
    std::unique_ptr<Transfer[]> with_all;
    ScratchPool::Buffer scratch;
  };

  bool start_lanes();
  bool advance_lane(ActiveLane& lane);
  bool is_lane_done(const ActiveLane& lane) const { return lane.at == lane.lane->count; }
  const Step& step_of(const ActiveLane& lane) const {
    return schedule_.steps[lane.lane->first + lane.at];
  }
  // Calls body(transfer, peer, is_receive) for every transfer of the lane's current step that is
  // pending or failed, until it returns false.
  template <class Body>
  void for_each_open(const ActiveLane& lane, Body&& body) const;
  // Whether all transfers are done; sets failure_ if one failed.
  bool is_settled(ActiveLane& lane);
  void look_for_departed(Transfer& transfer, Rank peer, bool is_receive);
  void issue(ActiveLane& lane, const Step& step);
  void issue_with_all(ActiveLane& lane, const Step& step);
  void complete(ActiveLane& lane, const Step& step);
  void fold(ActiveLane& lane, const Step& step);
  void prepare(Transfer& transfer, const Step& step, Rank peer, bool is_receive, std::byte* data);
  void fail(Rank peer, const Transfer& transfer);
  Link& link(Rank peer) const { return *group_.links[static_cast<std::size_t>(peer)]; }
  std::size_t num_ranks() const { return static_cast<std::size_t>(group_.world_size); }
  // Where a step's span is in memory. A send only reads, so an input may be given out for it.
  std::byte* at(const ActiveLane& lane, BufferId buffer, std::uint64_t offset,
                std::uint64_t count) const;
  // What the lane's scratch holds for `rank` in a fold; behind them lies the lane's own buffer.
  std::byte* slot(const ActiveLane& lane, const Step& step, Rank rank) const;

  GroupContext& group_;
  const OpRequest& request_;
  const Schedule schedule_;
  const std::uint64_t element_bytes_;
  const std::size_t lanes_max_;
  std::uint64_t scratch_bytes_ = 0;
  std::size_t next_lane_ = 0;
  std::deque<ActiveLane> active_;  // a deque: transfers must not move
  Status failure_;
};

}  // namespace pycomm::collectives

#include "collectives/checker.h"

#include <algorithm>
#include <bitset>
#include <map>
#include <set>
#include <tuple>

#include "base/hash.h"

namespace pycomm::collectives {
namespace {

// What an element holds: whose inputs were reduced into it, and in which expression.
struct Symbol {
  std::bitset<kCheckerWorldMax> inputs;
  std::uint64_t expression = 0;  // 0: never written
  bool operator==(const Symbol&) const = default;
};

struct Violation {
  std::string text;
};

using Atoms = std::vector<Symbol>;
using MessageName = std::tuple<Rank, Rank, std::uint32_t, std::uint32_t>;  // from, to, step, chunk

class Checker {
 public:
  Checker(const std::vector<Schedule>& schedules, const PlanRequest& request)
      : schedules_(schedules), request_(request), n_(request.world_size) {
    cut_atoms();
    for (Rank r = 0; r < n_; ++r) start_rank(r);
  }

  void run() {
    for (Rank r = 0; r < n_; ++r) check_lanes_disjoint(r);
    for (bool moved = true; moved;) {
      moved = false;
      for (Rank r = 0; r < n_; ++r) moved |= advance(r);
    }
    for (Rank r = 0; r < n_; ++r) {
      if (!is_done(r)) throw Violation{"rank " + std::to_string(r) + " waits for ever"};
    }
    if (!in_flight_.empty()) throw Violation{"a message is sent and never received"};
    for (Rank r = 0; r < n_; ++r) check_result(r);
  }

 private:
  struct RankState {
    Atoms output;
    Atoms scratch;
    std::uint32_t stage = 0;
    std::vector<std::uint32_t> at;        // next step of each lane
    std::vector<bool> sent;               // the send half of an exchange is out
    std::bitset<kCheckerWorldMax> heard;  // whose news arrived, however indirectly
  };
  struct Message {
    Atoms atoms;
    std::bitset<kCheckerWorldMax> heard;
  };

  // Atoms are the coarsest ranges that no slice of any rank cuts; scratch is cut likewise,
  // relative to each slot.
  void cut_atoms() {
    std::set<std::uint64_t> cuts{0, output_elements()};
    for (const Schedule& schedule : schedules_) {
      for (const Step& step : schedule.steps) {
        if (step.offset + step.count > limit(schedule, step)) {
          throw Violation{"a step reaches beyond its buffer"};
        }
        if (is_to_scratch(step)) continue;
        cuts.insert(step.offset);
        cuts.insert(step.offset + step.count);
      }
    }
    cuts_.assign(cuts.begin(), cuts.end());
    // A message cut inside its source must be cut inside its destination too: a rank's scratch is
    // cut where its slots begin and end, and by the output's cuts, shifted to each slot.
    for (const Schedule& schedule : schedules_) {
      std::set<std::uint64_t> scratch_cuts{0, schedule.scratch_elements};
      for (const Step& step : schedule.steps) {
        if (step.kind != StepKind::kFold) continue;
        for (Rank p = 0; p < n_; ++p) {
          for (std::uint64_t cut : cuts) {
            if (cut < step.offset || cut > step.offset + step.count) continue;
            scratch_cuts.insert(static_cast<std::uint64_t>(p) * step.scratch_stride + cut -
                                step.offset);
          }
        }
      }
      scratch_cuts_.emplace_back(scratch_cuts.begin(), scratch_cuts.end());
    }
  }

  static bool is_to_scratch(const Step& step) {
    return step.kind == StepKind::kRecv && step.buffer == BufferId::kScratch;
  }
  const std::vector<std::uint64_t>& scratch_cuts(Rank r) const {
    return scratch_cuts_[static_cast<std::size_t>(r)];
  }

  std::uint64_t output_elements() const {
    return request_.kind == OpKind::kAllGather ? request_.count * static_cast<std::uint64_t>(n_)
                                               : request_.count;
  }

  std::uint64_t limit(const Schedule& schedule, const Step& step) const {
    return is_to_scratch(step) ? schedule.scratch_elements : output_elements();
  }

  static std::pair<std::size_t, std::size_t> range(const std::vector<std::uint64_t>& cuts,
                                                   std::uint64_t offset, std::uint64_t count) {
    const auto first = std::lower_bound(cuts.begin(), cuts.end(), offset) - cuts.begin();
    const auto last = std::lower_bound(cuts.begin(), cuts.end(), offset + count) - cuts.begin();
    return {static_cast<std::size_t>(first), static_cast<std::size_t>(last)};
  }

  static Symbol input_of(Rank r) {
    Symbol symbol;
    symbol.inputs.set(static_cast<std::size_t>(r));
    symbol.expression = base::mix(0x1234567, static_cast<std::uint64_t>(r) + 1);
    return symbol;
  }

  void start_rank(Rank r) {
    RankState state;
    state.output.resize(cuts_.size() - 1);
    state.scratch.resize(scratch_cuts(r).size());
    state.at.assign(schedules_[static_cast<std::size_t>(r)].lanes.size(), 0);
    state.sent.assign(state.at.size(), false);
    state.heard.set(static_cast<std::size_t>(r));
    for (std::size_t a = 0; a + 1 < cuts_.size(); ++a) {
      const bool mine = request_.kind == OpKind::kAllReduce ||
                        (request_.kind == OpKind::kBroadcast && r == request_.root) ||
                        (request_.kind == OpKind::kAllGather &&
                         cuts_[a] / request_.count == static_cast<std::uint64_t>(r));
      if (mine) state.output[a] = input_of(r);
    }
    states_.push_back(std::move(state));
  }

  void check_lanes_disjoint(Rank r) const {
    const Schedule& schedule = schedules_[static_cast<std::size_t>(r)];
    struct Use {
      std::uint32_t lane;
      bool writes;
    };
    std::map<std::tuple<std::uint32_t, bool, std::size_t>, Use> seen;  // stage, scratch, atom
    for (std::uint32_t l = 0; l < schedule.lanes.size(); ++l) {
      const Lane& lane = schedule.lanes[l];
      for (std::uint32_t s = lane.first; s < lane.first + lane.count; ++s) {
        const Step& step = schedule.steps[s];
        const bool scratch = is_to_scratch(step);
        const bool writes = step.kind != StepKind::kSend;
        const auto [first, last] =
            range(scratch ? scratch_cuts(r) : cuts_, step.offset, step.count);
        for (std::size_t a = first; a < last; ++a) {
          auto [it, fresh] = seen.try_emplace({lane.stage, scratch, a}, Use{l, writes});
          if (fresh) continue;
          if (it->second.lane != l && (writes || it->second.writes)) {
            throw Violation{"two lanes of rank " + std::to_string(r) + " touch the same memory"};
          }
          it->second.writes |= writes;
        }
      }
    }
  }

  bool is_done(Rank r) const {
    const auto& lanes = schedules_[static_cast<std::size_t>(r)].lanes;
    const RankState& state = states_[static_cast<std::size_t>(r)];
    for (std::size_t l = 0; l < lanes.size(); ++l) {
      if (state.at[l] < lanes[l].count) return false;
    }
    return true;
  }

  bool advance(Rank r) {
    const Schedule& schedule = schedules_[static_cast<std::size_t>(r)];
    RankState& state = states_[static_cast<std::size_t>(r)];
    bool moved = false;
    bool stage_open = false;
    bool later = false;
    for (std::size_t l = 0; l < schedule.lanes.size(); ++l) {
      const Lane& lane = schedule.lanes[l];
      if (lane.stage != state.stage) {
        later |= lane.stage > state.stage;
        continue;
      }
      while (state.at[l] < lane.count && perform(r, l, schedule.steps[lane.first + state.at[l]])) {
        ++state.at[l];
        state.sent[l] = false;
        moved = true;
      }
      stage_open |= state.at[l] < lane.count;
    }
    if (!stage_open && later) {
      ++state.stage;
      moved = true;
    }
    return moved;
  }

  // True when the step is complete.
  bool perform(Rank r, std::size_t lane, const Step& step) {
    RankState& state = states_[static_cast<std::size_t>(r)];
    switch (step.kind) {
      case StepKind::kSend: send(r, step.peer, step); return true;
      case StepKind::kScale: return true;
      case StepKind::kRecv:
        return receive(r, step.peer, step, [](Symbol, Symbol got) { return got; });
      case StepKind::kRecvCombine:
        return receive(r, step.peer, step,
                       [&](Symbol mine, Symbol got) { return combine(got, mine); });
      case StepKind::kExchange:
      case StepKind::kExchangeCombine: {
        if (!state.sent[lane]) send(r, step.peer, step);
        state.sent[lane] = true;
        if (step.kind == StepKind::kExchange) {
          return receive(r, step.from, step, [](Symbol, Symbol got) { return got; });
        }
        return receive(r, step.peer, step, [&](Symbol mine, Symbol got) {
          return r < step.peer ? combine(mine, got) : combine(got, mine);
        });
      }
      case StepKind::kFold: fold(r, step); return true;
    }
    return true;
  }

  void send(Rank r, Rank to, const Step& step) {
    check_peer(r, to);
    const RankState& state = states_[static_cast<std::size_t>(r)];
    const auto [first, last] = range(cuts_, step.offset, step.count);
    Message message;
    message.heard = state.heard;
    for (std::size_t a = first; a < last; ++a) {
      if (state.output[a].expression == 0) throw Violation{"unwritten memory is sent"};
      message.atoms.push_back(state.output[a]);
    }
    if (!in_flight_.emplace(MessageName{r, to, step.step, step.chunk}, message).second) {
      throw Violation{"two messages of one name"};
    }
  }

  template <class Merge>
  bool receive(Rank r, Rank from, const Step& step, Merge merge) {
    check_peer(r, from);
    const auto it = in_flight_.find(MessageName{from, r, step.step, step.chunk});
    if (it == in_flight_.end()) return false;
    RankState& state = states_[static_cast<std::size_t>(r)];
    const bool scratch = is_to_scratch(step);
    const auto [first, last] = range(scratch ? scratch_cuts(r) : cuts_, step.offset, step.count);
    if (last - first != it->second.atoms.size()) {
      throw Violation{"a message is sent with one size and received with another"};
    }
    Atoms& target = scratch ? state.scratch : state.output;
    for (std::size_t a = first; a < last; ++a) {
      target[a] = merge(target[a], it->second.atoms[a - first]);
    }
    state.heard |= it->second.heard;
    in_flight_.erase(it);
    return true;
  }

  void fold(Rank r, const Step& step) {
    RankState& state = states_[static_cast<std::size_t>(r)];
    const auto [first, last] = range(cuts_, step.offset, step.count);
    for (std::size_t a = first; a < last; ++a) {
      const std::uint64_t within = cuts_[a] - step.offset;
      Symbol result;
      for (Rank p = 0; p < n_; ++p) {
        const std::uint64_t at = static_cast<std::uint64_t>(p) * step.scratch_stride + within;
        const auto& slots = scratch_cuts(r);
        const auto slot = static_cast<std::size_t>(
            std::lower_bound(slots.begin(), slots.end(), at) - slots.begin());
        const Symbol input = p == r ? state.output[a] : state.scratch[slot];
        result = p == 0 ? input : combine(result, input);
      }
      state.output[a] = result;
    }
  }

  static Symbol combine(const Symbol& a, const Symbol& b) {
    if (a.expression == 0 || b.expression == 0) throw Violation{"unwritten memory is reduced"};
    if ((a.inputs & b.inputs).any()) throw Violation{"an input is reduced twice"};
    Symbol result;
    result.inputs = a.inputs | b.inputs;
    result.expression = base::mix(base::mix(0x9e37, a.expression), b.expression);
    return result;
  }

  void check_peer(Rank r, Rank peer) const {
    if (peer < 0 || peer >= n_ || peer == r) throw Violation{"a step names no valid peer"};
  }

  void check_result(Rank r) const {
    const RankState& state = states_[static_cast<std::size_t>(r)];
    const std::string who = "rank " + std::to_string(r);
    for (std::size_t a = 0; a < state.output.size(); ++a) {
      const Symbol& got = state.output[a];
      if (request_.kind == OpKind::kAllReduce) {
        if (got.inputs.count() != static_cast<std::size_t>(n_)) {
          throw Violation{who + " misses an input"};
        }
        if (got != states_[0].output[a]) {
          throw Violation{who + " reduces in another order than rank 0"};
        }
      } else if (request_.kind == OpKind::kBroadcast) {
        if (got != input_of(request_.root)) throw Violation{who + " does not hold the root's"};
      } else if (request_.kind == OpKind::kAllGather) {
        if (got != input_of(static_cast<Rank>(cuts_[a] / request_.count))) {
          throw Violation{who + " holds a wrong part"};
        }
      }
    }
    if (request_.kind == OpKind::kBarrier && state.heard.count() != static_cast<std::size_t>(n_)) {
      throw Violation{who + " leaves the barrier before it heard of everyone"};
    }
  }

  const std::vector<Schedule>& schedules_;
  const PlanRequest& request_;
  const Rank n_;
  std::vector<std::uint64_t> cuts_;
  std::vector<std::vector<std::uint64_t>> scratch_cuts_;  // by rank
  std::vector<RankState> states_;
  std::map<MessageName, Message> in_flight_;
};

}  // namespace

Status check_schedules(const std::vector<Schedule>& schedules, const PlanRequest& request) {
  if (request.world_size < 1 || request.world_size > kCheckerWorldMax ||
      schedules.size() != static_cast<std::size_t>(request.world_size)) {
    return Status::error(StatusCode::kInvalidUsage, "the checker takes worlds of 1 to 64 ranks");
  }
  try {
    Checker(schedules, request).run();
  } catch (const Violation& violation) {
    return Status::error(StatusCode::kInternal,
                         std::string(schedules[0].name) + ": " + violation.text);
  }
  return Status();
}

}  // namespace pycomm::collectives

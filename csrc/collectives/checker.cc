#include "collectives/checker.h"

#include <algorithm>
#include <bitset>
#include <map>
#include <numeric>
#include <tuple>

#include "base/hash.h"

namespace pycomm::collectives {
namespace {

using Ranks = std::bitset<kCheckerWorldMax>;

// What one element holds: whose inputs were reduced into it, in which expression, and which element
// of theirs it was.
struct Symbol {
  Ranks inputs;
  std::uint64_t expression = 0;  // 0: never written
  std::uint64_t place = 0;
  bool operator==(const Symbol&) const = default;
};

struct Violation {
  std::string text;
};

using Symbols = std::vector<Symbol>;
using MessageName = std::tuple<Rank, Rank, std::uint32_t, std::uint32_t>;  // from, to, step, chunk

Symbol input_of(Rank r, std::uint64_t place) {
  Symbol symbol;
  symbol.inputs.set(static_cast<std::size_t>(r));
  symbol.expression = base::mix(0x1234567, static_cast<std::uint64_t>(r) + 1);
  symbol.place = place;
  return symbol;
}

Symbol combine(const Symbol& a, const Symbol& b) {
  if (a.expression == 0 || b.expression == 0) throw Violation{"unwritten memory is reduced"};
  if ((a.inputs & b.inputs).any()) throw Violation{"an input is reduced twice"};
  if (a.place != b.place) throw Violation{"different elements are reduced together"};
  return {a.inputs | b.inputs, base::mix(base::mix(0x9e37, a.expression), b.expression), a.place};
}

// Elements of input and output, and where they start in one memory, which models overlaps.
struct Layout {
  std::uint64_t input = 0;
  std::uint64_t output = 0;
  std::uint64_t input_base = 0;
  std::uint64_t output_base = 0;
  std::uint64_t total() const { return std::max(input_base + input, output_base + output); }
};

class Checker {
 public:
  Checker(const std::vector<Schedule>& schedules, const PlanRequest& request, bool in_place,
          const std::vector<Splits>* splits)
      : schedules_(schedules),
        request_(request),
        splits_(splits),
        in_place_(in_place),
        n_(request.world_size) {
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
    Layout layout;
    Symbols memory;
    std::uint32_t stage = 0;
    std::vector<std::uint32_t> at;      // next step of each lane
    std::vector<bool> sent;             // the sends of the lane's current step are out
    std::vector<Symbols> lane_buffers;  // BufferId::kLane
    Ranks heard;                        // whose news arrived, however indirectly
  };
  struct Message {
    Symbols symbols;
    Ranks heard;
  };

  RankState& state(Rank r) { return states_[static_cast<std::size_t>(r)]; }
  const RankState& state(Rank r) const { return states_[static_cast<std::size_t>(r)]; }
  const Schedule& schedule(Rank r) const { return schedules_[static_cast<std::size_t>(r)]; }
  std::uint64_t size() const { return static_cast<std::uint64_t>(n_); }

  std::uint64_t split(Rank from, Rank to) const {
    return (*splits_)[static_cast<std::size_t>(from)].send[static_cast<std::size_t>(to)];
  }
  // Where the part for (or from) `peer` starts in rank r's input (or output).
  std::uint64_t send_offset(Rank r, Rank peer) const {
    if (splits_ == nullptr) return static_cast<std::uint64_t>(peer) * request_.count;
    std::uint64_t offset = 0;
    for (Rank p = 0; p < peer; ++p) offset += split(r, p);
    return offset;
  }
  std::uint64_t recv_offset(Rank r, Rank peer) const {
    if (splits_ == nullptr) return static_cast<std::uint64_t>(peer) * request_.count;
    std::uint64_t offset = 0;
    for (Rank p = 0; p < peer; ++p) offset += split(p, r);
    return offset;
  }

  Layout layout_of(Rank r) const {
    const std::uint64_t count = request_.count;
    const std::uint64_t mine = static_cast<std::uint64_t>(r) * count;
    const bool is_root = r == request_.root;
    Layout layout;
    std::uint64_t shared_at = 0;  // of the smaller one in the larger
    switch (request_.kind) {
      case OpKind::kAllReduce:
      case OpKind::kBroadcast:
      case OpKind::kBarrier: layout = {0, count, 0, 0}; return layout;  // works on output
      case OpKind::kAllGather:
        layout = {count, size() * count, 0, 0};
        shared_at = mine;
        break;
      case OpKind::kReduce: layout = {count, is_root ? count : 0, 0, 0}; break;
      case OpKind::kReduceScatter:
        layout = {size() * count, count, 0, 0};
        shared_at = mine;
        break;
      case OpKind::kScatter:
        layout = {is_root ? size() * count : 0, count, 0, 0};
        shared_at = is_root ? mine : 0;
        break;
      case OpKind::kGather:
        layout = {count, is_root ? size() * count : 0, 0, 0};
        shared_at = is_root ? mine : 0;
        break;
      default: layout = {send_offset(r, n_), recv_offset(r, n_), 0, 0};
    }
    const bool overlaps =
        in_place_ && layout.input > 0 && layout.output > 0 && request_.kind != OpKind::kAllToAll;
    if (!overlaps) {
      layout.output_base = layout.input;
    } else if (layout.output <= layout.input) {
      layout.output_base = shared_at;
    } else {
      layout.input_base = shared_at;
    }
    return layout;
  }

  void start_rank(Rank r) {
    RankState start;
    start.layout = layout_of(r);
    start.memory.resize(start.layout.total());
    start.at.assign(schedule(r).lanes.size(), 0);
    start.sent.assign(start.at.size(), false);
    start.lane_buffers.resize(start.at.size());
    start.heard.set(static_cast<std::size_t>(r));
    const Layout& layout = start.layout;
    for (std::uint64_t i = 0; i < layout.input; ++i) {
      start.memory[layout.input_base + i] = input_of(r, i);
    }
    // What a rank gives itself.
    const auto place = [&](std::uint64_t to, std::uint64_t from, std::uint64_t count) {
      for (std::uint64_t i = 0; i < count; ++i) {
        start.memory[layout.output_base + to + i] = input_of(r, from + i);
      }
    };
    const std::uint64_t count = request_.count;
    const std::uint64_t mine = static_cast<std::uint64_t>(r) * count;
    const bool is_root = r == request_.root;
    const OpKind kind = request_.kind;
    if (kind == OpKind::kAllReduce || (kind == OpKind::kBroadcast && is_root)) place(0, 0, count);
    if (kind == OpKind::kAllGather || (kind == OpKind::kGather && is_root)) place(mine, 0, count);
    if (kind == OpKind::kScatter && is_root) place(0, mine, count);
    if (kind == OpKind::kAllToAll || kind == OpKind::kAllToAllUneven) {
      place(recv_offset(r, r), send_offset(r, r), splits_ ? split(r, r) : count);
    }
    if (n_ == 1 && (kind == OpKind::kReduce || kind == OpKind::kReduceScatter)) place(0, 0, count);
    states_.push_back(std::move(start));
  }

  // Index of an element in the rank's memory.
  std::uint64_t address(Rank r, BufferId buffer, std::uint64_t offset, std::uint64_t count) const {
    const Layout& layout = state(r).layout;
    const bool is_input = buffer == BufferId::kInput;
    if (offset + count > (is_input ? layout.input : layout.output)) {
      throw Violation{"a step reaches beyond its buffer"};
    }
    return (is_input ? layout.input_base : layout.output_base) + offset;
  }

  struct Use {
    std::uint32_t stage;
    std::uint64_t first;
    std::uint64_t end;
    std::uint32_t lane;
    bool writes;
  };

  void check_lanes_disjoint(Rank r) const {
    std::vector<Use> uses;
    for (std::uint32_t l = 0; l < schedule(r).lanes.size(); ++l) {
      const Lane& lane = schedule(r).lanes[l];
      for (std::uint32_t s = lane.first; s < lane.first + lane.count; ++s) {
        const Step& step = schedule(r).steps[s];
        const auto use = [&](BufferId buffer, std::uint64_t offset, bool writes) {
          if (buffer == BufferId::kLane || step.count == 0) return;
          const std::uint64_t first = address(r, buffer, offset, step.count);
          uses.push_back({lane.stage, first, first + step.count, l, writes});
        };
        const bool reads = step.kind == StepKind::kSend || step.kind == StepKind::kSendAll;
        use(step.buffer, step.offset, !reads);
        if (step.kind == StepKind::kGatherFold) use(step.own, step.own_offset, false);
      }
    }
    std::sort(uses.begin(), uses.end(), [](const Use& a, const Use& b) {
      return std::tie(a.stage, a.first) < std::tie(b.stage, b.first);
    });
    std::vector<Use> open;
    for (const Use& use : uses) {
      std::erase_if(open, [&](const Use& o) { return o.stage != use.stage || o.end <= use.first; });
      for (const Use& other : open) {
        if (other.lane != use.lane && (other.writes || use.writes)) {
          throw Violation{"two lanes of rank " + std::to_string(r) + " touch the same memory"};
        }
      }
      open.push_back(use);
    }
  }

  bool is_done(Rank r) const {
    for (std::size_t l = 0; l < schedule(r).lanes.size(); ++l) {
      if (state(r).at[l] < schedule(r).lanes[l].count) return false;
    }
    return true;
  }

  bool advance(Rank r) {
    RankState& mine = state(r);
    bool moved = false;
    bool stage_open = false;
    bool later = false;
    for (std::size_t l = 0; l < schedule(r).lanes.size(); ++l) {
      const Lane& lane = schedule(r).lanes[l];
      if (lane.stage != mine.stage) {
        later |= lane.stage > mine.stage;
        continue;
      }
      while (mine.at[l] < lane.count && perform(r, l, schedule(r).steps[lane.first + mine.at[l]])) {
        ++mine.at[l];
        mine.sent[l] = false;
        moved = true;
      }
      stage_open |= mine.at[l] < lane.count;
    }
    if (!stage_open && later) {
      ++mine.stage;
      moved = true;
    }
    return moved;
  }

  // True when the step is complete.
  bool perform(Rank r, std::size_t lane, const Step& step) {
    const auto send_once = [&](auto&& send_it) {
      if (!state(r).sent[lane]) send_it();
      state(r).sent[lane] = true;
    };
    const auto keep = [](const Symbol&, const Symbol& got) { return got; };
    switch (step.kind) {
      case StepKind::kSend: send(r, lane, step.peer, step); return true;
      case StepKind::kScale: return true;
      case StepKind::kRecv: return receive(r, lane, step.peer, step, keep);
      case StepKind::kRecvCombine:
        return receive(r, lane, step.peer, step,
                       [](const Symbol& mine, const Symbol& got) { return combine(got, mine); });
      case StepKind::kExchange:
        send_once([&] { send(r, lane, step.peer, step); });
        return receive(r, lane, step.from, step, keep);
      case StepKind::kExchangeCombine:
        send_once([&] { send(r, lane, step.peer, step); });
        return receive(r, lane, step.peer, step, [&](const Symbol& mine, const Symbol& got) {
          return r < step.peer ? combine(mine, got) : combine(got, mine);
        });
      case StepKind::kSendAll: send_all(r, lane, step); return true;
      case StepKind::kSwapFold:
        send_once([&] { send_all(r, lane, step); });
        return gather_fold(r, lane, step, step.buffer, step.offset);
      case StepKind::kGatherFold: return gather_fold(r, lane, step, step.own, step.own_offset);
    }
    return true;
  }

  // The span's elements, to read or write.
  Symbol* span(Rank r, std::size_t lane, BufferId buffer, std::uint64_t offset,
               std::uint64_t count) {
    if (buffer != BufferId::kLane)
      return state(r).memory.data() + address(r, buffer, offset, count);
    Symbols& own = state(r).lane_buffers[lane];
    if (own.size() < count) own.resize(count);
    return own.data();
  }

  void send(Rank r, std::size_t lane, Rank to, const Step& step) {
    check_peer(r, to);
    const Symbol* data = span(r, lane, step.buffer, step.offset, step.count);
    Message message;
    message.heard = state(r).heard;
    message.symbols.assign(data, data + step.count);
    for (const Symbol& symbol : message.symbols) {
      if (symbol.expression == 0) throw Violation{"unwritten memory is sent"};
    }
    if (!in_flight_.emplace(MessageName{r, to, step.step, step.chunk}, std::move(message)).second) {
      throw Violation{"two messages of one name"};
    }
  }

  void send_all(Rank r, std::size_t lane, const Step& step) {
    for (Rank p = 0; p < n_; ++p) {
      if (p != r) send(r, lane, p, step);
    }
  }

  // The message for (from, r) of this step, or null while it has not been sent.
  const Message* arrived(Rank r, Rank from, const Step& step) const {
    check_peer(r, from);
    const auto it = in_flight_.find(MessageName{from, r, step.step, step.chunk});
    if (it == in_flight_.end()) return nullptr;
    if (it->second.symbols.size() != step.count) {
      throw Violation{"a message is sent with one size and received with another"};
    }
    return &it->second;
  }

  template <class Merge>
  bool receive(Rank r, std::size_t lane, Rank from, const Step& step, Merge merge) {
    const Message* message = arrived(r, from, step);
    if (message == nullptr) return false;
    Symbol* target = span(r, lane, step.buffer, step.offset, step.count);
    for (std::size_t i = 0; i < step.count; ++i) target[i] = merge(target[i], message->symbols[i]);
    take(r, from, step, *message);
    return true;
  }

  void take(Rank r, Rank from, const Step& step, const Message& message) {
    state(r).heard |= message.heard;
    in_flight_.erase(MessageName{from, r, step.step, step.chunk});
  }

  bool gather_fold(Rank r, std::size_t lane, const Step& step, BufferId own,
                   std::uint64_t own_offset) {
    std::vector<const Message*> messages(static_cast<std::size_t>(n_), nullptr);
    for (Rank p = 0; p < n_; ++p) {
      if (p == r) continue;
      messages[static_cast<std::size_t>(p)] = arrived(r, p, step);
      if (messages[static_cast<std::size_t>(p)] == nullptr) return false;
    }
    const Symbol* mine = span(r, lane, own, own_offset, step.count);
    Symbols result(step.count);
    for (std::size_t i = 0; i < step.count; ++i) {
      for (Rank p = 0; p < n_; ++p) {
        const Symbol& input = p == r ? mine[i] : messages[static_cast<std::size_t>(p)]->symbols[i];
        result[i] = p == 0 ? input : combine(result[i], input);
      }
    }
    std::copy(result.begin(), result.end(), span(r, lane, step.buffer, step.offset, step.count));
    for (Rank p = 0; p < n_; ++p) {
      if (p != r) take(r, p, step, *messages[static_cast<std::size_t>(p)]);
    }
    return true;
  }

  void check_peer(Rank r, Rank peer) const {
    if (peer < 0 || peer >= n_ || peer == r) throw Violation{"a step names no valid peer"};
  }

  // What output element i of rank r must be: whose input, and which element of it.
  std::pair<Rank, std::uint64_t> origin(Rank r, std::uint64_t i) const {
    const std::uint64_t count = request_.count;
    switch (request_.kind) {
      case OpKind::kBroadcast: return {request_.root, i};
      case OpKind::kAllGather:
      case OpKind::kGather: return {static_cast<Rank>(i / count), i % count};
      case OpKind::kScatter: return {request_.root, static_cast<std::uint64_t>(r) * count + i};
      case OpKind::kReduceScatter: return {r, static_cast<std::uint64_t>(r) * count + i};
      case OpKind::kAllToAll:
      case OpKind::kAllToAllUneven: {
        Rank from = 0;
        while (recv_offset(r, from + 1) <= i) ++from;
        return {from, send_offset(from, r) + i - recv_offset(r, from)};
      }
      default: return {r, i};
    }
  }

  void check_result(Rank r) const {
    const RankState& mine = state(r);
    const std::string who = "rank " + std::to_string(r);
    Symbol in_order;
    for (Rank p = 0; p < n_; ++p) {
      in_order = p == 0 ? input_of(0, 0) : combine(in_order, input_of(p, 0));
    }
    for (std::uint64_t i = 0; i < mine.layout.output; ++i) {
      const Symbol& got = mine.memory[mine.layout.output_base + i];
      const auto [from, place] = origin(r, i);
      if (!reduces(request_.kind)) {
        if (got != input_of(from, place)) throw Violation{who + " holds a wrong element"};
        continue;
      }
      if (got.inputs.count() != static_cast<std::size_t>(n_)) {
        throw Violation{who + " misses an input"};
      }
      if (got.place != place) throw Violation{who + " holds a wrong element"};
      if (request_.in_rank_order && got.expression != in_order.expression) {
        throw Violation{who + " does not reduce in rank order"};
      }
      if (request_.kind == OpKind::kAllReduce &&
          got != state(0).memory[state(0).layout.output_base + i]) {
        throw Violation{who + " reduces in another order than rank 0"};
      }
    }
    if (request_.kind == OpKind::kBarrier && mine.heard.count() != static_cast<std::size_t>(n_)) {
      throw Violation{who + " leaves the barrier before it heard of everyone"};
    }
  }

  const std::vector<Schedule>& schedules_;
  const PlanRequest& request_;
  const std::vector<Splits>* const splits_;
  const bool in_place_;
  const Rank n_;
  std::vector<RankState> states_;
  std::map<MessageName, Message> in_flight_;
};

Status check(const std::vector<Schedule>& schedules, const PlanRequest& request, bool in_place,
             const std::vector<Splits>* splits) {
  if (request.world_size < 1 || request.world_size > kCheckerWorldMax ||
      schedules.size() != static_cast<std::size_t>(request.world_size)) {
    return Status::error(StatusCode::kInvalidUsage, "the checker takes worlds of 1 to 64 ranks");
  }
  try {
    Checker(schedules, request, in_place, splits).run();
  } catch (const Violation& violation) {
    return Status::error(StatusCode::kInternal,
                         std::string(schedules[0].name) + ": " + violation.text);
  }
  return Status();
}

}  // namespace

Status check_schedules(const std::vector<Schedule>& schedules, const PlanRequest& request,
                       bool in_place) {
  return check(schedules, request, in_place, nullptr);
}

Status check_schedules(const std::vector<Schedule>& schedules, const PlanRequest& request,
                       const std::vector<Splits>& splits) {
  return check(schedules, request, false, &splits);
}

}  // namespace pycomm::collectives

#include "collectives/execution.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "base/check.h"
#include "collectives/schedule_run.h"
#include "kernels/reduce.h"

namespace pycomm::collectives {
namespace {

// What one advance() of a shared reduction does: small enough that other operations and links of
// the process get their turn.
constexpr std::uint64_t kSharedSliceBytes = 2 * 1024 * 1024;

Status invalid(std::string text) {
  return Status::error(StatusCode::kInvalidUsage, std::move(text));
}

bool reads_input(const OpRequest& request, Rank rank) {
  switch (request.kind) {
    case OpKind::kBarrier:
    case OpKind::kRecv: return false;
    case OpKind::kBroadcast:
    case OpKind::kScatter: return request.root == rank;
    default: return true;
  }
}

bool writes_output(const OpRequest& request, Rank rank) {
  switch (request.kind) {
    case OpKind::kBarrier:
    case OpKind::kSend: return false;
    case OpKind::kReduce:
    case OpKind::kGather: return request.root == rank;
    default: return true;
  }
}

std::uint64_t total(const std::vector<std::uint64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), std::uint64_t{0});
}

struct Sizes {
  std::uint64_t input;  // in bytes
  std::uint64_t output;
};

Sizes sizes_of(const OpRequest& request, int world_size) {
  const std::uint64_t element = dtype_bytes(request.dtype);
  const std::uint64_t one = request.bytes();
  const std::uint64_t all = one * static_cast<std::uint64_t>(world_size);
  switch (request.kind) {
    case OpKind::kAllGather:
    case OpKind::kGather: return {one, all};
    case OpKind::kReduceScatter:
    case OpKind::kScatter: return {all, one};
    case OpKind::kAllToAll: return {all, all};
    case OpKind::kAllToAllUneven:
      return {total(request.splits->send) * element, total(request.splits->recv) * element};
    default: return {one, one};
  }
}

// Input and output lie apart, or where an operation in place has them.
bool overlaps_badly(const OpRequest& request, const Sizes& sizes, Rank rank) {
  const std::byte* in = request.input;
  const std::byte* out = request.output;
  if (in + sizes.input <= out || out + sizes.output <= in) return false;
  const std::uint64_t mine = static_cast<std::uint64_t>(rank) * request.bytes();
  switch (request.kind) {
    case OpKind::kAllGather:
    case OpKind::kGather: return in != out + mine;
    case OpKind::kReduceScatter:
    case OpKind::kScatter: return out != in + mine;
    case OpKind::kAllToAll:
    case OpKind::kAllToAllUneven: return true;
    default: return in != out;
  }
}

std::string find_fault(const OpRequest& request, Rank rank, int world_size) {
  const auto n = static_cast<std::size_t>(world_size);
  if (is_point_to_point(request.kind)) {
    const bool is_any = request.kind == OpKind::kRecv && request.root == kAnySource;
    if (world_size == 1) return "nobody else is in a group of one";
    if (request.root == rank) return "rank " + std::to_string(rank) + " cannot talk to itself";
    if (!is_any && (request.root < 0 || request.root >= world_size)) {
      return "rank " + std::to_string(request.root) + " is not in a group of " +
             std::to_string(world_size);
    }
  } else if (request.root < 0 || request.root >= world_size) {
    return "root " + std::to_string(request.root) + " is not in a group of " +
           std::to_string(world_size);
  }
  const bool is_uneven = request.kind == OpKind::kAllToAllUneven;
  if (is_uneven != (request.splits != nullptr)) return "splits are for an uneven all_to_all";
  if (is_uneven && (request.splits->send.size() != n || request.splits->recv.size() != n)) {
    return "splits need a count for each of " + std::to_string(n) + " ranks";
  }
  const auto self = static_cast<std::size_t>(rank);
  if (is_uneven && request.splits->send[self] != request.splits->recv[self]) {
    return "rank " + std::to_string(rank) + " sends " + std::to_string(request.splits->send[self]) +
           " elements to itself, but expects " + std::to_string(request.splits->recv[self]);
  }
  std::uint64_t most = request.count;
  if (is_uneven) {
    for (const auto* counts : {&request.splits->send, &request.splits->recv}) {
      for (const std::uint64_t count : *counts) most = std::max(most, count);
    }
  }
  if (most > kCountMax) return "too many elements";
  if (reduces(request.kind) && !is_reducible(request.dtype, request.op)) {
    return std::string(to_string(request.op)) + " is not defined on " + to_string(request.dtype);
  }
  const Sizes sizes = sizes_of(request, world_size);
  const bool reads = reads_input(request, rank) && sizes.input > 0;
  const bool writes = writes_output(request, rank) && sizes.output > 0;
  const auto are_wrong = [&](const std::shared_ptr<const Parts>& parts, std::uint64_t bytes) {
    const bool has_parts = is_uneven || world_size == 1 || bytes > request.bytes();
    return parts && (parts->size() != n || (bytes > 0 && !has_parts));
  };
  if (are_wrong(request.input_parts, sizes.input) ||
      are_wrong(request.output_parts, sizes.output)) {
    return "parts are for what has one for every rank";
  }
  if ((reads && request.input == nullptr && !request.input_parts) ||
      (writes && request.output == nullptr && !request.output_parts)) {
    return "no memory given";
  }
  if (request.input_parts || request.output_parts) return "";  // their overlaps are the caller's
  if (reads && writes && overlaps_badly(request, sizes, rank)) {
    return "input and output overlap, other than for an operation in place";
  }
  return "";
}

}  // namespace

Status validate(const OpRequest& request, Rank rank, int world_size) {
  // The common case, without a call.
  const bool is_plain =
      request.kind <= OpKind::kBroadcast && request.count <= kCountMax && request.root >= 0 &&
      request.root < world_size && !request.splits && !request.input_parts &&
      !request.output_parts && request.input == request.output &&
      (request.input != nullptr || request.count == 0) &&
      (request.kind != OpKind::kAllReduce || is_reducible(request.dtype, request.op));
  if (__builtin_expect(is_plain, 1)) return Status();
  const std::string fault = find_fault(request, rank, world_size);
  if (fault.empty()) return Status();
  return invalid(std::string(to_string(request.kind)) + ": " + fault);
}

Status timed_out(const std::vector<Rank>& late, std::int64_t timeout_ms) {
  std::string text = "waited for rank";
  if (late.size() > 1) text += "s";
  for (std::size_t i = 0; i < late.size(); ++i) {
    text += (i > 0 ? ", " : " ") + std::to_string(late[i]);
  }
  if (late.empty()) text = "went on";
  return Status::error(StatusCode::kTimeout,
                       text + " until the timeout of " + std::to_string(timeout_ms) + " ms",
                       late.empty() ? kNoRank : late.front());
}

Execution::Execution(GroupContext& group, const OpRequest& request, base::TimeNs now)
    : group_(group),
      request_(request),
      signature_(request.signature()),
      deadline_(base::deadline_after(now, request.timeout_ms)) {}

Execution::~Execution() = default;

bool Execution::advance(base::TimeNs now) {
  bool moved = false;
  switch (stage_) {
    case Stage::kStart: moved = start(); break;
    case Stage::kFlat:
    case Stage::kAnnounced:
    case Stage::kClosing: moved = await_flat(); break;
    case Stage::kShared: moved = reduce_shared(); break;
    case Stage::kMessages:
      moved = run_->advance();
      if (!run_->failure().is_ok()) {
        abort(run_->failure());
      } else if (run_->is_done()) {
        finish(Status());
        moved = true;
      }
      break;
    case Stage::kFinished: return false;
  }
  if (!moved && now >= deadline_) {
    abort(timed_out(waits_for(), request_.timeout_ms));
    return true;
  }
  return moved;
}

bool Execution::start() {
  if (group_.flat == nullptr) {
    start_messages();
    return true;
  }
  if (is_flat(group_.shape, request_.kind, request_.bytes(), group_.world_size)) {
    publish_request(*group_.flat, request_, signature_);
    stage_ = Stage::kFlat;
  } else {
    announce();
    stage_ = Stage::kAnnounced;
  }
  if (group_.waker != nullptr) group_.waker->wake_peers();
  return true;
}

// Says what is coming, and, if others can reach it, where the tensor lies.
void Execution::announce() {
  if (request_.splits) {
    std::vector<std::uint64_t> counts = request_.splits->send;
    counts.insert(counts.end(), request_.splits->recv.begin(), request_.splits->recv.end());
    group_.flat->publish(signature_, counts.data(), counts.size() * sizeof counts[0]);
    return;
  }
  std::uint64_t place = 0;
  const auto& bases = group_.shared.bases;
  if (!bases.empty() && request_.kind == OpKind::kAllReduce) {
    const std::byte* base = bases[static_cast<std::size_t>(group_.rank)];
    if (request_.output >= base &&
        request_.output + request_.bytes() <= base + group_.shared.bytes) {
      place = static_cast<std::uint64_t>(request_.output - base) + 1;
    }
  }
  if (place > 0) place_own_part();
  group_.flat->publish(signature_, &place, sizeof place);
}

Rank Execution::missing_peer() {
  for (Rank p = 0; p < group_.world_size; ++p) {
    if (group_.flat->has_arrived(p)) continue;
    const Viability viability = group_.links[static_cast<std::size_t>(p)]->is_viable();
    const bool has_left = group_.has_departed(p);
    if ((viability.viable && !has_left) || group_.flat->has_arrived(p)) return p;
    const std::string why = viability.viable ? "it left the group" : viability.reason;
    abort(
        Status::error(StatusCode::kPeerLost, "rank " + std::to_string(p) + " was lost: " + why, p));
    return p;
  }
  return kNoRank;
}

bool Execution::await_flat() {
  if (missing_peer() != kNoRank) return is_finished();
  if (stage_ == Stage::kFlat) {
    finish(collect_result(*group_.flat, request_, signature_, request_.op_number));
    return true;
  }
  if (stage_ == Stage::kClosing) {
    finish(Status());
    return true;
  }
  return after_announcement();
}

bool Execution::after_announcement() {
  if (Status status = compare_signatures(*group_.flat, signature_, request_.op_number);
      !status.is_ok()) {
    finish(status);
    return true;
  }
  if (request_.splits) {
    if (Status status = compare_splits(); !status.is_ok()) {
      finish(status);
    } else {
      start_messages();
    }
    return true;
  }
  for (Rank p = 0; p < group_.world_size; ++p) {
    std::uint64_t place;
    std::memcpy(&place, group_.flat->payload(p, sizeof place), sizeof place);
    if (place == 0) break;
    // A peer's word about its memory is checked before it becomes an address.
    const bool fits = place - 1 < group_.shared.bytes &&
                      request_.bytes() <= group_.shared.bytes - (place - 1) &&
                      (place - 1) % dtype_bytes(request_.dtype) == 0;
    if (!fits) {
      finish(Status::error(StatusCode::kInternal,
                           "rank " + std::to_string(p) + " announced memory it does not have", p));
      return true;
    }
    shared_outputs_.push_back(group_.shared.bases[static_cast<std::size_t>(p)] + (place - 1));
  }
  if (shared_outputs_.size() == static_cast<std::size_t>(group_.world_size)) {
    stage_ = Stage::kShared;
  } else {
    start_messages();
  }
  return true;
}

bool Execution::reduce_shared() {
  const std::uint64_t element_bytes = dtype_bytes(request_.dtype);
  const Part part = part_of(request_.count, group_.world_size, group_.rank, 4096 / element_bytes);
  const std::uint64_t slice =
      std::min(kSharedSliceBytes / element_bytes, part.count - shared_done_);
  if (slice > 0) {
    std::byte* outputs[kFlatWorldMax];
    const std::uint64_t offset = (part.offset + shared_done_) * element_bytes;
    for (std::size_t p = 0; p < shared_outputs_.size(); ++p)
      outputs[p] = shared_outputs_[p] + offset;
    kernels::fold(outputs, group_.world_size, outputs, group_.world_size, slice, request_.dtype,
                  request_.op, request_.scale(group_.world_size));
    shared_done_ += slice;
  }
  if (shared_done_ == part.count) {
    // Everyone's part is in everyone's tensor only when all have said so.
    group_.flat->publish(signature_, nullptr, 0);
    if (group_.waker != nullptr) group_.waker->wake_peers();
    stage_ = Stage::kClosing;
  }
  return true;
}

// What each rank sends must be what the other takes. All ranks look at all pairs, so that all come
// to the same end.
Status Execution::compare_splits() const {
  const auto n = static_cast<std::size_t>(group_.world_size);
  const auto count_of = [&](Rank p, std::size_t index) {
    std::uint64_t count;
    std::memcpy(&count, group_.flat->payload(p, 2 * n * sizeof count) + index * sizeof count,
                sizeof count);
    return count;
  };
  for (Rank from = 0; from < group_.world_size; ++from) {
    for (Rank to = 0; to < group_.world_size; ++to) {
      const std::uint64_t sent = count_of(from, static_cast<std::size_t>(to));
      const std::uint64_t wanted = count_of(to, n + static_cast<std::size_t>(from));
      if (sent == wanted) continue;
      return Status::error(StatusCode::kInvalidUsage,
                           "ranks disagree on operation " + std::to_string(request_.op_number) +
                               ", " + describe_signature(signature_) + ": rank " +
                               std::to_string(from) + " sends " + std::to_string(sent) +
                               " elements to rank " + std::to_string(to) + ", which expects " +
                               std::to_string(wanted),
                           from);
    }
  }
  return Status();
}

// What this rank gives itself, and what schedules expect in place (schedule.h).
void Execution::place_own_part() {
  const std::uint64_t part = request_.count;
  const std::uint64_t mine = static_cast<std::uint64_t>(group_.rank) * part;
  const bool is_root = request_.root == group_.rank;
  // In elements.
  const auto place = [&](std::uint64_t to, std::uint64_t from, std::uint64_t count) {
    if (count == 0 || request_.output_at(to) == request_.input_at(from)) return;
    std::memmove(request_.output_at(to), request_.input_at(from),
                 count * dtype_bytes(request_.dtype));
  };
  switch (request_.kind) {
    case OpKind::kAllReduce: place(0, 0, part); break;
    case OpKind::kBroadcast:
      if (is_root) place(0, 0, part);
      break;
    case OpKind::kAllGather: place(mine, 0, part); break;
    case OpKind::kGather:
      if (is_root) place(mine, 0, part);
      break;
    case OpKind::kScatter:
      if (is_root) place(0, mine, part);
      break;
    case OpKind::kAllToAll: place(mine, mine, part); break;
    case OpKind::kAllToAllUneven: {
      const auto before = [&](const std::vector<std::uint64_t>& counts) {
        return std::accumulate(counts.begin(), counts.begin() + group_.rank, std::uint64_t{0});
      };
      place(before(request_.splits->recv), before(request_.splits->send),
            request_.splits->send[static_cast<std::size_t>(group_.rank)]);
      break;
    }
    case OpKind::kReduce:
    case OpKind::kReduceScatter:
      if (group_.world_size == 1) place(0, 0, part);
      break;
    default: break;
  }
}

// Whether peers read nothing of what this rank gives itself: then they need not wait for the copy.
bool Execution::can_place_later() const {
  switch (request_.kind) {
    case OpKind::kGather:
    case OpKind::kScatter:
    case OpKind::kAllToAll:
    case OpKind::kAllToAllUneven: return true;
    case OpKind::kAllGather: return group_.shape.shares_memory;  // plan_direct_all_gather
    default: return false;
  }
}

void Execution::start_messages() {
  const bool places_later = can_place_later();
  if (!places_later) place_own_part();
  PlanRequest plan;
  plan.kind = request_.kind;
  plan.rank = group_.rank;
  plan.world_size = group_.world_size;
  plan.root = request_.root;
  plan.count = request_.kind == OpKind::kBarrier ? 0 : request_.count;
  plan.element_bytes = dtype_bytes(request_.dtype);
  plan.chunk_bytes = group_.chunk_bytes;
  plan.in_rank_order = folds_in_rank_order(group_.shape, request_.dtype);
  plan.splits = request_.splits.get();
  run_ = std::make_unique<ScheduleRun>(group_, request_, plan_over_messages(group_.shape, plan));
  stage_ = Stage::kMessages;
  if (!places_later) return;
  run_->advance();
  for (Link* link : group_.links) {
    if (link != nullptr) link->progress();  // what is announced leaves before the copy begins
  }
  place_own_part();
}

std::vector<Rank> Execution::waits_for() const {
  if (stage_ == Stage::kMessages) return run_->waits_for();
  std::vector<Rank> ranks;
  if (stage_ == Stage::kFlat || stage_ == Stage::kAnnounced || stage_ == Stage::kClosing) {
    for (Rank p = 0; p < group_.world_size; ++p) {
      if (!group_.flat->has_arrived(p)) ranks.push_back(p);
    }
  }
  return ranks;
}

void Execution::abort(const Status& status) {
  if (is_finished()) return;
  // Peers that are still reducing may write into this rank's tensor until their links are gone.
  if (stage_ == Stage::kShared || stage_ == Stage::kClosing) {
    group_.quarantine.push_back(request_.keepalive);
  }
  finish(status);
}

void Execution::finish(Status status) {
  if (run_) run_->cancel();
  const bool used_links = run_ != nullptr;
  run_.reset();
  if (used_links) {
    for (Link* link : group_.links) {
      if (link != nullptr) link->retire(group_.group, request_.op_number + 1);
    }
  }
  status_ = std::move(status);
  stage_ = Stage::kFinished;
}

}  // namespace pycomm::collectives

#include "collectives/execution.h"

#include <algorithm>
#include <cstring>

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

}  // namespace

namespace {

bool has_memory(const OpRequest& request, Rank rank) {
  if (request.count == 0 || request.kind == OpKind::kBarrier) return true;
  const bool reads = request.kind != OpKind::kBroadcast || request.root == rank;
  return request.output != nullptr && (!reads || request.input != nullptr);
}

Status explain_invalid(const OpRequest& request, int world_size) {
  const std::string what = to_string(request.kind);
  if (request.count > kCountMax) return invalid(what + ": too many elements");
  if (request.root < 0 || request.root >= world_size) {
    return invalid(what + ": root " + std::to_string(request.root) + " is not in a group of " +
                   std::to_string(world_size));
  }
  if (request.kind == OpKind::kAllReduce && !is_reducible(request.dtype, request.op)) {
    return invalid(what + ": " + to_string(request.op) + " is not defined on " +
                   to_string(request.dtype));
  }
  return invalid(what + ": no memory given");
}

}  // namespace

Status validate(const OpRequest& request, Rank rank, int world_size) {
  const bool is_valid =
      request.count <= kCountMax && request.root >= 0 && request.root < world_size &&
      (request.kind != OpKind::kAllReduce || is_reducible(request.dtype, request.op)) &&
      has_memory(request, rank);
  return __builtin_expect(is_valid, 1) ? Status() : explain_invalid(request, world_size);
}

Execution::Execution(GroupContext& group, const OpRequest& request, base::TimeNs deadline)
    : group_(group), request_(request), signature_(request.signature()), deadline_(deadline) {}

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
    const Rank late = waits_for();
    abort(Status::error(
        StatusCode::kTimeout,
        late == kNoRank ? "timed out" : "timed out waiting for rank " + std::to_string(late),
        late));
    return true;
  }
  return moved;
}

bool Execution::start() {
  if (group_.flat == nullptr) {
    start_messages();
    return true;
  }
  if (is_flat(group_.shape, request_.bytes())) {
    publish_request(*group_.flat, request_, signature_);
    stage_ = Stage::kFlat;
  } else {
    // Say what is coming, and where the tensor lies if others can reach it.
    std::uint64_t place = 0;
    const auto& bases = group_.shared.bases;
    if (!bases.empty() && request_.kind == OpKind::kAllReduce) {
      const std::byte* base = bases[static_cast<std::size_t>(group_.rank)];
      if (request_.output >= base &&
          request_.output + request_.bytes() <= base + group_.shared.bytes) {
        place = static_cast<std::uint64_t>(request_.output - base) + 1;
      }
    }
    if (place > 0 && request_.input != request_.output) {
      std::memcpy(request_.output, request_.input, request_.bytes());
    }
    group_.flat->publish(signature_, &place, sizeof place);
    stage_ = Stage::kAnnounced;
  }
  if (group_.waker != nullptr) group_.waker->wake_peers();
  return true;
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

void Execution::start_messages() {
  const std::uint64_t bytes = request_.bytes();
  if (request_.kind == OpKind::kAllGather) {
    std::byte* slot = request_.output + static_cast<std::uint64_t>(group_.rank) * bytes;
    if (bytes > 0 && slot != request_.input) std::memmove(slot, request_.input, bytes);
  } else if (request_.kind == OpKind::kAllReduce && bytes > 0 &&
             request_.input != request_.output) {
    std::memmove(request_.output, request_.input, bytes);
  } else if (request_.kind == OpKind::kBroadcast && request_.root == group_.rank && bytes > 0 &&
             request_.input != request_.output) {
    std::memmove(request_.output, request_.input, bytes);
  }
  if (request_.kind == OpKind::kAllReduce && scales_first(request_)) {
    kernels::reduce_kernels().scale(request_.output, request_.count, request_.dtype,
                                    request_.scale(group_.world_size));
  }
  PlanRequest plan;
  plan.kind = request_.kind;
  plan.rank = group_.rank;
  plan.world_size = group_.world_size;
  plan.root = request_.root;
  plan.count = request_.kind == OpKind::kBarrier ? 0 : request_.count;
  plan.element_bytes = dtype_bytes(request_.dtype);
  plan.chunk_bytes = group_.chunk_bytes;
  run_ = std::make_unique<ScheduleRun>(group_, request_, plan_over_messages(group_.shape, plan));
  stage_ = Stage::kMessages;
}

Rank Execution::waits_for() const {
  if (stage_ == Stage::kMessages) return run_->waits_for();
  if (stage_ == Stage::kFlat || stage_ == Stage::kAnnounced || stage_ == Stage::kClosing) {
    for (Rank p = 0; p < group_.world_size; ++p) {
      if (!group_.flat->has_arrived(p)) return p;
    }
  }
  return kNoRank;
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

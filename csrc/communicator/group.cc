#include "communicator/group.h"

#include <algorithm>
#include <cerrno>

#include "communicator/engine.h"
#include "platform/futex.h"
#include "platform/system.h"

namespace pycomm::communicator {

using collectives::Execution;

namespace {

// How long a failure waits for the word that explains it; a death is noticed within a millisecond.
constexpr base::TimeNs kLossGraceNs = 400'000'000;
constexpr int kTurnsMax = 4;
// An operation over messages that makes no headway for so long tells the others what it is.
constexpr base::TimeNs kTellAfterNs = 50'000'000;
constexpr std::size_t kWhereaboutsMax = 4096;

}  // namespace

// ---------------------------------------------------------------- QueuedOperation

Status QueuedOperation::status() const {
  std::lock_guard lock(mutex_);
  return status_;
}

void QueuedOperation::complete(Status status, Rank source) {
  std::shared_ptr<void> keepalive;
  std::vector<std::function<void()>> callbacks;
  {
    std::lock_guard lock(mutex_);
    status_ = std::move(status);
    source_ = source;
    finished_ns_ = platform::real_clock().now_ns();
    callbacks.swap(callbacks_);
    if (!has_waiting_owner_) keepalive.swap(request_.keepalive);
    done_.store(true, std::memory_order_release);
  }
  engine_->dispose(std::move(keepalive));
  changed_.notify_all();
  for (auto& callback : callbacks) engine_->run_later(std::move(callback));
}

void QueuedOperation::on_done(std::function<void()> callback) {
  if (generation_ != fork_generation()) return;  // nobody is here to finish it
  {
    std::lock_guard lock(mutex_);
    if (!is_done()) {
      callbacks_.push_back(std::move(callback));
      return;
    }
  }
  engine_->run_later(std::move(callback));
}

void QueuedOperation::park(std::int64_t timeout_ns) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), [this] { return is_done(); });
}

Status QueuedOperation::wait(std::int64_t timeout_ms) {
  if (generation_ != fork_generation()) {
    return Status::error(StatusCode::kInvalidUsage,
                         "this process was forked after the operation began; it is the parent's");
  }
  if (!is_done()) PYCOMM_RETURN_IF_ERROR(engine_->wait(*this, timeout_ms));
  return status();
}

// ---------------------------------------------------------------- Group

void Group::enqueue(std::shared_ptr<QueuedOperation> operation) {
  operation->request().op_number = next_op_number();
  recorder.begin(operation->op_number(), operation->request().signature());
  queue_.push_back(std::move(operation));
  num_queued_.fetch_add(1, std::memory_order_release);
  if (!whereabouts_.empty()) compare_whereabouts();
}

bool Group::advance(base::TimeNs now, With with) {
  if (queue_.empty()) return false;
  if (has_failed()) {
    if (with == With::kMemoryOnly) return false;  // sends and receives end with it
    fail(failure());
    return true;
  }
  QueuedOperation& operation = *queue_.front();
  if (!current_) {
    OpRequest& request = operation.request();
    if (request.timeout_ms < 0) request.timeout_ms = timeout_ms.load();
    current_ = std::make_unique<Execution>(context, request, now);
    tell_at_ = context.flat ? base::kNever : now + kTellAfterNs;
  }
  bool moved = false;
  // A bounded number of turns, so that other groups and links get theirs.
  for (int turn = 0; turn < kTurnsMax && !current_->is_finished(); ++turn) {
    if (!current_->advance(now, with)) break;
    moved = true;
  }
  if (!current_->is_finished()) {
    if (moved && tell_at_ != base::kNever) tell_at_ = now + kTellAfterNs;
    if (now >= tell_at_) tell_whereabouts(now);
    return moved;
  }
  const Status status = current_->status();
  // Only a difference of signatures leaves all ranks in step; after any other failure nobody knows
  // what the others hold.
  const bool goes_on =
      status.is_ok() || (status.code() == StatusCode::kInvalidUsage && context.flat != nullptr);
  if (!goes_on && with == With::kMemoryOnly) return false;
  const bool is_loss =
      status.code() == StatusCode::kPeerLost || status.code() == StatusCode::kAborted;
  if (is_loss && status.rank() != kNoRank) {
    // The peer may be a survivor like this one: what it says of the cause, or its own end, is
    // about to arrive and counts for more than what its silence looks like.
    if (loss_deadline_ == 0) loss_deadline_ = now + kLossGraceNs;
    const bool has_spoken = loss_seen_ && context.has_departed(status.rank());
    loss_seen_ = true;
    if (!has_spoken && now < loss_deadline_) return moved;
  }
  const Status told = explain(status, operation.request(), operation.op_number());
  recorder.end(operation.op_number(), status.code());
  current_.reset();
  loss_deadline_ = 0;
  loss_seen_ = false;
  const std::shared_ptr<QueuedOperation> done = std::move(queue_.front());
  queue_.pop_front();
  num_queued_.fetch_sub(1, std::memory_order_release);
  if (!goes_on) mark_failed(told);  // before the caller learns of it, and leaves
  done->complete(told);
  if (!goes_on) fail(told);
  return true;
}

void Group::fail(const Status& status, Tell tell) {
  mark_failed(status, tell);
  if (current_) current_->abort(status);
  current_.reset();
  while (!queue_.empty()) {
    const std::shared_ptr<QueuedOperation> operation = std::move(queue_.front());
    queue_.pop_front();
    num_queued_.fetch_sub(1, std::memory_order_release);
    recorder.end(operation->op_number(), status.code());
    operation->complete(explain(status, operation->request(), operation->op_number()));
  }
  for (const auto& operation : point_to_point.cancel()) {
    operation->complete(explain(status, operation->request(), 0));
  }
}

// ---------------------------------------------------------------- sends and receives

void Group::start_point_to_point(std::shared_ptr<QueuedOperation> operation, base::TimeNs now) {
  OpRequest& request = operation->request();
  if (request.timeout_ms < 0) request.timeout_ms = timeout_ms.load();
  point_to_point.start(std::move(operation), now);
}

bool Group::advance_point_to_point(base::TimeNs now) {
  if (point_to_point.num_pending() == 0) return false;
  std::vector<PointToPoint::Ended> ended;
  if (has_failed()) {
    const Status status = failure();
    for (auto& operation : point_to_point.cancel()) {
      ended.push_back({std::move(operation), status, kNoRank});
    }
  }
  bool moved = point_to_point.advance(now, &ended);
  for (const PointToPoint::Ended& end : ended) {
    // Who waits for the other half of a message that failed here waits in vain. The failure stands
    // before the caller learns of it: the caller may leave at once, and must leave its cause
    // behind.
    if (!end.status.is_ok()) mark_failed(end.status);
    end.operation->complete(explain(end.status, end.operation->request(), 0), end.source);
    moved = true;
  }
  return moved;
}

// ---------------------------------------------------------------- different operations

void Group::tell_whereabouts(base::TimeNs now) {
  tell_at_ = now + 20 * kTellAfterNs;
  const OpRequest& request = queue_.front()->request();
  for (Link* link : context.links) {
    if (link == nullptr) continue;
    static_cast<transport::CoreLink*>(link)->send_whereabouts(
        {context.group, request.op_number, request.signature()});
  }
}

void Group::note_whereabouts(Rank peer, const transport::Whereabouts& theirs) {
  // A flat exchange compares by itself.
  if (context.flat || has_failed() || theirs.op >= kPointToPointOp) return;
  if (whereabouts_.size() >= kWhereaboutsMax) return;
  whereabouts_[{peer, theirs.op}] = theirs.signature;
  compare_whereabouts();
}

void Group::compare_whereabouts() {
  for (auto it = whereabouts_.begin(); it != whereabouts_.end();) {
    const auto [peer, op] = it->first;
    if (op + 1 > last_op_number() + 1) {  // the last one is UINT64_MAX before the first
      ++it;
      continue;
    }
    const Signature theirs = it->second;
    const std::optional<Signature> mine = recorder.signature_of(op);
    it = whereabouts_.erase(it);
    if (!mine || *mine == theirs || has_failed()) continue;
    // The peer finds out by the same comparison.
    static_cast<transport::CoreLink*>(context.links[static_cast<std::size_t>(peer)])
        ->send_whereabouts({context.group, op, *mine});
    mark_failed(Status::error(
        StatusCode::kInvalidUsage,
        collectives::describe_difference(op, context.rank, *mine, peer, theirs), peer));
  }
}

Status Group::failure() const {
  std::lock_guard lock(failure_mutex_);
  return failure_;
}

void Group::own() {
  for (int spins = 0; !try_own(); ++spins) {
    if (spins < 1'000) {
      base::spin_pause();
    } else {
      platform::yield_thread();
    }
  }
}

Status Group::own_within(std::int64_t timeout_ms) {
  constexpr int kSpins = 1'000, kYields = 100;
  constexpr std::int64_t kPauseNs = 100'000;
  constexpr base::TimeNs kLookNs = 50'000'000;
  for (int spins = 0; spins < kSpins; ++spins) {
    if (try_own()) return Status();
    base::spin_pause();
  }
  const base::TimeNs start = platform::real_clock().now_ns();
  const base::TimeNs deadline = base::deadline_after(start, timeout_ms);
  base::TimeNs look_at = start + kLookNs;
  for (int yields = 0; !try_own(); ++yields) {
    const base::TimeNs now = platform::real_clock().now_ns();
    if (now > deadline) {
      return Status::error(StatusCode::kTimeout,
                           "another thread was inside an operation of this group until the timeout "
                           "of " +
                               std::to_string(timeout_ms) + " ms");
    }
    if (now > look_at) {
      look_at = now + kLookNs;
      if (is_interrupted && is_interrupted()) {
        return Status::error(StatusCode::kAborted, "interrupted while waiting");
      }
    }
    if (yields < kYields) {
      platform::yield_thread();
    } else {
      platform::sleep_ns(kPauseNs);
    }
  }
  return Status();
}

void Group::mark_failed(const Status& status, Tell tell) {
  {
    std::lock_guard lock(failure_mutex_);
    if (failure_.is_ok()) {
      failure_ = status;
      untold_ = tell == Tell::kPeers;
      undumped_ = status.code() == StatusCode::kTimeout;
    }
  }
  failed_.store(true, std::memory_order_release);
  if (!context.flat) return;
  for (Rank p = 0; p < context.world_size; ++p) wake_those_who_wait_for(p);
}

void Group::note_peer_lost(Rank peer, const Status& status) {
  mark_failed(Status::error(StatusCode::kPeerLost,
                            "rank " + std::to_string(peer) + " was lost: " + status.message(),
                            peer));
}

void Group::note_peer_departed(Rank peer) {
  if (context.departed) {
    context.departed[static_cast<std::size_t>(peer)].store(true, std::memory_order_release);
  }
  if (context.flat) wake_those_who_wait_for(peer);
}

// Threads of this process.
void Group::wake_those_who_wait_for(Rank peer) const {
  platform::futex_wake_all(context.flat->arrival_word(peer));
  platform::futex_wake_all(&context.local.marks[static_cast<std::size_t>(peer)]->position);
}

base::TimeNs Group::next_deadline() const {
  if (loss_deadline_ != 0) return loss_deadline_;
  return current_ ? std::min(current_->deadline(), tell_at_) : base::kNever;
}

void Group::wake_peers() {
  // In program order behind publish(); a sleeper's process_barrier() makes that enough.
  bool anyone_sleeps = false;
  for (const transport::shm::PeerFlags& peer : peer_flags) {
    anyone_sleeps |= peer.flat_sleepers->load(std::memory_order_relaxed) != 0;
    if (peer.bell_armed->load(std::memory_order_relaxed) == transport::shm::kBellAll) {
      peer.doorbell->ring();
    }
  }
  if (!anyone_sleeps) return;
  platform::futex_wake_all(context.flat->my_word());
  platform::futex_wake_all(&context.local.mine->position);
}

Status Group::pull(Rank peer, std::uint64_t address, std::byte* out, std::uint64_t bytes) {
  const auto index = static_cast<std::size_t>(peer < context.rank ? peer : peer - 1);
  if (platform::read_process_memory(peer_flags[index].pid, address, out, bytes)) return Status();
  const bool is_gone = errno == ESRCH || errno == EFAULT;
  const Status why = platform::system_error("reading the memory of rank " + std::to_string(peer));
  return Status::error(is_gone ? StatusCode::kPeerLost : StatusCode::kSystem, why.message(), peer);
}

collectives::Puller* Group::find_puller() {
  const bool can_pull = std::all_of(peer_flags.begin(), peer_flags.end(),
                                    [](const auto& peer) { return peer.can_be_read; });
  return can_pull ? this : nullptr;
}

Status Group::explain(const Status& status, const OpRequest& request,
                      std::uint64_t op_number) const {
  if (status.is_ok()) return status;
  std::string text = to_string(request.kind);
  if (is_point_to_point(request.kind)) {
    text += request.kind == OpKind::kSend ? " to " : " from ";
    text += request.root == kAnySource ? "any rank" : "rank " + std::to_string(request.root);
    text += " (tag " + std::to_string(request.tag) + ")";
  } else {
    text += " #" + std::to_string(op_number);
  }
  text += " of group '" + context.name + "' on rank " + std::to_string(context.rank) + ": ";
  // A text that was explained for an earlier operation is quoted whole.
  return Status::error(status.code(), text + status.message(), status.rank());
}

}  // namespace pycomm::communicator

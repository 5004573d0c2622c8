// How the engine moves: in a waiting caller, in its own thread, or asleep until someone rings.
#include <algorithm>
#include <exception>

#include "base/log.h"
#include "communicator/engine.h"
#include "platform/futex.h"
#include "platform/system.h"

namespace pycomm::communicator {
namespace {

using base::TimeNs;
using platform::real_clock;

// A waiting caller looks this often without a pause, then yields, then parks and leaves the rest
// to the progress thread.
constexpr int kSpinsBeforeYield = 300;
constexpr int kSpinsIfCrowded = 2;
constexpr TimeNs kRunBeforeParkNs = 300'000;
constexpr std::int64_t kParkSliceNs = 50'000'000;
// The progress thread yields this often while operations are open, before it sleeps.
constexpr int kYieldsBeforeSleep = 20;
constexpr std::int64_t kIdleSleepNs = 5'000'000'000;
constexpr std::int64_t kUnfencedSleepNs = 1'000'000;
constexpr std::int64_t kActiveSleepNs = 100'000'000;
// Callbacks that wait inside one another, at most.
constexpr std::size_t kCompletersMax = 64;
// Memory of finished operations is let go in batches, and when the engine goes to sleep.
constexpr std::size_t kDisposalsMax = 32;
constexpr std::int64_t kRunnerPauseNs = 500'000;

}  // namespace

// ---------------------------------------------------------------- progress

bool Engine::progress() {
  bool moved = false;
  for (const auto& endpoint : quic_) moved |= endpoint->progress(real_clock().now_ns());
  for (auto& [id, peer] : links_) moved |= peer.link->progress();
  watch_links();
  for (Tended* tended : tended_) tended->tend();
  const TimeNs now = real_clock().now_ns();
  int active = 0;
  for (Member& member : members_) {
    Group& group = *member.group;
    moved |= group.advance_point_to_point(now);
    active += group.point_to_point.num_pending();
    if (group.num_queued() == 0 || !group.try_own()) continue;
    moved |= group.advance(now, Group::With::kLinks);
    active += group.num_queued();
    group.release();
  }
  tell_failures();
  dump_timeouts();
  if (active > 0 || moved) {
    for (auto& [id, peer] : links_) moved |= peer.link->progress();
  }
  num_active_.store(active);
  bool has_unsent = false;
  for (const auto& [id, peer] : links_) has_unsent |= !peer.link->is_flushed();
  has_unsent_.store(has_unsent);
  return moved;
}

void Engine::submit(Group& group, std::shared_ptr<QueuedOperation> operation, bool caller_waits) {
  OpRequest& request = operation->request();
  if (request.timeout_ms < 0) request.timeout_ms = group.timeout_ms.load();
  if (const Status status = group.own_within(request.timeout_ms); !status.is_ok()) {
    operation->complete(group.explain(status, request, group.last_op_number() + 1));
    return;
  }
  {
    std::lock_guard lock(mutex_);
    if (group.has_failed()) {
      const Status failure = group.failure();
      operation->request().op_number = group.next_op_number();
      operation->complete(group.explain(failure, operation->request(), operation->op_number()));
      group.fail(failure);
      group.release();
      return;
    }
    group.enqueue(std::move(operation));
    group.release();
    num_active_.fetch_add(1);
    // The first chunk leaves now; whether a waiter or the progress thread goes on is open.
    progress();
  }
  if (is_active() && !caller_waits) kick();
}

void Engine::take_over() {
  num_active_.fetch_add(1);
  kick();
}

void Engine::submit_point_to_point(Group& group, std::shared_ptr<QueuedOperation> operation,
                                   bool caller_waits) {
  {
    std::lock_guard lock(mutex_);
    if (group.has_failed()) {
      operation->complete(group.explain(group.failure(), operation->request(), 0));
      return;
    }
    group.start_point_to_point(std::move(operation), real_clock().now_ns());
    num_active_.fetch_add(1);
    // What a receive takes in may take long: the waiter or the progress thread does it.
    for (Link* link : group.context.links) {
      if (link != nullptr) static_cast<transport::CoreLink*>(link)->flush();
    }
  }
  if (is_active() && !caller_waits) kick();
}

void Engine::abort_group(Group& group, const Status& status, Group::Tell tell) {
  group.mark_failed(status, tell);                // a caller that waits inside an exchange lets go
  if (group.is_in_handler_here()) return kick();  // and is below us on this very stack
  group.own();
  std::lock_guard lock(mutex_);
  group.fail(status, tell);
  tell_failures();
  group.release();
}

Status Engine::wait(QueuedOperation& operation, std::int64_t timeout_ms) {
  const TimeNs start = real_clock().now_ns();
  const TimeNs deadline = base::deadline_after(start, timeout_ms);
  begin_running();
  TimeNs last_move = start;
  for (int idle = 0; !operation.is_done(); ++idle) {
    const TimeNs now = real_clock().now_ns();
    bool moved = false;
    if (mutex_.try_lock()) {
      moved = progress();
      mutex_.unlock();
    }
    if (moved) {
      idle = 0;
      last_move = now;
    } else if (now - last_move > kRunBeforeParkNs || now >= deadline) {
      break;
    } else if (idle < (crowding_.is_crowded() ? kSpinsIfCrowded : kSpinsBeforeYield)) {
      base::spin_pause();
    } else {
      crowding_.yield();
    }
  }
  end_running();
  while (!operation.is_done()) {
    const TimeNs left = deadline - real_clock().now_ns();
    if (left <= 0) return Status::error(StatusCode::kTimeout, "not done yet");
    operation.park(std::min(left, kParkSliceNs));
  }
  return Status();
}

// With nothing to do here, what peers send waits for the next call: a bell would only take this
// processor from whoever computes on it.
void Engine::arm_bell() {
  if (!host_) return;
  const bool hears_messages = has_unsent_.load() || num_watchers_.load() > 0;
  host_->header().bell_armed.store(is_active()      ? transport::shm::kBellAll
                                   : hears_messages ? transport::shm::kBellMessages
                                                    : transport::shm::kBellOff);
}

void Engine::begin_watching() {
  num_watchers_.fetch_add(1);
  if (num_runners_.load() > 0 || !is_asleep_.load()) return;  // someone looks
  arm_bell();
  look_once_more();
}

void Engine::end_watching() { num_watchers_.fetch_sub(1); }

void Engine::begin_running() {
  num_runners_.fetch_add(1);
  if (host_) host_->header().bell_armed.store(transport::shm::kBellOff);
}

// If the progress thread slept meanwhile, peers must ring for it again, and what came before the
// bell was armed must not be missed.
void Engine::end_running() {
  if (num_runners_.fetch_sub(1) != 1) return;
  if (!is_active() && !has_unsent_.load()) return;
  if (is_asleep_.load()) {
    arm_bell();
    look_once_more();
  }
  if (is_active()) kick();
}

bool Engine::look_once_more() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  std::lock_guard lock(mutex_);
  return progress();
}

void Engine::kick() { kick_bell_.ring(); }

void Engine::progress_loop() {
  platform::block_signals_in_this_thread();
  int yields = 0;
  while (!is_stopping_.load()) {
    if (num_runners_.load() > 0) {
      // The runner moves the links; only ends of peers' sockets are for this thread to see.
      platform::sleep_ns(kRunnerPauseNs);
      std::vector<platform::Poller::Event> events;
      poller_.wait(0, &events);
      if (!events.empty()) {
        std::lock_guard lock(mutex_);
        dispatch(events);
      }
      continue;
    }
    bool moved;
    {
      std::lock_guard lock(mutex_);
      moved = progress();
    }
    if (moved) {
      yields = 0;
    } else if (is_active() && yields < kYieldsBeforeSleep) {
      ++yields;
      platform::yield_thread();
    } else {
      yields = 0;
      sleep_until_event();
    }
  }
}

void Engine::sleep_until_event() {
  flush_disposals();
  if (host_) host_->trim(real_clock().now_ns() - transport::shm::kKeptNs);
  is_asleep_.store(true);
  if (num_runners_.load() == 0) arm_bell();
  std::int64_t timeout = is_active() ? kActiveSleepNs : kIdleSleepNs;
  if (is_active() && !platform::process_barrier()) timeout = kUnfencedSleepNs;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [id, peer] : links_) peer.link->arm();
  }
  if (look_once_more()) {
    is_asleep_.store(false);
    return;
  }
  {
    std::lock_guard lock(mutex_);
    const TimeNs now = real_clock().now_ns();
    const auto wake_by = [&](TimeNs at) {
      timeout = std::min(timeout, std::max<std::int64_t>(at - now, 0));
    };
    for (const auto& [id, peer] : links_) wake_by(peer.link->next_deadline());
    for (Member& member : members_) {
      wake_by(member.group->point_to_point.next_deadline());
      if (member.group->num_queued() == 0 || !member.group->try_own()) continue;
      wake_by(member.group->next_deadline());
      member.group->release();
    }
  }
  std::vector<platform::Poller::Event> events;
  poller_.wait(timeout, &events);
  is_asleep_.store(false);
  if (host_) host_->header().bell_armed.store(transport::shm::kBellOff);
  std::lock_guard lock(mutex_);
  dispatch(events);
}

void Engine::dispatch(const std::vector<platform::Poller::Event>& events) {
  for (const platform::Poller::Event& event : events) {
    if (event.token == kKickToken) kick_bell_.clear();
    if (event.token == kDoorbellToken) host_->doorbell().clear();
    for (auto& [id, peer] : links_) {
      if (peer.token == event.token) peer.link->on_ready();
    }
  }
}

// ---------------------------------------------------------------- completions

void Engine::dispose(std::shared_ptr<void> memory) {
  if (!memory) return;
  bool is_many;
  {
    std::lock_guard lock(completion_mutex_);
    disposals_.push_back(std::move(memory));
    is_many = disposals_.size() >= kDisposalsMax;
  }
  if (is_many) flush_disposals();
}

void Engine::flush_disposals() {
  auto batch = std::make_shared<std::vector<std::shared_ptr<void>>>();
  {
    std::lock_guard lock(completion_mutex_);
    // After the end, stop() lets go of the rest.
    if (disposals_.empty() || is_stopping_.load()) return;
    batch->swap(disposals_);
  }
  run_later([batch] { batch->clear(); });
}

void Engine::run_later(std::function<void()> callback) {
  std::unique_lock lock(completion_mutex_);
  if (is_stopping_.load()) {  // no thread is left to do it
    lock.unlock();
    callback();
    return;
  }
  completions_.push_back(std::move(callback));
  const bool all_are_busy = num_idle_completers_ < completions_.size();
  if (all_are_busy && completion_threads_.size() < kCompletersMax) {
    completion_threads_.emplace_back([self = shared_from_this()] { self->completion_loop(); });
  }
  completion_changed_.notify_one();
}

void Engine::completion_loop() {
  platform::block_signals_in_this_thread();
  std::unique_lock lock(completion_mutex_);
  for (;;) {
    ++num_idle_completers_;
    completion_changed_.wait(lock, [this] { return !completions_.empty() || is_stopping_.load(); });
    --num_idle_completers_;
    if (completions_.empty()) return;
    std::function<void()> callback = std::move(completions_.front());
    completions_.pop_front();
    lock.unlock();
    try {
      callback();
    } catch (const std::exception& error) {
      base::log(base::LogLevel::kError, base::Subsystem::kInit,
                std::string("a completion callback threw: ") + error.what());
    }
    callback = nullptr;
    lock.lock();
  }
}

}  // namespace pycomm::communicator

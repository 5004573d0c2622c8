// One group inside an engine: its context, its queue of operations, and who may touch them.
//
// Ownership. `own` is a flag, not a lock: a caller with a small operation takes it and runs the
// exchange itself; the engine takes it to advance queued operations and passes by if it cannot.
// Everything in `context` and the queue belongs to the holder. Links additionally need the
// engine's mutex, which is taken second; sends and receives need that mutex only, so that a caller
// that waits inside an exchange does not hold them up.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "base/spin.h"
#include "collectives/execution.h"
#include "communicator/flight_recorder.h"
#include "communicator/fork_guard.h"
#include "communicator/point_to_point.h"
#include "communicator/tuning_file.h"
#include "platform/system.h"
#include "transport/shm/factory.h"

namespace pycomm::communicator {

class Engine;

// A queued operation, and the handle on it.
class QueuedOperation final : public Operation,
                              public std::enable_shared_from_this<QueuedOperation> {
 public:
  QueuedOperation(std::shared_ptr<Engine> engine, const OpRequest& request)
      : engine_(std::move(engine)), request_(request) {}

  bool is_done() const override { return done_.load(std::memory_order_acquire); }
  Status status() const override;
  Status wait(std::int64_t timeout_ms) override;
  void on_done(std::function<void()> callback) override;
  std::uint64_t op_number() const override { return request_.op_number; }
  Rank source() const override { return source_; }
  std::int64_t duration_ns() const override { return finished_ns_ - started_ns_; }

  OpRequest& request() { return request_; }
  // By the engine, once.
  void complete(Status status, Rank source = kNoRank);
  // Its caller holds it until the end, and lets go of the memory in its own thread.
  void keep_memory_for_owner() { has_waiting_owner_ = true; }
  // Parks until done or the time is up.
  void park(std::int64_t timeout_ns);

 private:
  const std::shared_ptr<Engine> engine_;
  const std::uint64_t generation_ = fork_generation();
  OpRequest request_;
  Rank source_ = kNoRank;  // before done_, as is finished_ns_
  const base::TimeNs started_ns_ = platform::real_clock().now_ns();
  base::TimeNs finished_ns_ = 0;
  bool has_waiting_owner_ = false;
  std::atomic<bool> done_{false};
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Status status_;
  std::vector<std::function<void()>> callbacks_;
};

class Group final : public collectives::Waker, public collectives::Puller {
 public:
  collectives::GroupContext context;
  std::atomic<std::int64_t> timeout_ms{1'800'000};
  std::vector<transport::shm::PeerFlags> peer_flags;  // of the other ranks, if memory is shared
  std::function<bool()> is_interrupted;
  std::byte* flat_area = nullptr;  // mine
  std::vector<int> global_ranks;   // of the group's ranks in the job
  std::string flight_folder;       // where a timeout dumps to; empty: nowhere
  TuningFile tuning;
  FlightRecorder recorder;
  PointToPoint point_to_point{context};  // needs the engine's mutex

  // Whether a failure is news to the other ranks, or a planned end.
  enum class Tell { kPeers, kNobody };

  bool try_own() { return !owned_.exchange(true, std::memory_order_acquire); }
  void own();
  // For callers whose operation has a timeout: another thread may be inside a small operation for
  // as long as a peer is slow. Errors: kTimeout, kAborted (a signal).
  Status own_within(std::int64_t timeout_ms);
  void release() { owned_.store(false, std::memory_order_release); }

  // --- holder only
  std::uint64_t next_op_number() {
    const std::uint64_t next = op_number_.load(std::memory_order_relaxed) + 1;
    op_number_.store(next, std::memory_order_relaxed);
    return next;
  }
  std::uint64_t last_op_number() const { return op_number_.load(std::memory_order_relaxed); }
  void enqueue(std::shared_ptr<QueuedOperation> operation);
  bool is_queue_empty() const { return queue_.empty(); }
  // Drives the operation at the front; with links only under the engine's mutex.
  using With = collectives::Execution::With;
  bool advance(base::TimeNs now, With with);
  // advance() without links can do no more: it goes on over messages, or the group is over.
  bool needs_engine() const {
    return has_failed() || (current_ && (current_->needs_links() || current_->is_finished()));
  }
  collectives::WaitingWord waiting_word() const {
    return current_ ? current_->waiting_word() : collectives::WaitingWord();
  }
  // The group is over: everything queued ends with `status`, and so does what comes.
  void fail(const Status& status, Tell tell = Tell::kPeers);
  // When the holder must look again at the latest.
  base::TimeNs next_deadline() const;

  // --- with the engine's mutex
  void start_point_to_point(std::shared_ptr<QueuedOperation> operation, base::TimeNs now);
  bool advance_point_to_point(base::TimeNs now);
  // A peer has waited for some time in an operation that it calls `signature`.
  void note_whereabouts(Rank peer, const transport::Whereabouts& theirs);

  // --- any thread
  bool has_failed() const { return failed_.load(std::memory_order_acquire); }
  Status failure() const;
  // From now on every wait of this group ends, with `status` if it is the first.
  void mark_failed(const Status& status, Tell tell = Tell::kPeers);
  // True once, when there is a failure to tell.
  bool take_untold_failure() { return untold_.exchange(false); }
  // True once, after a timeout.
  bool take_undumped_timeout() { return undumped_.exchange(false); }
  // Notes a peer's end, for callers that wait outside the engine.
  void note_peer_lost(Rank peer, const Status& status);
  void note_peer_departed(Rank peer);

  // Python signal handlers run inside a wait of this thread, while it owns the group: what they ask
  // of the group cannot wait for the owner.
  void set_in_handler(bool is_in) {
    handler_thread_.store(is_in ? std::this_thread::get_id() : std::thread::id());
  }
  bool is_in_handler_here() const { return handler_thread_.load() == std::this_thread::get_id(); }
  int num_queued() const { return num_queued_.load(std::memory_order_acquire); }

  // After a slot or a mark was written: wakes the ranks that sleep on it.
  void wake_peers() override;
  Status pull(Rank peer, std::uint64_t address, std::byte* out, std::uint64_t bytes) override;
  // This, if it can read every other rank's memory.
  collectives::Puller* find_puller();

  // "all_reduce #7 on group 'x': ..." with the code and rank of `status`.
  Status explain(const Status& status, const OpRequest& request, std::uint64_t op_number) const;

 private:
  void wake_those_who_wait_for(Rank peer) const;

  std::atomic<bool> owned_{false};
  // Written by the holder. The operation that confirms a new group is number 0, the user's first
  // is 1.
  std::atomic<std::uint64_t> op_number_{UINT64_MAX};
  std::deque<std::shared_ptr<QueuedOperation>> queue_;
  std::unique_ptr<collectives::Execution> current_;
  std::atomic<int> num_queued_{0};
  std::atomic<bool> failed_{false};
  std::atomic<bool> untold_{false};
  std::atomic<bool> undumped_{false};
  // Tells the others where this rank stands, once an operation has waited for long; and looks
  // whether what they said of an operation is what it was here.
  void tell_whereabouts(base::TimeNs now);
  void compare_whereabouts();

  base::TimeNs tell_at_ = base::kNever;  // when the current operation has waited for long
  std::map<std::pair<Rank, std::uint64_t>, Signature> whereabouts_;  // of peers that are ahead
  base::TimeNs loss_deadline_ = 0;  // until then the current operation's loss awaits its cause
  bool loss_seen_ = false;          // the links have had a look since
  std::atomic<std::thread::id> handler_thread_{};
  mutable std::mutex failure_mutex_;
  Status failure_;
};

}  // namespace pycomm::communicator

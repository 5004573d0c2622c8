// The communicator that users hold: the thin path of a small operation, and the door to the queue.
// Thread: any. Everything that a group shares with its peers is in Group and Engine.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "base/log.h"
#include "communicator/engine.h"
#include "communicator/fork_guard.h"
#include "platform/futex.h"
#include "platform/system.h"
#include "pycomm/communicator.h"

namespace pycomm::communicator {

// How a caller waits for a slot: look, then yield to others on this processor, then sleep in the
// kernel. The first two are bounded so that ranks that share a processor get on.
inline constexpr int kLooksBeforeYield = 4'000;
inline constexpr int kLooksIfCrowded = 20;
inline constexpr base::TimeNs kYieldNs = 100'000;
inline constexpr std::int64_t kSleepSliceNs = 50'000'000;
inline constexpr std::int64_t kUnfencedSleepNs = 1'000'000;

class CommunicatorImpl final : public Communicator {
 public:
  CommunicatorImpl(std::shared_ptr<Engine> engine, std::shared_ptr<Group> group,
                   std::vector<std::shared_ptr<transport::CoreLink>> links)
      : engine_(std::move(engine)), group_(std::move(group)), links_(std::move(links)) {}

  ~CommunicatorImpl() override {
    if (is_inherited()) {
      leak();
      return;
    }
    engine_->remove_group(group_);
    links_.clear();
    group_.reset();
    if (releases_user_) engine_->release_user();
  }

  // The caller of Engine::acquire() releases it, not this object.
  void keep_user() { releases_user_ = false; }

  Rank rank() const override { return group_->context.rank; }
  int world_size() const override { return group_->context.world_size; }

  Status run(const OpRequest& request) override {
    PYCOMM_RETURN_IF_ERROR(check_usable(request));
    if (__builtin_expect(base::is_tracing(), 0)) trace(request);
    if (group_->is_in_handler_here()) return refuse_in_handler();
    const bool is_small = collectives::is_flat(group_->context.shape, request.kind, request.bytes(),
                                               group_->context.world_size);
    const bool is_local = group_->context.flat != nullptr && !is_point_to_point(request.kind);
    if (is_local && group_->num_queued() == 0 && group_->try_own()) {
      if (group_->is_queue_empty() && !group_->has_failed()) {
        if (!is_small) return run_local(request);
        Status status = run_flat(request);
        group_->release();
        return status;
      }
      group_->release();
    }
    const auto operation = std::make_shared<QueuedOperation>(engine_, request);
    submit(operation, true);
    return await(*operation);
  }

  std::shared_ptr<Operation> start(const OpRequest& request) override {
    return begin(request, false);
  }
  Status run_all(const std::vector<OpRequest>& requests,
                 std::vector<std::shared_ptr<Operation>>* left) override;

  void abort(const std::string& reason) override {
    if (is_inherited()) return;
    engine_->abort_group(*group_, Status::error(StatusCode::kAborted, reason));
  }

  void set_timeout_ms(std::int64_t timeout_ms) override { group_->timeout_ms = timeout_ms; }
  void set_interrupt_check(std::function<bool()> is_interrupted) override {
    group_->is_interrupted = std::move(is_interrupted);
  }

  Result<std::shared_ptr<std::byte>> allocate_shared(std::uint64_t bytes) override;

  Result<std::unique_ptr<ShardBarrier>> create_shard_barrier(int num_shards) override;

  Status health() const override;

  std::vector<FlightRecord> flight_records() const override {
    return group_->recorder.snapshot(group_->last_op_number());
  }
  Result<std::string> dump_flight_records(const std::string& folder) const override;
  std::vector<PeerStats> peer_stats() const override;

 private:
  // Whether this process was forked after the group was created.
  bool is_inherited() const { return generation_ != fork_generation(); }

  Status check_usable(const OpRequest& request) const {
    if (is_inherited()) {
      return Status::error(StatusCode::kInvalidUsage,
                           "this process was forked after its group was created; the group "
                           "belongs to the parent");
    }
    return collectives::validate(request, group_->context.rank, group_->context.world_size);
  }

  void submit(const std::shared_ptr<QueuedOperation>& operation, bool caller_waits);

  void trace(const OpRequest& request) const;

  // The fused step of a small operation, in the caller. The group is owned.
  Status run_flat(const OpRequest& request) {
    Group& group = *group_;
    collectives::FlatExchange& flat = *group.context.flat;
    const std::uint64_t op_number = group.next_op_number();
    const Signature signature = request.signature();
    group.recorder.begin(op_number, signature);
    collectives::publish_request(flat, request, signature);
    group.wake_peers();
    for (Rank p = 0; p < group.context.world_size; ++p) {
      if (__builtin_expect(!await_peer(p), 0)) {
        if (Status status = await_slow_peer(p, request); !status.is_ok()) {
          return fail_flat(status, request, op_number);
        }
      }
    }
    Status status = collectives::collect_result(flat, request, signature, op_number);
    group.recorder.end(op_number, status.code());
    // A difference of signatures leaves everyone in step: the group goes on.
    return status.is_ok() ? status : group.explain(status, request, op_number);
  }

  std::shared_ptr<QueuedOperation> begin(const OpRequest& request, bool caller_waits);
  // An operation that goes through memory, driven by the caller. The group is owned, and released.
  Status run_local(const OpRequest& request);
  Status await(QueuedOperation& operation);
  // Looks, yields or sleeps until a peer moved; false after a signal.
  bool await_change(const collectives::WaitingWord& word, base::TimeNs idle_since);

  Status fail_flat(const Status& status, const OpRequest& request, std::uint64_t op_number);

  bool await_peer(Rank peer) const {
    const collectives::FlatExchange& flat = *group_->context.flat;
    if (flat.has_arrived(peer)) return true;
    const int looks = num_looks();
    for (int i = 0; i < looks; ++i) {
      base::spin_pause();
      if (flat.has_arrived(peer)) return true;
    }
    return false;
  }

  int num_looks() const {
    return engine_->crowding().is_crowded() ? kLooksIfCrowded : kLooksBeforeYield;
  }
  Status await_slow_peer(Rank peer, const OpRequest& request);

  // Runs signal handlers, which may come back to this group.
  bool is_interrupted();

  static Status refuse_in_handler();

  void sleep_on(const collectives::WaitingWord& word, std::int64_t timeout_ns);

  // In a forked child: locks may be held by threads that are not here, peers are the parent's.
  void leak();

  std::shared_ptr<Engine> engine_;
  std::shared_ptr<Group> group_;
  std::vector<std::shared_ptr<transport::CoreLink>> links_;
  const std::uint64_t generation_ = fork_generation();
  bool releases_user_ = true;
  std::atomic<std::uint64_t> num_barriers_{0};
};

}  // namespace pycomm::communicator

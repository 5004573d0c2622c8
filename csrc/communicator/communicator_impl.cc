#include "communicator/communicator_impl.h"

#include <algorithm>

#include "base/log.h"
#include "communicator/shard_barrier.h"

namespace pycomm::communicator {

Result<std::shared_ptr<std::byte>> CommunicatorImpl::allocate_shared(std::uint64_t bytes) {
  if (is_inherited() || engine_->host() == nullptr) {
    return Status::error(StatusCode::kSystem, "no shared memory: " + engine_->shm_refusal());
  }
  return allocate_shared_memory(bytes);
}

Result<std::unique_ptr<ShardBarrier>> CommunicatorImpl::create_shard_barrier(int num_shards) {
  constexpr int kShardsMax = 1 << 16;
  OpRequest meet;
  meet.kind = OpKind::kBarrier;
  PYCOMM_RETURN_IF_ERROR(check_usable(meet));
  if (num_shards < 1 || num_shards > kShardsMax) {
    return Status::error(StatusCode::kInvalidUsage,
                         "a barrier has 1 to 65536 shards, not " + std::to_string(num_shards));
  }
  auto barrier = std::make_unique<ShardBarrierImpl>(engine_, group_, num_shards);
  PYCOMM_RETURN_IF_ERROR(barrier->open(num_barriers_.fetch_add(1)));
  // Nobody counts at a rank that does not show its counters yet, or has others.
  std::vector<std::uint64_t> sizes(static_cast<std::size_t>(world_size()));
  const auto mine = static_cast<std::uint64_t>(num_shards);
  OpRequest compare;
  compare.kind = OpKind::kAllGather;
  compare.dtype = DType::kInt64;
  compare.count = 1;
  compare.input = reinterpret_cast<const std::byte*>(&mine);
  compare.output = reinterpret_cast<std::byte*>(sizes.data());
  PYCOMM_RETURN_IF_ERROR(run(compare));
  for (std::size_t r = 0; r < sizes.size(); ++r) {
    if (sizes[r] == mine) continue;
    return Status::error(StatusCode::kInvalidUsage,
                         "rank " + std::to_string(r) + " makes a barrier of " +
                             std::to_string(sizes[r]) + " shards, rank " + std::to_string(rank()) +
                             " one of " + std::to_string(mine),
                         static_cast<Rank>(r));
  }
  PYCOMM_RETURN_IF_ERROR(barrier->attach());
  return std::unique_ptr<ShardBarrier>(std::move(barrier));
}

Status CommunicatorImpl::health() const {
  if (is_inherited())
    return Status::error(StatusCode::kInvalidUsage, "a forked child has no group");
  return group_->has_failed() ? group_->failure() : Status();
}

Result<std::string> CommunicatorImpl::dump_flight_records(const std::string& folder) const {
  if (is_inherited())
    return Status::error(StatusCode::kInvalidUsage, "a forked child has no group");
  return engine_->dump_flight(*group_, folder);
}

std::vector<PeerStats> CommunicatorImpl::peer_stats() const {
  return is_inherited() ? std::vector<PeerStats>() : engine_->peer_stats(*group_);
}

void CommunicatorImpl::trace(const OpRequest& request) const {
  const auto subsystem =
      is_point_to_point(request.kind) ? base::Subsystem::kP2p : base::Subsystem::kColl;
  base::log(base::LogLevel::kTrace, subsystem,
            "group '" + group_->context.name + "' rank " + std::to_string(rank()) + ": " +
                describe_signature(request.signature()));
}

void CommunicatorImpl::submit(const std::shared_ptr<QueuedOperation>& operation,
                              bool caller_waits) {
  if (is_point_to_point(operation->request().kind)) {
    engine_->submit_point_to_point(*group_, operation, caller_waits);
  } else {
    engine_->submit(*group_, operation, caller_waits);
  }
}

Status CommunicatorImpl::fail_flat(const Status& status, const OpRequest& request,
                                   std::uint64_t op_number) {
  group_->recorder.end(op_number, status.code());
  const Status told = group_->explain(status, request, op_number);
  group_->mark_failed(told);
  engine_->kick();
  return told;
}

Status CommunicatorImpl::await_slow_peer(Rank peer, const OpRequest& request) {
  Group& group = *group_;
  const collectives::FlatExchange& flat = *group.context.flat;
  const base::TimeNs start = platform::real_clock().now_ns();
  const std::int64_t timeout =
      request.timeout_ms >= 0 ? request.timeout_ms : group.timeout_ms.load();
  const base::TimeNs deadline = base::deadline_after(start, timeout);
  while (!flat.has_arrived(peer)) {
    if (group.has_failed()) return group.failure();
    // In this order: a notice of who failed is taken in before the goodbye behind it.
    if (group.context.has_departed(peer) && !flat.has_arrived(peer) && !group.has_failed()) {
      return Status::error(
          StatusCode::kPeerLost,
          "rank " + std::to_string(peer) + " was lost: it left the group before this operation",
          peer);
    }
    const base::TimeNs now = platform::real_clock().now_ns();
    if (now >= deadline) {
      std::vector<Rank> late;
      for (Rank p = 0; p < group.context.world_size; ++p) {
        if (!flat.has_arrived(p)) late.push_back(p);
      }
      // The slowest may have come while we looked.
      if (!late.empty()) return collectives::timed_out(late, timeout);
    }
    if (now - start < kYieldNs) {
      engine_->crowding().yield();
      continue;
    }
    const std::atomic<std::uint64_t>* word = flat.arrival_word(peer);
    const std::uint64_t seen = word->load(std::memory_order_acquire);
    if (seen == flat.sequence()) break;
    sleep_on({word, seen}, std::min(deadline - now, kSleepSliceNs));
    if (is_interrupted()) {
      return Status::error(StatusCode::kAborted, "interrupted while waiting");
    }
  }
  return Status();
}

bool CommunicatorImpl::is_interrupted() {
  if (!group_->is_interrupted) return false;
  group_->set_in_handler(true);
  const bool result = group_->is_interrupted();
  group_->set_in_handler(false);
  return result;
}

Status CommunicatorImpl::refuse_in_handler() {
  return Status::error(StatusCode::kInvalidUsage,
                       "called from a signal handler inside an operation of the same group");
}

void CommunicatorImpl::sleep_on(const collectives::WaitingWord& word, std::int64_t timeout_ns) {
  auto& sleepers = engine_->host()->header().flat_sleepers;
  engine_->begin_watching();
  sleepers.fetch_add(1, std::memory_order_seq_cst);
  if (!platform::process_barrier()) timeout_ns = std::min(timeout_ns, kUnfencedSleepNs);
  if (!word.has_changed() && !group_->has_failed()) {
    platform::futex_wait(word.word, word.seen, timeout_ns);
  }
  sleepers.fetch_sub(1, std::memory_order_relaxed);
  engine_->end_watching();
}

Status CommunicatorImpl::run_local(const OpRequest& request) {
  Group& group = *group_;
  const auto operation = std::make_shared<QueuedOperation>(engine_, request);
  operation->keep_memory_for_owner();
  group.enqueue(operation);
  base::TimeNs idle_since = 0;
  for (;;) {
    const base::TimeNs now = platform::real_clock().now_ns();
    if (group.advance(now, Group::With::kMemoryOnly)) {
      if (operation->is_done()) break;
      idle_since = 0;
      continue;
    }
    if (group.needs_engine()) break;
    if (idle_since == 0) idle_since = now;
    if (!await_change(group.waiting_word(), idle_since)) {
      group.release();
      abort("interrupted");
      return Status::error(StatusCode::kAborted, "interrupted while waiting");
    }
  }
  group.release();
  if (operation->is_done()) return operation->status();
  engine_->take_over();
  return await(*operation);
}

Status CommunicatorImpl::await(QueuedOperation& operation) {
  for (;;) {
    Status status = operation.wait(kSleepSliceNs / 1'000'000);
    if (operation.is_done()) return operation.status();
    if (group_->is_interrupted && group_->is_interrupted()) {
      abort("interrupted");
      return Status::error(StatusCode::kAborted, "interrupted while waiting");
    }
  }
}

bool CommunicatorImpl::await_change(const collectives::WaitingWord& word, base::TimeNs idle_since) {
  for (int i = 0; i < num_looks(); ++i) {
    if (word.has_changed()) return true;
    base::spin_pause();
  }
  const base::TimeNs now = platform::real_clock().now_ns();
  if (now - idle_since < kYieldNs) {
    engine_->crowding().yield();
    return true;
  }
  // Its last word may have come by another way: looked at again at the next turn.
  const base::TimeNs left = std::max<std::int64_t>(group_->next_deadline() - now, 0);
  sleep_on(word, std::min(left, kSleepSliceNs));
  return !is_interrupted();
}

void CommunicatorImpl::leak() {
  new std::shared_ptr<Engine>(std::move(engine_));
  new std::shared_ptr<Group>(std::move(group_));
  for (auto& link : links_) new std::shared_ptr<transport::CoreLink>(std::move(link));
}

std::shared_ptr<QueuedOperation> CommunicatorImpl::begin(const OpRequest& request,
                                                         bool caller_waits) {
  if (base::is_tracing()) trace(request);
  auto operation = std::make_shared<QueuedOperation>(engine_, request);
  if (Status status = check_usable(request); !status.is_ok()) {
    operation->complete(status);
  } else if (group_->is_in_handler_here()) {
    operation->complete(refuse_in_handler());
  } else {
    submit(operation, caller_waits);
  }
  return operation;
}

Status CommunicatorImpl::run_all(const std::vector<OpRequest>& requests,
                                 std::vector<std::shared_ptr<Operation>>* left) {
  std::vector<std::shared_ptr<QueuedOperation>> operations;
  for (const OpRequest& request : requests) operations.push_back(begin(request, true));
  Status first;
  for (const auto& operation : operations) {
    Status status = await(*operation);
    if (first.is_ok()) first = std::move(status);
  }
  for (const auto& operation : operations) {
    if (!operation->is_done()) left->push_back(operation);
  }
  return first;
}

}  // namespace pycomm::communicator

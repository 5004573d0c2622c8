// The composition root: an engine, a bootstrap, a group, and the thin path of a small operation.
#include "pycomm/communicator.h"

#include <cstring>

#include "base/hash.h"
#include "base/log.h"
#include "communicator/bootstrap.h"
#include "communicator/engine.h"
#include "communicator/fork_guard.h"
#include "platform/crypto.h"
#include "platform/futex.h"
#include "platform/system.h"

#ifndef PYCOMM_VERSION
#error "the build defines PYCOMM_VERSION"
#endif

namespace pycomm {
namespace communicator {
namespace {

using base::TimeNs;
using collectives::FlatArea;
using platform::real_clock;

// How a caller waits for a slot: look, then yield to others on this processor, then sleep in the
// kernel. The first two are bounded so that ranks that share a processor get on.
constexpr int kLooksBeforeYield = 4'000;
constexpr int kLooksIfCrowded = 20;
constexpr TimeNs kYieldNs = 100'000;
constexpr std::int64_t kSleepSliceNs = 50'000'000;
constexpr std::int64_t kUnfencedSleepNs = 1'000'000;

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
    if (group_->is_in_handler_here()) return refuse_in_handler();
    const bool is_small = collectives::is_flat(group_->context.shape, request.bytes());
    if (is_small && group_->num_queued() == 0 && group_->try_own()) {
      if (group_->is_queue_empty() && !group_->has_failed()) {
        Status status = run_flat(request);
        group_->release();
        return status;
      }
      group_->release();
    }
    const auto operation = std::make_shared<QueuedOperation>(engine_, request);
    engine_->submit(*group_, operation, true);
    for (;;) {
      Status status = operation->wait(kSleepSliceNs / 1'000'000);
      if (operation->is_done()) return operation->status();
      if (group_->is_interrupted && group_->is_interrupted()) {
        abort("interrupted");
        return Status::error(StatusCode::kAborted, "interrupted while waiting");
      }
    }
  }

  std::shared_ptr<Operation> start(const OpRequest& request) override {
    auto operation = std::make_shared<QueuedOperation>(engine_, request);
    if (Status status = check_usable(request); !status.is_ok()) {
      operation->complete(status);
    } else if (group_->is_in_handler_here()) {
      operation->complete(refuse_in_handler());
    } else {
      engine_->submit(*group_, operation, false);
    }
    return operation;
  }

  void abort(const std::string& reason) override {
    if (is_inherited()) return;
    engine_->abort_group(*group_, Status::error(StatusCode::kAborted, reason));
  }

  void set_timeout_ms(std::int64_t timeout_ms) override { group_->timeout_ms = timeout_ms; }
  void set_interrupt_check(std::function<bool()> is_interrupted) override {
    group_->is_interrupted = std::move(is_interrupted);
  }

  Result<std::byte*> allocate_shared(std::uint64_t bytes) override {
    if (is_inherited() || engine_->host() == nullptr) {
      return Status::error(StatusCode::kSystem, "no shared memory: " + engine_->shm_refusal());
    }
    return engine_->host()->allocate_arena(bytes);
  }
  void free_shared(std::byte* data) override {
    if (!is_inherited()) engine_->host()->free_arena(data);
  }

  std::vector<FlightRecord> flight_records() const override {
    return group_->recorder.snapshot(group_->last_op_number());
  }
  std::vector<PeerStats> peer_stats() const override {
    return is_inherited() ? std::vector<PeerStats>() : engine_->peer_stats(*group_);
  }

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

  Status fail_flat(const Status& status, const OpRequest& request, std::uint64_t op_number) {
    group_->recorder.end(op_number, status.code());
    const Status told = group_->explain(status, request, op_number);
    group_->mark_failed(status);
    engine_->kick();
    return told;
  }

  bool await_peer(Rank peer) const {
    const collectives::FlatExchange& flat = *group_->context.flat;
    if (flat.has_arrived(peer)) return true;
    const int looks = engine_->crowding().is_crowded() ? kLooksIfCrowded : kLooksBeforeYield;
    for (int i = 0; i < looks; ++i) {
      base::spin_pause();
      if (flat.has_arrived(peer)) return true;
    }
    return false;
  }

  Status await_slow_peer(Rank peer, const OpRequest& request) {
    Group& group = *group_;
    const collectives::FlatExchange& flat = *group.context.flat;
    const TimeNs start = real_clock().now_ns();
    const std::int64_t timeout =
        request.timeout_ms >= 0 ? request.timeout_ms : group.timeout_ms.load();
    const TimeNs deadline = base::deadline_after(start, timeout);
    while (!flat.has_arrived(peer)) {
      if (group.has_failed()) return group.failure();
      // In this order: a notice of who failed is taken in before the goodbye behind it.
      if (group.context.has_departed(peer) && !flat.has_arrived(peer) && !group.has_failed()) {
        return Status::error(
            StatusCode::kPeerLost,
            "rank " + std::to_string(peer) + " was lost: it left the group before this operation",
            peer);
      }
      const TimeNs now = real_clock().now_ns();
      if (now >= deadline) {
        return Status::error(StatusCode::kTimeout,
                             "rank " + std::to_string(peer) + " did not arrive within " +
                                 std::to_string(timeout) + " ms",
                             peer);
      }
      if (now - start < kYieldNs) {
        engine_->crowding().yield();
        continue;
      }
      sleep_on(peer, std::min(deadline - now, kSleepSliceNs));
      if (is_interrupted()) {
        return Status::error(StatusCode::kAborted, "interrupted while waiting");
      }
    }
    return Status();
  }

  // Runs signal handlers, which may come back to this group.
  bool is_interrupted() {
    if (!group_->is_interrupted) return false;
    group_->set_in_handler(true);
    const bool result = group_->is_interrupted();
    group_->set_in_handler(false);
    return result;
  }

  static Status refuse_in_handler() {
    return Status::error(StatusCode::kInvalidUsage,
                         "called from a signal handler inside an operation of the same group");
  }

  void sleep_on(Rank peer, std::int64_t timeout_ns) {
    const collectives::FlatExchange& flat = *group_->context.flat;
    auto& sleepers = engine_->host()->header().flat_sleepers;
    const std::atomic<std::uint64_t>* word = flat.arrival_word(peer);
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    if (!platform::process_barrier()) timeout_ns = std::min(timeout_ns, kUnfencedSleepNs);
    const std::uint64_t seen = word->load(std::memory_order_seq_cst);
    if (seen != flat.sequence() && !group_->has_failed()) {
      platform::futex_wait(word, seen, timeout_ns);
    }
    sleepers.fetch_sub(1, std::memory_order_relaxed);
  }

  // In a forked child: locks may be held by threads that are not here, peers are the parent's.
  void leak() {
    new std::shared_ptr<Engine>(std::move(engine_));
    new std::shared_ptr<Group>(std::move(group_));
    for (auto& link : links_) new std::shared_ptr<transport::CoreLink>(std::move(link));
  }

  std::shared_ptr<Engine> engine_;
  std::shared_ptr<Group> group_;
  std::vector<std::shared_ptr<transport::CoreLink>> links_;
  const std::uint64_t generation_ = fork_generation();
  bool releases_user_ = true;
};

Hello make_hello(Engine& engine, int world_size, const Options& options) {
  Hello hello;
  hello.protocol = transport::kProtocolVersion;
  hello.build = version();
  hello.framework = options.framework;
  hello.fingerprint = options.plan_fingerprint();
  hello.world_size = world_size;
  hello.process_id = engine.process_id();
  hello.host = platform::host_identity();
  const bool shares = engine.host() != nullptr && options.transport != TransportChoice::kTcp;
  hello.shm_domain = shares ? platform::shared_memory_domain() : "";
  hello.shm_refusal = engine.shm_refusal();
  hello.local_name = engine.local_name();
  hello.tcp_address =
      options.bind_address.empty() ? platform::outgoing_address() : options.bind_address;
  hello.tcp_port = engine.tcp_listener().port;
  hello.has_secret = !options.secret.empty();
  hello.nonce = platform::random_u64() >> 1;  // bit 63 is the engine's, see kArenaRegion
  return hello;
}

Status check_choice(const std::vector<Hello>& hellos, Rank rank, const Options& options) {
  if (options.transport != TransportChoice::kShm) return Status();
  for (std::size_t r = 0; r < hellos.size(); ++r) {
    const Hello& mine = hellos[static_cast<std::size_t>(rank)];
    if (choose_path(mine, hellos[r]) == Path::kShm) continue;
    const std::string why = !hellos[r].shm_refusal.empty() ? hellos[r].shm_refusal
                            : !mine.shm_refusal.empty()    ? mine.shm_refusal
                                                           : "another host, container or user";
    return Status::error(StatusCode::kInvalidUsage,
                         "PYCOMM_TRANSPORT=shm, but rank " + std::to_string(r) +
                             " cannot share memory with rank " + std::to_string(rank) + ": " + why,
                         static_cast<Rank>(r));
  }
  return Status();
}

// Lays out my flat slots and maps everyone's.
Status share_flat_areas(Engine& engine, Group& group,
                        const std::vector<std::shared_ptr<transport::CoreLink>>& links,
                        TimeNs deadline) {
  auto area = engine.host()->allocate_segment(sizeof(FlatArea));
  if (!area.is_ok()) return area.status();
  group.flat_area = area.value();
  const std::uint64_t region = group.context.group;
  std::vector<std::byte*> areas(links.size(), nullptr);
  group.context.shared.bytes = engine.host()->arena().bytes();
  group.context.shared.bases.assign(links.size(), nullptr);
  for (std::size_t r = 0; r < links.size(); ++r) {
    if (links[r] == nullptr) {
      areas[r] = group.flat_area;
      group.context.shared.bases[r] = engine.host()->arena().data();
      continue;
    }
    PYCOMM_RETURN_IF_ERROR(links[r]->remote_memory()->expose(region, group.flat_area,
                                                             sizeof(FlatArea), RegionKind::kHost));
  }
  for (std::size_t r = 0; r < links.size(); ++r) {
    if (links[r] == nullptr) continue;
    const std::string who = "rank " + std::to_string(r);
    while ((areas[r] = links[r]->remote_memory()->map(region, sizeof(FlatArea))) == nullptr) {
      if (const Viability v = engine.viability_of(*links[r]); !v.viable) {
        return Status::error(StatusCode::kPeerLost, who + " was lost: " + v.reason,
                             static_cast<Rank>(r));
      }
      if (real_clock().now_ns() > deadline) {
        return Status::error(StatusCode::kTimeout, who + " did not set up shared memory in time",
                             static_cast<Rank>(r));
      }
      platform::sleep_ns(50'000);
    }
    group.context.shared.bases[r] =
        links[r]->remote_memory()->map(kArenaRegion, group.context.shared.bytes);
    if (group.context.shared.bases[r] == nullptr) {
      return Status::error(StatusCode::kInternal, who + " exposes no arena");
    }
    group.peer_flags.push_back(transport::shm::peer_flags(*links[r]));
  }
  group.context.flat = std::make_unique<collectives::FlatExchange>(group.context.rank, areas);
  return Status();
}

// The first operation of a group, over links that proved membership: did the store show everyone
// the same hellos in the same order?
Status confirm(Communicator& communicator, const std::vector<Hello>& hellos) {
  std::string all;
  for (const Hello& hello : hellos) all += encode(hello) + "\n";
  platform::Mac mine{};
  if (platform::crypto_viability().viable) {
    mine = platform::hmac_sha256("pycomm hellos", all);
  } else {  // then all links are of one host and user, and the store is no stranger's
    const std::uint64_t hash = base::fnv1a(all);
    std::memcpy(mine.data(), &hash, sizeof hash);
  }
  std::vector<platform::Mac> theirs(hellos.size());
  OpRequest request;
  request.kind = OpKind::kAllGather;
  request.count = mine.size();
  request.input = reinterpret_cast<const std::byte*>(mine.data());
  request.output = reinterpret_cast<std::byte*>(theirs.data());
  PYCOMM_RETURN_IF_ERROR(communicator.run(request));
  for (std::size_t r = 0; r < theirs.size(); ++r) {
    if (theirs[r] == mine) continue;
    return Status::error(StatusCode::kInternal,
                         "the rendezvous store showed rank " + std::to_string(r) +
                             " another group than rank " + std::to_string(communicator.rank()),
                         static_cast<Rank>(r));
  }
  return Status();
}

Result<std::unique_ptr<Communicator>> create_with(const std::shared_ptr<Engine>& engine,
                                                  Store& store, Rank rank, int world_size,
                                                  const Options& options) {
  const TimeNs deadline = base::deadline_after(real_clock().now_ns(), options.timeout_ms);
  std::lock_guard creation(engine->creation_mutex());
  auto hellos =
      exchange(store, options.group_name, rank, make_hello(*engine, world_size, options), deadline);
  if (!hellos.is_ok()) return hellos.status();
  PYCOMM_RETURN_IF_ERROR(compare(hellos.value()));
  PYCOMM_RETURN_IF_ERROR(check_choice(hellos.value(), rank, options));
  auto links = connect_all(*engine, hellos.value(), rank, options, deadline);
  if (!links.is_ok()) return links.status();

  auto group = std::make_shared<Group>();
  group->timeout_ms = options.timeout_ms;
  collectives::GroupContext& context = group->context;
  context.name = options.group_name;
  context.group = hellos.value()[0].nonce;
  context.rank = rank;
  context.world_size = world_size;
  context.chunk_bytes = options.chunk_bytes;
  context.waker = group.get();
  bool all_share = engine->host() != nullptr && world_size <= collectives::kFlatWorldMax;
  for (const auto& a : hellos.value()) {
    for (const auto& b : hellos.value()) all_share &= choose_path(a, b) == Path::kShm;
  }
  context.shape.shares_memory = all_share;
  for (const auto& link : links.value()) context.links.push_back(link.get());
  context.departed = std::make_unique<std::atomic<bool>[]>(static_cast<std::size_t>(world_size));
  if (engine->knows_group(context.group)) {
    return Status::error(StatusCode::kInternal, "the store handed out one group's number twice");
  }
  if (all_share) {
    if (Status status = share_flat_areas(*engine, *group, links.value(), deadline);
        !status.is_ok()) {
      engine->discard_group(*group, status);
      return status;
    }
  }
  std::vector<std::string> process_ids;
  for (const Hello& hello : hellos.value()) process_ids.push_back(hello.process_id);
  engine->add_group(group, process_ids);
  auto communicator = std::make_unique<CommunicatorImpl>(engine, group, std::move(links).value());
  if (Status status = confirm(*communicator, hellos.value()); !status.is_ok()) {
    communicator->keep_user();
    return status;
  }
  return std::unique_ptr<Communicator>(std::move(communicator));
}

}  // namespace
}  // namespace communicator

Result<std::unique_ptr<Communicator>> Communicator::create(Store& store, Rank rank, int world_size,
                                                           const Options& options) {
  if (world_size < 1 || rank < 0 || rank >= world_size) {
    return Status::error(StatusCode::kInvalidUsage,
                         "rank " + std::to_string(rank) + " of " + std::to_string(world_size));
  }
  auto engine = communicator::Engine::acquire(options);
  if (!engine.is_ok()) return engine.status();
  auto result = communicator::create_with(engine.value(), store, rank, world_size, options);
  if (!result.is_ok()) {
    engine.value()->release_user();
    return Status::error(result.status().code(),
                         "creating group '" + options.group_name + "' on rank " +
                             std::to_string(rank) + ": " + result.status().message(),
                         result.status().rank());
  }
  return result;
}

void shutdown_process() { communicator::Engine::shutdown_process(); }

const char* version() { return PYCOMM_VERSION; }

}  // namespace pycomm

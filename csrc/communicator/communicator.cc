// The composition root: an engine, hellos, links, a group, and a first operation that confirms it.
#include "pycomm/communicator.h"

#include <array>
#include <cstring>
#include <numeric>

#include "base/hash.h"
#include "base/log.h"
#include "communicator/bootstrap.h"
#include "communicator/communicator_impl.h"
#include "kernels/reduce.h"
#include "platform/aead.h"
#include "platform/crypto.h"
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

// Of a group and rank: three rounds of 128 KiB for each of two ranks.
constexpr std::uint64_t kWindowBytes = 768 * 1024;

Hello make_hello(Engine& engine, int world_size, const Options& options) {
  Hello hello;
  hello.protocol = transport::kProtocolVersion;
  hello.build = version();
  hello.framework = options.framework;
  hello.fingerprint = options.plan_fingerprint();
  hello.world_size = world_size;
  hello.process_id = engine.process_id();
  hello.host = platform::host_identity();
  const bool is_network_only =
      options.transport != TransportChoice::kAuto && options.transport != TransportChoice::kShm;
  const bool shares = engine.host() != nullptr && !is_network_only && !options.shm_disabled;
  hello.shm_domain = shares ? platform::shared_memory_domain() : "";
  hello.shm_refusal = is_network_only        ? "PYCOMM_TRANSPORT"
                      : options.shm_disabled ? "PYCOMM_SHM_DISABLE=1"
                                             : engine.shm_refusal();
  for (std::size_t i = 0; options.tls.is_set() && i < engine.quic().size(); ++i) {
    hello.quic_paths.push_back({engine.quic_told()[i], engine.quic()[i]->port()});
  }
  hello.quic_refusal = engine.quic_refusal();
  const bool may_use_rdma =
      options.transport == TransportChoice::kAuto || options.transport == TransportChoice::kRdma;
  hello.num_rdma_ports = may_use_rdma ? static_cast<int>(engine.rdma().ports.size()) : 0;
  hello.rdma_refusal = may_use_rdma ? engine.rdma_refusal() : "PYCOMM_TRANSPORT";
  hello.local_name = engine.local_name();
  hello.tcp_address = engine.addresses().advertise;
  const std::string& listen = engine.addresses().listen;
  hello.tcp_local_address = listen.empty() ? "127.0.0.1" : listen;
  hello.tcp_port = engine.tcp_listener().port;
  hello.proof = proof_of(options);
  hello.cpus = platform::allowed_cpus();
  hello.nonce = platform::random_u64() >> 1;  // bit 63 is the engine's, see kArenaRegion
  return hello;
}

// Every chunk waits for its clearance: a ring over a long path needs chunks that take about as long
// as its round trip, so that the wait does not count. Decided alike on all ranks, and only where
// nobody asked for another size.
std::uint64_t chunk_bytes_of(const std::vector<Hello>& hellos, const Options& options) {
  // Over RDMA each chunk is one clearance and one write, whatever its size.
  constexpr std::uint64_t kWideBytes = 4 << 20, kRdmaBytes = 1 << 20;
  if (options.chunk_bytes != Options().chunk_bytes) return options.chunk_bytes;
  std::uint64_t bytes = options.chunk_bytes;
  for (const Hello& a : hellos) {
    for (const Hello& b : hellos) {
      if (&a == &b) continue;
      const Path path = choose_path(a, b, options.transport);
      if (path == Path::kQuic) bytes = std::max(bytes, kWideBytes);
      if (path == Path::kRdma) bytes = std::max(bytes, kRdmaBytes);
    }
  }
  return bytes;
}

Status check_choice(const std::vector<Hello>& hellos, Rank rank, const Options& options) {
  if (options.transport != TransportChoice::kShm) return Status();
  for (std::size_t r = 0; r < hellos.size(); ++r) {
    const Hello& mine = hellos[static_cast<std::size_t>(rank)];
    if (choose_path(mine, hellos[r], options.transport) == Path::kShm) continue;
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
Status share_flat_areas(Engine& engine, Meeting& meeting, Group& group,
                        const std::vector<std::shared_ptr<transport::CoreLink>>& links,
                        const Options& options, TimeNs deadline) {
  auto area = engine.host()->allocate_segment(sizeof(FlatArea));
  if (!area.is_ok()) return area.status();
  group.flat_area = area.value();
  const std::uint64_t region = group.context.group;
  std::vector<std::byte*> areas(links.size(), nullptr);
  collectives::LocalChannel& local = group.context.local;
  transport::shm::Host& host = *engine.host();
  local.arena_bytes = host.arena().bytes();
  local.segment_bytes = host.segment().bytes();
  local.arenas.assign(links.size(), host.arena().data());
  local.segments.assign(links.size(), host.segment().data());
  for (std::size_t r = 0; r < links.size(); ++r) {
    if (links[r] == nullptr) {
      areas[r] = group.flat_area;
      continue;
    }
    PYCOMM_RETURN_IF_ERROR(engine.expose(*links[r], region, group.flat_area, sizeof(FlatArea)));
  }
  for (std::size_t r = 0; r < links.size(); ++r) {
    if (links[r] == nullptr) continue;
    const std::string who = "rank " + std::to_string(r);
    while ((areas[r] = engine.map(*links[r], region, sizeof(FlatArea))) == nullptr) {
      if (const Viability v = engine.viability_of(*links[r]); !v.viable) {
        return Status::error(StatusCode::kPeerLost, who + " was lost: " + v.reason,
                             static_cast<Rank>(r));
      }
      if (real_clock().now_ns() > deadline) {
        return Status::error(StatusCode::kTimeout, who + " did not set up shared memory in time",
                             static_cast<Rank>(r));
      }
      PYCOMM_RETURN_IF_ERROR(meeting.check_now_and_then());
      platform::sleep_ns(50'000);
    }
    local.arenas[r] = engine.map(*links[r], kArenaRegion, local.arena_bytes);
    local.segments[r] = engine.map(*links[r], kSegmentRegion, local.segment_bytes);
    if (local.arenas[r] == nullptr || local.segments[r] == nullptr) {
      return Status::error(StatusCode::kInternal, who + " exposes no memory");
    }
    group.peer_flags.push_back(transport::shm::peer_flags(*links[r]));
  }
  for (std::byte* area : areas) local.marks.push_back(&reinterpret_cast<FlatArea*>(area)->mark);
  local.mine = &reinterpret_cast<FlatArea*>(group.flat_area)->mark;
  local.window_bytes = kWindowBytes;
  local.allocate_window = [&host](std::uint64_t bytes) {
    auto window = host.allocate_segment(bytes);
    return window.is_ok() ? window.value() : nullptr;
  };
  local.puller = group.find_puller();
  if (options.tunes && group.context.rank == 0) {
    local.tuner = std::make_unique<collectives::Tuner>();
    local.clock = &real_clock();
    group.tuning = open_tuning(options, static_cast<int>(links.size()));
    local.tuner->from_text(group.tuning.load());
  }
  local.counters = std::make_unique<collectives::LocalCounters[]>(links.size());
  group.context.flat = std::make_unique<collectives::FlatExchange>(group.context.rank, areas);
  return Status();
}

void log_paths(const collectives::GroupContext& context,
               const std::vector<std::shared_ptr<transport::CoreLink>>& links) {
  if (!base::log_enabled(base::LogLevel::kInfo, base::Subsystem::kInit)) return;
  std::string text = "group '" + context.name + "': rank " + std::to_string(context.rank) + " of " +
                     std::to_string(context.world_size);
  for (std::size_t r = 0; r < links.size(); ++r) {
    if (links[r])
      text += ", " + std::string(links[r]->transport()) + " to rank " + std::to_string(r);
  }
  base::log(base::LogLevel::kInfo, base::Subsystem::kInit, text);
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

// Threads that create groups at the same time connect one after the other; what the second one's
// peers send meanwhile is stashed.
Result<std::vector<std::shared_ptr<transport::CoreLink>>> connect_in_turn(
    Engine& engine, Meeting& meeting, const std::vector<Hello>& hellos, Rank rank,
    const Options& options, TimeNs deadline) {
  std::unique_lock creation(engine.creation_mutex(), std::defer_lock);
  while (!creation.try_lock()) {
    PYCOMM_RETURN_IF_ERROR(meeting.check_now_and_then());
    if (real_clock().now_ns() > deadline) {
      return Status::error(StatusCode::kTimeout, "another thread is still creating a group");
    }
    platform::sleep_ns(200'000);
  }
  return connect_all({engine, meeting, hellos, rank, options, deadline});
}

Result<std::unique_ptr<Communicator>> create_with(const std::shared_ptr<Engine>& engine,
                                                  Meeting& meeting, Rank rank, int world_size,
                                                  const Options& options) {
  const TimeNs deadline = base::deadline_after(real_clock().now_ns(), options.timeout_ms);
  auto hellos = meeting.exchange(make_hello(*engine, world_size, options), deadline);
  if (!hellos.is_ok()) return hellos.status();
  PYCOMM_RETURN_IF_ERROR(compare(hellos.value()));
  PYCOMM_RETURN_IF_ERROR(check_choice(hellos.value(), rank, options));
  auto links = connect_in_turn(*engine, meeting, hellos.value(), rank, options, deadline);
  if (!links.is_ok()) return links.status();

  auto group = std::make_shared<Group>();
  group->timeout_ms = options.timeout_ms;
  collectives::GroupContext& context = group->context;
  context.name = options.group_name;
  context.group = hellos.value()[0].nonce;
  context.rank = rank;
  context.world_size = world_size;
  context.chunk_bytes = chunk_bytes_of(hellos.value(), options);
  context.waker = group.get();
  group->flight_folder = options.flight_recorder_folder;
  group->global_ranks = options.global_ranks;
  if (group->global_ranks.size() != static_cast<std::size_t>(world_size)) {
    group->global_ranks.resize(static_cast<std::size_t>(world_size));
    std::iota(group->global_ranks.begin(), group->global_ranks.end(), 0);
  }
  bool all_share = engine->host() != nullptr && world_size <= collectives::kLocalWorldMax;
  for (const auto& a : hellos.value()) {
    for (const auto& b : hellos.value())
      all_share &= choose_path(a, b, options.transport) == Path::kShm;
  }
  context.shape.shares_memory = all_share;
  context.shape.is_deterministic = options.deterministic;
  context.shape.is_crowded = world_size > num_cpus(hellos.value());
  for (const auto& link : links.value()) context.links.push_back(link.get());
  context.departed = std::make_unique<std::atomic<bool>[]>(static_cast<std::size_t>(world_size));
  if (engine->knows_group(context.group)) {
    return Status::error(StatusCode::kInternal, "the store handed out one group's number twice");
  }
  if (all_share) {
    if (Status status =
            share_flat_areas(*engine, meeting, *group, links.value(), options, deadline);
        !status.is_ok()) {
      engine->discard_group(*group, status);
      return status;
    }
  }
  std::vector<std::string> process_ids;
  for (const Hello& hello : hellos.value()) process_ids.push_back(hello.process_id);
  engine->add_group(group, process_ids);
  const auto links_by_rank = links.value();
  auto communicator = std::make_unique<CommunicatorImpl>(engine, group, std::move(links).value());
  log_paths(context, links_by_rank);
  communicator->set_interrupt_check(options.is_interrupted);
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
  communicator::Meeting meeting(store, options, rank);
  if (!options.complaint.empty()) {
    const Status status = Status::error(StatusCode::kInvalidUsage, options.complaint);
    meeting.give_up(status);
    return status;
  }
  auto engine = communicator::Engine::acquire(options);
  if (!engine.is_ok()) {
    meeting.give_up(engine.status());
    return engine.status();
  }
  auto result = communicator::create_with(engine.value(), meeting, rank, world_size, options);
  if (!result.is_ok()) {
    engine.value()->release_user();
    meeting.give_up(result.status());
    return Status::error(result.status().code(),
                         "creating group '" + options.group_name + "' on rank " +
                             std::to_string(rank) + ": " + result.status().message(),
                         result.status().rank());
  }
  return result;
}

void shutdown_process() { communicator::Engine::shutdown_process(); }

const char* version() { return PYCOMM_VERSION; }

std::vector<std::string> kernel_sets() {
  std::vector<std::string> names;
  for (const char* name : {"avx512", "avx2", "portable"}) {
    if (kernels::reduce_kernels_named(name) != nullptr) names.emplace_back(name);
  }
  return names;
}

Viability crypto_viability() { return platform::crypto_viability(); }

std::string packet_crypto() {
  const std::array<std::uint8_t, 16> key{};
  const auto aead = platform::make_aead(platform::Cipher::kAes128Gcm, key);
  return aead.is_ok() ? aead.value()->library_name() : aead.status().message();
}

std::vector<std::pair<std::string, std::string>> network_interfaces() {
  std::vector<std::pair<std::string, std::string>> result;
  for (const platform::Interface& i : platform::list_interfaces()) {
    result.emplace_back(i.name, i.address);
  }
  return result;
}

}  // namespace pycomm

// The engine's life and its groups; engine_links.cc connects it, engine_progress.cc moves it.
#include "communicator/engine.h"

#include <algorithm>
#include <cstdio>

#include "base/check.h"
#include "base/log.h"
#include "communicator/flight_dump.h"
#include "communicator/fork_guard.h"
#include "communicator/shared_memory.h"
#include "platform/futex.h"
#include "platform/system.h"
#include "transport/quic/factory.h"

namespace pycomm::communicator {
namespace {

using base::TimeNs;
using platform::real_clock;
using transport::CoreLink;

constexpr TimeNs kGoodbyeNs = 500'000'000;
constexpr std::size_t kEarlyNoticesMax = 256;

struct Registry {
  std::mutex mutex;
  std::weak_ptr<Engine> engine;
  int users = 0;
};
Registry& registry() { return of_this_process<Registry>(); }

Result<std::unique_ptr<transport::shm::Host>> share_memory(const Options& options) {
  auto memory = SharedMemory::of_process();
  if (!memory.is_ok()) return memory.status();
  memory.value().budget->set_bytes_max(options.shm_bytes_max);
  return transport::shm::Host::create(memory.value().budget, memory.value().arena);
}

}  // namespace

// ---------------------------------------------------------------- life

Result<std::shared_ptr<Engine>> Engine::acquire(const Options& options) {
  std::lock_guard lock(registry().mutex);
  std::shared_ptr<Engine> engine = registry().engine.lock();
  if (!engine || registry().users == 0) {
    engine.reset(new Engine());
    PYCOMM_RETURN_IF_ERROR(engine->start(options));
    registry().engine = engine;
  }
  ++registry().users;
  return engine;
}

void Engine::release_user() {
  std::lock_guard lock(registry().mutex);
  if (--registry().users == 0) stop();
}

void Engine::shutdown_process() {
  std::shared_ptr<Engine> engine;
  {
    std::lock_guard lock(registry().mutex);
    engine = registry().engine.lock();
  }
  if (engine) engine->stop();
}

Status Engine::start(const Options& options) {
  watch_forks();
  platform::register_for_process_barriers();
  static const bool registered = [] {
    platform::on_process_exit([] { Engine::shutdown_process(); });
    return true;
  }();
  static_cast<void>(registered);
  base::set_log_identity(platform::host_name(), platform::process_id());
  process_id_ = platform::random_hex128();
  local_name_ = "pycomm-" + process_id_;
  local_secret_ = platform::random_hex128();
  auto poller = platform::Poller::create();
  if (!poller.is_ok()) return poller.status();
  poller_ = std::move(poller).value();
  auto kick = platform::Doorbell::create();
  if (!kick.is_ok()) return kick.status();
  kick_bell_ = std::move(kick).value();
  PYCOMM_RETURN_IF_ERROR(poller_.add(kick_bell_.fd(), kKickToken));

  auto local = platform::listen_local(local_name_);
  if (!local.is_ok()) return local.status();
  local_listener_ = std::move(local).value();
  if (options.shm_disabled) {
    shm_refusal_ = "PYCOMM_SHM_DISABLE=1";
  } else if (auto host = share_memory(options); host.is_ok()) {
    host_ = std::move(host).value();
    PYCOMM_RETURN_IF_ERROR(poller_.add(host_->doorbell().fd(), kDoorbellToken));
  } else {
    shm_refusal_ = host.status().message();
    base::log(base::LogLevel::kWarn, base::Subsystem::kShm,
              "no shared memory here (" + shm_refusal_ + "); ranks of this host talk over TCP");
  }
  auto addresses = choose_addresses(options);
  if (!addresses.is_ok()) return addresses.status();
  addresses_ = std::move(addresses).value();
  auto tcp = platform::listen_tcp(addresses_.listen, options.ports.first, options.ports.last);
  if (!tcp.is_ok()) return tcp.status();
  tcp_listener_ = std::move(tcp).value();
  forget_after_fork(local_listener_.get());
  forget_after_fork(tcp_listener_.fd.get());
  Status status = start_quic(options);
  if (status.is_ok()) status = start_rdma(options);
  if (!status.is_ok()) {
    forget_no_more(local_listener_.get());
    forget_no_more(tcp_listener_.fd.get());
    for (const auto& endpoint : quic_) forget_no_more(endpoint->fd());
    forget_rdma();
    return status;
  }
  progress_thread_ = std::thread([this] { progress_loop(); });
  return Status();
}

void Engine::stop() {
  std::vector<Member> members;
  {
    std::lock_guard lock(mutex_);
    if (is_stopped_) return;
    is_stopped_ = true;
    members = members_;
  }
  for (Member& member : members) {
    abort_group(*member.group,
                Status::error(StatusCode::kAborted, "this process has shut pycomm down"),
                Group::Tell::kNobody);
  }
  {
    std::lock_guard lock(mutex_);
    for (const Member& member : members) tell_cause(*member.group);
    for (auto& [id, peer] : links_) peer.link->close();
    const TimeNs deadline = real_clock().now_ns() + kGoodbyeNs;
    // Until everything has left, and, over TCP, until the peer has taken it and closed.
    for (bool open = true; open && real_clock().now_ns() < deadline;) {
      open = false;
      for (const auto& endpoint : quic_) endpoint->progress(real_clock().now_ns());
      for (auto& [id, peer] : links_) {
        CoreLink& link = *peer.link;
        link.progress();
        if (link.has_ended()) continue;
        if (link.is_flushed()) link.end_writing();
        open |= !link.is_flushed() || link.awaits_peers_end();
      }
      if (open) platform::yield_thread();
    }
  }
  is_stopping_ = true;
  kick();
  if (progress_thread_.joinable()) progress_thread_.join();
  std::vector<std::thread> completers;
  {
    std::lock_guard lock(completion_mutex_);
    completers.swap(completion_threads_);
    completion_changed_.notify_all();
  }
  for (std::thread& thread : completers) {
    // A callback may hold the last communicator: its own thread ends by itself.
    if (thread.get_id() == std::this_thread::get_id()) {
      thread.detach();
    } else {
      thread.join();
    }
  }
  std::vector<std::shared_ptr<void>> disposals;  // let go without a lock, at the end
  {
    std::lock_guard lock(completion_mutex_);
    disposals.swap(disposals_);
  }
  std::lock_guard lock(mutex_);
  sweep_graves();
  keep_quarantines_for_good();
  graves_.clear();
  forget_no_more(local_listener_.get());
  forget_no_more(tcp_listener_.fd.get());
  for (auto& [id, peer] : links_) {
    for (const int fd : peer.link->fds()) forget_no_more(fd);
  }
  links_.clear();
  for (const auto& endpoint : quic_) forget_no_more(endpoint->fd());
  forget_rdma();
  stashed_.clear();
}

Engine::~Engine() {
  PYCOMM_CHECK(is_stopped_ || !progress_thread_.joinable());
  keep_quarantines_for_good();
}

// A peer that is stopped in the middle of an operation that failed here may write tensors long
// after this engine's end: they stay taken for as long as the process lives.
void Engine::keep_quarantines_for_good() {
  for (Grave& grave : graves_) {
    if (!grave.quarantine.empty()) new auto(std::move(grave.quarantine));
    grave.quarantine.clear();
  }
}

// ---------------------------------------------------------------- links and groups

void Engine::add_group(const std::shared_ptr<Group>& group,
                       const std::vector<std::string>& process_ids_by_rank) {
  std::lock_guard lock(mutex_);
  sweep_graves();
  members_.push_back({group, process_ids_by_rank});
  // A peer may have ended between the handshake and now.
  for (auto& [id, peer] : links_) {
    const auto& ids = process_ids_by_rank;
    if (std::find(ids.begin(), ids.end(), id) == ids.end()) continue;
    peer.told_lost = false;
    peer.told_departed = false;
  }
  std::erase_if(early_notices_, [&](const auto& early) {
    return early.second.group == group->context.group && take_notice(early.first, early.second);
  });
}

void Engine::remove_group(const std::shared_ptr<Group>& group) {
  abort_group(*group, Status::error(StatusCode::kAborted, "the group was destroyed"),
              Group::Tell::kNobody);
  group->own();
  // A home folder may be slow: no lock is held for it.
  if (group->context.local.tuner) group->tuning.save(group->context.local.tuner->to_text());
  std::lock_guard lock(mutex_);
  tell_cause(*group);
  leave(group->context, {group->context.group, StatusCode::kOk, group->context.rank});
  std::erase_if(members_, [&](const Member& member) { return member.group == group; });
  bury(*group);
  sweep_graves();
  group->release();
}

void Engine::leave(collectives::GroupContext& context, const transport::GroupNotice& notice) {
  for (Link* link : context.links) {
    if (link == nullptr) continue;
    static_cast<CoreLink*>(link)->send_notice(notice);
    link->progress();
    link->retire(context.group, UINT64_MAX);
  }
}

void Engine::discard_group(Group& group, const Status& why) {
  std::lock_guard lock(mutex_);
  leave(group.context, {group.context.group, why.code(), group.context.rank});
  bury(group);
  sweep_graves();
}

Viability Engine::viability_of(CoreLink& link) {
  std::lock_guard lock(mutex_);
  return link.is_viable();
}

bool Engine::knows_group(std::uint64_t group_id) {
  std::lock_guard lock(mutex_);
  return std::any_of(members_.begin(), members_.end(),
                     [&](const Member& member) { return member.group->context.group == group_id; });
}

void Engine::bury(Group& group) {
  if (group.flat_area == nullptr) return;
  reinterpret_cast<collectives::FlatArea*>(group.flat_area)->is_closed.store(1);
  Grave grave;
  grave.region = group.context.group;
  grave.area = group.flat_area;
  grave.window = std::exchange(group.context.local.window, nullptr);
  grave.quarantine = std::move(group.context.quarantine);
  for (Link* link : group.context.links) {
    if (link != nullptr) {
      grave.links.push_back(static_cast<CoreLink*>(link)->shared_from_this());
    }
  }
  group.flat_area = nullptr;
  graves_.push_back(std::move(grave));
}

// An area is free again once every peer has closed its own, withdrawn it, or ended.
void Engine::sweep_graves() {
  std::erase_if(graves_, [&](Grave& grave) {
    for (const auto& link : grave.links) {
      if (link->has_ended()) continue;
      const std::byte* theirs =
          link->remote_memory()->map(grave.region, sizeof(collectives::FlatArea));
      if (theirs == nullptr) continue;
      const auto* area = reinterpret_cast<const collectives::FlatArea*>(theirs);
      if (area->is_closed.load() == 0) return false;
    }
    for (const auto& link : grave.links) link->remote_memory()->withdraw(grave.region);
    host_->free_segment(grave.area);
    if (grave.window != nullptr) host_->free_segment(grave.window);
    for (auto& memory : grave.quarantine) dispose(std::move(memory));
    return true;
  });
}

// A peer's word about a group counts before its own end does.
void Engine::take_notices(const std::string& process_id, CoreLink& link) {
  for (const transport::Whereabouts& theirs : link.take_whereabouts()) {
    for (Member& member : members_) {
      if (member.group->context.group != theirs.group) continue;
      const auto& ids = member.process_ids;
      const auto from = std::find(ids.begin(), ids.end(), process_id) - ids.begin();
      if (from == static_cast<std::ptrdiff_t>(ids.size())) continue;
      member.group->note_whereabouts(static_cast<Rank>(from), theirs);
    }
  }
  for (const transport::GroupNotice& notice : link.take_notices()) {
    if (take_notice(process_id, notice)) continue;
    // Perhaps of a group that is about to be made here.
    early_notices_.emplace_back(process_id, notice);
    if (early_notices_.size() > kEarlyNoticesMax) early_notices_.pop_front();
  }
}

bool Engine::take_notice(const std::string& process_id, const transport::GroupNotice& notice) {
  for (Member& member : members_) {
    if (member.group->context.group != notice.group) continue;
    const auto& ids = member.process_ids;
    const auto from = std::find(ids.begin(), ids.end(), process_id) - ids.begin();
    if (from == static_cast<std::ptrdiff_t>(ids.size())) continue;  // no member says so
    if (notice.code == StatusCode::kOk) {
      member.group->note_peer_departed(static_cast<Rank>(from));
      return true;
    }
    const std::string who = "rank " + std::to_string(notice.rank);
    const std::string what = notice.rank == kNoRank ? std::string(to_string(notice.code))
                             : notice.code == StatusCode::kPeerLost ? who + " was lost"
                             : notice.code == StatusCode::kTimeout
                                 ? "it gave up waiting for " + who
                                 : to_string(notice.code) + (" at " + who);
    member.group->mark_failed(
        Status::error(notice.code, what + " (rank " + std::to_string(from) + " says)", notice.rank),
        Group::Tell::kNobody);
    return true;
  }
  return false;
}

Status Engine::expose(CoreLink& link, std::uint64_t region, std::byte* data, std::uint64_t bytes) {
  std::lock_guard lock(mutex_);
  return link.remote_memory()->expose(region, data, bytes, RegionKind::kHost);
}

std::byte* Engine::map(CoreLink& link, std::uint64_t region, std::uint64_t bytes) {
  std::lock_guard lock(mutex_);
  return link.remote_memory()->map(region, bytes);
}

void Engine::tell_failures() {
  for (Member& member : members_) {
    if (member.group->take_untold_failure()) send_failure(*member.group);
  }
}

void Engine::send_failure(const Group& group) {
  const Status failure = group.failure();
  for (Link* link : group.context.links) {
    if (link == nullptr) continue;
    static_cast<CoreLink*>(link)->send_notice(
        {group.context.group, failure.code(), failure.rank()});
    static_cast<CoreLink*>(link)->flush();
  }
}

// A rank that leaves because of another's failure says so: or the next one takes it for the cause.
void Engine::tell_cause(const Group& group) {
  const Status failure = group.failure();
  if (!failure.is_ok() && failure.code() != StatusCode::kAborted) send_failure(group);
}

Result<std::string> Engine::write_flight(const Group& about, const std::string& folder) {
  std::vector<FlightGroup> groups;
  for (const Member& member : members_) {
    const Group& group = *member.group;
    groups.push_back(
        {group.context.name, group.global_ranks, group.recorder.snapshot(group.last_op_number())});
  }
  // All ranks of the group write into one folder, whose name they have agreed on.
  char number[17];
  std::snprintf(number, sizeof number, "%016llx",
                static_cast<unsigned long long>(about.context.group));
  const std::string inside = folder + "/group-" + number;
  const int rank = about.global_ranks[static_cast<std::size_t>(about.context.rank)];
  const std::string name = "rank_" + std::to_string(rank);
  PYCOMM_RETURN_IF_ERROR(platform::make_private_folder(folder));
  PYCOMM_RETURN_IF_ERROR(platform::make_private_folder(inside));
  PYCOMM_RETURN_IF_ERROR(
      platform::write_private_file(inside + "/" + name, encode_flight_dump(groups)));
  return inside + "/" + name;
}

Result<std::string> Engine::dump_flight(const Group& about, const std::string& folder) {
  std::lock_guard lock(mutex_);
  return write_flight(about, folder);
}

void Engine::dump_timeouts() {
  for (const Member& member : members_) {
    Group& group = *member.group;
    if (!group.take_undumped_timeout() || group.flight_folder.empty()) continue;
    const auto path = write_flight(group, group.flight_folder);
    base::log(base::LogLevel::kWarn, base::Subsystem::kInit,
              path.is_ok() ? "a timeout: this rank's last operations are in " + path.value() +
                                 " (torchfrtrace on its folder compares all ranks)"
                           : "a timeout, and the flight recorder cannot be written: " +
                                 path.status().message());
  }
}

void Engine::watch_links() {
  for (auto& [id, peer] : links_) {
    take_notices(id, *peer.link);
    const bool lost = !peer.told_lost && !peer.link->failure().is_ok();
    const bool departed = !peer.told_departed && peer.link->peer_departed();
    if (lost || departed) {
      peer.told_lost |= lost;
      peer.told_departed |= departed;
      for (Member& member : members_) {
        for (std::size_t r = 0; r < member.process_ids.size(); ++r) {
          if (member.process_ids[r] != id) continue;
          if (lost) member.group->note_peer_lost(static_cast<Rank>(r), peer.link->failure());
          if (departed) member.group->note_peer_departed(static_cast<Rank>(r));
        }
      }
    }
    if (peer.link->fd() < 0) continue;
    if (peer.token != 0 && peer.link->has_ended()) {
      poller_.remove(peer.link->fd());
      peer.token = 0;
    }
    if (peer.token != 0 && peer.wants_write != peer.link->wants_write()) {
      peer.wants_write = !peer.wants_write;
      poller_.set_wants_write(peer.link->fd(), peer.token, peer.wants_write);
    }
  }
}

std::vector<PeerStats> Engine::peer_stats(const Group& group) {
  std::lock_guard lock(mutex_);
  std::vector<PeerStats> stats;
  for (std::size_t r = 0; r < group.context.links.size(); ++r) {
    const Link* link = group.context.links[r];
    if (link == nullptr) continue;
    LinkCounters counters = link->counters();
    if (group.context.local.counters) {
      const collectives::LocalCounters& local = group.context.local.counters[r];
      counters.bytes_sent += local.sent;
      counters.bytes_received += local.received;
      counters.bytes_staged += local.staged;
      counters.bytes_direct += local.direct;
    }
    stats.push_back({static_cast<Rank>(r), link->transport(), counters,
                     transport::quic::path_stats(*static_cast<const CoreLink*>(link)),
                     transport::rdma::link_stats(*static_cast<const CoreLink*>(link))});
  }
  return stats;
}

}  // namespace pycomm::communicator

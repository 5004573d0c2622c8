// The engine's connections: its QUIC endpoint, its links, and what came before anyone waited for
// it.
#include <algorithm>

#include "base/log.h"
#include "communicator/engine.h"
#include "communicator/fork_guard.h"
#include "communicator/rdma_ports.h"
#include "platform/crypto.h"
#include "platform/system.h"

namespace pycomm::communicator {
namespace {

using transport::CoreLink;

constexpr std::size_t kStashedMax = 64;

// Of this user on this host, so that the next life of a process can tell peers of the last one.
std::string reset_key() {
  const std::string folder = platform::user_cache_folder();
  const std::string path = folder + "/stateless_reset_key";
  if (auto known = platform::read_private_file(path); known.is_ok() && known.value().size() == 64) {
    return known.value();
  }
  const std::string fresh = platform::random_hex128() + platform::random_hex128();
  // Without a place to keep it, it is good for this life.
  if (!folder.empty()) static_cast<void>(platform::write_private_file(path, fresh));
  return fresh;
}

}  // namespace

Status Engine::start_quic(const Options& options) {
  if (!options.tls.is_set()) {
    quic_refusal_ = "no certificates (PYCOMM_CERTS)";
  } else if (handshaker_factory() == nullptr) {
    quic_refusal_ = "no handshaker in this program (it is Python's)";
  } else if (options.transport != TransportChoice::kAuto &&
             options.transport != TransportChoice::kQuic) {
    quic_refusal_ = "PYCOMM_TRANSPORT";
  } else if (const Viability crypto = platform::crypto_viability(); !crypto.viable) {
    quic_refusal_ = crypto.reason;
  }
  if (!quic_refusal_.empty()) return Status();
  const std::string key = reset_key();
  for (const auto& [bound, told] : options.quic_paths) {
    auto quic = transport::quic::Endpoint::open(bound.empty() ? addresses_.listen : bound,
                                                options.ports.first, options.ports.last, key);
    if (!quic.is_ok()) {
      quic_refusal_ = quic.status().message();
      base::log(base::LogLevel::kWarn, base::Subsystem::kNet,
                "a path for QUIC is left out: " + quic_refusal_);
      continue;
    }
    quic_.push_back(std::move(quic).value());
    quic_told_.push_back(told);
    forget_after_fork(quic_.back()->fd());
  }
  if (quic_.empty() && options.transport == TransportChoice::kQuic) {
    return Status::error(StatusCode::kSystem, "no QUIC: " + quic_refusal_);
  }
  for (const auto& endpoint : quic_) {
    PYCOMM_RETURN_IF_ERROR(poller_.add(endpoint->fd(), kUdpToken));
  }
  return Status();
}

Status Engine::start_rdma(const Options& options) {
  const bool is_wanted = options.transport == TransportChoice::kRdma;
  if (options.transport != TransportChoice::kAuto && !is_wanted) {
    rdma_refusal_ = "PYCOMM_TRANSPORT";
    return Status();
  }
  platform::verbs::Library* library = nullptr;
  if (options.rdma.is_disabled) {
    rdma_refusal_ = "PYCOMM_IB_DISABLE=1";
  } else if (!is_wanted && !platform::has_rdma_devices()) {
    rdma_refusal_ = "there is no RDMA device";
  } else {
    library = platform::verbs::ibverbs(&rdma_refusal_);
  }
  if (library != nullptr) {
    for (const auto& info :
         usable_ports(library->ports(options.rdma, &rdma_refusal_), options.rdma, &rdma_refusal_)) {
      auto port = library->open(info);
      if (!port.is_ok()) {
        rdma_refusal_ = port.status().message();
        continue;
      }
      for (const int fd : port.value()->fds()) forget_after_fork(fd);
      rdma_.ports.push_back(std::move(port).value());
    }
  }
  if (rdma_.ports.empty()) {
    return is_wanted ? Status::error(StatusCode::kSystem, "no RDMA: " + rdma_refusal_) : Status();
  }
  rdma_.budget = std::make_shared<transport::rdma::RegistrationBudget>(
      std::min(options.rdma.registered_bytes_max, platform::lockable_bytes()));
  std::string refusal;
  rdma_.monitor = platform::MemoryMonitor::of_process(&refusal);
  if (rdma_.monitor == nullptr) {
    base::log(
        base::LogLevel::kInfo, base::Subsystem::kNet,
        "RDMA registrations last for one use each: freed memory cannot be seen (" + refusal + ")");
  }
  return Status();
}

void Engine::forget_rdma() {
  for (const auto& port : rdma_.ports) {
    for (const int fd : port->fds()) forget_no_more(fd);
  }
  rdma_.ports.clear();
}

std::shared_ptr<CoreLink> Engine::find_link(const std::string& process_id) {
  std::lock_guard lock(mutex_);
  const auto it = links_.find(process_id);
  if (it == links_.end()) return nullptr;
  if (it->second.link->is_viable().viable) return it->second.link;
  // Groups that still hold it keep the object; a new group gets a new connection.
  forget(it->second);
  links_.erase(it);
  return nullptr;
}

void Engine::forget(PeerLink& peer) {
  if (peer.link->fd() < 0) return;
  if (peer.token != 0) poller_.remove(peer.link->fd());
  for (const int fd : peer.link->fds()) forget_no_more(fd);
}

Status Engine::add_link(const std::string& process_id, std::shared_ptr<CoreLink> link) {
  std::lock_guard lock(mutex_);
  PeerLink peer;
  peer.token = next_token_++;
  peer.link = std::move(link);
  if (host_ && std::string_view(peer.link->transport()) == "shm") {
    PYCOMM_RETURN_IF_ERROR(peer.link->remote_memory()->expose(
        kArenaRegion, host_->arena().data(), host_->arena().bytes(), RegionKind::kHost));
    PYCOMM_RETURN_IF_ERROR(peer.link->remote_memory()->expose(
        kSegmentRegion, host_->segment().data(), host_->segment().bytes(), RegionKind::kHost));
  }
  if (peer.link->fd() >= 0) {
    PYCOMM_RETURN_IF_ERROR(poller_.add(peer.link->fd(), peer.token));
    for (const int fd : peer.link->fds()) forget_after_fork(fd);
  }
  links_[process_id] = std::move(peer);
  return Status();
}

void Engine::stash(Stashed early) {
  std::lock_guard lock(mutex_);
  std::erase_if(stashed_, [&](const Stashed& s) { return s.process_id == early.process_id; });
  stashed_.push_back(std::move(early));
  if (stashed_.size() > kStashedMax) stashed_.pop_front();
}

std::optional<Stashed> Engine::take_stashed(const std::string& process_id) {
  std::lock_guard lock(mutex_);
  for (auto it = stashed_.begin(); it != stashed_.end(); ++it) {
    if (it->process_id != process_id) continue;
    Stashed early = std::move(*it);
    stashed_.erase(it);
    return early;
  }
  return std::nullopt;
}

}  // namespace pycomm::communicator

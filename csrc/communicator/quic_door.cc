#include "communicator/quic_door.h"

#include <algorithm>
#include <exception>

#include "base/log.h"
#include "platform/crypto.h"
#include "platform/system.h"
#include "transport/quic/factory.h"

namespace pycomm {
namespace {

HandshakerFactory the_factory = nullptr;

}  // namespace

void set_handshaker_factory(HandshakerFactory factory) { the_factory = factory; }
HandshakerFactory handshaker_factory() { return the_factory; }

namespace communicator {
namespace {

using base::TimeNs;
using platform::real_clock;

constexpr TimeNs kBlockedNs = 4'000'000'000;  // no answer for so long: UDP does not pass
constexpr TimeNs kBlockedAgainNs = 300'000'000;
constexpr std::int64_t kNapNs = 200'000;
constexpr int kRefusalsLogged = 5;
constexpr std::int64_t kAgainNs = 50'000'000;
// Of pycomm/control/handshake.py.
constexpr const char* kNotYet = "no group here awaits that process yet";

platform::CryptoLibrary library_of(Options::QuicCrypto choice) {
  switch (choice) {
    case Options::QuicCrypto::kOpenssl: return platform::CryptoLibrary::kOpenssl;
    case Options::QuicCrypto::kIpsecMb: return platform::CryptoLibrary::kIpsecMb;
    default: return platform::CryptoLibrary::kAny;
  }
}

// Alike on both sides: the client's first connection ID and the side.
std::string trace_name(const HandedOver& state) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string name;
  for (const char c : (state.is_client ? state.own_ids : state.peer_ids)[0].bytes) {
    name += kDigits[static_cast<unsigned char>(c) >> 4];
    name += kDigits[static_cast<unsigned char>(c) & 15];
  }
  return name + (state.is_client ? "_client" : "_server");
}

}  // namespace

QuicDoor::~QuicDoor() {
  if (handshakers_.empty()) return;
  gathering_.engine.with_lock([&] {
    for (const auto& endpoint : gathering_.engine.quic()) endpoint->set_shaking_hands(false);
  });
}

Status QuicDoor::open() {
  bool is_needed = false;
  HandshakerOptions needed;
  for (std::size_t r = 0; r < gathering_.hellos.size(); ++r) {
    if (static_cast<Rank>(r) == gathering_.rank) continue;
    const Hello& mine = gathering_.mine();
    is_needed |=
        choose_path(mine, gathering_.hellos[r], gathering_.options.transport) == Path::kQuic &&
        !gathering_.engine.find_link(gathering_.hellos[r].process_id);
    needed.expected.emplace_back(gathering_.hellos[r].process_id,
                                 gathering_.name_of(static_cast<Rank>(r)));
  }
  const auto& endpoints = gathering_.engine.quic();
  if (!is_needed || endpoints.empty()) return Status();
  needed.tls = gathering_.options.tls;
  needed.secret = gathering_.options.secret;
  needed.process_id = gathering_.engine.process_id();
  needed.reset_key = endpoints[0]->reset_key();
  needed.keylog_file = gathering_.options.quic_keylog;
  if (!needed.keylog_file.empty()) {
    base::log(base::LogLevel::kWarn, base::Subsystem::kNet,
              "PYCOMM_QUIC_KEYLOG: whoever reads " + needed.keylog_file +
                  " can read everything that QUIC carries in this job; unset it outside of tests");
  }
  try {
    while (handshakers_.size() < endpoints.size()) {
      handshakers_.push_back(handshaker_factory()(needed));
    }
  } catch (const std::exception& error) {
    handshakers_.clear();
    return Status::error(StatusCode::kInvalidUsage, error.what());
  }
  gathering_.engine.with_lock([&] {
    for (const auto& endpoint : endpoints) endpoint->set_shaking_hands(true);
  });
  return Status();
}

int QuicDoor::num_paths(const Hello& theirs) const {
  return static_cast<int>(std::max(handshakers_.size(), theirs.quic_paths.size()));
}

Status QuicDoor::add(const HandedOver& state, std::size_t endpoint) {
  const Rank rank = gathering_.rank_of(state.peer_process_id);
  if (rank == kNoRank) {
    return Status::error(StatusCode::kInvalidUsage, "it is of no rank of this group");
  }
  Peer& peer = peers_[state.peer_process_id];
  // A link of before is not added to: whoever connects has none any more, and begins a new stream.
  const auto known = gathering_.engine.find_link(state.peer_process_id);
  const bool is_another = known != nullptr && known == peer.link;
  const int most = num_paths(gathering_.hellos[static_cast<std::size_t>(rank)]);
  if (is_another && static_cast<int>(peer.connected.size()) >= most) {
    return Status::error(StatusCode::kInvalidUsage, "it opens more connections than it announced");
  }
  transport::quic::LinkOptions options;
  options.eager_bytes_max = gathering_.options.eager_bytes_max;
  options.session.seed = platform::random_u64();
  options.session.library = library_of(gathering_.options.quic_crypto);
  options.session.mtu_max = gathering_.options.quic_mtu_max;
  options.session.congestion = gathering_.options.quic_uses_cubic
                                   ? transport::quic::CongestionKind::kCubic
                                   : transport::quic::CongestionKind::kBbr;
  if (const std::string& folder = gathering_.options.quic_qlog_folder; !folder.empty()) {
    auto qlog = transport::quic::Qlog::open(folder, trace_name(state), state.is_client,
                                            real_clock().now_ns());
    if (!qlog.is_ok()) {
      base::log(base::LogLevel::kWarn, base::Subsystem::kNet,
                "no trace (PYCOMM_QUIC_QLOG): " + qlog.status().message());
    } else {
      options.session.qlog = std::move(qlog).value();
    }
  }
  const auto& socket = gathering_.engine.quic()[endpoint];
  const TimeNs now = real_clock().now_ns();
  if (is_another) {
    PYCOMM_RETURN_IF_ERROR(gathering_.engine.with_lock(
        [&] { return transport::quic::add_path(*known, socket, state, options, now); }));
  } else {
    auto link = gathering_.engine.with_lock(
        [&] { return transport::quic::make_link(socket, state, options, now); });
    if (!link.is_ok()) return link.status();
    peer.link = std::move(link).value();
    PYCOMM_RETURN_IF_ERROR(gathering_.engine.add_link(state.peer_process_id, peer.link));
    peer.connected.clear();
    peer.first_at = now;
  }
  peer.connected.insert(state.path >= 0 ? state.path
                                        : -1 - static_cast<int>(peer.connected.size()));
  gathering_.engine.kick();  // the peer waits for a first word
  return Status();
}

void QuicDoor::log_refusal(const std::string& reason) {
  if (num_refusals_++ >= kRefusalsLogged) return;
  base::log(base::LogLevel::kWarn, base::Subsystem::kNet,
            "a QUIC connection was refused: " + reason);
}

// One round: datagrams in, out, and what came of it.
bool QuicDoor::move() {
  bool moved = false;
  for (std::size_t i = 0; i < handshakers_.size(); ++i) {
    Handshaker& handshaker = *handshakers_[i];
    transport::quic::Endpoint& endpoint = *gathering_.engine.quic()[i];
    auto arrived = gathering_.engine.with_lock([&] {
      endpoint.progress(real_clock().now_ns());
      return endpoint.take_unclaimed();
    });
    moved |= !arrived.empty();
    for (const auto& datagram : arrived) handshaker.receive(datagram.bytes, datagram.from);
    const auto leaving = handshaker.take_datagrams();
    moved |= !leaving.empty();
    gathering_.engine.with_lock([&] {
      for (const auto& datagram : leaving) endpoint.send(datagram.bytes, datagram.address);
    });
    for (const HandedOver& state : handshaker.take_established()) {
      moved = true;
      const Status status = add(state, i);
      if (status.is_ok()) continue;
      peers_[state.peer_process_id].failures[state.path] = status.message();
      log_refusal(status.message());
    }
    for (const Handshaker::Failure& failure : handshaker.take_failures()) {
      const bool is_early = failure.reason.find(kNotYet) != std::string::npos;
      if (!is_early) log_refusal(failure.reason);
      if (!failure.process_id.empty()) {
        peers_[failure.process_id].failures[failure.path] = failure.reason;
      }
    }
  }
  return moved;
}

bool QuicDoor::accept() { return move(); }

bool QuicDoor::awaits_paths(const Hello& theirs) {
  const auto found = peers_.find(theirs.process_id);
  if (found == peers_.end()) return false;
  const Peer& peer = found->second;
  // The one that connects gives up on a path that is blocked as soon.
  return static_cast<int>(peer.connected.size()) < num_paths(theirs) && peer.first_at > 0 &&
         real_clock().now_ns() < std::min(gathering_.deadline, peer.first_at + kBlockedNs);
}

// A path that led nowhere to one peer is not waited for again while another serves.
TimeNs QuicDoor::patience(int path, const Peer& peer) const {
  return blocked_.contains(path) && !peer.connected.empty() ? kBlockedAgainNs : kBlockedNs;
}

HandshakeTarget QuicDoor::target(const Hello& theirs, int path) const {
  const UdpAddress& there =
      theirs.quic_paths[static_cast<std::size_t>(path) % theirs.quic_paths.size()];
  const bool is_local = theirs.host == gathering_.mine().host;
  const std::string& general = is_local ? theirs.tcp_local_address : theirs.tcp_address;
  return {{there.host.empty() ? general : there.host, there.port},
          theirs.process_id,
          gathering_.name_of(gathering_.rank_of(theirs.process_id)),
          path};
}

Status QuicDoor::connect(const Hello& theirs) {
  if (handshakers_.empty()) PYCOMM_RETURN_IF_ERROR(open());  // a link was there, and failed since
  if (handshakers_.empty()) return Status::error(StatusCode::kSystem, "there is no QUIC here");
  Peer& peer = peers_[theirs.process_id];
  std::set<int> open;  // paths that may still come
  for (int path = 0; path < num_paths(theirs); ++path) {
    const HandshakeTarget to = target(theirs, path);
    const Viability reach = theirs.host == gathering_.mine().host
                                ? Viability{}
                                : is_reachable_from_elsewhere(to.address.host);
    if (!reach.viable) {
      peer.failures[path] = reach.reason;
    } else {
      handshaker_of(path).connect(to);
    }
    open.insert(path);
  }
  const TimeNs start = real_clock().now_ns();
  std::set<int> heard;
  Status why;
  while (!open.empty()) {
    std::erase_if(open, [&](int path) { return peer.connected.contains(path); });
    const TimeNs now = real_clock().now_ns();
    bool is_early = false;
    for (auto it = open.begin(); it != open.end();) {
      const int path = *it;
      const HandshakeTarget to = target(theirs, path);
      if (handshaker_of(path).has_heard(theirs.process_id, path)) heard.insert(path);
      Status over;
      if (const auto failure = peer.failures.find(path); failure != peer.failures.end()) {
        const std::string reason = failure->second;
        peer.failures.erase(failure);
        if (reason.find(kNotYet) != std::string::npos && now < gathering_.deadline) {
          is_early = true;  // it is still about another group
          handshaker_of(path).connect(to);
        } else {
          over = Status::error(StatusCode::kInvalidUsage, reason);
        }
      } else if (now > gathering_.deadline ||
                 (!heard.contains(path) && now > start + patience(path, peer))) {
        blocked_.insert(path);
        over = Status::error(StatusCode::kTimeout, "no QUIC answer from " + to.address.host + ":" +
                                                       std::to_string(to.address.port) +
                                                       " (does a firewall let UDP through?)");
      }
      if (over.is_ok()) {
        ++it;
        continue;
      }
      it = open.erase(it);
      if (why.is_ok() || over.code() == StatusCode::kInvalidUsage) why = over;
    }
    PYCOMM_RETURN_IF_ERROR(gathering_.meeting.check_now_and_then());
    if (is_early) platform::sleep_ns(kAgainNs);
    if (!open.empty() && !move()) platform::sleep_ns(kNapNs);
  }
  if (peer.connected.empty()) return why;
  if (!gathering_.engine.find_link(theirs.process_id)) {
    return Status::error(StatusCode::kPeerLost, "the connection failed while others were opened");
  }
  if (!why.is_ok()) {
    base::log(base::LogLevel::kWarn, base::Subsystem::kNet,
              "a path to rank " + std::to_string(gathering_.rank_of(theirs.process_id)) +
                  " is left out: " + why.message() + "; " + std::to_string(peer.connected.size()) +
                  " of " + std::to_string(num_paths(theirs)) + " are used");
  }
  return Status();
}

}  // namespace communicator
}  // namespace pycomm

#include "communicator/quic_door.h"

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
constexpr std::int64_t kNapNs = 200'000;
constexpr int kRefusalsLogged = 5;
constexpr std::int64_t kAgainNs = 50'000'000;
// Of pycomm/control/handshake.py.
constexpr const char* kNotYet = "no group here awaits that process yet";

}  // namespace

QuicDoor::~QuicDoor() {
  if (handshaker_) gathering_.engine.with_quic([](auto& quic) { quic.set_shaking_hands(false); });
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
  if (!is_needed || !gathering_.engine.quic()) return Status();
  needed.tls = gathering_.options.tls;
  needed.secret = gathering_.options.secret;
  needed.process_id = gathering_.engine.process_id();
  needed.reset_key = gathering_.engine.quic()->reset_key();
  try {
    handshaker_ = handshaker_factory()(needed);
  } catch (const std::exception& error) {
    return Status::error(StatusCode::kInvalidUsage, error.what());
  }
  gathering_.engine.with_quic([](auto& quic) { quic.set_shaking_hands(true); });
  return Status();
}

Status QuicDoor::add(const HandedOver& state) {
  transport::quic::LinkOptions options;
  options.eager_bytes_max = gathering_.options.eager_bytes_max;
  options.session.seed = platform::random_u64();
  options.session.mtu_max = gathering_.options.quic_mtu_max;
  options.session.congestion = gathering_.options.quic_uses_cubic
                                   ? transport::quic::CongestionKind::kCubic
                                   : transport::quic::CongestionKind::kBbr;
  auto link = gathering_.engine.with_quic([&](auto&) {
    return transport::quic::make_link(gathering_.engine.quic(), state, options,
                                      real_clock().now_ns());
  });
  if (!link.is_ok()) return link.status();
  PYCOMM_RETURN_IF_ERROR(
      gathering_.engine.add_link(state.peer_process_id, std::move(link).value()));
  gathering_.engine.kick();  // the peer waits for a first word
  return Status();
}

// One round: datagrams in, out, and what came of it.
bool QuicDoor::move() {
  if (!handshaker_) return false;
  auto arrived = gathering_.engine.with_quic([](auto& quic) {
    quic.progress(real_clock().now_ns());
    return quic.take_unclaimed();
  });
  bool moved = !arrived.empty();
  for (const auto& datagram : arrived) handshaker_->receive(datagram.bytes, datagram.from);
  const auto leaving = handshaker_->take_datagrams();
  moved |= !leaving.empty();
  gathering_.engine.with_quic([&](auto& quic) {
    for (const auto& datagram : leaving) quic.send(datagram.bytes, datagram.address);
    return true;
  });
  for (const HandedOver& state : handshaker_->take_established()) {
    moved = true;
    if (const Status status = add(state); !status.is_ok()) {
      failures_[state.peer_process_id] = status.message();
    }
  }
  for (const Handshaker::Failure& failure : handshaker_->take_failures()) {
    const bool is_early = failure.reason.find(kNotYet) != std::string::npos;
    if (!is_early && num_refusals_++ < kRefusalsLogged) {
      base::log(base::LogLevel::kWarn, base::Subsystem::kNet,
                "a QUIC connection was refused: " + failure.reason);
    }
    if (!failure.process_id.empty()) failures_[failure.process_id] = failure.reason;
  }
  return moved;
}

bool QuicDoor::accept() { return move(); }

Status QuicDoor::connect(const Hello& theirs) {
  const bool is_local = theirs.host == gathering_.mine().host;
  const std::string& address = is_local ? theirs.tcp_local_address : theirs.tcp_address;
  if (!is_local) {
    if (const Viability reach = is_reachable_from_elsewhere(address); !reach.viable) {
      return Status::error(StatusCode::kInvalidUsage, reach.reason);
    }
  }
  const HandshakeTarget target{{address, theirs.quic_port},
                               theirs.process_id,
                               gathering_.name_of(gathering_.rank_of(theirs.process_id))};
  failures_.erase(theirs.process_id);
  handshaker_->connect(target);
  const TimeNs start = real_clock().now_ns();
  bool was_heard = false;
  while (!gathering_.engine.find_link(theirs.process_id)) {
    if (const auto it = failures_.find(theirs.process_id); it != failures_.end()) {
      if (it->second.find(kNotYet) != std::string::npos &&
          real_clock().now_ns() < gathering_.deadline) {
        failures_.erase(it);  // it is still about another group
        platform::sleep_ns(kAgainNs);
        handshaker_->connect(target);
        continue;
      }
      return Status::error(StatusCode::kInvalidUsage, it->second);
    }
    const TimeNs now = real_clock().now_ns();
    was_heard |= handshaker_->has_heard(theirs.process_id);
    if (now > gathering_.deadline || (!was_heard && now > start + kBlockedNs)) {
      return Status::error(StatusCode::kTimeout, "no QUIC answer from " + address + ":" +
                                                     std::to_string(theirs.quic_port) +
                                                     " (does a firewall let UDP through?)");
    }
    PYCOMM_RETURN_IF_ERROR(gathering_.meeting.check_now_and_then());
    if (!move()) platform::sleep_ns(kNapNs);
  }
  return Status();
}

}  // namespace communicator
}  // namespace pycomm

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
constexpr std::int64_t kNapNs = 200'000;
constexpr int kRefusalsLogged = 5;
constexpr std::int64_t kAgainNs = 50'000'000;
// Of pycomm/control/handshake.py.
constexpr const char* kNotYet = "no group here awaits that process yet";

}  // namespace

QuicDoor::QuicDoor(Engine& engine, Meeting& meeting, const std::vector<Hello>& hellos, Rank rank,
                   const Options& options, TimeNs deadline)
    : engine_(engine),
      meeting_(meeting),
      hellos_(hellos),
      rank_(rank),
      options_(options),
      deadline_(deadline) {}

QuicDoor::~QuicDoor() {
  if (handshaker_) engine_.with_quic([](auto& quic) { quic.set_shaking_hands(false); });
}

std::string QuicDoor::name_of(std::size_t rank) const {
  return options_.tls.name_of(rank < options_.global_ranks.size() ? options_.global_ranks[rank]
                                                                  : static_cast<int>(rank));
}

Status QuicDoor::open() {
  bool is_needed = false;
  HandshakerOptions needed;
  for (std::size_t r = 0; r < hellos_.size(); ++r) {
    if (static_cast<Rank>(r) == rank_) continue;
    const Hello& mine = hellos_[static_cast<std::size_t>(rank_)];
    is_needed |= choose_path(mine, hellos_[r], options_.transport) == Path::kQuic &&
                 !engine_.find_link(hellos_[r].process_id);
    needed.expected.emplace_back(hellos_[r].process_id, name_of(r));
  }
  if (!is_needed || !engine_.quic()) return Status();
  needed.tls = options_.tls;
  needed.secret = options_.secret;
  needed.process_id = engine_.process_id();
  needed.reset_key = engine_.quic()->reset_key();
  try {
    handshaker_ = handshaker_factory()(needed);
  } catch (const std::exception& error) {
    return Status::error(StatusCode::kInvalidUsage, error.what());
  }
  engine_.with_quic([](auto& quic) { quic.set_shaking_hands(true); });
  return Status();
}

Status QuicDoor::add(const HandedOver& state) {
  transport::quic::LinkOptions options;
  options.eager_bytes_max = options_.eager_bytes_max;
  options.session.seed = platform::random_u64();
  options.session.mtu_max = options_.quic_mtu_max;
  options.session.congestion = options_.quic_uses_cubic ? transport::quic::CongestionKind::kCubic
                                                        : transport::quic::CongestionKind::kBbr;
  auto link = engine_.with_quic([&](auto&) {
    return transport::quic::make_link(engine_.quic(), state, options, real_clock().now_ns());
  });
  if (!link.is_ok()) return link.status();
  PYCOMM_RETURN_IF_ERROR(engine_.add_link(state.peer_process_id, std::move(link).value()));
  engine_.kick();  // the peer waits for a first word
  return Status();
}

// One round: datagrams in, out, and what came of it.
bool QuicDoor::move() {
  if (!handshaker_) return false;
  auto arrived = engine_.with_quic([](auto& quic) {
    quic.progress(real_clock().now_ns());
    return quic.take_unclaimed();
  });
  bool moved = !arrived.empty();
  for (const auto& datagram : arrived) handshaker_->receive(datagram.bytes, datagram.from);
  const auto leaving = handshaker_->take_datagrams();
  moved |= !leaving.empty();
  engine_.with_quic([&](auto& quic) {
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
  const auto found = std::find_if(hellos_.begin(), hellos_.end(), [&](const Hello& h) {
    return h.process_id == theirs.process_id;
  });
  const bool is_local = theirs.host == hellos_[static_cast<std::size_t>(rank_)].host;
  const std::string& address = is_local ? theirs.tcp_local_address : theirs.tcp_address;
  if (!is_local) {
    if (const Viability reach = is_reachable_from_elsewhere(address); !reach.viable) {
      return Status::error(StatusCode::kInvalidUsage, reach.reason);
    }
  }
  const HandshakeTarget target{{address, theirs.quic_port},
                               theirs.process_id,
                               name_of(static_cast<std::size_t>(found - hellos_.begin()))};
  failures_.erase(theirs.process_id);
  handshaker_->connect(target);
  const TimeNs start = real_clock().now_ns();
  bool was_heard = false;
  while (!engine_.find_link(theirs.process_id)) {
    if (const auto it = failures_.find(theirs.process_id); it != failures_.end()) {
      if (it->second.find(kNotYet) != std::string::npos && real_clock().now_ns() < deadline_) {
        failures_.erase(it);  // it is still about another group
        platform::sleep_ns(kAgainNs);
        handshaker_->connect(target);
        continue;
      }
      return Status::error(StatusCode::kInvalidUsage, it->second);
    }
    const TimeNs now = real_clock().now_ns();
    was_heard |= handshaker_->has_heard(theirs.process_id);
    if (now > deadline_ || (!was_heard && now > start + kBlockedNs)) {
      return Status::error(StatusCode::kTimeout, "no QUIC answer from " + address + ":" +
                                                     std::to_string(theirs.quic_port) +
                                                     " (does a firewall let UDP through?)");
    }
    PYCOMM_RETURN_IF_ERROR(meeting_.check_now_and_then());
    if (!move()) platform::sleep_ns(kNapNs);
  }
  return Status();
}

}  // namespace communicator
}  // namespace pycomm

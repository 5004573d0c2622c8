#include "communicator/tcp_door.h"

#include <algorithm>
#include <array>
#include <atomic>

#include "base/log.h"
#include "platform/crypto.h"
#include "platform/system.h"
#include "transport/tcp/factory.h"

namespace pycomm::communicator {
namespace {

using base::TimeNs;
using platform::ByteStream;
using platform::IoOutcome;
using platform::IoResult;
using platform::real_clock;
using transport::tcp::Membership;

constexpr TimeNs kHandshakeNs = 5'000'000'000;
constexpr std::size_t kPendingMax = 64;
constexpr std::int64_t kRetryNs = 20'000'000;
constexpr std::int64_t kNapNs = 100'000;
constexpr int kRefusalsLogged = 5;  // of one group's creation
constexpr std::size_t kReadBytes = 256;

// Moves all of *out if it can; kWouldBlock leaves the rest.
Status write_out(ByteStream& stream, std::string* out) {
  while (!out->empty()) {
    const iovec vector{out->data(), out->size()};
    const IoResult sent = stream.write_vectors(&vector, 1);
    if (sent.outcome == IoOutcome::kWouldBlock) return Status();
    if (sent.outcome != IoOutcome::kMoved) {
      return Status::error(StatusCode::kSystem, "the connection broke during the handshake");
    }
    out->erase(0, sent.bytes);
  }
  stream.flush();
  return Status();
}

}  // namespace

TimeNs handshake_deadline(TimeNs deadline) {
  return std::min(deadline, real_clock().now_ns() + kHandshakeNs);
}

Status TcpDoor::open() {
  if (!gathering_.options.tls.is_set()) return Status();
  auto tls = platform::TlsContext::load(gathering_.options.tls);
  if (!tls.is_ok()) return tls.status();
  tls_ = std::move(tls).value();
  return Status();
}

Status TcpDoor::check_name(const platform::ByteStream& stream, Rank peer) const {
  if (!tls_ || (peer != kNoRank && stream.is_encrypted() &&
                stream.peer_is_named(gathering_.name_of(peer)))) {
    return Status();
  }
  return Status::error(StatusCode::kInvalidUsage,
                       "rank " + std::to_string(peer) +
                           " shows a certificate that is not made out to '" +
                           gathering_.name_of(peer) + "'",
                       peer);
}

Status TcpDoor::add(std::unique_ptr<ByteStream> stream, const std::string& process_id) {
  if (rdma_.wants(process_id)) return rdma_.begin(std::move(stream), process_id);
  transport::tcp::LinkOptions options;
  options.eager_bytes_max = gathering_.options.eager_bytes_max;
  return gathering_.engine.add_link(process_id,
                                    transport::tcp::make_link(std::move(stream), options));
}

// ---------------------------------------------------------------- connecting

Status TcpDoor::check_route(const std::string& address) {
  if (const Viability reach = is_reachable_from_elsewhere(address); !reach.viable) {
    return Status::error(StatusCode::kInvalidUsage, reach.reason);
  }
  if (tls_) return Status();
  if (platform::is_public_address(address) && !gathering_.options.allow_public_plaintext) {
    return Status::error(StatusCode::kInvalidUsage,
                         "refusing plain TCP to the public address " + address +
                             "; set PYCOMM_CERTS (pycomm certs) to encrypt, or "
                             "PYCOMM_ALLOW_PUBLIC_PLAINTEXT=1 if you accept that everyone on the "
                             "path can read the gradients");
  }
  static std::atomic<bool> said{false};
  if (!said.exchange(true)) {
    base::log(base::LogLevel::kWarn, base::Subsystem::kNet,
              "TCP between hosts is authenticated at connect but not encrypted; PYCOMM_CERTS "
              "(pycomm certs) encrypts it");
  }
  return Status();
}

// A connected stream on which TLS, if any, is done.
Result<std::unique_ptr<ByteStream>> TcpDoor::reach(const std::string& address, std::uint16_t port,
                                                   Rank peer) {
  // It has listened since before it said hello: who does not answer soon never will.
  const TimeNs until =
      std::min(gathering_.deadline,
               base::deadline_after(real_clock().now_ns(), gathering_.options.connect_timeout_ms));
  auto socket = platform::connect_tcp(address, port, until);
  if (!socket.is_ok()) {
    const Status& status = socket.status();
    return Status::error(
        status.code() == StatusCode::kTimeout ? StatusCode::kSystem : status.code(),
        status.message() + "; it listens on port " + std::to_string(port) + " and advertises " +
            address +
            ": is that the interface to use (PYCOMM_SOCKET_IFNAME, "
            "PYCOMM_ADVERTISE_ADDR there), and does a firewall let the port through "
            "(PYCOMM_PORT_RANGE)?");
  }
  if (!tls_) return platform::make_plain_stream(std::move(socket).value());
  auto stream = tls_->connect(std::move(socket).value(), gathering_.name_of(peer));
  for (;;) {
    const IoResult result = stream->shake_hands();
    if (result.outcome == IoOutcome::kMoved) return stream;
    if (result.outcome == IoOutcome::kClosed) return std::unique_ptr<ByteStream>();
    if (result.outcome == IoOutcome::kFailed) {
      return Status::error(
          StatusCode::kInvalidUsage,
          stream->explain(result) + " (it must be made out to '" + gathering_.name_of(peer) + "')");
    }
    if (real_clock().now_ns() > gathering_.deadline) {
      return Status::error(StatusCode::kTimeout, "the TLS handshake took too long");
    }
    PYCOMM_RETURN_IF_ERROR(gathering_.meeting.check_now_and_then());
    platform::sleep_ns(kNapNs);
  }
}

// Drives a membership over a stream until done. *was_heard: the peer said anything at all.
Status TcpDoor::converse(ByteStream& stream, Membership& membership, bool* was_heard) {
  std::string out = membership.start();
  for (;;) {
    PYCOMM_RETURN_IF_ERROR(write_out(stream, &out));
    if (membership.is_done()) return Status();
    std::array<char, kReadBytes> buffer;
    const std::size_t want = std::min(buffer.size(), membership.wanted());
    const IoResult got = stream.read_some(buffer.data(), want);
    switch (got.outcome) {
      case IoOutcome::kMoved:
        *was_heard = true;
        PYCOMM_RETURN_IF_ERROR(membership.feed({buffer.data(), got.bytes}, &out));
        break;
      case IoOutcome::kWouldBlock:
        if (real_clock().now_ns() > gathering_.deadline) {
          return Status::error(StatusCode::kTimeout, "the handshake took too long");
        }
        PYCOMM_RETURN_IF_ERROR(gathering_.meeting.check_now_and_then());
        platform::sleep_ns(kNapNs);
        break;
      case IoOutcome::kFailed:
        if (stream.is_encrypted()) {
          *was_heard = true;  // an alert
          return Status::error(StatusCode::kInvalidUsage, stream.explain(got));
        }
        [[fallthrough]];
      case IoOutcome::kClosed:
        return Status::error(
            StatusCode::kInvalidUsage,
            "the peer closed the connection during the handshake (another secret?)");
    }
  }
}

Status TcpDoor::connect(const Hello& theirs, const std::string& secret) {
  const Hello& mine = gathering_.mine();
  const Rank peer = gathering_.rank_of(theirs.process_id);
  if (theirs.proof != mine.proof) {
    return Status::error(StatusCode::kInvalidUsage,
                         "rank " + std::to_string(peer) + " proves membership by " + theirs.proof +
                             ", rank " + std::to_string(gathering_.rank) + " by " + mine.proof +
                             "; set PYCOMM_CERTS, or PYCOMM_SECRET_FILE, on every rank alike",
                         peer);
  }
  const bool is_local = theirs.host == mine.host;
  const std::string& address = is_local ? theirs.tcp_local_address : theirs.tcp_address;
  if (!is_local) PYCOMM_RETURN_IF_ERROR(check_route(address));
  for (;;) {
    auto stream = reach(address, theirs.tcp_port, peer);
    if (!stream.is_ok()) return stream.status();
    bool was_heard = false;
    Status status;
    if (stream.value()) {
      Membership membership = Membership::connector(stream.value()->export_secret() + secret,
                                                    gathering_.engine.process_id(),
                                                    theirs.process_id, platform::random_hex128());
      status = converse(*stream.value(), membership, &was_heard);
      if (status.is_ok()) {
        PYCOMM_RETURN_IF_ERROR(add(std::move(stream).value(), theirs.process_id));
        return rdma_.await(theirs.process_id);
      }
    } else {
      status = Status::error(StatusCode::kSystem, "the peer closed the connection");
    }
    // Cut off before a word: the acceptor made room for others. It will listen again.
    if (was_heard || real_clock().now_ns() > gathering_.deadline) return status;
    PYCOMM_RETURN_IF_ERROR(gathering_.meeting.check_now_and_then());
    platform::sleep_ns(kRetryNs);
  }
}

// ---------------------------------------------------------------- accepting

bool TcpDoor::accept() {
  bool moved = rdma_.advance();
  platform::UniqueFd fd = platform::accept_one(gathering_.engine.tcp_listener().fd.get());
  // The oldest makes room: who proves membership does so at once, strangers linger.
  if (fd && pending_.size() >= kPendingMax) pending_.erase(pending_.begin());
  if (fd && platform::crypto_viability().viable && platform::configure_stream(fd.get()).is_ok()) {
    Pending pending;
    pending.stream =
        tls_ ? tls_->accept(std::move(fd)) : platform::make_plain_stream(std::move(fd));
    pending.deadline = handshake_deadline(gathering_.deadline);
    pending_.push_back(std::move(pending));
    moved = true;
  }
  for (auto it = pending_.begin(); it != pending_.end();) {
    bool over = false;
    moved |= advance(*it, &over);
    it = over ? pending_.erase(it) : std::next(it);
  }
  return moved;
}

// Moves one handshake on; sets *over when it became a link or was given up.
bool TcpDoor::advance(Pending& pending, bool* over) {
  bool moved = false;
  Status status = hear(pending, &moved);
  if (!moved && status.is_ok()) {
    *over = real_clock().now_ns() > pending.deadline;
    return *over;
  }
  if (status.is_ok() && pending.membership && pending.membership->is_done()) {
    *over = true;
    Stashed arrived{pending.membership->peer(), {}, std::move(pending.stream)};
    const Rank peer = gathering_.rank_of(arrived.process_id);
    if (peer > gathering_.rank && !gathering_.engine.find_link(arrived.process_id)) {
      status = take_up(std::move(arrived));
    } else {
      gathering_.engine.stash(std::move(arrived));
    }
  }
  if (!status.is_ok()) {
    *over = true;
    refuse(pending, status);
  }
  return true;
}

Status TcpDoor::hear(Pending& pending, bool* moved) {
  if (!pending.has_shaken_hands) {
    const IoResult result = pending.stream->shake_hands();
    if (result.outcome == IoOutcome::kWouldBlock) return Status();
    *moved = true;
    if (result.outcome == IoOutcome::kClosed) {
      return Status::error(StatusCode::kSystem, "it closed during the TLS handshake");
    }
    if (result.outcome == IoOutcome::kFailed) {
      return Status::error(StatusCode::kInvalidUsage, pending.stream->explain(result));
    }
    pending.has_shaken_hands = true;
    const bool needs_local_secret = gathering_.options.secret.empty() && !tls_;
    const std::string& secret =
        needs_local_secret ? gathering_.engine.local_secret() : gathering_.options.secret;
    pending.membership = std::make_unique<Membership>(
        Membership::acceptor(pending.stream->export_secret() + secret,
                             gathering_.engine.process_id(), platform::random_hex128()));
    return Status();
  }
  std::array<char, kReadBytes> buffer;
  const std::size_t want = std::min(buffer.size(), pending.membership->wanted());
  const IoResult got = pending.stream->read_some(buffer.data(), want);
  if (got.outcome == IoOutcome::kWouldBlock) return Status();
  *moved = true;
  if (got.outcome == IoOutcome::kFailed && pending.stream->is_encrypted()) {
    return Status::error(StatusCode::kInvalidUsage, pending.stream->explain(got));
  }
  if (got.outcome != IoOutcome::kMoved) {
    return Status::error(StatusCode::kSystem,
                         "it closed during the handshake; a rank with another PYCOMM_SECRET_FILE?");
  }
  PYCOMM_RETURN_IF_ERROR(pending.membership->feed({buffer.data(), got.bytes}, &pending.out));
  // Of a process that no hello tells of, take_up() asks when its group is known.
  if (const Rank peer = gathering_.rank_of(pending.membership->peer()); peer != kNoRank) {
    PYCOMM_RETURN_IF_ERROR(check_name(*pending.stream, peer));
  }
  PYCOMM_RETURN_IF_ERROR(write_out(*pending.stream, &pending.out));
  // At most a hundred bytes on a fresh connection: the socket's buffer takes them whole.
  return pending.out.empty() ? Status() : Status::error(StatusCode::kSystem, "it takes no answer");
}

void TcpDoor::refuse(Pending& pending, const Status& why) {
  if (num_refusals_++ < kRefusalsLogged) {
    base::log(base::LogLevel::kWarn, base::Subsystem::kNet,
              "a TCP connection was refused: " + why.message());
  }
  if (!pending.stream || !pending.membership || pending.membership->peer().empty()) return;
  std::string out = Membership::refusal(why.message());
  static_cast<void>(write_out(*pending.stream, &out));
  pending.stream->end_writing();
}

Status TcpDoor::take_up(Stashed early) {
  PYCOMM_RETURN_IF_ERROR(check_name(*early.stream, gathering_.rank_of(early.process_id)));
  return add(std::move(early.stream), early.process_id);
}

}  // namespace pycomm::communicator

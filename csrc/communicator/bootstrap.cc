// The exchange through the store, and connecting. Of each pair the higher rank connects and the
// lower accepts; a rank first connects to all lower ones, then accepts the rest, so that waiting
// always points downwards.
#include "communicator/bootstrap.h"

#include <algorithm>

#include "base/log.h"
#include "communicator/quic_door.h"
#include "communicator/tcp_door.h"
#include "platform/crypto.h"
#include "platform/system.h"

namespace pycomm::communicator {
namespace {

using base::TimeNs;
using platform::real_clock;
using platform::UniqueFd;
using transport::CoreLink;

constexpr TimeNs kFirstWordNs = 500'000'000;
constexpr int kRefusalsLogged = 5;  // of one group's creation

Status about_rank(const Status& status, Rank rank, const char* doing) {
  if (status.is_ok()) return status;
  return Status::error(
      status.code(), std::string(doing) + " rank " + std::to_string(rank) + ": " + status.message(),
      rank);
}

class Connector {
 public:
  explicit Connector(const Gathering& gathering)
      : gathering_(gathering), rdma_(gathering), tcp_(gathering, rdma_), quic_(gathering) {}

  Status open() {
    PYCOMM_RETURN_IF_ERROR(tcp_.open());
    return quic_.open();
  }

  Status connect_lower() {
    for (Rank peer = 0; peer < gathering_.rank; ++peer) {
      const Hello& theirs = hello(peer);
      if (gathering_.engine.find_link(theirs.process_id)) continue;
      Status status = connect(
          theirs, choose_path(hello(gathering_.rank), theirs, gathering_.options.transport));
      if (!status.is_ok()) return about_rank(status, peer, "connecting to");
    }
    return Status();
  }

  Status accept_higher() {
    for (;;) {
      Rank missing = kNoRank;
      bool awaits_paths = false;
      for (Rank peer = gathering_.rank + 1; peer < size(); ++peer) {
        if (gathering_.engine.find_link(hello(peer).process_id)) {
          awaits_paths |= quic_.awaits_paths(hello(peer));
          continue;
        }
        missing = peer;
        if (auto early = gathering_.engine.take_stashed(hello(peer).process_id)) {
          // It may have given up since; then it comes again.
          const Status status = take_up(std::move(*early));
          if (!status.is_ok()) log_refusal("an early connection", status);
        }
      }
      if (missing == kNoRank && !awaits_paths) return Status();
      if (missing != kNoRank && real_clock().now_ns() > gathering_.deadline) {
        return Status::error(StatusCode::kTimeout,
                             "rank " + std::to_string(missing) + " did not connect in time",
                             missing);
      }
      PYCOMM_RETURN_IF_ERROR(gathering_.meeting.check_now_and_then());
      const bool moved = accept_local() | tcp_.accept() | quic_.accept();
      if (!moved) platform::sleep_ns(200'000);
    }
  }

 private:
  // One that came before this group knew of it.
  Status take_up(Stashed early) {
    if (early.stream) return tcp_.take_up(std::move(early));
    return establish_shm(std::move(early.local), early.process_id,
                         handshake_deadline(gathering_.deadline));
  }

  Status connect(const Hello& theirs, Path path) {
    if (path == Path::kShm) return connect_shm(theirs);
    const TransportChoice choice = gathering_.options.transport;
    const bool is_wanted = choice == TransportChoice::kQuic;
    if (path == Path::kRdma) return connect_tcp(theirs);  // where the stream becomes one
    if (path == Path::kTcp) {
      if (!is_wanted && choice != TransportChoice::kRdma) return connect_tcp(theirs);
      const Hello& mine = hello(gathering_.rank);
      const std::string& refusal = is_wanted ? mine.quic_refusal : mine.rdma_refusal;
      const std::string& other = is_wanted ? theirs.quic_refusal : theirs.rdma_refusal;
      return Status::error(
          StatusCode::kInvalidUsage,
          std::string(is_wanted ? "PYCOMM_TRANSPORT=quic, but there is no QUIC: "
                                : "PYCOMM_TRANSPORT=rdma, but there is no RDMA: ") +
              (!refusal.empty() ? refusal : "on the other host: " + other));
    }
    const Status status = quic_.connect(theirs);
    if (status.is_ok() || is_wanted || status.code() != StatusCode::kTimeout) return status;
    base::log(base::LogLevel::kWarn, base::Subsystem::kNet,
              status.message() + "; TLS over TCP is used instead");
    return connect_tcp(theirs);
  }

  const Hello& hello(Rank rank) const { return gathering_.hellos[static_cast<std::size_t>(rank)]; }
  Rank size() const { return static_cast<Rank>(gathering_.hellos.size()); }

  // --- shared memory
  Status connect_shm(const Hello& theirs) {
    auto socket = platform::connect_local(theirs.local_name, gathering_.deadline);
    if (!socket.is_ok()) return socket.status();
    const TimeNs until =
        gathering_.deadline;  // the peer may have others to serve, or to reach, first
    PYCOMM_RETURN_IF_ERROR(platform::send_with_fds(
        socket.value().get(), "shm " + gathering_.engine.process_id(), {}, until));
    PYCOMM_RETURN_IF_ERROR(await_answer(socket.value().get()));
    return establish_shm(std::move(socket).value(), theirs.process_id, until);
  }

  // The peer may come to us late; that it gave up, or a signal, ends the wait.
  Status await_answer(int fd) {
    for (;;) {
      const TimeNs now = real_clock().now_ns();
      Status status =
          platform::await_readable(fd, std::min(gathering_.deadline, now + Meeting::kAskEveryNs));
      if (status.code() != StatusCode::kTimeout || now > gathering_.deadline) return status;
      PYCOMM_RETURN_IF_ERROR(gathering_.meeting.check_now_and_then());
    }
  }

  Status establish_shm(UniqueFd socket, const std::string& process_id, TimeNs until) {
    transport::shm::LinkOptions options;
    options.eager_bytes_max = gathering_.options.eager_bytes_max;
    auto link =
        transport::shm::establish(*gathering_.engine.host(), std::move(socket), options, until);
    if (!link.is_ok()) return link.status();
    return gathering_.engine.add_link(process_id, std::move(link).value());
  }

  bool accept_local() {
    UniqueFd socket = platform::accept_one(gathering_.engine.local_listener());
    if (!socket) return false;
    Status status = serve_local(std::move(socket));
    if (!status.is_ok()) log_refusal("a local connection", status);
    return true;
  }

  Status serve_local(UniqueFd socket) {
    auto credentials = platform::peer_credentials(socket.get());
    if (!credentials.is_ok()) return credentials.status();
    if (credentials.value().uid != platform::effective_uid()) {
      return Status::error(StatusCode::kInvalidUsage, "it belongs to another user");
    }
    // A connector speaks at once, before it is even accepted.
    const TimeNs first_word = std::min(gathering_.deadline, real_clock().now_ns() + kFirstWordNs);
    const TimeNs until = handshake_deadline(gathering_.deadline);
    std::vector<UniqueFd> fds;
    auto message = platform::receive_with_fds(socket.get(), 0, &fds, first_word);
    if (!message.is_ok()) return message.status();
    const std::string& text = message.value();
    if (text == "secret") {
      return platform::send_with_fds(socket.get(), gathering_.engine.local_secret(), {}, until);
    }
    const std::string process_id = text.size() == 36 ? text.substr(4) : "";
    if (text.substr(0, 4) != "shm " || process_id.empty()) {
      return Status::error(StatusCode::kInternal, "it speaks another language");
    }
    if (!is_awaited(process_id)) {
      gathering_.engine.stash({process_id, std::move(socket), nullptr});
      return Status();
    }
    return establish_shm(std::move(socket), process_id, until);
  }

  void log_refusal(const char* what, const Status& status) {
    if (num_refusals_++ >= kRefusalsLogged) return;
    base::log(base::LogLevel::kWarn, base::Subsystem::kNet,
              std::string(what) + " was refused: " + status.message());
  }

  bool is_awaited(const std::string& process_id) {
    for (Rank peer = gathering_.rank + 1; peer < size(); ++peer) {
      if (hello(peer).process_id == process_id) return !gathering_.engine.find_link(process_id);
    }
    return false;
  }

  // --- TCP
  Status connect_tcp(const Hello& theirs) {
    if (const Viability crypto = platform::crypto_viability(); !crypto.viable) {
      return Status::error(StatusCode::kSystem, "TCP needs libcrypto: " + crypto.reason);
    }
    auto secret = secret_for(theirs);
    if (!secret.is_ok()) return secret.status();
    return tcp_.connect(theirs, secret.value());
  }

  // The secret of a pair: the job's, or, among processes of one user on one host, the acceptor's,
  // handed over its local socket after a look at the peer's credentials. Certificates need none.
  Result<std::string> secret_for(const Hello& acceptor) {
    if (!gathering_.options.secret.empty() || gathering_.options.tls.is_set())
      return gathering_.options.secret;
    if (acceptor.host != hello(gathering_.rank).host) {
      return Status::error(
          StatusCode::kInvalidUsage,
          "ranks on several hosts have to prove that they are of this job: by certificates, which "
          "encrypt too (pycomm certs, then PYCOMM_CERTS), or by a secret (head -c 32 /dev/urandom "
          "| base64 > secret; chmod 600 secret, copied to every host, PYCOMM_SECRET_FILE)");
    }
    auto socket = platform::connect_local(acceptor.local_name, gathering_.deadline);
    if (!socket.is_ok()) return socket.status();
    auto credentials = platform::peer_credentials(socket.value().get());
    if (!credentials.is_ok()) return credentials.status();
    if (credentials.value().uid != platform::effective_uid()) {
      return Status::error(StatusCode::kInvalidUsage,
                           "its local socket belongs to another user; set PYCOMM_SECRET_FILE");
    }
    const TimeNs until = gathering_.deadline;
    PYCOMM_RETURN_IF_ERROR(platform::send_with_fds(socket.value().get(), "secret", {}, until));
    PYCOMM_RETURN_IF_ERROR(await_answer(socket.value().get()));
    std::vector<UniqueFd> fds;
    return platform::receive_with_fds(socket.value().get(), 0, &fds, until);
  }

  const Gathering& gathering_;
  RdmaDoor rdma_;
  TcpDoor tcp_;
  QuicDoor quic_;
  int num_refusals_ = 0;
};

}  // namespace

Result<std::vector<Hello>> Meeting::exchange(const Hello& mine, TimeNs deadline) {
  const auto key = [&](Rank r) { return prefix_ + std::to_string(r); };
  PYCOMM_RETURN_IF_ERROR(store_.set(key(rank_), encode(mine)));
  std::vector<Hello> hellos;
  for (Rank r = 0; r < mine.world_size; ++r) {
    Result<std::string> text = Status::error(StatusCode::kTimeout, "not asked yet");
    do {
      const std::int64_t left_ms = (deadline - real_clock().now_ns()) / 1'000'000;
      text = store_.get(key(r), std::clamp<std::int64_t>(left_ms, 1, kAskEveryNs / 1'000'000));
      if (text.is_ok()) break;
      PYCOMM_RETURN_IF_ERROR(check());
    } while (text.status().code() == StatusCode::kTimeout && real_clock().now_ns() < deadline);
    if (!text.is_ok()) return about_rank(text.status(), r, "waiting for the hello of");
    auto hello = decode(text.value());
    if (!hello.is_ok()) return about_rank(hello.status(), r, "reading the hello of");
    // One's own is not taken from the store.
    hellos.push_back(r == rank_ ? mine : std::move(hello).value());
  }
  return hellos;
}

void Meeting::give_up(const Status& why) {
  if (is_over_) return;
  is_over_ = true;
  // A store that fails too has told the others by itself.
  static_cast<void>(store_.set(
      prefix_ + "failed", "rank " + std::to_string(rank_) + " could not join: " + why.message()));
}

Status Meeting::check_now_and_then() {
  const TimeNs now = real_clock().now_ns();
  if (now < ask_at_) return Status();
  ask_at_ = now + kAskEveryNs;
  return check();
}

Status Meeting::check() {
  if (is_interrupted_ && is_interrupted_()) {
    return Status::error(StatusCode::kAborted, "interrupted while ranks came together");
  }
  const auto failed = store_.has(prefix_ + "failed");
  if (!failed.is_ok()) return failed.status();
  if (!failed.value()) return Status();
  is_over_ = true;
  auto why = store_.get(prefix_ + "failed", 1000);
  if (!why.is_ok()) return why.status();
  return Status::error(StatusCode::kAborted, why.value().substr(0, 2000));
}

Rank Gathering::rank_of(const std::string& process_id) const {
  for (std::size_t r = 0; r < hellos.size(); ++r) {
    if (hellos[r].process_id == process_id) return static_cast<Rank>(r);
  }
  return kNoRank;
}

std::string Gathering::name_of(Rank peer) const {
  const auto r = static_cast<std::size_t>(peer);
  return options.tls.name_of(r < options.global_ranks.size() ? options.global_ranks[r] : peer);
}

Result<std::vector<std::shared_ptr<CoreLink>>> connect_all(const Gathering& gathering) {
  Connector connector(gathering);
  PYCOMM_RETURN_IF_ERROR(connector.open());
  PYCOMM_RETURN_IF_ERROR(connector.connect_lower());
  PYCOMM_RETURN_IF_ERROR(connector.accept_higher());
  std::vector<std::shared_ptr<CoreLink>> links;
  for (std::size_t r = 0; r < gathering.hellos.size(); ++r) {
    const auto rank = static_cast<Rank>(r);
    links.push_back(rank == gathering.rank
                        ? nullptr
                        : gathering.engine.find_link(gathering.hellos[r].process_id));
    if (rank != gathering.rank && links.back() == nullptr) {
      return Status::error(
          StatusCode::kPeerLost,
          "the connection to rank " + std::to_string(r) + " failed while others were made", rank);
    }
  }
  return links;
}

}  // namespace pycomm::communicator

// The exchange through the store, and connecting. Of each pair the higher rank connects and the
// lower accepts; a rank first connects to all lower ones, then accepts the rest, so that waiting
// always points downwards.
#include "communicator/bootstrap.h"

#include <algorithm>
#include <map>

#include "base/log.h"
#include "platform/crypto.h"
#include "platform/system.h"
#include "transport/tcp/factory.h"
#include "transport/tcp/membership.h"

namespace pycomm::communicator {
namespace {

using base::TimeNs;
using platform::real_clock;
using platform::UniqueFd;
using transport::CoreLink;
using transport::tcp::Membership;

// One stranger that connects and says nothing may not hold up a group for longer.
constexpr TimeNs kHandshakeNs = 5'000'000'000;
constexpr std::size_t kPendingMax = 64;
constexpr std::int64_t kRetryNs = 20'000'000;
constexpr TimeNs kFirstWordNs = 500'000'000;
constexpr int kRefusalsLogged = 5;  // of one group's creation

TimeNs handshake_deadline(TimeNs deadline) {
  return std::min(deadline, real_clock().now_ns() + kHandshakeNs);
}

Status about_rank(const Status& status, Rank rank, const char* doing) {
  if (status.is_ok()) return status;
  return Status::error(
      status.code(), std::string(doing) + " rank " + std::to_string(rank) + ": " + status.message(),
      rank);
}

// Drives a membership over a stream until done.
// *was_heard tells whether the peer said anything at all.
Status drive(Membership& membership, int fd, Meeting& meeting, TimeNs deadline, bool* was_heard) {
  std::string out = membership.start();
  for (;;) {
    while (!out.empty()) {
      const iovec vector{out.data(), out.size()};
      const platform::IoResult sent = platform::write_vectors(fd, &vector, 1);
      if (sent.outcome == platform::IoOutcome::kMoved) {
        out.erase(0, sent.bytes);
      } else if (sent.outcome != platform::IoOutcome::kWouldBlock) {
        return Status::error(StatusCode::kSystem, "the connection broke during the handshake");
      }
    }
    if (membership.is_done()) return Status();
    char buffer[256];
    const std::size_t want = std::min(sizeof buffer, membership.wanted());
    const platform::IoResult got = platform::read_some(fd, buffer, want);
    if (got.outcome == platform::IoOutcome::kMoved) {
      *was_heard = true;
      PYCOMM_RETURN_IF_ERROR(membership.feed({buffer, got.bytes}, &out));
    } else if (got.outcome == platform::IoOutcome::kWouldBlock) {
      if (real_clock().now_ns() > deadline) {
        return Status::error(StatusCode::kTimeout, "the handshake took too long");
      }
      PYCOMM_RETURN_IF_ERROR(meeting.check_now_and_then());
      platform::sleep_ns(100'000);
    } else {
      return Status::error(StatusCode::kInvalidUsage,
                           "the peer closed the connection during the handshake (another secret?)");
    }
  }
}

class Connector {
 public:
  Connector(Engine& engine, Meeting& meeting, const std::vector<Hello>& hellos, Rank rank,
            const Options& options, TimeNs deadline)
      : engine_(engine),
        meeting_(meeting),
        hellos_(hellos),
        rank_(rank),
        options_(options),
        deadline_(deadline) {}

  Status connect_lower() {
    for (Rank peer = 0; peer < rank_; ++peer) {
      const Hello& theirs = hello(peer);
      if (engine_.find_link(theirs.process_id)) continue;
      Status status = choose_path(hello(rank_), theirs) == Path::kShm ? connect_shm(theirs)
                                                                      : connect_tcp(theirs);
      if (!status.is_ok()) return about_rank(status, peer, "connecting to");
    }
    return Status();
  }

  Status accept_higher() {
    for (;;) {
      Rank missing = kNoRank;
      for (Rank peer = rank_ + 1; peer < size(); ++peer) {
        if (engine_.find_link(hello(peer).process_id)) continue;
        missing = peer;
        if (auto early = engine_.take_stashed(hello(peer).process_id)) {
          // It may have given up since; then it comes again.
          const Status status = take_up(std::move(*early));
          if (!status.is_ok()) log_refusal("an early connection", status);
        }
      }
      if (missing == kNoRank) return Status();
      if (real_clock().now_ns() > deadline_) {
        return Status::error(StatusCode::kTimeout,
                             "rank " + std::to_string(missing) + " did not connect in time",
                             missing);
      }
      PYCOMM_RETURN_IF_ERROR(meeting_.check_now_and_then());
      const bool moved = accept_local() | accept_tcp();
      if (!moved) platform::sleep_ns(200'000);
    }
  }

 private:
  // One that came before this group knew of it.
  Status take_up(Stashed early) {
    if (!early.is_local) return add_tcp(std::move(early.fd), early.process_id);
    return establish_shm(std::move(early.fd), early.process_id, handshake_deadline(deadline_));
  }

  struct Pending {
    UniqueFd fd;
    Membership membership;
    TimeNs deadline;
    std::string out;
  };

  const Hello& hello(Rank rank) const { return hellos_[static_cast<std::size_t>(rank)]; }
  Rank size() const { return static_cast<Rank>(hellos_.size()); }

  // --- shared memory
  Status connect_shm(const Hello& theirs) {
    auto socket = platform::connect_local(theirs.local_name, deadline_);
    if (!socket.is_ok()) return socket.status();
    const TimeNs until = deadline_;  // the peer may have others to serve, or to reach, first
    PYCOMM_RETURN_IF_ERROR(
        platform::send_with_fds(socket.value().get(), "shm " + engine_.process_id(), {}, until));
    PYCOMM_RETURN_IF_ERROR(await_answer(socket.value().get()));
    return establish_shm(std::move(socket).value(), theirs.process_id, until);
  }

  // The peer may come to us late; that it gave up, or a signal, ends the wait.
  Status await_answer(int fd) {
    for (;;) {
      const TimeNs now = real_clock().now_ns();
      Status status = platform::await_readable(fd, std::min(deadline_, now + Meeting::kAskEveryNs));
      if (status.code() != StatusCode::kTimeout || now > deadline_) return status;
      PYCOMM_RETURN_IF_ERROR(meeting_.check_now_and_then());
    }
  }

  Status establish_shm(UniqueFd socket, const std::string& process_id, TimeNs until) {
    transport::shm::LinkOptions options;
    options.eager_bytes_max = options_.eager_bytes_max;
    auto link = transport::shm::establish(*engine_.host(), std::move(socket), options, until);
    if (!link.is_ok()) return link.status();
    return engine_.add_link(process_id, std::move(link).value());
  }

  bool accept_local() {
    UniqueFd socket = platform::accept_one(engine_.local_listener());
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
    const TimeNs first_word = std::min(deadline_, real_clock().now_ns() + kFirstWordNs);
    const TimeNs until = handshake_deadline(deadline_);
    std::vector<UniqueFd> fds;
    auto message = platform::receive_with_fds(socket.get(), 0, &fds, first_word);
    if (!message.is_ok()) return message.status();
    const std::string& text = message.value();
    if (text == "secret") {
      return platform::send_with_fds(socket.get(), engine_.local_secret(), {}, until);
    }
    const std::string process_id = text.size() == 36 ? text.substr(4) : "";
    if (text.substr(0, 4) != "shm " || process_id.empty()) {
      return Status::error(StatusCode::kInternal, "it speaks another language");
    }
    if (!is_awaited(process_id)) {
      engine_.stash({process_id, std::move(socket), true});
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
    for (Rank peer = rank_ + 1; peer < size(); ++peer) {
      if (hello(peer).process_id == process_id) return !engine_.find_link(process_id);
    }
    return false;
  }

  // --- TCP
  // The secret of a pair: the job's, or, among processes of one user on one host, the acceptor's,
  // handed over its local socket after a look at the peer's credentials.
  Result<std::string> secret_for(const Hello& acceptor) {
    if (!options_.secret.empty()) return options_.secret;
    if (acceptor.host != hello(rank_).host) {
      return Status::error(
          StatusCode::kInvalidUsage,
          "ranks on several hosts need a secret that proves membership: write 32 random bytes to "
          "a file of mode 0600 (head -c 32 /dev/urandom | base64 > secret), copy it to every host "
          "and set PYCOMM_SECRET_FILE to its path");
    }
    auto socket = platform::connect_local(acceptor.local_name, deadline_);
    if (!socket.is_ok()) return socket.status();
    auto credentials = platform::peer_credentials(socket.value().get());
    if (!credentials.is_ok()) return credentials.status();
    if (credentials.value().uid != platform::effective_uid()) {
      return Status::error(StatusCode::kInvalidUsage,
                           "its local socket belongs to another user; set PYCOMM_SECRET_FILE");
    }
    const TimeNs until = deadline_;
    PYCOMM_RETURN_IF_ERROR(platform::send_with_fds(socket.value().get(), "secret", {}, until));
    PYCOMM_RETURN_IF_ERROR(await_answer(socket.value().get()));
    std::vector<UniqueFd> fds;
    return platform::receive_with_fds(socket.value().get(), 0, &fds, until);
  }

  Status connect_tcp(const Hello& theirs) {
    if (const Viability crypto = platform::crypto_viability(); !crypto.viable) {
      return Status::error(StatusCode::kSystem, "TCP needs libcrypto: " + crypto.reason);
    }
    if (theirs.has_secret != !options_.secret.empty()) {
      return Status::error(StatusCode::kInvalidUsage,
                           "one rank has PYCOMM_SECRET_FILE set and the other has not");
    }
    auto secret = secret_for(theirs);
    if (!secret.is_ok()) return secret.status();
    const bool is_local = theirs.host == hello(rank_).host;
    const std::string& address = is_local ? theirs.tcp_local_address : theirs.tcp_address;
    if (!is_local) {
      if (const Viability reach = is_reachable_from_elsewhere(address); !reach.viable) {
        return Status::error(StatusCode::kInvalidUsage, reach.reason);
      }
      PYCOMM_RETURN_IF_ERROR(announce_plaintext(address));
    }
    for (;;) {
      // It has listened since before it said hello: who does not answer soon never will.
      const TimeNs until = std::min(
          deadline_, base::deadline_after(real_clock().now_ns(), options_.connect_timeout_ms));
      auto stream = platform::connect_tcp(address, theirs.tcp_port, until);
      if (!stream.is_ok()) return explain_unreachable(stream.status(), address, theirs.tcp_port);
      Membership membership = Membership::connector(secret.value(), engine_.process_id(),
                                                    theirs.process_id, platform::random_hex128());
      bool was_heard = false;
      Status status = drive(membership, stream.value().get(), meeting_, deadline_, &was_heard);
      if (status.is_ok()) return add_tcp(std::move(stream).value(), theirs.process_id);
      // Cut off before a word: the acceptor made room for others. It will listen again.
      if (was_heard || real_clock().now_ns() > deadline_) return status;
      platform::sleep_ns(kRetryNs);
    }
  }

  Status explain_unreachable(const Status& status, const std::string& address,
                             std::uint16_t port) const {
    return Status::error(
        status.code() == StatusCode::kTimeout ? StatusCode::kSystem : status.code(),
        status.message() + "; it listens on port " + std::to_string(port) + " and advertises " +
            address +
            ": is that the interface to use (PYCOMM_SOCKET_IFNAME, "
            "PYCOMM_ADVERTISE_ADDR there), and does a firewall let the port through "
            "(PYCOMM_PORT_RANGE)?");
  }

  Status announce_plaintext(const std::string& address) {
    if (platform::is_public_address(address) && !options_.allow_public_plaintext) {
      return Status::error(StatusCode::kInvalidUsage,
                           "refusing plain TCP to the public address " + address +
                               "; use a private network, or set PYCOMM_ALLOW_PUBLIC_PLAINTEXT=1 "
                               "if you accept that everyone on the path can read the gradients");
    }
    static std::atomic<bool> said{false};
    if (!said.exchange(true)) {
      base::log(base::LogLevel::kWarn, base::Subsystem::kNet,
                "TCP between hosts is authenticated at connect but not encrypted");
    }
    return Status();
  }

  Status add_tcp(UniqueFd stream, const std::string& process_id) {
    transport::tcp::LinkOptions options;
    options.eager_bytes_max = options_.eager_bytes_max;
    return engine_.add_link(process_id, transport::tcp::make_link(std::move(stream), options));
  }

  bool accept_tcp() {
    bool moved = false;
    UniqueFd fd = platform::accept_one(engine_.tcp_listener().fd.get());
    // The oldest makes room: who proves membership does so at once, strangers linger.
    if (fd && pending_.size() >= kPendingMax) pending_.erase(pending_.begin());
    if (fd && platform::crypto_viability().viable && platform::configure_stream(fd.get()).is_ok()) {
      const std::string& secret =
          options_.secret.empty() ? engine_.local_secret() : options_.secret;
      pending_.push_back(
          {std::move(fd),
           Membership::acceptor(secret, engine_.process_id(), platform::random_hex128()),
           handshake_deadline(deadline_),
           {}});
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
  bool advance(Pending& pending, bool* over) {
    char buffer[256];
    const std::size_t want = std::min(sizeof buffer, pending.membership.wanted());
    const platform::IoResult got = platform::read_some(pending.fd.get(), buffer, want);
    if (got.outcome == platform::IoOutcome::kWouldBlock) {
      *over = real_clock().now_ns() > pending.deadline;
      return *over;
    }
    Status status;
    if (got.outcome != platform::IoOutcome::kMoved) {
      status =
          Status::error(StatusCode::kSystem,
                        "it closed during the handshake; a rank with another PYCOMM_SECRET_FILE?");
    } else {
      status = pending.membership.feed({buffer, got.bytes}, &pending.out);
    }
    if (status.is_ok() && !pending.out.empty()) {
      // At most a hundred bytes on a fresh connection: the socket's buffer takes them whole.
      const iovec vector{pending.out.data(), pending.out.size()};
      const platform::IoResult sent = platform::write_vectors(pending.fd.get(), &vector, 1);
      if (sent.bytes != pending.out.size()) {
        status = Status::error(StatusCode::kSystem, "it takes no answer");
      }
      pending.out.clear();
    }
    if (status.is_ok() && pending.membership.is_done()) {
      *over = true;
      if (is_awaited(pending.membership.peer())) {
        status = add_tcp(std::move(pending.fd), pending.membership.peer());
      } else {
        engine_.stash({pending.membership.peer(), std::move(pending.fd), false});
      }
    }
    if (!status.is_ok()) {
      *over = true;
      log_refusal("a TCP connection", status);
    }
    return true;
  }

  Engine& engine_;
  Meeting& meeting_;
  const std::vector<Hello>& hellos_;
  const Rank rank_;
  const Options& options_;
  const TimeNs deadline_;
  std::vector<Pending> pending_;
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

Result<std::vector<std::shared_ptr<CoreLink>>> connect_all(Engine& engine, Meeting& meeting,
                                                           const std::vector<Hello>& hellos,
                                                           Rank rank, const Options& options,
                                                           TimeNs deadline) {
  Connector connector(engine, meeting, hellos, rank, options, deadline);
  PYCOMM_RETURN_IF_ERROR(connector.connect_lower());
  PYCOMM_RETURN_IF_ERROR(connector.accept_higher());
  std::vector<std::shared_ptr<CoreLink>> links;
  for (std::size_t r = 0; r < hellos.size(); ++r) {
    links.push_back(static_cast<Rank>(r) == rank ? nullptr
                                                 : engine.find_link(hellos[r].process_id));
  }
  return links;
}

}  // namespace pycomm::communicator

// How two processes come to a QUIC link: a handshaker (pycomm/handshaker.h) for each of the
// engine's UDP sockets shakes hands until a connection is confirmed and quiet; the engine carries
// it on. Between two processes there are as many connections as the one with more sockets has; a
// path that does not open is left out. Thread: the one that creates the group.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "communicator/bootstrap.h"
#include "communicator/engine.h"
#include "pycomm/handshaker.h"

namespace pycomm::communicator {

class QuicDoor {
 public:
  explicit QuicDoor(const Gathering& gathering) : gathering_(gathering) {}
  ~QuicDoor();

  // Errors: the handshaker's (certificates that cannot be read).
  Status open();
  // Errors: kTimeout (nothing came back: UDP is blocked), kInvalidUsage (refused, with the reason).
  Status connect(const Hello& theirs);
  // Moves handshakes on; true if anything moved.
  bool accept();
  // Whether a process that connects may still be about to open another path.
  bool awaits_paths(const Hello& theirs);

 private:
  struct Peer {
    std::set<int> connected;              // paths that are there; of those it opened, -1, -2, ...
    std::map<int, std::string> failures;  // by path
    std::shared_ptr<transport::CoreLink> link;  // that this door made
    base::TimeNs first_at = 0;
  };
  bool move();
  void log_refusal(const std::string& reason);
  base::TimeNs patience(int path, const Peer& peer) const;
  Status add(const HandedOver& state, std::size_t endpoint);
  HandshakeTarget target(const Hello& theirs, int path) const;
  Handshaker& handshaker_of(int path) {
    return *handshakers_[static_cast<std::size_t>(path) % handshakers_.size()];
  }
  int num_paths(const Hello& theirs) const;

  const Gathering& gathering_;
  std::vector<std::unique_ptr<Handshaker>> handshakers_;  // by endpoint
  std::map<std::string, Peer> peers_;                     // by process id
  std::set<int> blocked_;                                 // paths that led nowhere before
  int num_refusals_ = 0;
};

}  // namespace pycomm::communicator

// How two processes come to a QUIC link: the handshaker (pycomm/handshaker.h) shakes hands over the
// engine's UDP socket until a connection is confirmed and quiet; the engine carries it on.
// Thread: the one that creates the group.
#pragma once

#include <map>
#include <memory>
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

 private:
  bool move();
  Status add(const HandedOver& state);

  const Gathering& gathering_;
  std::unique_ptr<Handshaker> handshaker_;
  std::map<std::string, std::string> failures_;  // by process id
  int num_refusals_ = 0;
};

}  // namespace pycomm::communicator

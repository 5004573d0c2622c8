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
  QuicDoor(Engine& engine, Meeting& meeting, const std::vector<Hello>& hellos, Rank rank,
           const Options& options, base::TimeNs deadline);
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
  std::string name_of(std::size_t rank) const;

  Engine& engine_;
  Meeting& meeting_;
  const std::vector<Hello>& hellos_;
  const Rank rank_;
  const Options& options_;
  const base::TimeNs deadline_;
  std::unique_ptr<Handshaker> handshaker_;
  std::map<std::string, std::string> failures_;  // by process id
  int num_refusals_ = 0;
};

}  // namespace pycomm::communicator

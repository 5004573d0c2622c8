// How two processes come to a TCP link: connect or accept, TLS where certificates are set, then
// Membership. Thread: the one that creates the group.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "communicator/bootstrap.h"
#include "communicator/engine.h"
#include "communicator/rdma_door.h"
#include "platform/tls.h"
#include "transport/tcp/membership.h"

namespace pycomm::communicator {

// One stranger that connects and says nothing may not hold up a group for longer.
base::TimeNs handshake_deadline(base::TimeNs deadline);

class TcpDoor {
 public:
  TcpDoor(const Gathering& gathering, RdmaDoor& rdma) : gathering_(gathering), rdma_(rdma) {}

  // Reads the certificates, if any. Errors: as TlsContext::load.
  Status open();
  // `secret` proves membership, beside a certificate where those are set.
  Status connect(const Hello& theirs, const std::string& secret);
  // Takes one connection, moves the handshakes on; true if anything moved.
  bool accept();
  // Makes a link of one that came before its group was known here.
  Status take_up(Stashed early);

 private:
  struct Pending {
    std::unique_ptr<platform::ByteStream> stream;
    bool has_shaken_hands = false;
    std::unique_ptr<transport::tcp::Membership> membership;
    base::TimeNs deadline = 0;
    std::string out;
  };

  Status check_route(const std::string& address);
  Result<std::unique_ptr<platform::ByteStream>> reach(const std::string& address,
                                                      std::uint16_t port, Rank peer);
  Status converse(platform::ByteStream& stream, transport::tcp::Membership& membership,
                  bool* was_heard);
  bool advance(Pending& pending, bool* over);
  Status hear(Pending& pending, bool* moved);
  // Whether the certificate is made out to the rank that the peer says it is.
  Status check_name(const platform::ByteStream& stream, Rank peer) const;
  void refuse(Pending& pending, const Status& why);
  Status add(std::unique_ptr<platform::ByteStream> stream, const std::string& process_id);

  const Gathering& gathering_;
  RdmaDoor& rdma_;
  std::shared_ptr<platform::TlsContext> tls_;  // null without certificates
  std::vector<Pending> pending_;
  int num_refusals_ = 0;
};

}  // namespace pycomm::communicator

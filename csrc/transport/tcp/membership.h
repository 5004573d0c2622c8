// Proof of membership before a TCP connection may carry anything: both sides show, by HMAC over
// fresh nonces, that they hold the job's secret. Sans-IO: bytes in, bytes out.
//
//   connector -> acceptor   magic, version, connector's process id, acceptor's, nonce
//   acceptor  -> connector  'c', nonce, MAC("acceptor", everything above)
//   connector -> acceptor   MAC("connector", everything above)
//   acceptor  -> connector  'k'
// or, instead of an answer of the acceptor's, 'r', a length of one byte and a reason in words.
// The two labels keep one side's answer from being replayed as the other's. It authenticates the
// connection's begin, not its bytes; under TLS the secret is the connection's own (exporter), which
// binds the process ids to it. See docs/security.md.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "pycomm/status.h"

namespace pycomm::transport::tcp {

class Membership {
 public:
  // Process ids and nonces are 32 hexadecimal digits.
  static Membership connector(std::string secret, const std::string& self, const std::string& peer,
                              const std::string& nonce);
  static Membership acceptor(std::string secret, const std::string& self, const std::string& nonce);

  // What must be sent first.
  std::string start() const;
  // Takes bytes of the peer's; appends to *out what must be sent. After is_done() it takes no more.
  // Errors: kInternal (not this protocol), kInvalidUsage (wrong secret, wrong process).
  Status feed(std::string_view in, std::string* out);
  // How many bytes it still needs, so that no byte of the stream behind it is taken.
  std::size_t wanted() const { return wanted_ - buffer_.size(); }
  bool is_done() const { return state_ == State::kDone; }
  // The acceptor's: empty until the hello is here.
  const std::string& peer() const { return peer_; }
  // What an acceptor sends before it closes.
  static std::string refusal(std::string_view reason);

 private:
  enum class State {
    kHello,
    kAnswer,
    kChallenge,
    kProof,
    kVerdict,
    kRefusal,
    kReason,
    kDone,
  };
  Membership() = default;
  Status step(std::string* out);
  Status on_hello(std::string* out);
  Status on_challenge(std::string* out);
  void expect(State state, std::size_t bytes);
  std::string mac(const char* label) const;

  State state_ = State::kHello;
  std::string secret_, self_, peer_, nonce_, transcript_, buffer_;
  std::size_t wanted_ = 0;
};

}  // namespace pycomm::transport::tcp

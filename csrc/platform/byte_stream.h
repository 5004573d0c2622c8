// A connected, non-blocking stream of bytes: a socket, plain or under TLS.
#pragma once

#include <memory>
#include <string>

#include "platform/fd.h"
#include "platform/sockets.h"

namespace pycomm::platform {

class ByteStream {
 public:
  virtual ~ByteStream() = default;

  virtual int fd() const = 0;
  // Moves the handshake on: kMoved when it is done, kWouldBlock while it is not, else why not.
  virtual IoResult shake_hands() { return {IoOutcome::kMoved}; }
  // Whether the peer's certificate is made out to `name`; a plain stream knows nothing against it.
  virtual bool peer_is_named(const std::string&) const { return true; }
  // 32 bytes that only the two ends of this connection know, or nothing (RFC 8446 section 7.5).
  virtual std::string export_secret() const { return {}; }

  // What they move is moved for good: bytes that write_vectors() took will leave by flush().
  virtual IoResult write_vectors(const iovec* vectors, int count) = 0;
  virtual IoResult read_some(void* data, std::uint64_t bytes) = 0;
  // Lets taken bytes leave; false while some are left.
  virtual IoResult flush() { return {IoOutcome::kMoved}; }
  // Nothing more will be written. May be called again while bytes are left.
  virtual void end_writing() = 0;
  // Of a kFailed, in words.
  virtual std::string explain(const IoResult& failed) const = 0;
  virtual bool is_encrypted() const { return false; }
};

std::unique_ptr<ByteStream> make_plain_stream(UniqueFd socket);

}  // namespace pycomm::platform

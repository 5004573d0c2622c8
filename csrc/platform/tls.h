// TLS 1.3 with certificates on both sides over a connected socket (RFC 8446), by OpenSSL 3.
//
// A certificate of the peer's is taken if it chains to the CA, is within its dates, allows this use
// and is not on the list of the denied; whether its name fits is the caller's question too, since
// who accepts learns only later who it should be. No tickets, no resumption, no early data.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "platform/byte_stream.h"
#include "pycomm/options.h"

namespace pycomm::platform {

class TlsContext {
 public:
  virtual ~TlsContext() = default;
  // Reads the files anew. Errors: kSystem (no OpenSSL 3), kInvalidUsage (a file: which, and why).
  static Result<std::shared_ptr<TlsContext>> load(const TlsOptions& options);

  // The certificate of the one that accepts must be made out to `peer_name`.
  virtual std::unique_ptr<ByteStream> connect(UniqueFd socket, const std::string& peer_name) = 0;
  virtual std::unique_ptr<ByteStream> accept(UniqueFd socket) = 0;
};

}  // namespace pycomm::platform

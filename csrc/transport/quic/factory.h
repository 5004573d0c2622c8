// Links over QUIC connections whose handshake is done (pycomm/handshaker.h).
#pragma once

#include <memory>
#include <optional>

#include "pycomm/communicator.h"
#include "transport/core_link.h"
#include "transport/quic/endpoint.h"

namespace pycomm::transport::quic {

struct LinkOptions {
  std::uint64_t eager_bytes_max = 8 * 1024;
  SessionOptions session;
};

// The link lives no longer than `endpoint`. Errors: as Session::create.
Result<std::unique_ptr<CoreLink>> make_link(std::shared_ptr<Endpoint> endpoint,
                                            const HandedOver& state, const LinkOptions& options,
                                            base::TimeNs now);

// Nothing for a link of another transport.
std::optional<PathStats> path_stats(const CoreLink& link);

}  // namespace pycomm::transport::quic

// Links over QUIC connections whose handshake is done (pycomm/handshaker.h).
#pragma once

#include <memory>
#include <vector>

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

// Another connection between the same two processes: the link's bytes are striped over all of them.
// Errors: as Session::create; kInvalidUsage for a link of another transport.
Status add_path(CoreLink& link, std::shared_ptr<Endpoint> endpoint, const HandedOver& state,
                const LinkOptions& options, base::TimeNs now);

// A row for each connection, the quickest first; none for a link of another transport.
std::vector<PathStats> path_stats(const CoreLink& link);

}  // namespace pycomm::transport::quic

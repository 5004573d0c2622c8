// Links over QUIC connections whose handshake is done (pycomm/handshaker.h).
#pragma once

#include <memory>

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

// What a link knows of its path, for stats(); nothing for a link of another transport.
struct PathStats {
  double rtt_s = 0, bandwidth_bytes_per_s = 0;
  std::uint64_t packets_sent = 0, packets_lost = 0, bytes_resent = 0, window_bytes = 0, mtu = 0;
};
bool path_stats(const CoreLink& link, PathStats* out);

}  // namespace pycomm::transport::quic

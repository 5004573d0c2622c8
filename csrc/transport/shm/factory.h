// Shared-memory links between processes of one user on one host.
#pragma once

#include <memory>
#include <string>

#include "base/clock.h"
#include "platform/fd.h"
#include "transport/core_link.h"
#include "transport/shm/host.h"

namespace pycomm::transport::shm {

struct LinkOptions {
  std::uint64_t eager_bytes_max = 8 * 1024;
  bool allow_pull = true;  // process_vm_readv where the kernel grants it
};

// Exchanges segments over a connected local socket whose peer runs as this user. Both sides call
// it; each blocks until the other did, up to the deadline. The socket stays open: its end of file
// is how a death is noticed.
// Errors: kTimeout, kInternal (the peer is no pycomm of this version), kSystem.
Result<std::unique_ptr<CoreLink>> establish(Host& host, platform::UniqueFd socket,
                                            const LinkOptions& options, base::TimeNs deadline);

// What ranks that share memory need of each other beside the link.
struct PeerFlags {
  const std::atomic<std::uint32_t>* bell_armed;
  const std::atomic<std::uint32_t>* flat_sleepers;
  const platform::Doorbell* doorbell;
  int pid;
  bool can_be_read;  // this process may read the peer's memory
};
// `link` must come from establish().
PeerFlags peer_flags(CoreLink& link);

}  // namespace pycomm::transport::shm

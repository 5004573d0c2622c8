// Which address a rank listens on and which one it tells its peers: one policy, in one place.
#pragma once

#include <string>
#include <vector>

#include "platform/sockets.h"
#include "pycomm/options.h"
#include "pycomm/transport.h"

namespace pycomm::communicator {

// The first interface that `spec` allows, in the system's order: "eth,ib" names prefixes, "=eth0"
// exact names, a leading ^ excludes what follows. Without a spec loopback and docker bridges come
// last. Errors: kInvalidUsage naming the interfaces that there are.
Result<platform::Interface> choose_interface(const std::string& spec,
                                             const std::vector<platform::Interface>& interfaces);

struct Addresses {
  std::string listen;     // "" is any
  std::string advertise;  // what peers connect to
};
// Without a job's secret nobody on another host can join: then only this host is listened to.
Result<Addresses> choose_addresses(const Options& options);

// Whether a rank on another host can have any use of the address; if not, why and what to do.
Viability is_reachable_from_elsewhere(const std::string& address);

}  // namespace pycomm::communicator

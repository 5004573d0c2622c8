// RDMA links between processes that proved membership over a stream, which stays open beside the
// rails: it carries their addresses and what is said when one breaks, and its end is the peer's.
#pragma once

#include <memory>
#include <vector>

#include "platform/byte_stream.h"
#include "platform/memory_monitor.h"
#include "platform/verbs.h"
#include "pycomm/communicator.h"
#include "transport/core_link.h"
#include "transport/rdma/registrations.h"

namespace pycomm::transport::rdma {

// What all links of a process share.
struct Place {
  std::vector<std::shared_ptr<platform::verbs::Port>> ports;
  std::shared_ptr<RegistrationBudget> budget;
  platform::MemoryMonitor* monitor = nullptr;  // null: registrations last for one use
};

struct LinkOptions {
  std::uint64_t eager_bytes_max = 8 * 1024;
  RdmaOptions rdma;
  std::int64_t establish_ns = 5'000'000'000;  // for the first rails to carry something
  std::int64_t patience_ns = 5'000'000'000;   // without any rail, before the peer is given up
};

enum class Establishment : std::uint8_t {
  kUnderWay,
  kDone,
  kRefused,  // by either side: take_stream() serves for a link of another kind
};

// Both ends make one over the same stream, and call progress() until it is established. Errors:
// kSystem (descriptors).
Result<std::shared_ptr<CoreLink>> make_link(std::unique_ptr<platform::ByteStream> stream,
                                            const Place& place, const LinkOptions& options,
                                            base::TimeNs now);
Establishment establishment(const CoreLink& link);
// Of a refused link; why it was refused in words.
std::unique_ptr<platform::ByteStream> take_stream(CoreLink& link, std::string* reason);

// None for a link of another kind.
std::optional<RdmaStats> link_stats(const CoreLink& link);

}  // namespace pycomm::transport::rdma

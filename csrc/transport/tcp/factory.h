// TCP links between processes that proved membership.
#pragma once

#include <memory>

#include "platform/fd.h"
#include "transport/core_link.h"

namespace pycomm::transport::tcp {

struct LinkOptions {
  std::uint64_t eager_bytes_max = 8 * 1024;
};

// Takes a connected, configured stream on which Membership is done.
std::unique_ptr<CoreLink> make_link(platform::UniqueFd stream, const LinkOptions& options);

}  // namespace pycomm::transport::tcp

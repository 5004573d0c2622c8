// TCP links between processes that proved membership.
#pragma once

#include <memory>

#include "platform/byte_stream.h"
#include "transport/core_link.h"

namespace pycomm::transport::tcp {

struct LinkOptions {
  std::uint64_t eager_bytes_max = 8 * 1024;
};

// Takes a connected stream, plain or under TLS, on which Membership is done.
std::unique_ptr<CoreLink> make_link(std::unique_ptr<platform::ByteStream> stream,
                                    const LinkOptions& options);

}  // namespace pycomm::transport::tcp

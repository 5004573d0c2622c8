// TUN devices in other network namespaces: whole IP packets, by read and write.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/clock.h"
#include "platform/fd.h"
#include "pycomm/status.h"

namespace pycomm::platform {

inline constexpr std::size_t kPacketBytesMax = 65'536;

// A non-blocking device `name` in the namespace that `namespace_path` names; it goes with the fd.
// Errors: kSystem (no such namespace, no /dev/net/tun, no CAP_NET_ADMIN and CAP_SYS_ADMIN).
Result<UniqueFd> open_tun(const std::string& namespace_path, const std::string& name);

// The packet's bytes, or 0 if there is none, or no room.
std::size_t read_packet(int fd, std::uint8_t* out, std::size_t bytes_max);
std::size_t write_packet(int fd, const std::uint8_t* packet, std::size_t bytes);

// Until one of them is readable, at most until `deadline`.
void await_any_readable(const std::vector<int>& fds, base::TimeNs deadline);

}  // namespace pycomm::platform

// The few things that a network changes in a packet, with their checksums. Source: RFC 791, RFC
// 768, RFC 3168 (ECN), RFC 1624 (incremental update of a checksum).
#pragma once

#include <cstdint>
#include <optional>
#include <span>

namespace pycomm::lab {

// Host byte order; nothing for what is no whole IPv4 header.
std::optional<std::uint32_t> ipv4_destination(std::span<const std::uint8_t> packet);

// Sets Congestion Experienced if the sender understands ECN.
void mark_congestion(std::span<std::uint8_t> packet);

enum class UdpPort { kSource, kDestination };
// Leaves packets alone that are not UDP, and fragments that have no header.
void shift_udp_port(std::span<std::uint8_t> packet, UdpPort which, int shift);

}  // namespace pycomm::lab

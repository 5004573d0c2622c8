#include "lab/packet_edit.h"

namespace pycomm::lab {
namespace {

constexpr std::size_t kIpHeaderBytesMin = 20;
constexpr std::size_t kTosOffset = 1;
constexpr std::size_t kFragmentOffset = 6;
constexpr std::size_t kProtocolOffset = 9;
constexpr std::size_t kIpChecksumOffset = 10;
constexpr std::size_t kDestinationOffset = 16;
constexpr std::uint8_t kUdp = 17;
constexpr std::uint8_t kEcnBits = 3;
constexpr std::size_t kUdpHeaderBytes = 8;
constexpr std::size_t kUdpChecksumOffset = 6;
constexpr std::uint16_t kFragmentBits = 0x1fff;

std::uint16_t read_u16(std::span<const std::uint8_t> bytes, std::size_t at) {
  return static_cast<std::uint16_t>(bytes[at] << 8 | bytes[at + 1]);
}

void write_u16(std::span<std::uint8_t> bytes, std::size_t at, std::uint16_t value) {
  bytes[at] = static_cast<std::uint8_t>(value >> 8);
  bytes[at + 1] = static_cast<std::uint8_t>(value);
}

// HC' = ~(~HC + ~m + m'), RFC 1624 section 3.
std::uint16_t updated(std::uint16_t checksum, std::uint16_t before, std::uint16_t after) {
  std::uint32_t sum = static_cast<std::uint16_t>(~checksum);
  sum += static_cast<std::uint16_t>(~before);
  sum += after;
  while (sum > 0xffff) sum = (sum & 0xffff) + (sum >> 16);
  return static_cast<std::uint16_t>(~sum);
}

bool is_ipv4(std::span<const std::uint8_t> packet) {
  return packet.size() >= kIpHeaderBytesMin && packet[0] >> 4 == 4;
}

}  // namespace

std::optional<std::uint32_t> ipv4_destination(std::span<const std::uint8_t> packet) {
  if (!is_ipv4(packet)) return std::nullopt;
  return std::uint32_t{read_u16(packet, kDestinationOffset)} << 16 |
         read_u16(packet, kDestinationOffset + 2);
}

void mark_congestion(std::span<std::uint8_t> packet) {
  if (!is_ipv4(packet) || (packet[kTosOffset] & kEcnBits) == 0) return;
  const std::uint16_t before = read_u16(packet, 0);
  packet[kTosOffset] |= kEcnBits;
  const std::uint16_t checksum = read_u16(packet, kIpChecksumOffset);
  write_u16(packet, kIpChecksumOffset, updated(checksum, before, read_u16(packet, 0)));
}

void shift_udp_port(std::span<std::uint8_t> packet, UdpPort which, int shift) {
  if (!is_ipv4(packet) || packet[kProtocolOffset] != kUdp) return;
  if ((read_u16(packet, kFragmentOffset) & kFragmentBits) != 0) return;
  const std::size_t header = std::size_t{4} * (packet[0] & 0xf);
  if (packet.size() < header + kUdpHeaderBytes) return;
  const std::size_t at = header + (which == UdpPort::kSource ? 0 : 2);
  const std::uint16_t before = read_u16(packet, at);
  const auto after = static_cast<std::uint16_t>(before + shift);
  write_u16(packet, at, after);
  // Zero means that the sender computed none.
  const std::uint16_t checksum = read_u16(packet, header + kUdpChecksumOffset);
  if (checksum == 0) return;
  const std::uint16_t fresh = updated(checksum, before, after);
  write_u16(packet, header + kUdpChecksumOffset, fresh == 0 ? 0xffff : fresh);
}

}  // namespace pycomm::lab

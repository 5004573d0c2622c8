// A program that takes a QUIC v2 connection over and exchanges packets with the peer:
//
//   packet_tool [--send HEX] [--expect HEX] --state-fd N --socket-fd M
//
// It repeats the frames HEX, each time in a packet of its own, until a packet of the peer holds the
// bytes of --expect, and then sends them once more, since the peer may have started only now.
// It acknowledges nothing, so it suits a network without loss. Every opened packet is printed. Exit
// status: 0, or 1 with the reason on stderr.
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <span>
#include <string_view>
#include <vector>

#include "handed_over_state.h"
#include "packet_protection.h"

namespace pycomm::probe {
namespace {

using Bytes = std::vector<std::uint8_t>;

constexpr int kRepeatIntervalMs = 20;
constexpr int kNumRepeatsMax = 250;  // 5 s
constexpr std::size_t kDatagramBytesMax = 65535;

struct Options {
  Bytes send;
  Bytes expect;
  int state_fd = -1;
  int socket_fd = -1;
};

bool fail(std::string_view reason) {
  std::fprintf(stderr, "packet_tool: %.*s\n", static_cast<int>(reason.size()), reason.data());
  return false;
}

bool parse_options(int argc, char** argv, Options& options) {
  if (argc % 2 == 0) return false;
  for (int i = 1; i < argc; i += 2) {
    const std::string_view name = argv[i];
    const std::string_view value = argv[i + 1];
    const bool is_known = (name == "--send" && parse_hex(value, options.send)) ||
                          (name == "--expect" && parse_hex(value, options.expect)) ||
                          (name == "--state-fd" && parse_number(value, options.state_fd)) ||
                          (name == "--socket-fd" && parse_number(value, options.socket_fd));
    if (!is_known) return false;
  }
  return options.state_fd >= 0 && options.socket_fd >= 0;
}

void print(const OpenedPacket& packet) {
  std::printf("opened packet_number=%llu payload=",
              static_cast<unsigned long long>(packet.packet_number));
  for (const std::uint8_t byte : packet.payload) std::printf("%02x", byte);
  std::printf("\n");
}

bool send_packet(const Options& options, PacketProtection& protection, std::uint64_t number) {
  if (options.send.empty()) return true;
  const auto packet = protection.seal(number, options.send);
  if (!packet) return fail("could not seal");
  // A refusal is the kernel's word for a peer that is not there yet; the next try tells.
  if (send(options.socket_fd, packet->data(), packet->size(), 0) < 0 && errno != ECONNREFUSED)
    return fail("could not send");
  std::printf("sealed packet_number=%llu\n", static_cast<unsigned long long>(number));
  return true;
}

// Waits one interval for the expected bytes.
bool receive_packets(const Options& options, PacketProtection& protection) {
  Bytes buffer(kDatagramBytesMax);
  pollfd socket{options.socket_fd, POLLIN, 0};
  while (poll(&socket, 1, kRepeatIntervalMs) == 1) {
    const ssize_t got = recv(options.socket_fd, buffer.data(), buffer.size(), 0);
    if (got < 0) continue;
    const auto packet = protection.open(std::span(buffer).first(static_cast<std::size_t>(got)));
    if (!packet) continue;
    print(*packet);
    const auto& expect = options.expect;
    const auto& payload = packet->payload;
    if (std::search(payload.begin(), payload.end(), expect.begin(), expect.end()) != payload.end())
      return true;
  }
  return false;
}

bool run(int argc, char** argv) {
  Options options;
  if (!parse_options(argc, argv, options)) return fail("wrong arguments");
  ConnectionState state;
  if (!read_handed_over_state(options.state_fd, state)) return fail("the state is malformed");
  const auto protection = PacketProtection::create(state);
  if (!protection) return fail("the state is not usable");
  for (std::uint64_t i = 0; i < kNumRepeatsMax; ++i) {
    if (!send_packet(options, *protection, state.next_packet_number + i)) return false;
    if (options.expect.empty()) return true;
    if (receive_packets(options, *protection))
      return send_packet(options, *protection, state.next_packet_number + i + 1);
  }
  return fail("the peer did not answer");
}

}  // namespace
}  // namespace pycomm::probe

int main(int argc, char** argv) { return pycomm::probe::run(argc, argv) ? 0 : 1; }

// A program that takes a QUIC v2 connection over and exchanges packets with the peer:
//
//   packet_tool [--send HEX] [--expect HEX] --state-fd N --socket-fd M
//
// It repeats the frames HEX, each time in a packet of its own, until a packet of the peer holds the
// bytes of --expect, and then sends them once more, since the peer may have started only now.
// It acknowledges nothing, so it suits a network without loss. Every opened packet is printed. Exit
// status: 0, or 1 with the reason on stderr.
#include <openssl/crypto.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <map>
#include <span>
#include <string_view>
#include <vector>

#include "packet_protection.h"

namespace pycomm::probe {
namespace {

using Bytes = std::vector<std::uint8_t>;

constexpr int kRepeatIntervalMs = 20;
constexpr int kNumRepeatsMax = 250;  // 5 s
constexpr std::size_t kStateBytesMax = 4096;
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

template <typename Number>
bool parse_number(std::string_view text, Number& out, int base = 10) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out, base);
  return error == std::errc{} && end == text.data() + text.size() && !text.empty();
}

bool parse_hex(std::string_view text, std::span<std::uint8_t> out) {
  if (text.size() != 2 * out.size()) return false;
  for (std::size_t i = 0; i < out.size(); ++i) {
    if (!parse_number(text.substr(2 * i, 2), out[i], 16)) return false;
  }
  return true;
}

bool parse_hex(std::string_view text, Bytes& out) {
  out.resize(text.size() / 2);
  return parse_hex(text, std::span<std::uint8_t>(out));
}

// Every key must appear exactly once, and no other. Errors: false.
bool parse_state(std::string_view text, ConnectionState& state) {
  std::map<std::string_view, std::string_view> values;
  while (!text.empty()) {
    const std::size_t line_end = text.find('\n');
    const std::size_t equals = text.find('=');
    if (line_end == text.npos || equals == text.npos || equals > line_end) return false;
    const auto value = text.substr(equals + 1, line_end - equals - 1);
    if (!values.emplace(text.substr(0, equals), value).second) return false;
    text.remove_prefix(line_end + 1);
  }
  unsigned key_phase = 0;
  const bool is_parsed = values.size() == 7 &&
                         parse_hex(values["send_secret"], state.send_secret) &&
                         parse_hex(values["recv_secret"], state.recv_secret) &&
                         parse_hex(values["own_cid"], state.own_cid) &&
                         parse_hex(values["peer_cid"], state.peer_cid) &&
                         parse_number(values["next_packet_number"], state.next_packet_number) &&
                         parse_number(values["largest_received_packet_number"],
                                      state.largest_received_packet_number) &&
                         parse_number(values["key_phase"], key_phase) && key_phase <= 1;
  state.key_phase = key_phase == 1;
  return is_parsed;
}

// Reads the pipe to its end and wipes the text, which holds the secrets.
bool read_state(int fd, ConnectionState& state) {
  std::array<char, kStateBytesMax> text{};
  std::size_t num_bytes = 0;
  ssize_t got = 0;
  while (num_bytes < text.size() &&
         (got = read(fd, text.data() + num_bytes, text.size() - num_bytes)) > 0) {
    num_bytes += static_cast<std::size_t>(got);
  }
  const bool is_read = got == 0 && parse_state({text.data(), num_bytes}, state);
  OPENSSL_cleanse(text.data(), text.size());
  close(fd);
  return is_read;
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
  if (!read_state(options.state_fd, state)) return fail("the state is malformed");
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

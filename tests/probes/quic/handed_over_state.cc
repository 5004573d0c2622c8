#include "handed_over_state.h"

#include <openssl/crypto.h>
#include <unistd.h>

#include <array>
#include <map>

namespace pycomm::probe {
namespace {

constexpr std::size_t kStateBytesMax = 4096;

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

}  // namespace

bool read_handed_over_state(int fd, ConnectionState& state) {
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

}  // namespace pycomm::probe

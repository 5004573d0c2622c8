// The state of a connection as handshake.py hands it over: `key=value` lines on a pipe.
#pragma once

#include <charconv>
#include <cstdint>
#include <span>
#include <string_view>
#include <system_error>
#include <vector>

#include "packet_protection.h"

namespace pycomm::probe {

using Bytes = std::vector<std::uint8_t>;

// Reads the pipe to its end, closes it, and wipes the text, which holds the secrets.
// Errors: false if a key is missing, unknown, doubled or malformed.
bool read_handed_over_state(int fd, ConnectionState& state);

template <typename Number>
bool parse_number(std::string_view text, Number& out, int base = 10) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out, base);
  return error == std::errc{} && end == text.data() + text.size() && !text.empty();
}

inline bool parse_hex(std::string_view text, std::span<std::uint8_t> out) {
  if (text.size() != 2 * out.size()) return false;
  for (std::size_t i = 0; i < out.size(); ++i) {
    if (!parse_number(text.substr(2 * i, 2), out[i], 16)) return false;
  }
  return true;
}

inline bool parse_hex(std::string_view text, Bytes& out) {
  out.resize(text.size() / 2);
  return parse_hex(text, std::span<std::uint8_t>(out));
}

}  // namespace pycomm::probe

// Hashing of small records: FNV-1a (G. Fowler, L. C. Noll, K.-P. Vo; constants from RFC 9923),
// and a mixer for integer keys. Not for anything an attacker may choose.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "pycomm/transport.h"

namespace pycomm::base {

constexpr std::uint64_t fnv1a(std::string_view text) {
  std::uint64_t hash = 0xcbf29ce484222325ull;
  for (char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
  return hash;
}

constexpr std::uint64_t mix(std::uint64_t a, std::uint64_t b) {
  std::uint64_t h = (a ^ (b + 0x9E3779B97F4A7C15ull + (a << 6) + (a >> 2))) * 0xBF58476D1CE4E5B9ull;
  return h ^ (h >> 29);
}

struct TransferIdHash {
  std::size_t operator()(const TransferId& id) const {
    return mix(mix(id.group, id.op), mix((std::uint64_t{id.epoch} << 32) | id.step, id.chunk));
  }
};

}  // namespace pycomm::base

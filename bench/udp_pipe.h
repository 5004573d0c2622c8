// What an encrypted datagram transport cannot beat on loopback: one process seals and sends, the
// other receives and opens, by the same AEAD, in batches (GSO, GRO). No acknowledgement, no loss
// recovery, no congestion control, no copy to anywhere.
//
// Reviewed: nothing here may be slowed to win.
#pragma once

#include <cstdint>

namespace pycomm::bench {

enum class PipeCipher : std::uint8_t { kNone, kOpenssl, kIpsecMb };  // AES-128-GCM by a library

// Bytes of UDP payload that arrived a second, in datagrams of `payload_bytes` that are read from
// `source_bytes` of memory, over and over; without a library they are not encrypted. Zero: cannot
// be measured here (no such library).
double udp_pipe_bytes_per_s(std::uint64_t payload_bytes, std::uint64_t source_bytes,
                            PipeCipher cipher);

}  // namespace pycomm::bench

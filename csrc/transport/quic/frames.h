// Frame types of 1-RTT packets (RFC 9000 section 19, RFC 9221 section 4), and the one message of
// our own: a DATAGRAM by which an engine says that it, and no longer its handshake, listens.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pycomm::transport::quic {

inline constexpr std::uint64_t kFramePadding = 0x00, kFramePing = 0x01;
inline constexpr std::uint64_t kFrameAck = 0x02, kFrameAckEcn = 0x03;
inline constexpr std::uint64_t kFrameResetStream = 0x04, kFrameStopSending = 0x05;
inline constexpr std::uint64_t kFrameCrypto = 0x06, kFrameNewToken = 0x07;
inline constexpr std::uint64_t kFrameStream = 0x08, kFrameStreamLast = 0x0f;
inline constexpr std::uint64_t kStreamFinBit = 1, kStreamLengthBit = 2, kStreamOffsetBit = 4;
inline constexpr std::uint64_t kFrameMaxData = 0x10, kFrameMaxStreamData = 0x11;
inline constexpr std::uint64_t kFrameMaxStreamsBidi = 0x12, kFrameMaxStreamsUni = 0x13;
inline constexpr std::uint64_t kFrameDataBlocked = 0x14, kFrameStreamDataBlocked = 0x15;
inline constexpr std::uint64_t kFrameStreamsBlockedBidi = 0x16, kFrameStreamsBlockedUni = 0x17;
inline constexpr std::uint64_t kFrameNewConnectionId = 0x18, kFrameRetireConnectionId = 0x19;
inline constexpr std::uint64_t kFramePathChallenge = 0x1a, kFramePathResponse = 0x1b;
inline constexpr std::uint64_t kFrameCloseTransport = 0x1c, kFrameCloseApplication = 0x1d;
inline constexpr std::uint64_t kFrameHandshakeDone = 0x1e;
inline constexpr std::uint64_t kFrameDatagram = 0x30, kFrameDatagramLength = 0x31;

// "I am the engine", then a byte: the sender heard the receiver; and knows that it is heard itself,
// so that nobody need answer.
inline constexpr char kHelloText[] = "pycomm engine ";
inline constexpr std::size_t kHelloBytes = sizeof kHelloText;
inline constexpr std::uint8_t kHelloHearsYou = 1, kHelloKnowsIt = 2;

}  // namespace pycomm::transport::quic

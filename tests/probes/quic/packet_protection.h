// Sealing and opening of QUIC v2 1-RTT packets with AES-128-GCM, for a connection whose handshake
// was made elsewhere.
//
// Invariant: a packet number is sealed at most once, and never one below the hand-over's
// next_packet_number, so that no AEAD nonce repeats (RFC 9001 section 5.3).
// Not here: key updates, duplicate detection, acknowledgements, frames.
// Thread: one at a time. Errors: nothing throws; an empty optional or pointer is a failure.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

struct evp_cipher_ctx_st;

namespace pycomm::probe {

inline constexpr std::size_t kSecretBytes = 32;           // SHA-256, RFC 8446 section 7.1
inline constexpr std::size_t kKeyBytes = 16;              // AES-128, RFC 9001 section 5.1
inline constexpr std::size_t kIvBytes = 12;               // RFC 9001 section 5.3
inline constexpr std::size_t kTagBytes = 16;              // RFC 9001 section 5.3
inline constexpr std::size_t kPacketNumberBytes = 4;      // of the packets that seal() makes
inline constexpr std::size_t kConnectionIdBytesMax = 20;  // RFC 9000 section 17.2
inline constexpr std::uint64_t kPacketNumberMax = (std::uint64_t{1} << 62) - 1;  // section 12.3
inline constexpr std::uint64_t kNumSealedMax = std::uint64_t{1} << 23;  // RFC 9001 section 6.6
inline constexpr std::uint64_t kNumForgedMax = std::uint64_t{1} << 52;  // RFC 9001 section 6.6

// The 1-RTT part of a connection as it is handed over. Wiped on destruction.
struct ConnectionState {
  std::array<std::uint8_t, kSecretBytes> send_secret{};
  std::array<std::uint8_t, kSecretBytes> recv_secret{};
  std::vector<std::uint8_t> own_cid;   // destination of the packets that the peer sends
  std::vector<std::uint8_t> peer_cid;  // destination of the packets that we send
  std::uint64_t next_packet_number = 0;
  std::uint64_t largest_received_packet_number = 0;
  bool key_phase = false;

  ~ConnectionState();
};

// Keys of one direction. Wiped on destruction.
struct PacketKeys {
  std::array<std::uint8_t, kKeyBytes> key{};
  std::array<std::uint8_t, kIvBytes> iv{};
  std::array<std::uint8_t, kKeyBytes> hp{};  // header protection

  ~PacketKeys();
};

// HKDF-Expand-Label with an empty context, at most 32 bytes long, over SHA-256.
// Errors: false when OpenSSL fails or a length is out of range; `out` is unspecified then.
// Source: RFC 8446 section 7.1, RFC 5869 section 2.3.
bool hkdf_expand_label(std::span<const std::uint8_t> secret, std::string_view label,
                       std::span<std::uint8_t> out);

// The keys of a traffic secret, by the labels "quicv2 key", "quicv2 iv" and "quicv2 hp".
// Errors: false when OpenSSL fails. Source: RFC 9369 section 3.3.2, RFC 9001 section 5.1.
bool derive_packet_keys(std::span<const std::uint8_t, kSecretBytes> secret, PacketKeys& out);

// The packet number that is closest to the next expected one and ends in the `num_bits` bits of
// `truncated`. Source: RFC 9000 appendix A.3.
std::uint64_t decode_packet_number(std::uint64_t largest_received, std::uint64_t truncated,
                                   unsigned num_bits);

struct OpenedPacket {
  std::uint64_t packet_number = 0;
  std::span<std::uint8_t> payload;  // frames, inside the buffer that was given to open()
};

class PacketProtection {
 public:
  // Errors: null for an over-long connection ID, a packet number out of range or an OpenSSL
  // failure.
  static std::unique_ptr<PacketProtection> create(const ConnectionState& state);

  PacketProtection(const PacketProtection&) = delete;
  PacketProtection& operator=(const PacketProtection&) = delete;
  ~PacketProtection();

  // One short header packet for the peer, with a packet number of four bytes. The caller keeps
  // packet_number within 2^31 of the largest one acknowledged (RFC 9000 appendix A.2).
  // Errors: nullopt for a packet number that is used, skipped or out of range, for an empty payload
  // (RFC 9000 section 12.4), after kNumSealedMax packets, and on an OpenSSL failure; the packet
  // number counts as used in the last case. Source: RFC 9000 section 17.3.1, RFC 9001 section 5.
  std::optional<std::vector<std::uint8_t>> seal(std::uint64_t packet_number,
                                                std::span<const std::uint8_t> payload);

  // Decrypts a whole UDP datagram in place. A replayed packet opens again: duplicate detection is
  // the caller's (RFC 9000 section 12.3).
  // Errors: nullopt for what is not an authentic short header packet to us in our key phase; the
  // datagram's contents are unspecified then, and nothing else has changed.
  // Source: RFC 9000 section 17.3.1, RFC 9001 sections 5.3 and 5.4.
  std::optional<OpenedPacket> open(std::span<std::uint8_t> packet);

  // Packets that failed authentication; open() refuses everything after kNumForgedMax of them.
  std::uint64_t num_forged() const { return num_forged_; }

 private:
  struct ContextDeleter {
    void operator()(evp_cipher_ctx_st* context) const;
  };
  using Context = std::unique_ptr<evp_cipher_ctx_st, ContextDeleter>;
  using Mask = std::array<std::uint8_t, 5>;

  PacketProtection() = default;
  static Context make_context(bool is_aead, bool is_sealing, const PacketKeys& keys);
  bool encrypt(std::uint64_t packet_number, std::size_t header_bytes,
               std::span<const std::uint8_t> payload, std::span<std::uint8_t> packet);
  bool decrypt(std::uint64_t packet_number, std::span<const std::uint8_t> header,
               std::span<std::uint8_t> sealed);
  static bool header_mask(evp_cipher_ctx_st* context, std::span<const std::uint8_t> sample,
                          Mask& mask);

  Context seal_context_;
  Context open_context_;
  Context seal_header_context_;
  Context open_header_context_;
  std::array<std::uint8_t, kIvBytes> seal_iv_{};
  std::array<std::uint8_t, kIvBytes> open_iv_{};
  std::vector<std::uint8_t> own_cid_;
  std::vector<std::uint8_t> peer_cid_;
  std::uint64_t next_packet_number_ = 0;
  std::uint64_t largest_received_ = 0;
  std::uint64_t num_sealed_ = 0;
  std::uint64_t num_forged_ = 0;
  bool key_phase_ = false;
};

}  // namespace pycomm::probe

// Packet protection of QUIC v2's 1-RTT packets, both directions, with key updates.
// Source: RFC 9001 sections 5 and 6, RFC 9369 section 3.3.2 (the labels), RFC 9000 appendix A.
//
// Keys change before the AEAD's limits (RFC 9001 section 6.6), at the peer's wish too; the old ones
// open what was late for a while. Thread: the session's.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/clock.h"
#include "platform/aead.h"
#include "platform/secret_memory.h"

namespace pycomm::transport::quic {

using platform::Cipher;
using platform::CryptoLibrary;

inline constexpr std::size_t kSecretBytes = 32;  // both suites hash with SHA-256
inline constexpr std::size_t kConnectionIdBytesMax = 20;
inline constexpr std::size_t kPacketNumberBytesMax = 4;

struct TrafficSecret {
  std::array<std::uint8_t, kSecretBytes> bytes{};
};

struct ProtectionLimits {
  std::uint64_t packets_per_key_max = std::uint64_t{1} << 22;  // half of AES-GCM's 2^23
  std::uint64_t forged_max = std::uint64_t{1} << 35;  // a half of ChaCha20's, AES's is 2^52
};

// What open() found in a packet that nobody forged.
struct Opened {
  std::uint64_t packet_number = 0;
  std::uint8_t first_byte = 0;
  std::span<std::uint8_t> payload;
};

class Protection {
 public:
  // Errors: kSystem (no library).
  static Result<std::unique_ptr<Protection>> create(Cipher cipher, const TrafficSecret& sending,
                                                    const TrafficSecret& receiving,
                                                    const ProtectionLimits& limits,
                                                    CryptoLibrary library);
  ~Protection();

  // Bytes that a packet has besides its payload.
  static std::size_t overhead(std::size_t cid_bytes, std::size_t packet_number_bytes) {
    return 1 + cid_bytes + packet_number_bytes + platform::kTagBytes;
  }
  // Of a packet number, when everything up to `largest_acked` has arrived (RFC 9000 appendix A.2).
  static std::size_t packet_number_bytes(std::uint64_t number, std::uint64_t num_unacked);

  // Writes a whole packet to `out` and returns its size. The payload must have at least
  // 4 - packet_number_bytes bytes (RFC 9001 section 5.4.2).
  std::size_t seal(std::uint64_t packet_number, std::size_t number_bytes,
                   std::span<const std::uint8_t> cid, const iovec* pieces, int num_pieces,
                   std::size_t payload_bytes, std::uint8_t* out);
  // Opens a packet in place. Nothing: not ours, forged, or too late.
  std::optional<Opened> open(std::span<std::uint8_t> packet, std::size_t cid_bytes,
                             std::uint64_t largest_received, base::TimeNs now);

  // An update may follow an update only when a packet under the newest keys was acknowledged.
  void on_acked(std::uint64_t packet_number);
  bool wants_update() const;
  // From now on packets leave under the next keys. Requires may_update().
  void update();
  bool may_update() const { return is_confirmed_; }
  // Old keys are forgotten some probe timeouts after an update (RFC 9001 section 6.5).
  void drop_old_keys_at(base::TimeNs at) { drop_old_at_ = at; }
  bool has_old_keys() const { return old_ != nullptr; }

  // No packet may be sealed any more: the peer never confirmed the keys.
  bool is_worn_out() const { return num_sealed_ + 2 >= 2 * limits_.packets_per_key_max; }
  bool is_exhausted() const { return num_forged_ >= limits_.forged_max; }
  std::uint64_t num_forged() const { return num_forged_; }
  std::uint64_t num_updates() const { return num_updates_; }
  const char* library() const { return sending_.aead->library_name(); }

 private:
  struct Direction {
    std::unique_ptr<platform::Aead> aead;
    platform::Nonce iv{};
  };
  Protection() = default;
  Result<Direction> make_direction(const TrafficSecret& secret) const;
  Direction make_next(platform::Secret<TrafficSecret>& secret);
  void move_on(bool was_asked);
  bool open_with(Direction& keys, std::uint64_t number, std::span<const std::uint8_t> header,
                 std::span<std::uint8_t> sealed);

  Cipher cipher_ = Cipher::kAes128Gcm;
  CryptoLibrary library_ = CryptoLibrary::kAny;
  ProtectionLimits limits_;
  std::unique_ptr<platform::HeaderProtection> sending_header_, receiving_header_;
  Direction sending_, receiving_;
  Direction next_receiving_;        // made ahead, so that a forged bit costs no derivation
  std::unique_ptr<Direction> old_;  // for what was late
  platform::Secret<TrafficSecret> sending_secret_;         // of the phase in use
  platform::Secret<TrafficSecret> next_receiving_secret_;  // of the phase that comes
  bool phase_ = false;
  bool is_confirmed_ = true;                   // a packet of this phase was acknowledged
  std::uint64_t first_sent_of_phase_ = 0;      // its lowest packet number
  std::uint64_t first_received_of_phase_ = 0;  // lowest packet number opened with receiving_
  bool has_received_of_phase_ = false;
  std::uint64_t num_sealed_ = 0;
  std::uint64_t num_opened_ = 0;
  std::uint64_t num_forged_ = 0;
  std::uint64_t num_updates_ = 0;
  std::uint64_t last_sealed_ = 0;
  base::TimeNs drop_old_at_ = base::kNever;
};

// HKDF-Expand-Label for up to 32 bytes (RFC 8446 section 7.1).
void hkdf_expand_label(const TrafficSecret& secret, const char* label, std::span<std::uint8_t> out);

std::uint64_t decode_packet_number(std::uint64_t largest_received, std::uint64_t truncated,
                                   std::size_t num_bytes);

}  // namespace pycomm::transport::quic

#include "transport/quic/protection.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/check.h"
#include "platform/crypto.h"

namespace pycomm::transport::quic {
namespace {

constexpr std::uint8_t kLongHeaderBit = 0x80;
constexpr std::uint8_t kFixedBit = 0x40;
constexpr std::uint8_t kKeyPhaseBit = 0x04;
constexpr std::uint8_t kNumberLengthBits = 0x03;
constexpr std::uint8_t kProtectedBits = 0x1f;  // RFC 9001 section 5.4.1
constexpr std::size_t kSampleOffset = 4;       // from the packet number, RFC 9001 section 5.4.2

platform::Nonce make_nonce(const platform::Nonce& iv, std::uint64_t number) {
  platform::Nonce nonce = iv;
  for (std::size_t i = 0; i < sizeof number; ++i) {
    nonce[nonce.size() - 1 - i] ^= static_cast<std::uint8_t>(number >> (8 * i));
  }
  return nonce;
}

}  // namespace

void hkdf_expand_label(const TrafficSecret& secret, const char* label,
                       std::span<std::uint8_t> out) {
  PYCOMM_CHECK(out.size() <= kSecretBytes);
  const std::string full = std::string("tls13 ") + label;
  std::string info{'\0', static_cast<char>(out.size()), static_cast<char>(full.size())};
  info += full;
  info += '\0';    // no context
  info += '\x01';  // the first and only block of HKDF-Expand
  std::string key(secret.bytes.begin(), secret.bytes.end());
  platform::Mac block = platform::hmac_sha256(key, info);
  std::copy_n(block.begin(), out.size(), out.begin());
  platform::wipe(block.data(), block.size());
  platform::wipe(key.data(), key.size());
}

std::uint64_t decode_packet_number(std::uint64_t largest_received, std::uint64_t truncated,
                                   std::size_t num_bytes) {
  const std::uint64_t expected = largest_received + 1;
  const std::uint64_t window = std::uint64_t{1} << (8 * num_bytes);
  const std::uint64_t half = window / 2;
  const std::uint64_t candidate = (expected & ~(window - 1)) | truncated;
  if (candidate + half <= expected && candidate < (std::uint64_t{1} << 62) - window) {
    return candidate + window;
  }
  if (candidate > expected + half && candidate >= window) return candidate - window;
  return candidate;
}

Protection::~Protection() = default;

Result<Protection::Direction> Protection::make_direction(const TrafficSecret& secret) const {
  std::array<std::uint8_t, kSecretBytes> key{};
  const std::span used(key.data(), platform::key_bytes(cipher_));
  Direction direction;
  hkdf_expand_label(secret, "quicv2 key", used);
  hkdf_expand_label(secret, "quicv2 iv", direction.iv);
  auto aead = platform::make_aead(cipher_, used, library_);
  platform::wipe(key.data(), key.size());
  if (!aead.is_ok()) return aead.status();
  direction.aead = std::move(aead).value();
  return direction;
}

// Moves `secret` on to the next phase and gives that phase's keys.
Protection::Direction Protection::make_next(platform::Secret<TrafficSecret>& secret) {
  TrafficSecret next;
  hkdf_expand_label(*secret, "quicv2 ku", next.bytes);
  *secret = next;
  platform::wipe(&next, sizeof next);
  auto direction = make_direction(*secret);
  PYCOMM_CHECK(direction.is_ok());
  return std::move(direction).value();
}

Result<std::unique_ptr<Protection>> Protection::create(Cipher cipher, const TrafficSecret& sending,
                                                       const TrafficSecret& receiving,
                                                       const ProtectionLimits& limits,
                                                       CryptoLibrary library) {
  std::unique_ptr<Protection> p(new Protection());
  p->cipher_ = cipher;
  p->library_ = library;
  p->limits_ = limits;
  *p->sending_secret_ = sending;
  *p->next_receiving_secret_ = receiving;
  auto outgoing = p->make_direction(sending);
  if (!outgoing.is_ok()) return outgoing.status();
  auto incoming = p->make_direction(receiving);
  if (!incoming.is_ok()) return incoming.status();
  p->sending_ = std::move(outgoing).value();
  p->receiving_ = std::move(incoming).value();
  std::array<std::uint8_t, kSecretBytes> key{};
  const std::span used(key.data(), platform::key_bytes(cipher));
  for (const bool is_sending : {true, false}) {
    hkdf_expand_label(is_sending ? sending : receiving, "quicv2 hp", used);
    auto header = platform::make_header_protection(cipher, used, library);
    platform::wipe(key.data(), key.size());
    if (!header.is_ok()) return header.status();
    (is_sending ? p->sending_header_ : p->receiving_header_) = std::move(header).value();
  }
  p->next_receiving_ = p->make_next(p->next_receiving_secret_);
  return p;
}

std::size_t Protection::packet_number_bytes(std::uint64_t number, std::uint64_t num_unacked) {
  static_cast<void>(number);
  std::size_t bytes = 1;
  while (bytes < kPacketNumberBytesMax && num_unacked >= std::uint64_t{1} << (8 * bytes - 1)) {
    ++bytes;
  }
  return bytes;
}

std::size_t Protection::seal(std::uint64_t packet_number, std::size_t number_bytes,
                             std::span<const std::uint8_t> cid, const iovec* pieces, int num_pieces,
                             std::size_t payload_bytes, std::uint8_t* out) {
  PYCOMM_CHECK(num_sealed_ < 2 * limits_.packets_per_key_max);
  ++num_sealed_;
  last_sealed_ = packet_number;
  const std::size_t number_offset = 1 + cid.size();
  const std::size_t header_bytes = number_offset + number_bytes;
  out[0] = static_cast<std::uint8_t>(kFixedBit | (phase_ ? kKeyPhaseBit : 0) | (number_bytes - 1));
  std::copy(cid.begin(), cid.end(), out + 1);
  for (std::size_t i = 0; i < number_bytes; ++i) {
    out[header_bytes - 1 - i] = static_cast<std::uint8_t>(packet_number >> (8 * i));
  }
  sending_.aead->seal(make_nonce(sending_.iv, packet_number), {out, header_bytes}, pieces,
                      num_pieces, out + header_bytes);
  const platform::HeaderMask mask =
      sending_header_->mask(std::span<const std::uint8_t, platform::kSampleBytes>(
          out + number_offset + kSampleOffset, platform::kSampleBytes));
  out[0] ^= mask[0] & kProtectedBits;
  for (std::size_t i = 0; i < number_bytes; ++i) out[number_offset + i] ^= mask[1 + i];
  return header_bytes + payload_bytes + platform::kTagBytes;
}

bool Protection::open_with(Direction& keys, std::uint64_t number,
                           std::span<const std::uint8_t> header, std::span<std::uint8_t> sealed) {
  return keys.aead->open(make_nonce(keys.iv, number), header, sealed);
}

std::optional<Opened> Protection::open(std::span<std::uint8_t> packet, std::size_t cid_bytes,
                                       std::uint64_t largest_received, base::TimeNs now) {
  const std::size_t number_offset = 1 + cid_bytes;
  if (packet.size() < number_offset + kSampleOffset + platform::kSampleBytes) return std::nullopt;
  if ((packet[0] & (kLongHeaderBit | kFixedBit)) != kFixedBit || is_exhausted())
    return std::nullopt;
  const platform::HeaderMask mask =
      receiving_header_->mask(std::span<const std::uint8_t, platform::kSampleBytes>(
          packet.data() + number_offset + kSampleOffset, platform::kSampleBytes));
  packet[0] ^= mask[0] & kProtectedBits;
  const std::size_t number_bytes = std::size_t{1} + (packet[0] & kNumberLengthBits);
  std::uint64_t truncated = 0;
  for (std::size_t i = 0; i < number_bytes; ++i) {
    packet[number_offset + i] ^= mask[1 + i];
    truncated = truncated << 8 | packet[number_offset + i];
  }
  const std::uint64_t number = decode_packet_number(largest_received, truncated, number_bytes);
  const std::size_t header_bytes = number_offset + number_bytes;
  const auto header = packet.first(header_bytes);
  const auto sealed = packet.subspan(header_bytes);
  const Opened opened{number, packet[0], sealed.first(sealed.size() - platform::kTagBytes)};
  if (now >= drop_old_at_) {
    old_.reset();
    drop_old_at_ = base::kNever;
  }

  const bool phase = (packet[0] & kKeyPhaseBit) != 0;
  bool ok;
  if (phase == phase_) {
    ok = open_with(receiving_, number, header, sealed);
    if (ok && (!has_received_of_phase_ || number < first_received_of_phase_)) {
      has_received_of_phase_ = true;
      first_received_of_phase_ = number;
    }
  } else if (old_ && (!has_received_of_phase_ || number < first_received_of_phase_)) {
    ok = open_with(*old_, number, header, sealed);
  } else {  // the peer's update, if it is genuine
    ok = open_with(next_receiving_, number, header, sealed);
    if (ok) {
      move_on(false);
      has_received_of_phase_ = true;
      first_received_of_phase_ = number;
    }
  }
  if (!ok) {
    ++num_forged_;
    return std::nullopt;
  }
  ++num_opened_;
  return opened;
}

void Protection::move_on(bool was_asked) {
  old_ = std::make_unique<Direction>(std::move(receiving_));
  receiving_ = std::move(next_receiving_);
  next_receiving_ = make_next(next_receiving_secret_);
  sending_ = make_next(sending_secret_);
  phase_ = !phase_;
  is_confirmed_ = false;
  has_received_of_phase_ = !was_asked;
  first_sent_of_phase_ = last_sealed_ + 1;
  num_sealed_ = 0;
  num_opened_ = 0;
  ++num_updates_;
}

bool Protection::wants_update() const {
  return is_confirmed_ &&
         (num_sealed_ >= limits_.packets_per_key_max || num_opened_ >= limits_.packets_per_key_max);
}

void Protection::update() {
  PYCOMM_CHECK(is_confirmed_);
  move_on(true);
}

void Protection::on_acked(std::uint64_t packet_number) {
  if (packet_number >= first_sent_of_phase_) is_confirmed_ = true;
}

}  // namespace pycomm::transport::quic

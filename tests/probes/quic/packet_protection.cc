#include "packet_protection.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>

#include <algorithm>

namespace pycomm::probe {
namespace {

// First byte of a short header packet, RFC 9000 section 17.3.1.
constexpr std::uint8_t kLongHeaderBit = 0x80;
constexpr std::uint8_t kFixedBit = 0x40;
constexpr std::uint8_t kReservedBits = 0x18;
constexpr std::uint8_t kKeyPhaseBit = 0x04;
constexpr std::uint8_t kPacketNumberLengthBits = 0x03;
constexpr std::uint8_t kProtectedBits = 0x1f;  // RFC 9001 section 5.4.1

constexpr std::size_t kSampleBytes = 16;         // RFC 9001 section 5.4.3
constexpr std::size_t kSampleOffset = 4;         // from the packet number, RFC 9001 section 5.4.2
constexpr std::size_t kPayloadBytesMax = 65535;  // of a UDP datagram

using Nonce = std::array<std::uint8_t, kIvBytes>;

// The IV exclusive-or the packet number, padded on the left. Source: RFC 9001 section 5.3.
Nonce make_nonce(const std::array<std::uint8_t, kIvBytes>& iv, std::uint64_t packet_number) {
  Nonce nonce = iv;
  for (std::size_t i = 0; i < sizeof(packet_number); ++i) {
    nonce[kIvBytes - 1 - i] ^= static_cast<std::uint8_t>(packet_number >> (8 * i));
  }
  return nonce;
}

}  // namespace

ConnectionState::~ConnectionState() {
  OPENSSL_cleanse(send_secret.data(), send_secret.size());
  OPENSSL_cleanse(recv_secret.data(), recv_secret.size());
}

PacketKeys::~PacketKeys() {
  OPENSSL_cleanse(key.data(), key.size());
  OPENSSL_cleanse(iv.data(), iv.size());
  OPENSSL_cleanse(hp.data(), hp.size());
}

bool hkdf_expand_label(std::span<const std::uint8_t> secret, std::string_view label,
                       std::span<std::uint8_t> out) {
  constexpr std::string_view kPrefix = "tls13 ";
  constexpr std::size_t kLabelBytesMax = 255;
  const std::size_t label_bytes = kPrefix.size() + label.size();
  if (out.size() > kSecretBytes || label_bytes > kLabelBytesMax) return false;
  std::vector<std::uint8_t> info{0, static_cast<std::uint8_t>(out.size()),
                                 static_cast<std::uint8_t>(label_bytes)};
  info.insert(info.end(), kPrefix.begin(), kPrefix.end());
  info.insert(info.end(), label.begin(), label.end());
  info.push_back(0);  // length of the context
  info.push_back(1);  // counter of HKDF-Expand: one block is enough up to 32 bytes
  std::array<std::uint8_t, kSecretBytes> block{};
  unsigned block_bytes = 0;
  const bool is_done = HMAC(EVP_sha256(), secret.data(), static_cast<int>(secret.size()),
                            info.data(), info.size(), block.data(), &block_bytes) != nullptr;
  if (is_done) std::copy_n(block.begin(), out.size(), out.begin());
  OPENSSL_cleanse(block.data(), block.size());
  return is_done && block_bytes == kSecretBytes;
}

bool derive_packet_keys(std::span<const std::uint8_t, kSecretBytes> secret, PacketKeys& out) {
  return hkdf_expand_label(secret, "quicv2 key", out.key) &&
         hkdf_expand_label(secret, "quicv2 iv", out.iv) &&
         hkdf_expand_label(secret, "quicv2 hp", out.hp);
}

std::uint64_t decode_packet_number(std::uint64_t largest_received, std::uint64_t truncated,
                                   unsigned num_bits) {
  const std::uint64_t expected = largest_received + 1;
  const std::uint64_t window = std::uint64_t{1} << num_bits;
  const std::uint64_t half_window = window / 2;
  const std::uint64_t candidate = (expected & ~(window - 1)) | truncated;
  // As in appendix A.3, with both sides shifted so that nothing goes below zero.
  if (candidate + half_window <= expected && candidate <= kPacketNumberMax - window) {
    return candidate + window;
  }
  if (candidate > expected + half_window && candidate >= window) return candidate - window;
  return candidate;
}

void PacketProtection::ContextDeleter::operator()(evp_cipher_ctx_st* context) const {
  EVP_CIPHER_CTX_free(context);  // wipes the key schedule
}

PacketProtection::Context PacketProtection::make_context(bool is_aead, bool is_sealing,
                                                         const PacketKeys& keys) {
  Context context(EVP_CIPHER_CTX_new());
  const EVP_CIPHER* cipher = is_aead ? EVP_aes_128_gcm() : EVP_aes_128_ecb();
  const std::uint8_t* key = is_aead ? keys.key.data() : keys.hp.data();
  if (!context || EVP_CipherInit_ex2(context.get(), cipher, key, nullptr, is_sealing, nullptr) != 1)
    return nullptr;
  if (EVP_CIPHER_CTX_set_padding(context.get(), 0) != 1) return nullptr;
  return context;
}

std::unique_ptr<PacketProtection> PacketProtection::create(const ConnectionState& state) {
  if (state.own_cid.size() > kConnectionIdBytesMax ||
      state.peer_cid.size() > kConnectionIdBytesMax ||
      state.next_packet_number > kPacketNumberMax ||
      state.largest_received_packet_number > kPacketNumberMax)
    return nullptr;
  PacketKeys seal_keys;
  PacketKeys open_keys;
  if (!derive_packet_keys(state.send_secret, seal_keys) ||
      !derive_packet_keys(state.recv_secret, open_keys))
    return nullptr;
  std::unique_ptr<PacketProtection> self(new PacketProtection);
  self->seal_context_ = make_context(true, true, seal_keys);
  self->open_context_ = make_context(true, false, open_keys);
  // Header protection only ever encrypts, RFC 9001 section 5.4.3.
  self->seal_header_context_ = make_context(false, true, seal_keys);
  self->open_header_context_ = make_context(false, true, open_keys);
  if (!self->seal_context_ || !self->open_context_ || !self->seal_header_context_ ||
      !self->open_header_context_)
    return nullptr;
  self->seal_iv_ = seal_keys.iv;
  self->open_iv_ = open_keys.iv;
  self->own_cid_ = state.own_cid;
  self->peer_cid_ = state.peer_cid;
  self->next_packet_number_ = state.next_packet_number;
  self->largest_received_ = state.largest_received_packet_number;
  self->num_sealed_ = state.next_packet_number;  // those of the handshake count, at most so many
  self->key_phase_ = state.key_phase;
  return self;
}

PacketProtection::~PacketProtection() {
  OPENSSL_cleanse(seal_iv_.data(), seal_iv_.size());
  OPENSSL_cleanse(open_iv_.data(), open_iv_.size());
}

bool PacketProtection::header_mask(evp_cipher_ctx_st* context, std::span<const std::uint8_t> sample,
                                   Mask& mask) {
  std::array<std::uint8_t, kSampleBytes> block{};
  int block_bytes = 0;
  if (EVP_EncryptUpdate(context, block.data(), &block_bytes, sample.data(), kSampleBytes) != 1 ||
      block_bytes != static_cast<int>(kSampleBytes))
    return false;
  std::copy_n(block.begin(), mask.size(), mask.begin());
  mask[0] = static_cast<std::uint8_t>(mask[0] & kProtectedBits);
  return true;
}

bool PacketProtection::encrypt(std::uint64_t packet_number, std::size_t header_bytes,
                               std::span<const std::uint8_t> payload,
                               std::span<std::uint8_t> packet) {
  const Nonce nonce = make_nonce(seal_iv_, packet_number);
  EVP_CIPHER_CTX* context = seal_context_.get();
  std::uint8_t* out = packet.data() + header_bytes;
  int num_bytes = 0;
  return EVP_EncryptInit_ex2(context, nullptr, nullptr, nonce.data(), nullptr) == 1 &&
         EVP_EncryptUpdate(context, nullptr, &num_bytes, packet.data(),
                           static_cast<int>(header_bytes)) == 1 &&
         EVP_EncryptUpdate(context, out, &num_bytes, payload.data(),
                           static_cast<int>(payload.size())) == 1 &&
         num_bytes == static_cast<int>(payload.size()) &&
         EVP_EncryptFinal_ex(context, out + payload.size(), &num_bytes) == 1 &&
         EVP_CIPHER_CTX_ctrl(context, EVP_CTRL_AEAD_GET_TAG, kTagBytes, out + payload.size()) == 1;
}

std::optional<std::vector<std::uint8_t>> PacketProtection::seal(
    std::uint64_t packet_number, std::span<const std::uint8_t> payload) {
  if (packet_number < next_packet_number_ || packet_number > kPacketNumberMax) return std::nullopt;
  if (payload.empty() || payload.size() > kPayloadBytesMax) return std::nullopt;
  if (num_sealed_ >= kNumSealedMax) return std::nullopt;
  next_packet_number_ = packet_number + 1;
  ++num_sealed_;

  const std::size_t number_offset = 1 + peer_cid_.size();
  const std::size_t header_bytes = number_offset + kPacketNumberBytes;
  std::vector<std::uint8_t> packet(header_bytes + payload.size() + kTagBytes);
  packet[0] = kFixedBit | (key_phase_ ? kKeyPhaseBit : 0) | (kPacketNumberBytes - 1);
  std::copy(peer_cid_.begin(), peer_cid_.end(), packet.begin() + 1);
  for (std::size_t i = 0; i < kPacketNumberBytes; ++i) {
    packet[header_bytes - 1 - i] = static_cast<std::uint8_t>(packet_number >> (8 * i));
  }
  Mask mask{};
  const auto sample = std::span(packet).subspan(number_offset + kSampleOffset, kSampleBytes);
  if (!encrypt(packet_number, header_bytes, payload, packet) ||
      !header_mask(seal_header_context_.get(), sample, mask))
    return std::nullopt;
  packet[0] ^= mask[0];
  for (std::size_t i = 0; i < kPacketNumberBytes; ++i) packet[number_offset + i] ^= mask[1 + i];
  return packet;
}

bool PacketProtection::decrypt(std::uint64_t packet_number, std::span<const std::uint8_t> header,
                               std::span<std::uint8_t> sealed) {
  const Nonce nonce = make_nonce(open_iv_, packet_number);
  EVP_CIPHER_CTX* context = open_context_.get();
  const std::size_t payload_bytes = sealed.size() - kTagBytes;
  std::uint8_t* tag = sealed.data() + payload_bytes;
  int num_bytes = 0;
  return EVP_DecryptInit_ex2(context, nullptr, nullptr, nonce.data(), nullptr) == 1 &&
         EVP_DecryptUpdate(context, nullptr, &num_bytes, header.data(),
                           static_cast<int>(header.size())) == 1 &&
         EVP_DecryptUpdate(context, sealed.data(), &num_bytes, sealed.data(),
                           static_cast<int>(payload_bytes)) == 1 &&
         EVP_CIPHER_CTX_ctrl(context, EVP_CTRL_AEAD_SET_TAG, kTagBytes, tag) == 1 &&
         EVP_DecryptFinal_ex(context, tag, &num_bytes) == 1;
}

std::optional<OpenedPacket> PacketProtection::open(std::span<std::uint8_t> packet) {
  const std::size_t number_offset = 1 + own_cid_.size();
  // Whatever cannot hold a whole sample is dropped, RFC 9001 section 5.4.2.
  if (packet.size() < number_offset + kSampleOffset + kSampleBytes) return std::nullopt;
  if (packet.size() > kPayloadBytesMax || num_forged_ >= kNumForgedMax) return std::nullopt;
  if ((packet[0] & (kLongHeaderBit | kFixedBit)) != kFixedBit) return std::nullopt;
  if (!std::equal(own_cid_.begin(), own_cid_.end(), packet.begin() + 1)) return std::nullopt;

  Mask mask{};
  const auto sample = packet.subspan(number_offset + kSampleOffset, kSampleBytes);
  if (!header_mask(open_header_context_.get(), sample, mask)) return std::nullopt;
  packet[0] ^= mask[0];
  const std::size_t number_bytes = (packet[0] & kPacketNumberLengthBits) + std::size_t{1};
  std::uint64_t truncated = 0;
  for (std::size_t i = 0; i < number_bytes; ++i) {
    packet[number_offset + i] ^= mask[1 + i];
    truncated = truncated << 8 | packet[number_offset + i];
  }
  const std::uint64_t packet_number =
      decode_packet_number(largest_received_, truncated, static_cast<unsigned>(8 * number_bytes));

  const std::size_t header_bytes = number_offset + number_bytes;
  const auto sealed = packet.subspan(header_bytes);
  if (!decrypt(packet_number, packet.first(header_bytes), sealed)) {
    OPENSSL_cleanse(sealed.data(), sealed.size());  // leaves no plaintext that nobody vouched for
    ++num_forged_;
    return std::nullopt;
  }
  // Only now is the header authentic. A set reserved bit is the peer's protocol violation (RFC 9000
  // section 17.3.1), a wrong key phase under the old key a KEY_UPDATE_ERROR (RFC 9001 section 6.2).
  const bool key_phase = (packet[0] & kKeyPhaseBit) != 0;
  if ((packet[0] & kReservedBits) != 0 || key_phase != key_phase_) return std::nullopt;
  largest_received_ = std::max(largest_received_, packet_number);
  return OpenedPacket{packet_number, sealed.first(sealed.size() - kTagBytes)};
}

}  // namespace pycomm::probe

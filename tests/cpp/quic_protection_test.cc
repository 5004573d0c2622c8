// Packet protection against the published vectors of QUIC v2, and between the two libraries.
#include <gtest/gtest.h>

#include "base/rng.h"
#include "platform/aead_ipsec_mb.h"
#include "transport/quic/protection.h"
#include "transport/quic/wire.h"

namespace pycomm::transport::quic {
namespace {

std::vector<std::uint8_t> unhex(const std::string& hex) {
  std::vector<std::uint8_t> bytes;
  for (std::size_t i = 0; i < hex.size(); i += 2) {
    bytes.push_back(static_cast<std::uint8_t>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

TrafficSecret secret_of(const std::vector<std::uint8_t>& bytes) {
  TrafficSecret secret;
  std::copy(bytes.begin(), bytes.end(), secret.bytes.begin());
  return secret;
}

// RFC 9369 appendix A.5: a short-header packet under ChaCha20-Poly1305.
TEST(QuicProtection, MatchesTheVectorsOfVersion2) {
  const TrafficSecret secret =
      secret_of(unhex("9ac312a7f877468ebe69422748ad00a15443f18203a07d6060f688f30f21632b"));
  const auto derived = [&](const char* label, std::size_t bytes) {
    std::vector<std::uint8_t> out(bytes);
    hkdf_expand_label(secret, label, out);
    return out;
  };
  EXPECT_EQ(derived("quicv2 key", 32),
            unhex("3bfcddd72bcf02541d7fa0dd1f5f9eeea817e09a6963a0e6c7df0f9a1bab90f2"));
  EXPECT_EQ(derived("quicv2 iv", 12), unhex("a6b5bc6ab7dafce30ffff5dd"));
  EXPECT_EQ(derived("quicv2 hp", 32),
            unhex("d659760d2ba434a226fd37b35c69e2da8211d10c4f12538787d65645d5d1b8e2"));
  EXPECT_EQ(derived("quicv2 ku", 32),
            unhex("c69374c49e3d2a9466fa689e49d476db5d0dfbc87d32ceeaa6343fd0ae4c7d88"));
  auto protection =
      Protection::create(Cipher::kChaCha20Poly1305, secret, secret, {}, CryptoLibrary::kAny)
          .value();
  std::uint8_t ping = 1;
  const iovec piece{&ping, 1};
  std::vector<std::uint8_t> packet(21);
  EXPECT_EQ(protection->seal(654'360'564, 3, {}, &piece, 1, 1, packet.data()), packet.size());
  EXPECT_EQ(packet, unhex("5558b1c60ae7b6b932bc27d786f4bc2bb20f2162ba"));
  const auto opened = protection->open(packet, 0, 654'360'563, 0);
  ASSERT_TRUE(opened.has_value());
  EXPECT_EQ(opened->packet_number, 654'360'564u);
  EXPECT_EQ(opened->payload.size(), 1u);
}

// What one library seals the other opens, in whatever pieces it came, and nothing that was changed.
TEST(QuicProtection, LibrariesAgreeAndChangesAreNoticed) {
  if (!platform::ipsec_mb::viability().viable) {
    GTEST_SKIP() << "this processor or build has no libipsec-mb";
  }
  base::Rng rng(3);
  const TrafficSecret a = secret_of(std::vector<std::uint8_t>(32, 7));
  const auto make = [&](CryptoLibrary library) {
    return Protection::create(Cipher::kAes128Gcm, a, a, {}, library).value();
  };
  auto ours = make(CryptoLibrary::kIpsecMb);
  auto theirs = make(CryptoLibrary::kOpenssl);
  const std::vector<std::uint8_t> cid(8, 9);
  for (std::uint64_t number = 0; number < 300; ++number) {
    std::vector<std::uint8_t> data(4 + rng.below(1'400));
    for (auto& byte : data) byte = static_cast<std::uint8_t>(rng.next());
    const std::size_t cut = rng.below(data.size());
    const iovec pieces[2] = {{data.data(), cut}, {data.data() + cut, data.size() - cut}};
    for (int turn = 0; turn < 2; ++turn) {
      Protection& sealing = turn == 0 ? *ours : *theirs;
      Protection& opening = turn == 0 ? *theirs : *ours;
      std::vector<std::uint8_t> packet(data.size() + 64);
      packet.resize(sealing.seal(number, 4, cid, pieces, 2, data.size(), packet.data()));
      auto spoilt = packet;
      spoilt[rng.below(spoilt.size() - 1) + 1] ^= static_cast<std::uint8_t>(1 + rng.below(255));
      EXPECT_FALSE(opening.open(spoilt, cid.size(), number, 0).has_value());
      const auto opened = opening.open(packet, cid.size(), number, 0);
      ASSERT_TRUE(opened.has_value());
      EXPECT_TRUE(
          std::equal(data.begin(), data.end(), opened->payload.begin(), opened->payload.end()));
    }
  }
}

// RFC 9000 appendix A.3's example, and every length around every place.
TEST(QuicProtection, PacketNumbersAreDecodedAroundTheExpectedOne) {
  EXPECT_EQ(decode_packet_number(0xa82f30ea, 0x9b32, 2), 0xa82f9b32u);
  base::Rng rng(4);
  for (int i = 0; i < 20'000; ++i) {
    const std::uint64_t largest = rng.next() >> (2 + rng.below(60));
    const std::size_t bytes = 1 + rng.below(4);
    const std::uint64_t half = std::uint64_t{1} << (8 * bytes - 1);
    const std::uint64_t number = largest + 1 + rng.below(half);
    if (number >= kVarintMax) continue;
    const std::uint64_t mask = (std::uint64_t{1} << (8 * bytes)) - 1;
    EXPECT_EQ(decode_packet_number(largest, number & mask, bytes), number);
  }
}

TEST(QuicWire, IntegersOfEveryLengthComeBack) {
  base::Rng rng(5);
  for (int i = 0; i < 10'000; ++i) {
    const std::uint64_t value = rng.next() >> (2 + rng.below(62));
    std::vector<std::uint8_t> bytes(8);
    Writer writer(bytes);
    writer.varint(value);
    EXPECT_EQ(writer.size(), varint_bytes(value));
    Reader reader(std::span<const std::uint8_t>(bytes.data(), writer.size()));
    EXPECT_EQ(reader.varint(), value);
    EXPECT_FALSE(reader.failed());
    Reader cut(std::span<const std::uint8_t>(bytes.data(), writer.size() - 1));
    cut.varint();
    EXPECT_TRUE(cut.failed());
  }
}

}  // namespace
}  // namespace pycomm::transport::quic

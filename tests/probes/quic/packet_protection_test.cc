// Round trips between the two ends of a connection, hostile packets, and the vectors of
// RFC 9369 appendix A.
#include "packet_protection.h"

#include <gtest/gtest.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>

#include <string>

namespace pycomm::probe {
namespace {

using Bytes = std::vector<std::uint8_t>;

Bytes from_hex(std::string_view text) {
  Bytes bytes;
  for (std::size_t i = 0; i + 1 < text.size(); i += 2)
    bytes.push_back(
        static_cast<std::uint8_t>(std::stoi(std::string(text.substr(i, 2)), nullptr, 16)));
  return bytes;
}

Bytes to_bytes(std::span<const std::uint8_t> span) { return {span.begin(), span.end()}; }

Bytes make_payload(std::size_t num_bytes) {
  Bytes payload(num_bytes);
  for (std::size_t i = 0; i < num_bytes; ++i) payload[i] = static_cast<std::uint8_t>(i * 7 + 1);
  return payload;
}

ConnectionState make_state(bool is_client) {
  ConnectionState state;
  state.send_secret.fill(is_client ? 0x11 : 0x22);
  state.recv_secret.fill(is_client ? 0x22 : 0x11);
  state.own_cid = Bytes(8, is_client ? 0xc1 : 0x5e);
  state.peer_cid = Bytes(8, is_client ? 0x5e : 0xc1);
  state.next_packet_number = 10;
  state.largest_received_packet_number = 9;
  return state;
}

class PacketProtectionTest : public testing::Test {
 protected:
  std::unique_ptr<PacketProtection> client_ = PacketProtection::create(make_state(true));
  std::unique_ptr<PacketProtection> server_ = PacketProtection::create(make_state(false));
};

TEST_F(PacketProtectionTest, RoundTripInBothDirections) {
  std::uint64_t packet_number = 10;
  for (const std::size_t num_bytes : {1u, 2u, 3u, 15u, 16u, 17u, 1177u, 8900u, 60000u}) {
    const Bytes payload = make_payload(num_bytes);
    for (const auto& [sender, receiver] :
         {std::pair{client_.get(), server_.get()}, std::pair{server_.get(), client_.get()}}) {
      auto packet = sender->seal(packet_number, payload);
      ASSERT_TRUE(packet);
      EXPECT_EQ(packet->size(), 1 + 8 + kPacketNumberBytes + num_bytes + kTagBytes);
      const auto opened = receiver->open(*packet);
      ASSERT_TRUE(opened);
      EXPECT_EQ(opened->packet_number, packet_number);
      EXPECT_EQ(to_bytes(opened->payload), payload);
    }
    ++packet_number;
  }
}

TEST_F(PacketProtectionTest, HeaderIsProtected) {
  const auto packet = client_->seal(10, make_payload(40));
  ASSERT_TRUE(packet);
  EXPECT_EQ((*packet)[0] & 0xc0, 0x40);
  EXPECT_EQ(Bytes(packet->begin() + 1, packet->begin() + 9), Bytes(8, 0x5e));
  EXPECT_NE(Bytes(packet->begin() + 9, packet->begin() + 13), (Bytes{0, 0, 0, 10}));
}

TEST_F(PacketProtectionTest, EveryFlippedBitIsRefused) {
  const Bytes payload = make_payload(40);
  const auto packet = client_->seal(10, payload);
  ASSERT_TRUE(packet);
  for (std::size_t i = 0; i < packet->size(); ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      Bytes tampered = *packet;
      tampered[i] ^= static_cast<std::uint8_t>(1 << bit);
      EXPECT_FALSE(server_->open(tampered)) << "byte " << i << ", bit " << bit;
    }
  }
  EXPECT_GT(server_->num_forged(), 0u);
  Bytes intact = *packet;
  const auto opened = server_->open(intact);
  ASSERT_TRUE(opened);
  EXPECT_EQ(to_bytes(opened->payload), payload);
}

TEST_F(PacketProtectionTest, NothingIsLeftOfARefusedPayload) {
  auto packet = client_->seal(10, make_payload(40));
  ASSERT_TRUE(packet);
  packet->back() ^= 1;
  ASSERT_FALSE(server_->open(*packet));
  EXPECT_EQ(Bytes(packet->begin() + 13, packet->end()), Bytes(40 + kTagBytes, 0));
}

TEST_F(PacketProtectionTest, EveryTruncationAndExtensionIsRefused) {
  const auto packet = client_->seal(10, make_payload(40));
  ASSERT_TRUE(packet);
  for (std::size_t num_bytes = 0; num_bytes < packet->size(); ++num_bytes) {
    Bytes truncated(packet->begin(), packet->begin() + static_cast<std::ptrdiff_t>(num_bytes));
    EXPECT_FALSE(server_->open(truncated)) << num_bytes << " bytes";
  }
  Bytes extended = *packet;
  extended.push_back(0);
  EXPECT_FALSE(server_->open(extended));
}

TEST_F(PacketProtectionTest, AReplayOpensAgainWithItsNumber) {
  const auto packet = client_->seal(10, make_payload(40));
  ASSERT_TRUE(packet);
  for (int i = 0; i < 2; ++i) {
    Bytes copy = *packet;
    const auto opened = server_->open(copy);
    ASSERT_TRUE(opened);
    EXPECT_EQ(opened->packet_number, 10u);
  }
}

TEST_F(PacketProtectionTest, AReflectedPacketIsRefused) {
  auto state = make_state(true);
  state.peer_cid = state.own_cid;  // so that only the keys tell the directions apart
  const auto self_addressed = PacketProtection::create(state);
  auto packet = self_addressed->seal(10, make_payload(40));
  ASSERT_TRUE(packet);
  EXPECT_FALSE(client_->open(*packet));
}

TEST_F(PacketProtectionTest, NumbersMayJumpAndArriveOutOfOrder) {
  const Bytes payload = make_payload(40);
  auto early = client_->seal(10, payload);
  auto late = client_->seal(70'010, payload);
  auto very_late = client_->seal(std::uint64_t{1} << 31, payload);
  ASSERT_TRUE(early && late && very_late);
  EXPECT_EQ(server_->open(*late)->packet_number, 70'010u);
  EXPECT_EQ(server_->open(*early)->packet_number, 10u);
  EXPECT_EQ(server_->open(*very_late)->packet_number, std::uint64_t{1} << 31);
}

TEST_F(PacketProtectionTest, ANumberIsNeverSealedTwice) {
  const Bytes payload = make_payload(4);
  EXPECT_FALSE(client_->seal(9, payload));  // used before the hand-over
  EXPECT_TRUE(client_->seal(10, payload));
  EXPECT_FALSE(client_->seal(10, payload));
  EXPECT_TRUE(client_->seal(12, payload));
  EXPECT_FALSE(client_->seal(11, payload));
  EXPECT_FALSE(client_->seal(kPacketNumberMax + 1, payload));
  EXPECT_TRUE(client_->seal(kPacketNumberMax, payload));
}

TEST_F(PacketProtectionTest, AnEmptyPayloadIsNotSealed) { EXPECT_FALSE(client_->seal(10, {})); }

TEST_F(PacketProtectionTest, TheOtherKeyPhaseIsRefused) {
  auto state = make_state(true);
  state.key_phase = true;
  auto packet = PacketProtection::create(state)->seal(10, make_payload(40));
  ASSERT_TRUE(packet);
  EXPECT_FALSE(server_->open(*packet));
}

TEST(PacketProtection, SealsUpToTheConfidentialityLimit) {
  auto state = make_state(true);
  state.next_packet_number = kNumSealedMax - 1;
  const auto client = PacketProtection::create(state);
  EXPECT_TRUE(client->seal(kNumSealedMax - 1, make_payload(4)));
  EXPECT_FALSE(client->seal(kNumSealedMax, make_payload(4)));
}

TEST(PacketProtection, AnUnusableStateIsRefused) {
  auto state = make_state(true);
  state.peer_cid = Bytes(kConnectionIdBytesMax + 1);
  EXPECT_EQ(PacketProtection::create(state), nullptr);
  state = make_state(true);
  state.next_packet_number = kPacketNumberMax + 1;
  EXPECT_EQ(PacketProtection::create(state), nullptr);
}

TEST(PacketProtection, ConnectionIdsMayBeEmptyOrDifferInLength) {
  auto client_state = make_state(true);
  auto server_state = make_state(false);
  client_state.own_cid = server_state.peer_cid = {};
  client_state.peer_cid = server_state.own_cid = Bytes(kConnectionIdBytesMax, 0x77);
  const auto client = PacketProtection::create(client_state);
  const auto server = PacketProtection::create(server_state);
  auto to_server = client->seal(10, make_payload(1));
  auto to_client = server->seal(10, make_payload(1));
  ASSERT_TRUE(to_server && to_client);
  EXPECT_TRUE(server->open(*to_server));
  EXPECT_TRUE(client->open(*to_client));
}

// RFC 9000 appendix A.3, and the edges of the window.
TEST(DecodePacketNumber, PicksTheClosestToTheExpected) {
  EXPECT_EQ(decode_packet_number(0xa82f30ea, 0x9b32, 16), 0xa82f9b32u);
  EXPECT_EQ(decode_packet_number(0, 1, 8), 1u);
  EXPECT_EQ(decode_packet_number(0xff, 0x00, 8), 0x100u);
  EXPECT_EQ(decode_packet_number(0x100, 0xff, 8), 0xffu);
  EXPECT_EQ(decode_packet_number(0x17f, 0x00, 8), 0x200u);
  EXPECT_EQ(decode_packet_number(0x17e, 0x00, 8), 0x100u);
  EXPECT_EQ(decode_packet_number(kPacketNumberMax - 1, 0x00, 8), kPacketNumberMax - 0xff);
}

struct Vector {
  std::string_view label;
  std::string_view secret, key, iv, hp;
};

// RFC 9369 appendix A.1, with the salt of section 3.3.1.
TEST(Rfc9369, InitialSecretsGiveTheKeysOfAppendixA1) {
  const Bytes salt = from_hex("0dede3def700a6db819381be6e269dcbf9bd2ed9");
  const Bytes client_cid = from_hex("8394c8f03e515708");
  Bytes initial(kSecretBytes);
  ASSERT_NE(HMAC(EVP_sha256(), salt.data(), static_cast<int>(salt.size()), client_cid.data(),
                 client_cid.size(), initial.data(), nullptr),
            nullptr);  // HKDF-Extract, RFC 5869 section 2.2
  const Vector vectors[] = {
      {"client in", "14ec9d6eb9fd7af83bf5a668bc17a7e283766aade7ecd0891f70f9ff7f4bf47b",
       "8b1a0bc121284290a29e0971b5cd045d", "91f73e2351d8fa91660e909f",
       "45b95e15235d6f45a6b19cbcb0294ba9"},
      {"server in", "0263db1782731bf4588e7e4d93b7463907cb8cd8200b5da55a8bd488eafc37c1",
       "82db637861d55e1d011f19ea71d5d2a7", "dd13c276499c0249d3310652",
       "edf6d05c83121201b436e16877593c3a"},
  };
  for (const Vector& vector : vectors) {
    std::array<std::uint8_t, kSecretBytes> secret{};
    ASSERT_TRUE(hkdf_expand_label(initial, vector.label, secret));
    EXPECT_EQ(to_bytes(secret), from_hex(vector.secret));
    PacketKeys keys;
    ASSERT_TRUE(derive_packet_keys(secret, keys));
    EXPECT_EQ(to_bytes(keys.key), from_hex(vector.key));
    EXPECT_EQ(to_bytes(keys.iv), from_hex(vector.iv));
    EXPECT_EQ(to_bytes(keys.hp), from_hex(vector.hp));
  }
}

// RFC 9369 appendix A.5, whose keys are twice as long as ours but whose labels are the same.
TEST(Rfc9369, LabelsGiveTheKeysOfAppendixA5) {
  const Bytes secret = from_hex("9ac312a7f877468ebe69422748ad00a15443f18203a07d6060f688f30f21632b");
  const std::pair<std::string_view, std::string_view> vectors[] = {
      {"quicv2 key", "3bfcddd72bcf02541d7fa0dd1f5f9eeea817e09a6963a0e6c7df0f9a1bab90f2"},
      {"quicv2 iv", "a6b5bc6ab7dafce30ffff5dd"},
      {"quicv2 hp", "d659760d2ba434a226fd37b35c69e2da8211d10c4f12538787d65645d5d1b8e2"},
      {"quicv2 ku", "c69374c49e3d2a9466fa689e49d476db5d0dfbc87d32ceeaa6343fd0ae4c7d88"},
  };
  for (const auto& [label, expected] : vectors) {
    Bytes out(expected.size() / 2);
    ASSERT_TRUE(hkdf_expand_label(secret, label, out));
    EXPECT_EQ(out, from_hex(expected)) << label;
  }
}

}  // namespace
}  // namespace pycomm::probe

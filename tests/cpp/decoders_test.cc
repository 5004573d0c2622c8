// Decoders on hostile input: random bytes, and valid messages with every kind of damage. The
// coverage-guided fuzzers of `make test-all` run the same functions for longer.
#include "decoders.h"

#include <gtest/gtest.h>

#include "base/rng.h"

namespace pycomm {
namespace {

using transport::FrameHeader;
using transport::FrameKind;
using transport::tcp::Membership;

// Headers that are almost right reach deeper than noise.
std::vector<std::uint8_t> plausible_frames(base::Rng& rng) {
  std::vector<std::uint8_t> bytes;
  for (std::uint64_t n = 1 + rng.below(12); n > 0; --n) {
    FrameHeader header;
    header.kind = static_cast<std::uint8_t>(rng.below(transport::kFrameKindMax + 2));
    header.group = rng.below(3);
    header.op = 1 + rng.below(4);
    header.chunk = static_cast<std::uint32_t>(rng.below(5));
    header.signature = rng.below(3) == 0 ? 4 : 9;
    static constexpr std::uint64_t kSizes[] = {0,   1,   8,   99,   100,  101, 256,
                                               257, 512, 999, 1000, 1001, 4096};
    const auto size = [&] { return rng.below(12) == 0 ? rng.next() : kSizes[rng.below(13)]; };
    header.message_bytes = size();
    header.argument = size();
    header.key = static_cast<std::uint32_t>(rng.below(4));
    const auto kind = static_cast<FrameKind>(header.kind);
    if (kind == FrameKind::kEager || kind == FrameKind::kData || kind == FrameKind::kWrite ||
        rng.below(20) == 0) {
      header.payload_bytes =
          static_cast<std::uint32_t>(rng.below(2) == 0 ? header.message_bytes : size());
    }
    const auto* raw = reinterpret_cast<const std::uint8_t*>(&header);
    bytes.insert(bytes.end(), raw, raw + sizeof header);
    for (std::uint64_t i = 0; i < header.payload_bytes && i < 1200; ++i) bytes.push_back(0xa5);
  }
  return bytes;
}

TEST(Decoders, MessageCoreSurvivesHostileFrames) {
  base::Rng rng(1);
  for (int i = 0; i < 20'000; ++i) {
    const auto bytes = plausible_frames(rng);
    test::feed_message_core(bytes.data(), bytes.size());
  }
}

TEST(Decoders, HelloSurvivesDamage) {
  communicator::Hello hello;
  hello.protocol = transport::kProtocolVersion;
  hello.build = "1";
  hello.world_size = 3;
  hello.process_id = std::string(32, 'a');
  hello.tcp_port = 123;
  const std::string good = communicator::encode(hello);
  ASSERT_TRUE(communicator::decode(good).is_ok());
  EXPECT_EQ(communicator::encode(communicator::decode(good).value()), good);
  base::Rng rng(2);
  for (int i = 0; i < 20'000; ++i) {
    std::string text = good;
    for (std::uint64_t n = 1 + rng.below(4); n > 0 && !text.empty(); --n) {
      const std::size_t at = rng.below(text.size());
      switch (rng.below(3)) {
        case 0: text[at] = static_cast<char>(rng.next()); break;
        case 1: text.erase(at, 1 + rng.below(9)); break;
        default:
          text.insert(at, std::string(1 + rng.below(3), static_cast<char>(rng.next())));
          break;
      }
    }
    test::feed_hello(reinterpret_cast<const std::uint8_t*>(text.data()), text.size());
  }
  EXPECT_FALSE(communicator::decode(good.substr(0, good.size() - 3)).is_ok());
  EXPECT_FALSE(communicator::decode(good + good).is_ok());
  EXPECT_FALSE(communicator::decode(std::string(5000, 'x')).is_ok());
}

TEST(Decoders, MembershipIsNeverGrantedToNoise) {
  base::Rng rng(3);
  for (int i = 0; i < 5'000; ++i) {
    std::vector<std::uint8_t> bytes(rng.below(300));
    for (auto& byte : bytes) byte = static_cast<std::uint8_t>(rng.next());
    test::feed_membership(bytes.data(), bytes.size());
  }
}

// Runs a handshake; `spoil` may change each message. True if both sides are done.
bool handshake(const std::string& secret_a, const std::string& secret_b,
               const std::function<void(int, std::string*)>& spoil = {}) {
  const std::string a(32, 'a'), b(32, 'b');
  Membership acceptor = Membership::acceptor(secret_a, a, std::string(32, '1'));
  Membership connector = Membership::connector(secret_b, b, a, std::string(32, '2'));
  std::string to_acceptor = connector.start(), to_connector;
  for (int message = 0; message < 4; ++message) {
    std::string& in = message % 2 == 0 ? to_acceptor : to_connector;
    std::string& out = message % 2 == 0 ? to_connector : to_acceptor;
    if (spoil) spoil(message, &in);
    Membership& side = message % 2 == 0 ? acceptor : connector;
    if (!side.feed(in, &out).is_ok()) return false;
    in.clear();
  }
  return acceptor.is_done() && connector.is_done() && acceptor.peer() == b;
}

TEST(Membership, NeedsTheSameSecretOnBothSides) {
  EXPECT_TRUE(handshake("one secret", "one secret"));
  EXPECT_FALSE(handshake("one secret", "another"));
  EXPECT_FALSE(handshake("one secret", ""));
}

TEST(Membership, NoticesEveryChangedByte) {
  static constexpr std::size_t kBytes[] = {104, 64, 32, 1};
  for (int message = 0; message < 4; ++message) {
    for (std::size_t at = 0; at < kBytes[message]; ++at) {
      EXPECT_FALSE(handshake("s", "s",
                             [&](int m, std::string* text) {
                               if (m == message) (*text)[at] = static_cast<char>((*text)[at] ^ 1);
                             }))
          << "message " << message << " byte " << at;
    }
  }
}

TEST(Membership, AnAnswerCannotBeReplayedToItsSender) {
  const std::string a(32, 'a'), b(32, 'b'), nonce(32, '1');
  Membership acceptor = Membership::acceptor("s", a, nonce);
  std::string answer;
  ASSERT_TRUE(acceptor.feed(Membership::connector("s", b, a, std::string(32, '2')).start(), &answer)
                  .is_ok());
  // The acceptor's own MAC, sent back to it as the connector's.
  std::string out;
  EXPECT_FALSE(acceptor.feed(answer.substr(32), &out).is_ok());
}

TEST(Hello, DifferencesNameBothRanksAndValues) {
  communicator::Hello zero;
  zero.protocol = transport::kProtocolVersion;
  zero.build = "1";
  zero.framework = "torch 2.13.0";
  zero.world_size = 2;
  zero.process_id = std::string(32, 'a');
  communicator::Hello one = zero;
  one.process_id = std::string(32, 'b');
  EXPECT_TRUE(communicator::compare({zero, one}).is_ok());
  one.framework = "torch 2.14.0";
  const Status status = communicator::compare({zero, one});
  for (const char* part : {"rank 0", "rank 1", "2.13.0", "2.14.0"}) {
    EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
  }
  one = zero;
  EXPECT_NE(communicator::compare({zero, one}).message().find("same process"), std::string::npos);
}

}  // namespace
}  // namespace pycomm

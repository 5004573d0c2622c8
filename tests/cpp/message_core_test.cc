// The message core alone: what no pair of honest links would show.
#include "transport/message_core.h"

#include <gtest/gtest.h>

namespace pycomm::transport {
namespace {

// A port whose next key is chosen by the test.
class FakePort final : public PullPort {
 public:
  std::uint32_t next_key = 0;
  std::vector<std::uint32_t> revoked;
  bool announce(const std::byte*, std::uint64_t, std::uint32_t* key) override {
    *key = next_key;
    return true;
  }
  void revoke(std::uint32_t key) override { revoked.push_back(key); }
  Status pull(std::uint32_t, std::uint64_t, std::byte*, std::uint64_t) override { return Status(); }
};

Status feed(MessageCore& core, const FrameHeader& header) {
  PYCOMM_RETURN_IF_ERROR(core.begin(header));
  if (std::byte* target = core.payload_target()) {
    for (std::uint32_t i = 0; i < header.payload_bytes; ++i) target[i] = std::byte{1};
  }
  return core.end();
}

// Every key that an announcement can have, the largest too, is one that kPulled finishes.
TEST(MessageCore, EveryAnnouncementKeyIsFinishedByItsPull) {
  FakePort port;
  CoreOptions options;
  options.peer_pulls = true;
  MessageCore core(options, &port);
  std::vector<std::byte> data(100'000);
  std::uint64_t op = 0;
  for (const std::uint32_t key : {0u, 1u, 255u, 0x80000000u, 0xfffffffeu, 0xffffffffu}) {
    port.next_key = key;
    Transfer send;
    send.id = {1, ++op, 0, 0, 0};
    send.data = data.data();
    send.bytes = data.size();
    core.send(send);
    core.pop();
    FrameHeader pulled;
    pulled.kind = static_cast<std::uint8_t>(FrameKind::kPulled);
    pulled.set_id(send.id);
    pulled.key = key;
    ASSERT_TRUE(feed(core, pulled).is_ok());
    EXPECT_EQ(send.state, TransferState::kDone) << key;
    EXPECT_EQ(port.revoked.back(), key);
  }
}

// The window is the receiver's to hold: a peer that sends more than it was given is cut off.
TEST(MessageCore, APeerThatIgnoresTheWindowIsCutOff) {
  CoreOptions options;
  options.eager_bytes_max = 1024;
  options.eager_window_bytes = 16 * 1024;
  MessageCore core(options, nullptr);
  std::uint64_t taken = 0;
  for (std::uint64_t op = 0; op < 1000; ++op) {
    FrameHeader eager;
    eager.kind = static_cast<std::uint8_t>(FrameKind::kEager);
    eager.set_id({1, op, 0, 0, 0});
    eager.payload_bytes = 1024;
    eager.message_bytes = 1024;
    if (!feed(core, eager).is_ok()) break;
    taken += 1024;
  }
  EXPECT_GT(taken, 8u * 1024);
  EXPECT_LE(taken, 16u * 1024);
}

TEST(MessageCore, NothingMayFollowAGoodbye) {
  MessageCore core(CoreOptions{}, nullptr);
  FrameHeader goodbye;
  goodbye.kind = static_cast<std::uint8_t>(FrameKind::kGoodbye);
  ASSERT_TRUE(feed(core, goodbye).is_ok());
  FrameHeader credit;
  credit.kind = static_cast<std::uint8_t>(FrameKind::kCredit);
  EXPECT_FALSE(feed(core, credit).is_ok());
}

}  // namespace
}  // namespace pycomm::transport

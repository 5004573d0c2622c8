// The UDP socket that sessions share: what is of no session here.
#include <gtest/gtest.h>

#include "link_pairs.h"
#include "platform/crypto.h"

namespace pycomm {
namespace {

using base::TimeNs;
using transport::quic::Endpoint;

constexpr const char* kKey = "a key that outlives its process";

std::shared_ptr<Endpoint> open(std::uint16_t port = 0, const char* key = kKey) {
  return Endpoint::open("127.0.0.1", port, port, key).value();
}

std::shared_ptr<transport::CoreLink> make(const std::shared_ptr<Endpoint>& endpoint,
                                          const HandedOver& state) {
  return transport::quic::make_link(endpoint, state, {}, platform::real_clock().now_ns()).value();
}

// A peer whose process ended and came again on the same port, with or without the same key.
Status after_a_restart(const char* new_key) {
  auto [client, server] = test::make_handed_over();
  for (auto* state : {&client, &server}) {  // as the handshake derives them
    for (ConnectionId& id : state->peer_ids) {
      const platform::Mac mac = platform::hmac_sha256(kKey, id.bytes);
      id.reset_token.assign(mac.begin(), mac.begin() + 16);
    }
  }
  auto here = open(), there = open();
  client.peer = {"127.0.0.1", there->port()};
  server.peer = {"127.0.0.1", here->port()};
  auto mine = make(here, client);
  auto theirs = make(there, server);
  const auto pump = [&](std::int64_t for_ms) {
    const auto until = platform::real_clock().now_ns() + base::ms_to_ns(for_ms);
    while (platform::real_clock().now_ns() < until && mine->failure().is_ok()) {
      here->progress(platform::real_clock().now_ns());
      there->progress(platform::real_clock().now_ns());
      mine->progress();
      if (theirs) theirs->progress();
    }
  };
  pump(50);
  EXPECT_TRUE(mine->failure().is_ok());
  const std::uint16_t port = there->port();
  theirs.reset();
  there.reset();
  there = open(port, new_key);
  std::vector<std::byte> data(5'000);
  Transfer send;
  send.id = {1, 1, 0, 0, 0};
  send.data = data.data();
  send.bytes = data.size();
  mine->send(send);
  pump(1'000);
  mine->cancel(send);
  return mine->failure();
}

TEST(QuicEndpoint, APeerThatWasRestartedIsNoticedAtOnce) {
  const Status status = after_a_restart(kKey);
  EXPECT_EQ(status.code(), StatusCode::kPeerLost);
  EXPECT_NE(status.message().find("restarted"), std::string::npos) << status.message();
}

TEST(QuicEndpoint, AResetUnderAnotherKeyEndsNothing) {
  EXPECT_TRUE(after_a_restart("another key").is_ok());
}

TEST(QuicLink, APathThatFailsIsLeftOutAndTheLastOneEndsTheLink) {
  test::LinkPair pair = test::make_quic_pair(1);
  // Where the second connection leads, nobody listens.
  auto [client, server] = test::make_handed_over();
  auto here = open();
  client.peer = {"127.0.0.1", open()->port()};
  const TimeNs now = platform::real_clock().now_ns();
  ASSERT_TRUE(transport::quic::add_path(*pair.a, here, client, {}, now).is_ok());
  EXPECT_EQ(transport::quic::path_stats(*pair.a).size(), 2u);
  std::vector<std::byte> data(3'000'000, std::byte{7}), out(data.size());
  for (std::uint64_t op = 1; transport::quic::path_stats(*pair.a).size() == 2; ++op) {
    ASSERT_LT(platform::real_clock().now_ns(), now + 5'000'000'000);
    Transfer send, post;
    send.id = post.id = {1, op, 0, 0, 0};
    send.bytes = post.bytes = data.size();
    send.data = data.data();
    post.data = out.data();
    pair.b->post(post);
    pair.a->send(send);
    while (!post.is_finished() || !send.is_finished()) {
      here->progress(platform::real_clock().now_ns());
      pair.pump();
    }
    ASSERT_EQ(post.state, TransferState::kDone);
    ASSERT_EQ(out, data);
  }
  EXPECT_TRUE(pair.a->is_viable().viable);
}

TEST(QuicEndpoint, WhatIsOfNoSessionIsKeptForHandshakesWithinBounds) {
  auto here = open();
  auto there = open();
  here->set_shaking_hands(true);
  for (int i = 0; i < 400; ++i) {
    there->send(std::string(i % 2 == 0 ? 1'200 : 5'000, '\xc3'), {"127.0.0.1", here->port()});
    here->progress(platform::real_clock().now_ns());
  }
  const auto kept = here->take_unclaimed();
  EXPECT_GT(kept.size(), 0u);
  EXPECT_LE(kept.size(), Endpoint::kUnclaimedMax);
  for (const auto& datagram : kept) EXPECT_EQ(datagram.bytes.size(), 1'200u);
}

}  // namespace
}  // namespace pycomm

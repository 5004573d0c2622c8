// RDMA links where something says no: any verbs call, a peer that leaves, a region that is
// withdrawn, a link that cannot be.
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>

#include "base/rng.h"
#include "rdma_moves.h"

namespace pycomm {
namespace {

using test::expect_moves;
using test::kOneRail;
using test::make_transfer;
using test::pattern;
using test::pump_until;
using test::RdmaPair;
using test::RdmaSetup;
using test::stats;
using test::two_rails;

// Every verbs call that can fail fails once, while a link is made and used: it comes to be, or is
// refused on both sides alike, and nothing that was accepted is lost.
TEST(Rdma, AnyCallMayFail) {
  int num_refused = 0, num_calls = 0;
  for (int call = 0; call == 0 || call < num_calls; ++call) {
    SCOPED_TRACE(call);
    RdmaPair pair = test::begin_fake_rdma_pair(two_rails(7));
    pair.fabric->call_to_fail = call;
    const bool is_there = establish(pair);
    using transport::rdma::Establishment;
    ASSERT_TRUE(pair.a->failure().is_ok()) << pair.a->failure().to_string();
    ASSERT_TRUE(pair.b->failure().is_ok()) << pair.b->failure().to_string();
    ASSERT_EQ(transport::rdma::establishment(*pair.a), transport::rdma::establishment(*pair.b));
    if (is_there) {
      expect_moves(pair, 1, 100);
      expect_moves(pair, 3, 50'000);
    } else {
      ++num_refused;
    }
    num_calls = pair.fabric->num_calls;
  }
  EXPECT_GT(num_calls, 250);
  EXPECT_EQ(num_refused, 0);  // there is a second path
}

// A peer that leaves wants nothing more: no NIC reads for it, and what waits for it ends.
TEST(Rdma, APeerThatLeavesEndsWorkOnItsMemory) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    RdmaPair pair = make_fake_rdma_pair(two_rails(seed));
    std::vector<std::uint64_t> memory(1000);
    auto* at = reinterpret_cast<std::byte*>(memory.data());
    ASSERT_TRUE(pair.b->remote_memory()->expose(1, at, 8000, RegionKind::kHost).is_ok());
    auto source = std::make_unique<std::vector<std::byte>>(pattern(6'000'000, seed));
    std::vector<std::byte> target(source->size());
    auto send = std::make_unique<Transfer>(make_transfer(1, *source));
    Transfer recv = make_transfer(1, target);
    std::vector<std::byte> word(8);
    Transfer unknown = make_transfer(2, word);
    pair.b->post(recv);
    pair.a->send(*send);
    pair.a->remote_memory()->write(unknown, 77, 0);  // a region that never comes
    for (std::uint64_t turn = 0; turn < seed * 3; ++turn) pair.pump();
    pair.b->close();
    ASSERT_TRUE(pump_until(pair, [&] { return send->is_finished() && unknown.is_finished(); }));
    EXPECT_EQ(unknown.state, TransferState::kFailed);
    const std::uint64_t writes = pair.fabric->num_writes;
    send.reset();
    source.reset();
    for (int turn = 0; turn < 300; ++turn) pair.pump();
    EXPECT_EQ(pair.fabric->num_writes, writes);
    EXPECT_EQ(pair.a->next_deadline() < platform::real_clock().now_ns(), false);
  }
}

TEST(Rdma, AWithdrawnRegionIsOutOfReachWhateverElseLiesThere) {
  RdmaPair pair = make_fake_rdma_pair(kOneRail);
  std::vector<std::byte> memory(1 << 20), source = pattern(1 << 18, 1), got(8);
  ASSERT_TRUE(
      pair.b->remote_memory()->expose(1, memory.data(), memory.size(), RegionKind::kHost).is_ok());
  Transfer send = make_transfer(1, source), recv = make_transfer(1, source);
  recv.data = memory.data();
  pair.b->post(recv);
  pair.a->send(send);
  ASSERT_TRUE(pump_until(pair, [&] { return recv.is_finished() && send.is_finished(); }));
  // A message that is still awaited there keeps its own part, and nothing else.
  Transfer awaited = recv;
  awaited.id.op = 5;
  pair.b->post(awaited);
  for (int turn = 0; turn < 50; ++turn) pair.pump();
  const std::uint64_t held = stats(pair.b).bytes_registered;
  pair.b->remote_memory()->withdraw(1);
  EXPECT_EQ(stats(pair.b).bytes_registered, held - memory.size());
  Transfer read = make_transfer(2, got);
  pair.a->remote_memory()->read(read, 1, 0);
  ASSERT_TRUE(pump_until(pair, [&] { return read.is_finished(); }, 20'000'000));
  EXPECT_EQ(read.status.code(), StatusCode::kInvalidUsage) << read.status.to_string();
  pair.b->cancel(awaited);
}

// Any call fails while a link that is up is used, with one path: it comes back, and nothing is
// lost.
TEST(Rdma, AnyCallMayFailLater) {
  // Most calls are alike; those around 130 give credits back.
  for (int call = 0; call < 300; call += call >= 120 && call < 140 ? 1 : 6) {
    SCOPED_TRACE(call);
    RdmaSetup setup = kOneRail;
    setup.seed = static_cast<std::uint64_t>(call) + 1;
    RdmaPair pair = make_fake_rdma_pair(setup);
    if (call % 3 == 0) pair.fabric->acks_to_lose = 1;  // so that a rail begins anew
    pair.fabric->call_to_fail = pair.fabric->num_calls + call;
    std::vector<std::byte> sources[150], targets[150];
    std::deque<Transfer> sends, recvs;
    for (std::uint64_t i = 0; i < 150; ++i) {
      sources[i] = pattern(i % 30 == 0 ? 20'000 : 100, i);
      targets[i].resize(sources[i].size());
      sends.push_back(make_transfer(i, sources[i]));
      recvs.push_back(make_transfer(i, targets[i]));
      pair.a->send(sends.back());
    }
    // One side sends all it may before the other looks.
    for (int turn = 0; turn < 200; ++turn) pair.a->progress();
    for (Transfer& recv : recvs) pair.b->post(recv);
    ASSERT_TRUE(pump_until(
        pair,
        [&] {
          return std::all_of(recvs.begin(), recvs.end(), [](auto& t) { return t.is_finished(); });
        },
        20'000'000))
        << pair.a->failure().to_string();
    for (std::uint64_t i = 0; i < 150; ++i) {
      ASSERT_EQ(recvs[i].state, TransferState::kDone) << recvs[i].status.to_string();
      ASSERT_EQ(sources[i], targets[i]) << i;
    }
  }
}

// An announcement that comes twice is cleared once.
TEST(Rdma, AnAnnouncedMessageIsGrantedOnce) {
  RdmaSetup setup = kOneRail;
  setup.is_watched = false;
  RdmaPair pair = make_fake_rdma_pair(setup);
  const std::uint64_t held = stats(pair.b).bytes_registered;
  for (std::uint64_t op = 1; op <= 5; ++op) {
    auto source = pattern(100'000, op);
    std::vector<std::byte> target(source.size());
    Transfer send = make_transfer(op, source), recv = make_transfer(op, target);
    send.is_announced = true;  // the receiver, which does not look first, clears it by itself
    pair.b->post(recv);
    for (std::uint64_t turn = 0; turn < op; ++turn) pair.pump();
    pair.a->send(send);
    ASSERT_TRUE(pump_until(pair, [&] { return recv.is_finished() && send.is_finished(); }));
    EXPECT_EQ(source, target);
    EXPECT_EQ(stats(pair.b).bytes_registered, held);
  }
}

TEST(Rdma, ALinkThatCannotBeIsRefusedOnBothSidesAndTheStreamServesOn) {
  for (const int rails : {0, 1}) {
    RdmaSetup setup;
    if (rails > 0) setup = kOneRail;
    setup.options.establish_ns = base::ms_to_ns(500);
    RdmaPair pair = test::begin_fake_rdma_pair(setup);
    pair.fabric->dead_ports = {"one:1"};
    // One end is done first, and speaks TCP before the other has read the verdict.
    using transport::rdma::Establishment;
    const auto is_open = [](const auto& link) {
      return transport::rdma::establishment(*link) == Establishment::kUnderWay;
    };
    while (is_open(pair.a) && is_open(pair.b)) pair.pump();
    std::string reason;
    test::LinkPair tcp;
    const bool a_is_first = !is_open(pair.a);
    auto& first = a_is_first ? pair.a : pair.b;
    auto& second = a_is_first ? pair.b : pair.a;
    auto& quick = a_is_first ? tcp.a : tcp.b;
    auto early = pattern(500, 3);
    Transfer word = make_transfer(77, early);
    quick = transport::tcp::make_link(transport::rdma::take_stream(*first, &reason), {});
    EXPECT_NE(reason.find(rails == 0 ? "no RDMA device" : "RETRY_EXC"), std::string::npos)
        << reason;
    quick->send(word);
    quick->progress();
    while (is_open(second) && second->failure().is_ok()) second->progress();
    ASSERT_EQ(transport::rdma::establishment(*second), Establishment::kRefused);
    (a_is_first ? tcp.b : tcp.a) =
        transport::tcp::make_link(transport::rdma::take_stream(*second, &reason), {});
    RdmaPair over_tcp;
    over_tcp.a = tcp.a;
    over_tcp.b = tcp.b;
    over_tcp.pump = [&] {
      tcp.a->progress();
      tcp.b->progress();
    };
    expect_moves(over_tcp, 1, 100'000);
  }
}

}  // namespace
}  // namespace pycomm

// The transport contract, one suite over every transport (csrc/include/pycomm/transport.h says
// what each test holds it to).
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <deque>

#include "base/rng.h"
#include "link_pairs.h"
#include "rdma_pair.h"

namespace pycomm {
namespace {

using test::LinkPair;

struct Subject {
  const char* name;
  LinkPair (*make)();
};

// TEST_IB_DEVICES="rxe0,rxe2;rxe1,rxe3": the two ends' devices, in the order of their paths.
test::RdmaSetup devices_of_machine(bool all) {
  test::RdmaSetup setup;
  int side = 0;
  std::string name;
  for (const char c : platform::environment("TEST_IB_DEVICES").value_or("") + ";") {
    if (c != ',' && c != ';') {
      name += c;
      continue;
    }
    if (!name.empty() && side < 2 && (all || setup.devices[side].empty())) {
      setup.devices[side].push_back(name);
    }
    name.clear();
    side += c == ';';
  }
  return setup;
}

std::vector<Subject> subjects() {
  std::vector<Subject> all = {
      {"shm_pull", [] { return test::make_shm_pair(true); }},
      {"shm_staged", [] { return test::make_shm_pair(false); }},
      {"tcp", [] { return test::make_tcp_pair(); }},
      {"quic", [] { return test::make_quic_pair(); }},
      {"quic_paths", [] { return test::make_quic_pair(3); }},
      {"rdma", []() -> LinkPair { return test::make_fake_rdma_pair({{{"one"}, {"two"}}}); }},
      {"rdma_rails",
       []() -> LinkPair {
         return test::make_fake_rdma_pair({{{"one", "three"}, {"two", "four"}}});
       }},
      {"sim", [] { return test::make_sim_pair(1); }},
  };
  if (!devices_of_machine(true).devices[1].empty()) {
    all.push_back({"verbs", []() -> LinkPair {
                     return test::make_real_rdma_pair(devices_of_machine(false));
                   }});
    all.push_back({"verbs_rails", []() -> LinkPair {
                     return test::make_real_rdma_pair(devices_of_machine(true));
                   }});
  }
  return all;
}

constexpr Signature kSignature =
    make_signature(OpKind::kAllReduce, DType::kFloat32, ReduceOp::kSum, 0, 7);

Transfer make_transfer(std::uint64_t op, std::uint32_t chunk, std::vector<std::byte>& data) {
  Transfer t;
  t.id = {99, op, 0, 1, chunk};
  t.signature = kSignature;
  t.data = data.data();
  t.bytes = data.size();
  return t;
}

std::vector<std::byte> pattern(std::uint64_t bytes, std::uint64_t seed) {
  base::Rng rng(seed);
  std::vector<std::byte> data(bytes);
  for (auto& b : data) b = static_cast<std::byte>(rng.next());
  return data;
}

class Contract : public testing::TestWithParam<Subject> {
 protected:
  void SetUp() override { pair_ = GetParam().make(); }

  template <class Condition>
  bool pump_until(Condition done, int turns = 200'000) {
    for (int i = 0; i < turns; ++i) {
      if (done()) return true;
      pair_.pump();
    }
    return done();
  }
  void pump_a_while(int turns = 300) {
    for (int i = 0; i < turns; ++i) pair_.pump();
  }

  LinkPair pair_;
};

TEST_P(Contract, MovesEverySizeWhicheverSideComesFirst) {
  std::uint64_t op = 0;
  for (const std::uint64_t bytes :
       {0u, 1u, 8u, 100u, 8192u, 8193u, 65'536u, 100'003u, 3'000'001u}) {
    for (const bool post_first : {true, false}) {
      ++op;
      std::vector<std::byte> source = pattern(bytes, op), target(bytes);
      Transfer send = make_transfer(op, 0, source), recv = make_transfer(op, 0, target);
      if (post_first) pair_.b->post(recv);
      pump_a_while(20);
      pair_.a->send(send);
      pump_a_while(20);
      if (!post_first) pair_.b->post(recv);
      ASSERT_TRUE(pump_until([&] { return send.is_finished() && recv.is_finished(); })) << bytes;
      ASSERT_EQ(recv.state, TransferState::kDone) << recv.status.to_string();
      ASSERT_EQ(send.state, TransferState::kDone);
      ASSERT_EQ(source, target);
    }
  }
}

TEST_P(Contract, ManyTransfersBothWaysInAnyOrder) {
  constexpr int kCount = 300;
  base::Rng rng(5);
  std::deque<std::vector<std::byte>> sources, targets;
  std::deque<Transfer> sends, recvs;
  std::vector<int> post_order, send_order;
  for (int i = 0; i < 2 * kCount; ++i) {
    const std::uint64_t bytes = rng.below(4) == 0 ? rng.below(60'000) : rng.below(300);
    sources.push_back(pattern(bytes, static_cast<std::uint64_t>(i)));
    targets.emplace_back(bytes);
    sends.push_back(make_transfer(1, static_cast<std::uint32_t>(i), sources.back()));
    recvs.push_back(make_transfer(1, static_cast<std::uint32_t>(i), targets.back()));
    post_order.push_back(i);
    send_order.push_back(i);
  }
  for (std::size_t i = post_order.size() - 1; i > 0; --i) {
    std::swap(post_order[i], post_order[rng.below(i + 1)]);
    std::swap(send_order[i], send_order[rng.below(i + 1)]);
  }
  for (std::size_t i = 0; i < post_order.size(); ++i) {
    const auto p = static_cast<std::size_t>(post_order[i]),
               s = static_cast<std::size_t>(send_order[i]);
    (p % 2 == 0 ? pair_.b : pair_.a)->post(recvs[p]);
    (s % 2 == 0 ? pair_.a : pair_.b)->send(sends[s]);
    if (i % 7 == 0) pair_.pump();
  }
  ASSERT_TRUE(pump_until([&] {
    return std::all_of(recvs.begin(), recvs.end(),
                       [](const Transfer& t) { return t.is_finished(); }) &&
           std::all_of(sends.begin(), sends.end(),
                       [](const Transfer& t) { return t.is_finished(); });
  }));
  for (std::size_t i = 0; i < recvs.size(); ++i) {
    ASSERT_EQ(recvs[i].state, TransferState::kDone) << recvs[i].status.to_string();
    ASSERT_EQ(sources[i], targets[i]);
  }
}

// One group that runs ahead fills its window; another group on the same link still gets through.
TEST_P(Contract, ARunawayGroupIsBoundedAndStarvesNobody) {
  constexpr int kAhead = 2'000;
  std::vector<std::byte> source = pattern(1'000, 1);
  std::deque<Transfer> sends;
  for (int i = 0; i < kAhead; ++i) {
    sends.push_back(make_transfer(static_cast<std::uint64_t>(i), 0, source));
    pair_.a->send(sends.back());
  }
  pump_a_while(6'000);
  const auto done =
      std::count_if(sends.begin(), sends.end(), [](const Transfer& t) { return t.is_finished(); });
  EXPECT_LT(done, kAhead);  // what nobody asked for is held back at the sender
  std::vector<std::byte> other = pattern(500, 2), target(500);
  Transfer urgent = make_transfer(0, 0, other), wanted = make_transfer(0, 0, target);
  urgent.id.group = wanted.id.group = 7;
  pair_.a->send(urgent);
  pair_.b->post(wanted);
  ASSERT_TRUE(pump_until([&] { return wanted.is_finished(); }));
  EXPECT_EQ(target, other);
  std::vector<std::byte> sink(1'000);
  for (int i = 0; i < kAhead; ++i) {
    Transfer recv = make_transfer(static_cast<std::uint64_t>(i), 0, sink);
    pair_.b->post(recv);
    ASSERT_TRUE(pump_until([&] { return recv.is_finished(); })) << i;
    ASSERT_EQ(recv.state, TransferState::kDone);
    ASSERT_EQ(sink, source);
  }
}

TEST_P(Contract, DifferentSignaturesOrLengthsAreAnErrorThatShowsBoth) {
  for (const std::uint64_t bytes : {100u, 50'000u}) {
    std::vector<std::byte> source(bytes), target(bytes);
    Transfer send = make_transfer(bytes, 0, source), recv = make_transfer(bytes, 0, target);
    send.signature = make_signature(OpKind::kAllReduce, DType::kInt64, ReduceOp::kMax, 0, 5);
    pair_.b->post(recv);
    pair_.a->send(send);
    ASSERT_TRUE(pump_until([&] { return recv.is_finished(); }));
    EXPECT_EQ(recv.status.code(), StatusCode::kInvalidUsage);
    EXPECT_NE(recv.status.message().find("max, int64, 5 elements"), std::string::npos);
    EXPECT_NE(recv.status.message().find("sum, float32, 7 elements"), std::string::npos);
    pair_.a->cancel(send);
  }
  std::vector<std::byte> source(64), target(32);
  Transfer send = make_transfer(7, 1, source), recv = make_transfer(7, 1, target);
  pair_.b->post(recv);
  pair_.a->send(send);
  ASSERT_TRUE(pump_until([&] { return recv.is_finished(); }));
  EXPECT_EQ(recv.status.code(), StatusCode::kInvalidUsage);
}

TEST_P(Contract, CancelledTransfersTouchNothingAfterwards) {
  for (const std::uint64_t bytes : {64u, 4'000u, 2'000'000u}) {
    auto source = pattern(bytes, 3);
    std::vector<std::byte> target(bytes, std::byte{0x11});
    Transfer send = make_transfer(bytes, 0, source), recv = make_transfer(bytes, 0, target);
    pair_.b->post(recv);
    pair_.b->cancel(recv);
    EXPECT_EQ(recv.state, TransferState::kFailed);
    pair_.a->send(send);
    pump_a_while();
    pair_.a->cancel(send);
    EXPECT_TRUE(std::all_of(target.begin(), target.end(),
                            [](std::byte b) { return b == std::byte{0x11}; }));
    std::fill(source.begin(), source.end(), std::byte{0});
    pair_.b->retire(99, bytes + 1);
    pair_.a->retire(99, bytes + 1);
  }
  // The link still works.
  auto source = pattern(100'000, 4);
  std::vector<std::byte> target(100'000);
  Transfer send = make_transfer(5'000'000, 0, source), recv = make_transfer(5'000'000, 0, target);
  pair_.b->post(recv);
  pair_.a->send(send);
  ASSERT_TRUE(pump_until([&] { return recv.is_finished() && send.is_finished(); }));
  EXPECT_EQ(source, target);
}

// In an exchange a post and a send have the same name on each side: cancelling one leaves the
// other.
TEST_P(Contract, APostAndASendOfOneNameAreTwoThings) {
  std::uint64_t op = 0;
  for (const std::uint64_t bytes : {64u, 100'000u}) {
    for (const bool cancels_post : {true, false}) {
      ++op;
      auto from_a = pattern(bytes, op), from_b = pattern(bytes, op + 7);
      std::vector<std::byte> at_a(bytes), at_b(bytes);
      Transfer send_a = make_transfer(op, 0, from_a), post_a = make_transfer(op, 0, at_a);
      Transfer send_b = make_transfer(op, 0, from_b), post_b = make_transfer(op, 0, at_b);
      pair_.a->post(post_a);
      pair_.a->send(send_a);
      pair_.a->cancel(cancels_post ? post_a : send_a);
      pump_a_while(20);
      pair_.b->post(post_b);
      pair_.b->send(send_b);
      Transfer& kept = cancels_post ? post_b : post_a;
      ASSERT_TRUE(pump_until([&] { return kept.is_finished(); })) << bytes << cancels_post;
      ASSERT_EQ(kept.state, TransferState::kDone) << kept.status.to_string();
      EXPECT_EQ(cancels_post ? at_b : at_a, cancels_post ? from_a : from_b);
      for (Transfer* t : {&send_a, &post_a}) pair_.a->cancel(*t);
      for (Transfer* t : {&send_b, &post_b}) pair_.b->cancel(*t);
      pair_.a->retire(99, op + 1);
      pair_.b->retire(99, op + 1);
    }
  }
}

// Whatever was done when one side left is there for the other, which is slow to look.
TEST_P(Contract, AGoodbyeOvertakesNothing) {
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
    LinkPair pair = GetParam().make();
    auto source = pattern(1'500'000, seed);
    std::vector<std::byte> target(source.size());
    Transfer send = make_transfer(1, 0, source), recv = make_transfer(1, 0, target);
    pair.b->post(recv);
    for (int i = 0; i < 40; ++i) pair.pump();
    pair.a->send(send);
    int turns = 0;
    // The receiver sleeps where its transport lets the bytes come all the same.
    const bool alone = std::string(GetParam().name).starts_with("rdma");
    while (!send.is_finished() && ++turns < 200'000) {
      if (alone) {
        pair.a->progress();
      } else {
        pair.pump();
      }
    }
    ASSERT_EQ(send.state, TransferState::kDone) << send.status.to_string();
    pair.a->close();
    for (int i = 0; i < 50 && alone; ++i) pair.a->progress();
    for (int i = 0; i < 200'000 && !recv.is_finished(); ++i) pair.pump();
    ASSERT_EQ(recv.state, TransferState::kDone) << recv.status.to_string();
    EXPECT_EQ(source, target);
  }
}

// Half of a large message is on its way when the sender withdraws: the stream stays in step.
TEST_P(Contract, CancellingInMidFlightLeavesTheLinkInStep) {
  base::Rng rng(17);
  for (int round = 0; round < 30; ++round) {
    const auto op = static_cast<std::uint64_t>(round);
    auto source = pattern(1'500'000, op);
    std::vector<std::byte> target(source.size());
    Transfer send = make_transfer(op, 0, source), recv = make_transfer(op, 0, target);
    pair_.b->post(recv);
    pair_.a->send(send);
    pump_a_while(static_cast<int>(rng.below(12)));
    pair_.a->cancel(send);
    pump_a_while(static_cast<int>(rng.below(3)));
    pair_.b->cancel(recv);
    pair_.a->retire(99, op + 1);
    pair_.b->retire(99, op + 1);
    std::vector<std::byte> small = pattern(100, op), got(100);
    Transfer s = make_transfer(op + 1000, 1, small), r = make_transfer(op + 1000, 1, got);
    s.id.group = r.id.group = 5;
    pair_.b->post(r);
    pair_.a->send(s);
    ASSERT_TRUE(pump_until([&] { return r.is_finished() && s.is_finished(); }));
    ASSERT_EQ(r.state, TransferState::kDone) << r.status.to_string();
    ASSERT_EQ(small, got);
  }
}

TEST_P(Contract, WhatComesForARetiredOperationIsDropped) {
  pair_.b->retire(99, 10);
  std::vector<std::byte> source = pattern(200, 1);
  std::deque<Transfer> sends;
  for (std::uint64_t op = 0; op < 10; ++op) {
    sends.push_back(make_transfer(op, 0, source));
    pair_.a->send(sends.back());
  }
  std::vector<std::byte> target(200);
  Transfer send = make_transfer(10, 0, source), recv = make_transfer(10, 0, target);
  pair_.b->post(recv);
  pair_.a->send(send);
  ASSERT_TRUE(pump_until([&] { return recv.is_finished(); }));
  EXPECT_EQ(source, target);
}

TEST_P(Contract, AGoodbyeDeliversWhatWasSentAndFailsTheRest) {
  std::vector<std::byte> source = pattern(3'000, 1), target(3'000), never(10);
  Transfer send = make_transfer(1, 0, source), late = make_transfer(2, 0, never);
  pair_.a->send(send);
  pair_.b->post(late);
  ASSERT_TRUE(pump_until([&] { return send.is_finished(); }));
  pair_.a->close();
  ASSERT_TRUE(pump_until([&] { return late.is_finished(); }));
  EXPECT_EQ(late.status.code(), StatusCode::kPeerLost);
  Transfer recv = make_transfer(1, 0, target);
  pair_.b->post(recv);
  EXPECT_EQ(recv.state, TransferState::kDone);
  EXPECT_EQ(source, target);
  EXPECT_FALSE(pair_.b->is_viable().viable);
  EXPECT_FALSE(pair_.b->is_viable().reason.empty());
  // The one that left needs nothing more: sending to it is no error.
  Transfer after = make_transfer(3, 0, source);
  pair_.b->send(after);
  EXPECT_EQ(after.state, TransferState::kDone);
}

TEST_P(Contract, AFailedLinkFailsEverythingNowAndLater) {
  std::vector<std::byte> data(100);
  std::vector<std::byte> large(500'000);
  Transfer recv = make_transfer(1, 0, data), send = make_transfer(2, 0, large);
  pair_.b->post(recv);
  pair_.b->send(send);
  pair_.b->fail(Status::error(StatusCode::kPeerLost, "gone"));
  EXPECT_EQ(recv.status.message(), "gone");
  EXPECT_EQ(send.status.message(), "gone");
  Transfer next = make_transfer(3, 0, data);
  pair_.b->post(next);
  EXPECT_EQ(next.status.message(), "gone");
  EXPECT_FALSE(pair_.b->is_viable().viable);
}

TEST_P(Contract, RemoteWritesAreSeenByALaterFetchAdd) {
  constexpr std::uint64_t kBytes = 100'000;
  std::vector<std::uint64_t> own(kBytes / 8);
  std::byte* memory =
      pair_.memory ? pair_.memory(1, kBytes) : reinterpret_cast<std::byte*>(own.data());
  RemoteMemory* here = pair_.a->remote_memory();
  RemoteMemory* there = pair_.b->remote_memory();
  ASSERT_TRUE(here->can_write() && here->can_fetch_add());
  ASSERT_TRUE(there->expose(5, memory, kBytes, RegionKind::kHost).is_ok());
  EXPECT_FALSE(there->expose(5, memory, kBytes, RegionKind::kHost).is_ok());
  std::uint64_t old = 0;
  for (std::uint64_t round = 0; round < 20; ++round) {
    auto source = pattern(kBytes - 8, round);
    Transfer write = make_transfer(round, 0, source);
    here->write(write, 5, 8);
    Transfer add;
    add.id = {99, round, 0, 2, 0};
    add.data = reinterpret_cast<std::byte*>(&old);
    add.bytes = 8;
    here->fetch_add(add, 5, 0, 3);
    ASSERT_TRUE(pump_until([&] { return add.is_finished() && write.is_finished(); }));
    ASSERT_EQ(add.state, TransferState::kDone) << add.status.to_string();
    ASSERT_EQ(old, round * 3);
    ASSERT_EQ(std::memcmp(memory + 8, source.data(), source.size()), 0);
  }
  // Beyond the end, unaligned, or withdrawn: nothing moves, and fetch_add says so.
  const std::vector<std::byte> before(memory, memory + kBytes);
  for (const std::uint64_t offset : {kBytes - 7, kBytes, std::uint64_t{4}, UINT64_MAX - 3}) {
    Transfer add;
    add.id = {99, 1000 + offset, 0, 3, 0};
    add.data = reinterpret_cast<std::byte*>(&old);
    add.bytes = 8;
    here->fetch_add(add, 5, offset, 1);
    ASSERT_TRUE(pump_until([&] { return add.is_finished(); }));
    EXPECT_EQ(add.status.code(), StatusCode::kInvalidUsage);
  }
  there->withdraw(5);
  std::vector<std::byte> source(64, std::byte{0xee});
  Transfer write = make_transfer(50, 0, source);
  here->write(write, 5, 0);
  pump_a_while();
  EXPECT_EQ(std::memcmp(memory, before.data(), kBytes), 0);
}

TEST_P(Contract, ANoticeTravelsBeforeTheGoodbyeBehindIt) {
  pair_.a->send_notice({99, StatusCode::kPeerLost, 4});
  pair_.a->close();
  std::vector<transport::GroupNotice> notices;
  ASSERT_TRUE(pump_until([&] {
    for (const auto& notice : pair_.b->take_notices()) notices.push_back(notice);
    return pair_.b->peer_departed();
  }));
  ASSERT_EQ(notices.size(), 1u);
  EXPECT_EQ(notices[0].group, 99u);
  EXPECT_EQ(notices[0].code, StatusCode::kPeerLost);
  EXPECT_EQ(notices[0].rank, 4);
}

TEST_P(Contract, ARegionIsMappedOnlyInFull) {
  RemoteMemory* there = pair_.b->remote_memory();
  if (!there->can_map()) {  // then no region is an address, whatever is asked
    std::vector<std::uint64_t> own(512);
    auto* data = reinterpret_cast<std::byte*>(own.data());
    ASSERT_TRUE(there->expose(8, data, 4096, RegionKind::kHost).is_ok());
    EXPECT_EQ(pair_.a->remote_memory()->map(8, 4096), nullptr);
    return;
  }
  std::byte* memory = pair_.memory(1, 4096);
  ASSERT_TRUE(there->expose(8, memory, 4096, RegionKind::kHost).is_ok());
  EXPECT_NE(pair_.a->remote_memory()->map(8, 4096), nullptr);
  EXPECT_EQ(pair_.a->remote_memory()->map(8, 4097), nullptr);
  EXPECT_EQ(pair_.a->remote_memory()->map(9, 1), nullptr);
}

TEST_P(Contract, CountersTellCopiesFromDirectMoves) {
  std::vector<std::byte> source = pattern(1'000'000, 1), target(1'000'000);
  Transfer send = make_transfer(1, 0, source), recv = make_transfer(1, 0, target);
  pair_.b->post(recv);
  pair_.a->send(send);
  ASSERT_TRUE(pump_until([&] { return send.is_finished() && recv.is_finished(); }));
  const LinkCounters sent = pair_.a->counters(), received = pair_.b->counters();
  EXPECT_EQ(sent.bytes_sent, 1'000'000u);
  EXPECT_EQ(received.bytes_received, 1'000'000u);
  EXPECT_EQ(sent.messages_sent, 1u);
  EXPECT_EQ(received.messages_received, 1u);
  const std::string name = GetParam().name;
  if (name == "shm_pull") {
    EXPECT_EQ(sent.bytes_staged + received.bytes_staged, 0u);
    EXPECT_EQ(received.bytes_direct, 1'000'000u);
  } else if (name.starts_with("rdma") || name.starts_with("verbs")) {
    EXPECT_EQ(sent.bytes_staged + received.bytes_staged, 0u);
    EXPECT_EQ(sent.bytes_direct, 1'000'000u);
    EXPECT_EQ(received.bytes_direct, 1'000'000u);
  } else if (name == "shm_staged") {
    EXPECT_EQ(sent.bytes_staged, 1'000'000u);
    EXPECT_EQ(received.bytes_staged, 1'000'000u);
  }
}

INSTANTIATE_TEST_SUITE_P(Every, Contract, testing::ValuesIn(subjects()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace pycomm

// RDMA links over a simulated NIC: what happens when paths break, memory is short, and any call
// fails. The contract itself is transport_conformance_test's, real devices' too.
#include <gtest/gtest.h>
#include <sys/mman.h>

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

TEST(Rdma, ALargeMessageIsNeverCopiedAndRegisteredOnce) {
  RdmaPair pair = make_fake_rdma_pair(kOneRail);
  std::vector<std::byte> source = pattern(4'000'000, 1), target(source.size());
  for (std::uint64_t op = 1; op <= 10; ++op) {
    Transfer send = make_transfer(op, source), recv = make_transfer(op, target);
    pair.b->post(recv);
    pair.a->send(send);
    ASSERT_TRUE(pump_until(pair, [&] { return send.is_finished() && recv.is_finished(); }));
  }
  EXPECT_EQ(source, target);
  EXPECT_EQ(pair.a->counters().bytes_staged + pair.b->counters().bytes_staged, 0u);
  std::string refusal;
  if (platform::MemoryMonitor::of_process(&refusal) == nullptr) {
    EXPECT_EQ(stats(pair.a).registrations, 10u);
    GTEST_SKIP() << "registrations cannot be kept here: " << refusal;
  }
  EXPECT_EQ(stats(pair.a).registrations, 1u);
  EXPECT_EQ(stats(pair.a).cache_hits, 9u);
}

// Memory that was given back and mapped again is other memory.
TEST(Rdma, FreedMemoryIsRegisteredAnew) {
  std::string refusal;
  if (platform::MemoryMonitor::of_process(&refusal) == nullptr) {
    GTEST_SKIP() << "registrations cannot be kept here: " << refusal;
  }
  RdmaPair pair = make_fake_rdma_pair(kOneRail);
  constexpr std::uint64_t kBytes = 1 << 20;
  std::vector<std::byte> target(kBytes);
  void* at = nullptr;
  for (std::uint64_t op = 1; op <= 12; ++op) {
    // The same address each time; given back in three ways.
    void* mapped = mmap(at, kBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | (at != nullptr ? MAP_FIXED : 0), -1, 0);
    ASSERT_TRUE(mapped != MAP_FAILED && (at == nullptr || mapped == at));
    at = mapped;
    std::memset(at, static_cast<int>(op), kBytes);
    Transfer recv = make_transfer(op, target), send = recv;
    send.data = static_cast<std::byte*>(at);
    pair.b->post(recv);
    pair.a->send(send);
    ASSERT_TRUE(pump_until(pair, [&] { return send.is_finished() && recv.is_finished(); }));
    EXPECT_EQ(target[kBytes - 1], static_cast<std::byte>(op));
    if (op % 3 == 0) {
      ASSERT_EQ(munmap(at, kBytes), 0);
    } else if (op % 3 == 1) {
      ASSERT_EQ(madvise(at, kBytes, MADV_DONTNEED), 0);
    }  // else the next mapping takes its place
  }
  munmap(at, kBytes);
  const RdmaStats counters = stats(pair.a);
  EXPECT_EQ(counters.registrations, 12u);
  EXPECT_EQ(counters.cache_hits, 0u);
}

TEST(Rdma, WithoutASightOfFreedMemoryNothingIsKept) {
  RdmaSetup setup = kOneRail;
  setup.is_watched = false;
  RdmaPair pair = make_fake_rdma_pair(setup);
  const std::uint64_t cells = stats(pair.a).bytes_registered;
  std::vector<std::byte> source = pattern(100'000, 1), target(source.size());
  for (std::uint64_t op = 1; op <= 3; ++op) {
    Transfer send = make_transfer(op, source), recv = make_transfer(op, target);
    pair.b->post(recv);
    pair.a->send(send);
    ASSERT_TRUE(pump_until(pair, [&] { return send.is_finished() && recv.is_finished(); }));
    EXPECT_EQ(stats(pair.a).bytes_registered, cells);
  }
  EXPECT_EQ(stats(pair.a).registrations, 3u);
}

// Little may be locked: what does not fit goes through cells, and arrives all the same.
TEST(Rdma, BeyondTheLimitOfLockedMemoryBytesAreCopied) {
  for (const bool kernel_refuses : {false, true}) {
    RdmaSetup setup = kOneRail;
    if (!kernel_refuses) setup.bytes_registered_max = 2'000'000;
    RdmaPair pair = make_fake_rdma_pair(setup);
    if (kernel_refuses) pair.fabric->bytes_lockable = pair.fabric->bytes_locked + 2'000'000;
    expect_moves(pair, 1, 1'000'000);
    const std::uint64_t before = pair.b->counters().bytes_staged;
    expect_moves(pair, 11, 5'000'000);
    EXPECT_GE(pair.b->counters().bytes_staged, before + 5'000'000);
    expect_moves(pair, 21, 1'000'000);
  }
}

// A path dies at a random moment, with work of unknown fate: everything arrives once, over the
// other.
TEST(Rdma, APathThatDiesLosesAndDoublesNothing) {
  std::uint64_t num_again = 0;
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE(seed);
    RdmaPair pair = make_fake_rdma_pair(two_rails(seed));
    base::Rng rng(seed);
    constexpr int kCount = 40;
    std::deque<std::vector<std::byte>> sources, targets;
    std::deque<Transfer> sends, recvs;
    const int dies_at = static_cast<int>(rng.below(kCount)),
              dies_after = static_cast<int>(rng.below(30));
    for (int i = 0; i < kCount; ++i) {
      const std::uint64_t bytes = rng.below(3) == 0 ? rng.below(600'000) : rng.below(5'000);
      sources.push_back(pattern(bytes, rng.next()));
      targets.emplace_back(bytes);
      sends.push_back(make_transfer(static_cast<std::uint64_t>(i), sources.back()));
      recvs.push_back(make_transfer(static_cast<std::uint64_t>(i), targets.back()));
    }
    for (int i = 0; i < kCount; ++i) {
      const auto n = static_cast<std::size_t>(i);
      pair.b->post(recvs[n]);
      pair.a->send(sends[n]);
      if (i == dies_at) {
        for (int turn = 0; turn < dies_after; ++turn) pair.pump();
        pair.fabric->acks_to_lose = static_cast<int>(rng.below(3));
        pair.fabric->dead_ports.insert(rng.below(2) == 0 ? "one:1" : "four:1");
      }
      if (rng.below(3) == 0) pair.pump();
    }
    ASSERT_TRUE(pump_until(pair, [&] {
      return std::all_of(recvs.begin(), recvs.end(), [](auto& t) { return t.is_finished(); }) &&
             std::all_of(sends.begin(), sends.end(), [](auto& t) { return t.is_finished(); });
    }));
    for (int i = 0; i < kCount; ++i) {
      const auto n = static_cast<std::size_t>(i);
      ASSERT_EQ(recvs[n].state, TransferState::kDone) << recvs[n].status.to_string();
      ASSERT_EQ(sources[n], targets[n]) << i;
    }
    num_again += stats(pair.a).messages_again;
  }
  EXPECT_GT(num_again, 60u);  // breaks did hit work under way
}

// With one path and a lost acknowledgement: the same path begins anew and goes on.
TEST(Rdma, TheOnlyPathComesBack) {
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    SCOPED_TRACE(seed);
    RdmaSetup setup = kOneRail;
    setup.seed = seed;
    RdmaPair pair = make_fake_rdma_pair(setup);
    std::vector<std::byte> sources[20], targets[20];
    std::deque<Transfer> sends, recvs;
    for (std::uint64_t i = 0; i < 20; ++i) {
      sources[i] = pattern(i % 3 == 0 ? 200'000 : 700, seed * 100 + i);
      targets[i].resize(sources[i].size());
      sends.push_back(make_transfer(i, sources[i]));
      recvs.push_back(make_transfer(i, targets[i]));
      pair.b->post(recvs.back());
      pair.a->send(sends.back());
      pair.pump();
      if (i == seed % 20) pair.fabric->acks_to_lose = 1;
    }
    ASSERT_TRUE(pump_until(
        pair,
        [&] {
          return std::all_of(recvs.begin(), recvs.end(), [](auto& t) { return t.is_finished(); });
        },
        20'000'000));
    for (std::uint64_t i = 0; i < 20; ++i) {
      ASSERT_EQ(recvs[i].state, TransferState::kDone) << recvs[i].status.to_string();
      ASSERT_EQ(sources[i], targets[i]);
    }
  }
}

TEST(Rdma, WithoutAnyPathEveryWaiterHearsTheVerbsStatus) {
  RdmaSetup setup = two_rails(3);
  setup.options.patience_ns = base::ms_to_ns(300);
  RdmaPair pair = make_fake_rdma_pair(setup);
  auto source = pattern(1'000'000, 1);
  std::vector<std::byte> target(source.size()), other(100);
  Transfer send = make_transfer(1, source), recv = make_transfer(1, target);
  Transfer waiting = make_transfer(2, other);
  pair.b->post(recv);
  pair.a->post(waiting);
  pair.a->send(send);
  pair.fabric->dead_ports = {"one:1", "three:1"};
  const base::TimeNs start = platform::real_clock().now_ns();
  ASSERT_TRUE(pump_until(
      pair, [&] { return send.is_finished() && recv.is_finished() && waiting.is_finished(); },
      100'000'000));
  EXPECT_LT(platform::real_clock().now_ns() - start, base::ms_to_ns(5'000));
  for (const Transfer* transfer : {&send, &waiting}) {
    EXPECT_EQ(transfer->status.code(), StatusCode::kPeerLost);
    EXPECT_NE(transfer->status.message().find("IBV_WC_RETRY_EXC_ERR"), std::string::npos)
        << transfer->status.message();
    EXPECT_NE(transfer->status.message().find("one:1"), std::string::npos);
  }
  EXPECT_EQ(recv.status.code(), StatusCode::kPeerLost);
}

// A NIC that repeats for ever and says nothing, as the kernel's rdma_rxe does with atomics.
TEST(Rdma, APathThatFallsSilentIsLeft) {
  RdmaSetup setup = two_rails(4);
  setup.options.rdma.timeout_code = 1;  // then two seconds are the least
  RdmaPair pair = make_fake_rdma_pair(setup);
  expect_moves(pair, 1, 300'000);
  pair.fabric->silent_ports = {"one:1"};
  const base::TimeNs start = platform::real_clock().now_ns();
  auto source = pattern(500'000, 1);
  std::vector<std::byte> target(source.size());
  Transfer send = make_transfer(11, source), recv = make_transfer(11, target);
  pair.b->post(recv);
  pair.a->send(send);
  ASSERT_TRUE(
      pump_until(pair, [&] { return send.is_finished() && recv.is_finished(); }, 100'000'000));
  EXPECT_EQ(source, target);
  EXPECT_LT(platform::real_clock().now_ns() - start, base::ms_to_ns(6'000));
  EXPECT_NE(stats(pair.a).paths[0].find("down"), std::string::npos);
}

TEST(Rdma, APeerThatDiesIsNoticedByItsStream) {
  RdmaPair pair = make_fake_rdma_pair(kOneRail);
  std::vector<std::byte> data(100);
  Transfer recv = make_transfer(1, data);
  pair.b->post(recv);
  pair.pump = [b = pair.b] { b->progress(); };
  pair.a.reset();
  ASSERT_TRUE(pump_until(pair, [&] { return recv.is_finished(); }, 100'000'000));
  EXPECT_EQ(recv.status.code(), StatusCode::kPeerLost);
  EXPECT_NE(recv.status.message().find("without a goodbye"), std::string::npos);
}

// After cancel() the NIC writes nothing there, however far the transfer had come; other messages
// arrive in spite of it.
TEST(Rdma, ACancelledReceiveIsNotWrittenLater) {
  base::Rng rng(5);
  for (std::uint64_t round = 0; round < 60; ++round) {
    SCOPED_TRACE(round);
    RdmaPair pair = make_fake_rdma_pair(two_rails(round + 1));
    auto source = pattern(3'000'000, round), small = pattern(20'000, round + 7);
    std::vector<std::byte> target(source.size()), got(small.size());
    Transfer send = make_transfer(1, source), recv = make_transfer(1, target);
    Transfer other_send = make_transfer(2, small), other = make_transfer(2, got);
    pair.b->post(recv);
    pair.b->post(other);
    pair.a->send(send);
    pair.a->send(other_send);
    for (std::uint64_t turn = rng.below(40); turn > 0; --turn) pair.pump();
    pair.b->cancel(recv);
    std::fill(target.begin(), target.end(), std::byte{0x5a});
    ASSERT_TRUE(pump_until(
        pair, [&] { return other.is_finished() && other_send.is_finished(); }, 20'000'000));
    EXPECT_EQ(other.state, TransferState::kDone) << other.status.to_string();
    EXPECT_EQ(small, got);
    if (recv.state == TransferState::kFailed) {
      EXPECT_TRUE(std::all_of(target.begin(), target.end(),
                              [](std::byte b) { return b == std::byte{0x5a}; }));
    }
    pair.a->cancel(send);
  }
}

// What a cancelled sender may change afterwards never arrives as the message.
TEST(Rdma, ACancelledSendIsNotReadLater) {
  base::Rng rng(6);
  for (std::uint64_t round = 0; round < 60; ++round) {
    SCOPED_TRACE(round);
    RdmaPair pair = make_fake_rdma_pair(two_rails(round + 1));
    auto source = pattern(3'000'000, round);
    const auto meant = source;
    std::vector<std::byte> target(source.size());
    Transfer send = make_transfer(1, source), recv = make_transfer(1, target);
    pair.b->post(recv);
    pair.a->send(send);
    for (std::uint64_t turn = rng.below(40); turn > 0; --turn) pair.pump();
    pair.a->cancel(send);
    std::fill(source.begin(), source.end(), std::byte{0xee});
    for (int turn = 0; turn < 2'000; ++turn) pair.pump();
    if (recv.state == TransferState::kDone) {
      EXPECT_EQ(target, meant);
    }
    // Of random bytes every 256th is that one; of the bytes from after the cancel all are.
    EXPECT_LT(std::count(target.begin(), target.end(), std::byte{0xee}), 30'000);
    pair.b->cancel(recv);
    expect_moves(pair, 11, 10'000);
  }
}

TEST(Rdma, ARegionIsReadWrittenAndCountedByTheNic) {
  RdmaPair pair = make_fake_rdma_pair(two_rails(1));
  std::vector<std::uint64_t> memory(1000);
  auto* at = reinterpret_cast<std::byte*>(memory.data());
  RemoteMemory& here = *pair.a->remote_memory();
  ASSERT_TRUE(pair.b->remote_memory()->expose(1, at, 8000, RegionKind::kHost).is_ok());
  auto source = pattern(7000, 3);
  std::vector<std::byte> back(7000);
  std::uint64_t old = 7;
  Transfer write = make_transfer(1, source), read = make_transfer(2, back), add;
  add.id = {99, 3, 0, 1, 0};
  add.data = reinterpret_cast<std::byte*>(&old);
  add.bytes = 8;
  here.write(write, 1, 8);
  here.fetch_add(add, 1, 0, 5);
  here.read(read, 1, 8);
  ASSERT_TRUE(pump_until(
      pair, [&] { return write.is_finished() && add.is_finished() && read.is_finished(); }));
  EXPECT_EQ(back, source);
  EXPECT_EQ(old, 0u);
  EXPECT_EQ(memory[0], 5u);
  EXPECT_EQ(stats(pair.a).atomics, 1u);
  EXPECT_EQ(pair.fabric->num_atomics, 1u);
}

// A fetch_add whose acknowledgement is lost was carried out or not: it is never done twice, and its
// caller hears that nobody knows.
TEST(Rdma, AFetchAddIsNeverDoneTwice) {
  std::uint64_t memory = 0;
  RdmaPair pair = make_fake_rdma_pair(two_rails(2));
  ASSERT_TRUE(pair.b->remote_memory()
                  ->expose(1, reinterpret_cast<std::byte*>(&memory), 8, RegionKind::kHost)
                  .is_ok());
  for (std::uint64_t i = 1; i <= 20; ++i) {
    std::uint64_t old = 0;
    Transfer add;
    add.id = {99, i, 0, 1, 0};
    add.data = reinterpret_cast<std::byte*>(&old);
    add.bytes = 8;
    if (i == 5) pair.fabric->acks_to_lose = 1;
    pair.a->remote_memory()->fetch_add(add, 1, 0, 1);
    ASSERT_TRUE(pump_until(pair, [&] { return add.is_finished(); }, 20'000'000));
    EXPECT_EQ(memory, i);
    if (add.state == TransferState::kFailed) {
      EXPECT_NE(add.status.message().find("may or may not"), std::string::npos);
    } else {
      EXPECT_EQ(old, i - 1);
    }
  }
}

}  // namespace
}  // namespace pycomm

// Communicators in real processes: every operation at every path, mismatches, leaving, dying.
#include "pycomm/communicator.h"

#include <gtest/gtest.h>

#include <deque>

#include "forked_ranks.h"
#include "op_cases.h"

namespace pycomm {
namespace {

using test::all_reduce;
using test::run_group;

Options options_for(TransportChoice transport) {
  Options options;
  options.transport = transport;
  options.timeout_ms = 30'000;
  return options;
}

std::vector<int> zeros(int n) { return std::vector<int>(static_cast<std::size_t>(n), 0); }

struct Case {
  TransportChoice transport;
  int world_size;
};

class Collectives : public testing::TestWithParam<Case> {};

// Sums of small integers are exact in any order, so the expected value is exact too.
TEST_P(Collectives, AllReduceAtEverySize) {
  const Case c = GetParam();
  const auto results = run_group(c.world_size, options_for(c.transport), [&](Communicator& comm) {
    for (const std::uint64_t count : {0ull, 1ull, 2ull, 7ull, 16ull, 1000ull, 1024ull, 1025ull,
                                      20'000ull, 65'537ull, 1'000'003ull}) {
      std::vector<float> data(count);
      for (std::uint64_t i = 0; i < count; ++i) {
        data[i] = static_cast<float>(comm.rank() + 1) * static_cast<float>(i % 97);
      }
      const Status status = comm.run(all_reduce(data.data(), count));
      if (!status.is_ok()) {
        std::fprintf(stderr, "%s\n", status.to_string().c_str());
        return 1;
      }
      const int n = comm.world_size();
      const float total = static_cast<float>(n * (n + 1) / 2);
      for (std::uint64_t i = 0; i < count; ++i) {
        if (data[i] != total * static_cast<float>(i % 97)) return 2;
      }
    }
    return 0;
  });
  EXPECT_EQ(results, zeros(c.world_size));
}

TEST_P(Collectives, EveryOperationAtEverySizeAndRoot) {
  const Case c = GetParam();
  const auto results = run_group(c.world_size, options_for(c.transport), [&](Communicator& comm) {
    const int n = comm.world_size();
    for (const std::uint64_t count : {0ull, 1ull, 10ull, 300ull, 5'000ull, 300'000ull}) {
      for (int kind = 0; kind < kNumCollectives; ++kind) {
        const Rank root = static_cast<Rank>((count + static_cast<std::uint64_t>(kind)) %
                                            static_cast<std::uint64_t>(n));
        const test::OpCase op{static_cast<OpKind>(kind), n, count, root};
        test::OpData data;
        const Status status = comm.run(op.request(comm.rank(), data));
        const std::int64_t wrong = status.is_ok() ? op.first_wrong(comm.rank(), data) : 0;
        if (!status.is_ok() || wrong >= 0) {
          std::fprintf(stderr, "%s of %llu: %s, wrong at %lld\n", to_string(op.kind),
                       static_cast<unsigned long long>(count), status.to_string().c_str(),
                       static_cast<long long>(wrong));
          return 1;
        }
      }
    }
    return 0;
  });
  EXPECT_EQ(results, zeros(c.world_size));
}

OpRequest point_to_point(OpKind kind, Rank peer, std::uint32_t tag, std::vector<float>& data) {
  OpRequest request;
  request.kind = kind;
  request.dtype = DType::kFloat32;
  request.root = peer;
  request.tag = tag;
  request.input = request.output = reinterpret_cast<std::byte*>(data.data());
  request.count = data.size();
  return request;
}

// Every rank sends to every other, in an order of its own; receives are posted in another.
TEST_P(Collectives, SendsAndReceivesMatchByRankAndTagInOrder) {
  const Case c = GetParam();
  const auto results = run_group(c.world_size, options_for(c.transport), [&](Communicator& comm) {
    const int n = comm.world_size();
    struct Message {
      Rank peer;
      std::uint32_t tag;
      int number;
      std::vector<float> data;
    };
    const auto value = [](Rank from, Rank to, std::uint32_t tag, int number) {
      return static_cast<float>(from * 1000 + to * 100) + static_cast<float>(tag * 10) +
             static_cast<float>(number);
    };
    constexpr std::size_t kSizes[] = {0, 3, 1'000, 70'000};
    std::deque<Message> sends, receives;
    std::vector<std::shared_ptr<Operation>> operations;
    for (int number = 0; number < 4; ++number) {
      for (const std::uint32_t tag : {0u, 7u}) {
        for (Rank peer = 0; peer < n; ++peer) {
          if (peer == comm.rank()) continue;
          const std::size_t size = kSizes[(static_cast<std::size_t>(number) + tag) % 4];
          sends.push_back(
              {peer, tag, number, std::vector<float>(size, value(comm.rank(), peer, tag, number))});
          operations.push_back(
              comm.start(point_to_point(OpKind::kSend, peer, tag, sends.back().data)));
        }
      }
    }
    // A collective between them neither waits for them nor holds them up.
    std::vector<float> sum(20'000, 1.0f);
    if (!comm.run(all_reduce(sum.data(), sum.size())).is_ok()) return 1;
    for (const std::uint32_t tag : {7u, 0u}) {
      for (Rank peer = n - 1; peer >= 0; --peer) {
        for (int number = 0; number < 4 && peer != comm.rank(); ++number) {
          const std::size_t size = kSizes[(static_cast<std::size_t>(number) + tag) % 4];
          receives.push_back({peer, tag, number, std::vector<float>(size)});
          operations.push_back(
              comm.start(point_to_point(OpKind::kRecv, peer, tag, receives.back().data)));
        }
      }
    }
    for (const auto& operation : operations) {
      if (!operation->wait().is_ok()) return 2;
    }
    for (const Message& m : receives) {
      for (const float got : m.data) {
        if (got != value(m.peer, comm.rank(), m.tag, m.number)) return 3;
      }
    }
    return 0;
  });
  EXPECT_EQ(results, zeros(c.world_size));
}

TEST_P(Collectives, AReceiveFromAnySourceTakesEachMessageOnceAndSaysWhose) {
  const Case c = GetParam();
  const auto results = run_group(c.world_size, options_for(c.transport), [&](Communicator& comm) {
    for (const std::size_t size : {std::size_t{1}, std::size_t{100'000}}) {
      const auto tag = static_cast<std::uint32_t>(size);
      std::vector<float> data(size, static_cast<float>(comm.rank()));
      if (comm.rank() != 0) {
        for (int k = 0; k < 2; ++k) {
          if (!comm.run(point_to_point(OpKind::kSend, 0, tag, data)).is_ok()) return 1;
        }
        continue;
      }
      std::vector<int> seen(static_cast<std::size_t>(comm.world_size()), 0);
      for (int k = 0; k < 2 * (comm.world_size() - 1); ++k) {
        const auto got = comm.start(point_to_point(OpKind::kRecv, kAnySource, tag, data));
        if (!got->wait().is_ok() || got->source() <= 0) return 2;
        if (data[size - 1] != static_cast<float>(got->source())) return 3;
        ++seen[static_cast<std::size_t>(got->source())];
      }
      for (std::size_t p = 1; p < seen.size(); ++p) {
        if (seen[p] != 2) return 4;
      }
    }
    return 0;
  });
  EXPECT_EQ(results, zeros(c.world_size));
}

TEST_P(Collectives, ManyAsyncOperationsInFlight) {
  const Case c = GetParam();
  const auto results = run_group(c.world_size, options_for(c.transport), [&](Communicator& comm) {
    std::vector<std::vector<float>> buffers;
    std::vector<std::shared_ptr<Operation>> operations;
    for (int i = 0; i < 60; ++i) buffers.emplace_back(1 + static_cast<std::size_t>(i) * 997, 1.0f);
    for (auto& buffer : buffers) {
      operations.push_back(comm.start(all_reduce(buffer.data(), buffer.size())));
    }
    for (std::size_t i = 0; i < buffers.size(); ++i) {
      if (!operations[i]->wait().is_ok()) return 1;
      for (float value : buffers[i]) {
        if (value != static_cast<float>(comm.world_size())) return 2;
      }
    }
    return 0;
  });
  EXPECT_EQ(results, zeros(c.world_size));
}

// A rank that runs out of work first and leaves is no death to the others.
TEST_P(Collectives, LeavingEarlyIsNoDeath) {
  const Case c = GetParam();
  const auto results = run_group(c.world_size, options_for(c.transport), [&](Communicator& comm) {
    std::vector<float> data(100'000, 1.0f);
    if (!comm.run(all_reduce(data.data(), data.size())).is_ok()) return 1;
    if (comm.rank() > 0) return 0;
    platform::sleep_ns(100'000'000);
    const Status after = comm.run(all_reduce(data.data(), 2));
    if (comm.world_size() == 1) return after.is_ok() ? 0 : 2;
    // Needing a rank that left is an error that names it.
    if (after.code() != StatusCode::kPeerLost || after.rank() == kNoRank) return 3;
    return after.message().find("left") != std::string::npos ? 0 : 4;
  });
  EXPECT_EQ(results, zeros(c.world_size));
}

INSTANTIATE_TEST_SUITE_P(
    Paths, Collectives,
    testing::Values(Case{TransportChoice::kShm, 1}, Case{TransportChoice::kShm, 2},
                    Case{TransportChoice::kShm, 3}, Case{TransportChoice::kShm, 5},
                    Case{TransportChoice::kTcp, 2}, Case{TransportChoice::kTcp, 3},
                    Case{TransportChoice::kTcp, 4}),
    [](const auto& info) {
      return std::string(info.param.transport == TransportChoice::kShm ? "shm" : "tcp") +
             std::to_string(info.param.world_size);
    });

TEST(Communicator, SharedTensorsAreReducedInPlaceWithNothingStaged) {
  for (const int world_size : {2, 3, 4}) {
    const auto results =
        run_group(world_size, options_for(TransportChoice::kShm), [&](Communicator& comm) {
          for (const std::uint64_t count : {1025ull, 100'001ull, 4'194'304ull}) {
            auto memory = comm.allocate_shared(count * sizeof(float));
            if (!memory.is_ok()) return 1;
            auto* data = reinterpret_cast<float*>(memory.value().get());
            for (std::uint64_t i = 0; i < count; ++i) {
              data[i] = static_cast<float>(i % 31) * static_cast<float>(comm.rank() + 1);
            }
            if (!comm.run(all_reduce(data, count)).is_ok()) return 2;
            const int n = comm.world_size();
            for (std::uint64_t i = 0; i < count; ++i) {
              if (data[i] != static_cast<float>(i % 31) * static_cast<float>(n * (n + 1) / 2))
                return 3;
            }
            if (!comm.run(OpRequest{}).is_ok()) return 4;
          }
          for (const PeerStats& peer : comm.peer_stats()) {
            if (peer.counters.bytes_staged != 0 || peer.counters.bytes_direct == 0) return 5;
          }
          return 0;
        });
    EXPECT_EQ(results, zeros(world_size));
  }
}

// Whether they wait in an operation of whatever size, or do nothing at all.
TEST(Communicator, AnAbortIsNewsToEveryRankAtOnce) {
  for (const std::uint64_t count : {2ull, 300'000ull}) {
    const auto results = run_group(3, options_for(TransportChoice::kShm), [&](Communicator& comm) {
      std::vector<float> data(count, 1.0f);
      if (!comm.run(all_reduce(data.data(), count)).is_ok()) return 1;
      if (comm.rank() == 1) {
        platform::sleep_ns(400'000'000);
        comm.abort("enough");
        platform::sleep_ns(600'000'000);
        return 0;
      }
      const base::TimeNs start = platform::real_clock().now_ns();
      if (comm.rank() == 0) {
        if (comm.run(all_reduce(data.data(), count)).is_ok()) return 2;
      } else {
        while (comm.health().is_ok()) {
          platform::sleep_ns(5'000'000);
          if (platform::real_clock().now_ns() - start > base::ms_to_ns(3'000)) return 3;
        }
      }
      return platform::real_clock().now_ns() - start < base::ms_to_ns(900) ? 0 : 4;
    });
    EXPECT_EQ(results, zeros(3));
  }
}

TEST(Communicator, DifferentOperationsAreAnErrorThatNamesBothAndTheGroupGoesOn) {
  const auto results = run_group(3, options_for(TransportChoice::kShm), [&](Communicator& comm) {
    std::vector<float> data(100'000, 1.0f);
    for (const std::uint64_t count : {10ull, 50'000ull}) {
      const Status status = comm.run(all_reduce(data.data(), comm.rank() == 1 ? count + 1 : count));
      if (status.code() != StatusCode::kInvalidUsage) return 1;
      const std::string& text = status.message();
      if (text.find(std::to_string(count) + " elements") == std::string::npos) return 2;
      if (text.find(std::to_string(count + 1) + " elements") == std::string::npos) return 3;
    }
    return comm.run(all_reduce(data.data(), 10)).is_ok() ? 0 : 4;
  });
  EXPECT_EQ(results, zeros(3));
}

// Also where no message of one has the name of a message of the other.
TEST(Communicator, DifferentKindsOfOperationsAreNamedOnEveryTransport) {
  for (const TransportChoice transport : {TransportChoice::kShm, TransportChoice::kTcp}) {
    const std::pair<OpKind, OpKind> pairs[] = {{OpKind::kBroadcast, OpKind::kAllReduce},
                                               {OpKind::kScatter, OpKind::kGather},
                                               {OpKind::kAllGather, OpKind::kReduceScatter},
                                               {OpKind::kBarrier, OpKind::kAllToAll}};
    for (const auto& [first, second] : pairs) {
      for (const std::uint64_t count : {3ull, 30'000ull}) {
        const auto results = run_group(3, options_for(transport), [&](Communicator& comm) {
          test::OpData data;
          const test::OpCase op{comm.rank() == 1 ? second : first, 3, count, 0};
          // All have come together; a slow rank may hear of the others' failure even in here.
          Status status = comm.run(OpRequest{});
          if (status.is_ok()) status = comm.run(op.request(comm.rank(), data));
          // Whose operation needed nobody else learns it at the next one.
          if (status.is_ok()) status = comm.run(OpRequest{});
          if (status.code() != StatusCode::kInvalidUsage) {
            std::fprintf(stderr, "rank %d: %s\n", comm.rank(), status.to_string().c_str());
            return 1;
          }
          const bool names_both = status.message().find(to_string(first)) != std::string::npos &&
                                  status.message().find(to_string(second)) != std::string::npos;
          return names_both ? 0 : status.message().find("says") != std::string::npos ? 0 : 2;
        });
        EXPECT_EQ(results, zeros(3)) << to_string(first) << " and " << to_string(second);
      }
    }
  }
}

TEST(Communicator, CountsOfAnUnevenAllToAllThatDisagreeAreNamed) {
  for (const TransportChoice transport : {TransportChoice::kShm, TransportChoice::kTcp}) {
    const auto results = run_group(2, options_for(transport), [&](Communicator& comm) {
      std::vector<float> in(100), out(100);
      auto splits = std::make_shared<Splits>();
      splits->send = {5, 7};
      splits->recv = {comm.rank() == 0 ? 5u : 6u, comm.rank() == 0 ? 5u : 7u};
      OpRequest request;
      request.kind = OpKind::kAllToAllUneven;
      request.dtype = DType::kFloat32;
      request.input = reinterpret_cast<std::byte*>(in.data());
      request.output = reinterpret_cast<std::byte*>(out.data());
      request.splits = splits;
      Status status = comm.run(request);
      // Rank 0 sends 7 and rank 1 takes 6: at least rank 1 says so with its numbers. Over messages
      // rank 0 may have all that it asked for, and learn it at the next operation.
      if (status.is_ok() && transport == TransportChoice::kTcp) status = comm.run(OpRequest{});
      const std::string& text = status.message();
      const bool is_told = text.find("7 elements") != std::string::npos;
      if (comm.rank() == 1 && !is_told) std::fprintf(stderr, "%s\n", text.c_str());
      if (comm.rank() == 1) return is_told ? 0 : 1;
      return status.code() == StatusCode::kInvalidUsage ? 0 : 2;
    });
    EXPECT_EQ(results, zeros(2));
  }
}

TEST(Communicator, AReceiveOfAnotherSizeIsAnErrorOnBothSides) {
  for (const TransportChoice transport : {TransportChoice::kShm, TransportChoice::kTcp}) {
    const auto results = run_group(2, options_for(transport), [&](Communicator& comm) {
      std::vector<float> data(comm.rank() == 0 ? 50'000 : 40'000);
      const Status status = comm.run(point_to_point(
          comm.rank() == 0 ? OpKind::kSend : OpKind::kRecv, 1 - comm.rank(), 0, data));
      if (status.code() != StatusCode::kInvalidUsage) return 1;
      return comm.rank() == 0 || status.message().find("50000") != std::string::npos ? 0 : 2;
    });
    EXPECT_EQ(results, zeros(2));
  }
}

TEST(Communicator, UnequalOptionsAreAnErrorThatNamesBothSides) {
  const std::string folder = test::make_folder();
  const auto results = test::run_ranks(2, [&](Rank rank) {
    auto store = make_file_store(folder);
    Options options = options_for(TransportChoice::kShm);
    if (rank == 1) options.chunk_bytes *= 2;
    auto communicator = Communicator::create(*store, rank, 2, options);
    if (communicator.is_ok()) return 1;
    const std::string text = communicator.status().message();
    const bool names_both =
        text.find("262144") != std::string::npos && text.find("524288") != std::string::npos;
    return names_both && communicator.status().code() == StatusCode::kInvalidUsage ? 0 : 2;
  });
  std::filesystem::remove_all(folder);
  EXPECT_EQ(results, zeros(2));
}

TEST(Communicator, AMissingRankIsNamedAtTheDeadline) {
  const std::string folder = test::make_folder();
  const auto results = test::run_ranks(1, [&](Rank) {
    auto store = make_file_store(folder);
    Options options = options_for(TransportChoice::kAuto);
    options.timeout_ms = 300;
    auto communicator = Communicator::create(*store, 0, 2, options);
    return communicator.status().code() == StatusCode::kTimeout &&
                   communicator.status().message().find("rank 1") != std::string::npos
               ? 0
               : 1;
  });
  std::filesystem::remove_all(folder);
  EXPECT_EQ(results, zeros(1));
}

TEST(Communicator, ALateRankIsATimeoutThatNamesIt) {
  for (const TransportChoice transport : {TransportChoice::kShm, TransportChoice::kTcp}) {
    const auto results = run_group(2, options_for(transport), [&](Communicator& comm) {
      std::vector<float> data(2, 1.0f);
      OpRequest request = all_reduce(data.data(), 2);
      if (comm.rank() == 1) {
        platform::sleep_ns(600'000'000);
        return 0;
      }
      request.timeout_ms = 200;
      const Status status = comm.run(request);
      return status.code() == StatusCode::kTimeout && status.rank() == 1 ? 0 : 1;
    });
    EXPECT_EQ(results, zeros(2));
  }
}

TEST(Communicator, AForkedChildGetsAnErrorNotAHang) {
  const auto results = run_group(2, options_for(TransportChoice::kShm), [&](Communicator& comm) {
    std::vector<float> data(8, 1.0f);
    if (!comm.run(all_reduce(data.data(), 8)).is_ok()) return 1;
    const pid_t child = fork();
    if (child == 0) {
      const Status status = comm.run(all_reduce(data.data(), 8));
      if (status.code() != StatusCode::kInvalidUsage) _exit(1);
#if defined(__SANITIZE_THREAD__)
      _exit(0);  // this sanitizer allows no new threads after a fork with threads
#endif
      // It may start anew.
      const std::string folder = test::make_folder();
      auto store = make_file_store(folder);
      auto own = Communicator::create(*store, 0, 1, Options());
      std::filesystem::remove_all(folder);
      _exit(own.is_ok() && own.value()->run(all_reduce(data.data(), 8)).is_ok() ? 0 : 2);
    }
    int status = 0;
    waitpid(child, &status, 0);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) return 2;
    return comm.run(all_reduce(data.data(), 8)).is_ok() ? 0 : 3;
  });
  EXPECT_EQ(results, zeros(2));
}

TEST(Communicator, FiftyTimesInitAndDestroyLeavesNoDescriptors) {
  const std::string folder = test::make_folder();
  const auto results = test::run_ranks(2, [&](Rank rank) {
    auto store = make_file_store(folder);
    const auto count_fds = [] {
      int n = 0;
      for ([[maybe_unused]] const auto& entry :
           std::filesystem::directory_iterator("/proc/self/fd"))
        ++n;
      return n;
    };
    int before = 0;
    for (int i = 0; i < 50; ++i) {
      Options options = options_for(i % 2 == 0 ? TransportChoice::kShm : TransportChoice::kTcp);
      options.group_name = "round" + std::to_string(i);
      auto communicator = Communicator::create(*store, rank, 2, options);
      if (!communicator.is_ok()) return 1;
      std::vector<float> data(5'000, 1.0f);
      if (!communicator.value()->run(all_reduce(data.data(), data.size())).is_ok()) return 2;
      communicator = Status::error(StatusCode::kAborted, "dropped");
      if (i == 1) before = count_fds();
    }
    return count_fds() == before ? 0 : 3;
  });
  std::filesystem::remove_all(folder);
  EXPECT_EQ(results, zeros(2));
}

TEST(Communicator, SixtyFourSubgroupsShareOneEngine) {
  const std::string folder = test::make_folder();
  const auto results = test::run_ranks(2, [&](Rank rank) {
    auto store = make_file_store(folder);
    const auto count_threads = [] {
      int n = 0;
      for ([[maybe_unused]] const auto& entry :
           std::filesystem::directory_iterator("/proc/self/task"))
        ++n;
      return n;
    };
    int threads_of_one_group = 0;
    std::vector<std::unique_ptr<Communicator>> groups;
    for (int i = 0; i < 64; ++i) {
      Options options = options_for(TransportChoice::kAuto);
      options.group_name = "group" + std::to_string(i);
      auto communicator = Communicator::create(*store, rank, 2, options);
      if (!communicator.is_ok()) return 1;
      groups.push_back(std::move(communicator).value());
      if (i == 0) threads_of_one_group = count_threads();
    }
    for (int round = 0; round < 3; ++round) {
      for (auto& group : groups) {
        std::vector<float> data(3'000, 1.0f);
        if (!group->run(all_reduce(data.data(), 3)).is_ok()) return 2;
        if (!group->run(all_reduce(data.data(), data.size())).is_ok()) return 3;
        if (data[2] != 4.0f || data[3] != 2.0f) return 4;
      }
    }
    return count_threads() == threads_of_one_group ? 0 : 5;
  });
  std::filesystem::remove_all(folder);
  EXPECT_EQ(results, zeros(2));
}

}  // namespace
}  // namespace pycomm

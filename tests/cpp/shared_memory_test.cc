// The arena for tensors, what is kept of it, and the file of what was learnt.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <thread>
#include <vector>

#include "base/rng.h"
#include "communicator/tuning_file.h"
#include "forked_ranks.h"
#include "platform/memory.h"
#include "platform/system.h"
#include "transport/shm/arena.h"

namespace pycomm {
namespace {

using transport::shm::Arena;
using transport::shm::Budget;
using Contents = Arena::Contents;

std::shared_ptr<Arena> make_arena(const std::shared_ptr<Budget>& budget) {
  return Arena::create(budget).value();
}

TEST(Arena, FreedMemoryIsKeptForTheNextOneThenGivenBack) {
  auto budget = std::make_shared<Budget>(UINT64_MAX);
  auto arena = make_arena(budget);
  std::byte* first = arena->allocate(100'000, Contents::kAny).value();
  std::memset(first, 7, 100'000);
  arena->free(first);
  EXPECT_GT(arena->kept_bytes(), 0u);
  std::byte* second = arena->allocate(100'000, Contents::kZeros).value();
  EXPECT_EQ(second, first);
  for (int i = 0; i < 100'000; ++i) ASSERT_EQ(second[i], std::byte{0});
  arena->free(second);
  arena->trim(platform::real_clock().now_ns() - 60'000'000'000);
  EXPECT_GT(arena->kept_bytes(), 0u);  // it is not that old
  arena->trim(base::kNever);
  EXPECT_EQ(arena->kept_bytes(), 0u);
  EXPECT_EQ(budget->used(), 0u);
  struct stat info;
  ASSERT_EQ(fstat(arena->memory().fd(), &info), 0);
  EXPECT_EQ(info.st_blocks, 0);  // the system has every page back
}

TEST(Arena, WhatIsLargerThanAllThatIsKeptGoesBackAtOnce) {
  auto budget = std::make_shared<Budget>(UINT64_MAX);
  auto arena = make_arena(budget);
  arena->free(arena->allocate(std::uint64_t{600} << 20, Contents::kAny).value());
  EXPECT_EQ(arena->kept_bytes(), 0u);
  EXPECT_EQ(budget->used(), 0u);
}

TEST(Arena, ALimitIsAnErrorWithARemedyAndWhatIsKeptGoesFirst) {
  auto budget = std::make_shared<Budget>(1 << 20);
  auto arena = make_arena(budget);
  const auto refused = arena->allocate(2 << 20, Contents::kAny);
  ASSERT_EQ(refused.status().code(), StatusCode::kSystem);
  EXPECT_NE(refused.status().message().find("PYCOMM_SHM_BYTES_MAX"), std::string::npos);
  std::byte* most = arena->allocate(1 << 20, Contents::kAny).value();
  EXPECT_FALSE(arena->allocate(4096, Contents::kAny).is_ok());
  arena->free(most);
  EXPECT_TRUE(arena->allocate(4096, Contents::kAny).is_ok());  // another size, from the same room
}

TEST(Arena, ManyThreadsGetMemoryOfTheirOwn) {
  auto budget = std::make_shared<Budget>(UINT64_MAX);
  auto arena = make_arena(budget);
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      base::Rng rng(static_cast<std::uint64_t>(t));
      for (int i = 0; i < 200; ++i) {
        const std::uint64_t bytes = 1 + rng.below(60'000);
        std::byte* data = arena->allocate(bytes, Contents::kAny).value();
        std::memset(data, t, bytes);
        std::this_thread::yield();
        for (std::uint64_t k = 0; k < bytes; k += 512) wrong += data[k] != std::byte(t);
        arena->free(data);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  arena->trim(base::kNever);
  EXPECT_EQ(budget->used(), 0u);
}

TEST(SharedMemory, MayBeMadeBeforeTheGroupAndOutliveIt) {
  const std::string folder = test::make_folder();
  const auto results = test::run_ranks(2, [&](Rank rank) {
    auto memory = allocate_shared_memory(1 << 20).value();
    auto* data = reinterpret_cast<float*>(memory.get());
    for (int round = 0; round < 2; ++round) {
      data[0] = data[(1 << 18) - 1] = static_cast<float>(rank + 1);
      Options options;
      options.timeout_ms = 20'000;
      options.group_name = "round " + std::to_string(round);
      auto store = make_file_store(folder);
      auto comm = Communicator::create(*store, rank, 2, options);
      if (!comm.is_ok()) return 1;
      if (!comm.value()->run(test::all_reduce(data, 1 << 18)).is_ok()) return 2;
      if (comm.value()->peer_stats()[0].counters.bytes_staged != 0) return 3;
      comm.value().reset();
      if (data[0] != 3.0f || data[(1 << 18) - 1] != 3.0f) return 4;
    }
    return 0;
  });
  std::filesystem::remove_all(folder);
  EXPECT_EQ(results, (std::vector<int>{0, 0}));
}

// A peer that is stopped inside an operation that has failed here writes into the tensor when it
// goes on, whatever became of group and engine meanwhile: nobody else may have that memory.
TEST(SharedMemory, WhatAStoppedPeerMayStillWriteIsNotHandedOutAgain) {
  constexpr std::uint64_t kBytes = std::uint64_t{64} << 20;
  const std::string folder = test::make_folder();
  const auto body = [&](Rank rank) {
    auto memory = allocate_shared_memory(kBytes).value();
    auto* data = reinterpret_cast<float*>(memory.get());
    std::fill(data, data + kBytes / sizeof(float), 1.0f);
    Options options;
    options.timeout_ms = 20'000;
    auto store = make_file_store(folder);
    auto comm = Communicator::create(*store, rank, 2, options);
    if (!comm.is_ok()) return 1;
    OpRequest request = test::all_reduce(data, kBytes / sizeof(float));
    request.keepalive = std::move(memory);
    if (!comm.value()->run(request).is_ok()) return 3;
    if (rank == 0) request.timeout_ms = 400;
    std::ofstream(folder + "/ready" + std::to_string(rank)).put('x');
    while (comm.value()->run(request).is_ok()) {
    }
    if (rank == 1) return 0;
    comm.value().reset();  // the last one: the engine ends with it
    request.keepalive.reset();
    auto next = allocate_shared_memory(kBytes).value();
    std::ofstream(folder + "/go-on").put('x');
    platform::sleep_ns(150'000'000);
    const auto* seen = next.get();
    return std::all_of(seen, seen + kBytes, [](std::byte b) { return b == std::byte{0}; }) ? 0 : 2;
  };
  const auto results = test::run_ranks(2, body, [&](const std::vector<pid_t>& children) {
    const auto await = [&](const char* name) {
      for (int i = 0; i < 30'000 && !std::filesystem::exists(folder + name); ++i) {
        platform::sleep_ns(1'000'000);
      }
    };
    await("/ready0");
    await("/ready1");
    platform::sleep_ns(20'000'000);
    kill(children[1], SIGSTOP);
    await("/go-on");
    kill(children[1], SIGCONT);
  });
  std::filesystem::remove_all(folder);
  EXPECT_EQ(results, (std::vector<int>{0, 0}));
}

TEST(SharedMemory, AForkedChildReadsItAndFreesNothing) {
  auto memory = allocate_shared_memory(1 << 20).value();
  memory.get()[5] = std::byte{42};
  const pid_t child = fork();
  if (child == 0) {
    const bool reads = memory.get()[5] == std::byte{42};
    memory.get()[5] = std::byte{1};  // its own copy
    memory.reset();
    auto own = allocate_shared_memory(1 << 16);
    _exit(reads && own.is_ok() ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(memory.get()[5], std::byte{42});
}

TEST(Pages, OnlyHugeOnesAreTakenForHuge) {
  constexpr std::uint64_t kBytes = 4 << 20;
  std::vector<std::byte> small(1 << 20, std::byte{1});
  EXPECT_FALSE(platform::has_huge_pages(small.data(), small.size()));
  auto arena = make_arena(std::make_shared<Budget>(UINT64_MAX));
  std::byte* shared = arena->allocate(kBytes, Contents::kAny).value();
  std::memset(shared, 1, kBytes);
  EXPECT_FALSE(platform::has_huge_pages(shared, kBytes));
}

class Learnt : public testing::Test {
 protected:
  void SetUp() override { folder_ = test::make_folder(); }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  communicator::TuningFile file() const {
    Options options;
    options.tuning_file = folder_ + "/learnt.txt";
    return communicator::open_tuning(options, 2);
  }
  std::string folder_;
};

TEST_F(Learnt, IsKeptForThisUserAlone) {
  file().save("all_reduce 21 1 2 3 4\n");
  struct stat info;
  ASSERT_EQ(stat(file().path().c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  EXPECT_EQ(file().load(), "all_reduce 21 1 2 3 4\n");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder_), {}), 1);
}

TEST_F(Learnt, WhatOthersCouldHaveWrittenIsNotRead) {
  std::ofstream(file().path()) << "all_reduce 21 1 2 3 4\n";
  chmod(file().path().c_str(), 0644);
  EXPECT_EQ(file().load(), "");
}

TEST_F(Learnt, NoFolderIsNoFailure) {
  Options options;
  options.tuning_file = folder_ + "/missing/learnt.txt";
  communicator::open_tuning(options, 2).save("all_reduce 21 1 2 3 4\n");
  EXPECT_EQ(communicator::open_tuning(options, 2).load(), "");
  options.tuning_file = "off";
  EXPECT_EQ(communicator::open_tuning(options, 2).path(), "");
}

}  // namespace
}  // namespace pycomm

// Operations among ranks of one host, all ranks in this thread: memory and order of turns are ours,
// so every interleaving that the pacing allows can come up, and a chunk that is overwritten before
// it was read, or read before it was written, is a wrong result. A failing run prints its seed.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>

#include "base/rng.h"
#include "collectives/execution.h"
#include "collectives/local_agreement.h"
#include "op_cases.h"

namespace pycomm {
namespace {

using collectives::Announcement;
using collectives::Execution;
using collectives::FlatArea;
using collectives::GroupContext;
using collectives::LocalChannel;
using collectives::Way;
using With = Execution::With;

constexpr std::uint64_t kSegmentBytes = 1 << 20;
constexpr std::uint64_t kArenaBytes = 8 << 20;

enum class Place { kPrivate, kArena, kMixed };

// All ranks of a group, with memory that only looks shared.
class LocalGroup : public collectives::Puller {
 public:
  LocalGroup(int world_size, std::uint64_t window_bytes, Way way) {
    const auto n = static_cast<std::size_t>(world_size);
    for (std::size_t r = 0; r < n; ++r) {
      segments_.emplace_back(new std::byte[kSegmentBytes]);
      arenas_.emplace_back(new std::byte[kArenaBytes]);
      areas_.push_back(std::make_unique<FlatArea>());
    }
    for (std::size_t r = 0; r < n; ++r) {
      auto context = std::make_unique<GroupContext>();
      context->rank = static_cast<Rank>(r);
      context->world_size = world_size;
      context->shape.shares_memory = true;
      context->shape.way = way;
      context->shape.is_crowded = world_size % 2 == 1;
      context->shape.stream_bytes_min = 256 * 1024;
      std::vector<std::byte*> flat;
      LocalChannel& local = context->local;
      for (std::size_t p = 0; p < n; ++p) {
        flat.push_back(reinterpret_cast<std::byte*>(areas_[p].get()));
        local.marks.push_back(&areas_[p]->mark);
        local.segments.push_back(segments_[p].get());
        local.arenas.push_back(arenas_[p].get());
      }
      local.mine = &areas_[r]->mark;
      local.segment_bytes = kSegmentBytes;
      local.arena_bytes = kArenaBytes;
      local.window_bytes = window_bytes;
      local.allocate_window = [this, r](std::uint64_t) { return segments_[r].get() + 64; };
      local.puller = this;
      context->flat = std::make_unique<collectives::FlatExchange>(context->rank, flat);
      contexts_.push_back(std::move(context));
    }
  }

  Status pull(Rank, std::uint64_t address, std::byte* out, std::uint64_t bytes) override {
    std::memcpy(out, reinterpret_cast<const std::byte*>(address), bytes);
    ++num_pulls;
    return Status();
  }

  GroupContext& operator[](Rank r) { return *contexts_[static_cast<std::size_t>(r)]; }
  std::byte* arena(Rank r) { return arenas_[static_cast<std::size_t>(r)].get(); }

  int num_pulls = 0;

 private:
  std::vector<std::unique_ptr<std::byte[]>> segments_;
  std::vector<std::unique_ptr<std::byte[]>> arenas_;
  std::vector<std::unique_ptr<FlatArea>> areas_;
  std::vector<std::unique_ptr<GroupContext>> contexts_;
};

struct Run {
  std::uint64_t seed = 0;
  int world_size = 2;
  std::uint64_t window_bytes = 0;
  Way way = Way::kStreamedWindow;
  Place place = Place::kPrivate;
  std::vector<test::OpCase> cases;

  static Run from_seed(std::uint64_t seed) {
    base::Rng rng(seed);
    Run run;
    run.seed = seed;
    run.world_size = static_cast<int>(2 + rng.below(5));
    const auto n = static_cast<std::uint64_t>(run.world_size);
    run.window_bytes = 3 * n * 256 * (1 + rng.below(64));
    run.way = static_cast<Way>(rng.below(collectives::kNumWays));
    run.place = static_cast<Place>(rng.below(3));
    const std::uint64_t num_cases = 1 + rng.below(4);
    for (std::uint64_t i = 0; i < num_cases; ++i) {
      static constexpr std::uint64_t kCounts[] = {1, 300, 4'097, 12'288, 30'011};
      run.cases.push_back({static_cast<OpKind>(1 + rng.below(kNumCollectives - 1)), run.world_size,
                           kCounts[rng.below(5)],
                           static_cast<Rank>(rng.below(static_cast<std::uint64_t>(n)))});
    }
    return run;
  }

  bool is_in_arena(Rank r) const {
    return place == Place::kArena || (place == Place::kMixed && r % 2 == 0);
  }

  // Moves a tensor into the arena, at *used.
  static std::byte* move_to(std::byte* arena, std::uint64_t* used, const std::vector<float>& data) {
    std::byte* at = arena + *used;
    if (!data.empty()) std::memcpy(at, data.data(), data.size() * sizeof(float));
    *used += (data.size() * sizeof(float) + 63) / 64 * 64;
    EXPECT_LE(*used, kArenaBytes);
    return at;
  }

  void play() const {
    base::Rng rng(seed ^ 0xface);
    LocalGroup group(world_size, window_bytes, way);
    const auto n = static_cast<std::size_t>(world_size);
    // Rank `slow` gets one turn in a hundred: the others run into every limit that there is.
    const auto slow = static_cast<Rank>(rng.below(2 * n));
    std::vector<std::vector<std::unique_ptr<test::OpData>>> data(n);
    std::vector<std::vector<OpRequest>> requests(n);
    for (Rank r = 0; r < world_size; ++r) {
      std::uint64_t used = 0;
      for (const test::OpCase& c : cases) {
        auto& mine = data[static_cast<std::size_t>(r)];
        mine.push_back(std::make_unique<test::OpData>());
        OpRequest request = c.request(r, *mine.back());
        request.op_number = mine.size();
        if (is_in_arena(r)) {
          request.input = move_to(group.arena(r), &used, mine.back()->input);
          request.output = move_to(group.arena(r), &used, mine.back()->output);
        }
        requests[static_cast<std::size_t>(r)].push_back(request);
      }
    }
    std::vector<std::unique_ptr<Execution>> current(n);
    std::vector<std::size_t> next(n, 0);
    std::size_t num_over = 0;
    std::uint64_t idle_turns = 0;
    while (num_over < n) {
      const auto r = static_cast<Rank>(rng.below(n));
      const auto i = static_cast<std::size_t>(r);
      if (next[i] == cases.size() || (r == slow && rng.below(100) != 0)) continue;
      if (!current[i]) {
        current[i] = std::make_unique<Execution>(group[r], requests[i][next[i]], 0);
      }
      const bool moved = current[i]->advance(0, With::kMemoryOnly);
      idle_turns = moved ? 0 : idle_turns + 1;
      ASSERT_LT(idle_turns, 100'000u) << "nobody gets on";
      ASSERT_FALSE(current[i]->needs_links());
      if (!current[i]->is_finished()) continue;
      ASSERT_TRUE(current[i]->status().is_ok()) << current[i]->status().to_string();
      read_back(r, requests[i][next[i]], *data[i][next[i]]);
      ASSERT_EQ(cases[next[i]].first_wrong(r, *data[i][next[i]]), -1)
          << "rank " << r << ", " << to_string(cases[next[i]].kind) << " of "
          << cases[next[i]].count << ", operation " << next[i];
      current[i].reset();
      if (++next[i] == cases.size()) ++num_over;
    }
  }

  void read_back(Rank r, const OpRequest& request, test::OpData& data) const {
    if (!is_in_arena(r)) return;
    std::memcpy(data.output.data(), request.output, data.output.size() * sizeof(float));
    std::memcpy(data.input.data(), request.input, data.input.size() * sizeof(float));
  }
};

TEST(Local, EveryInterleavingGivesTheResult) {
  const char* one = std::getenv("SIM_SEED");
  const char* number = std::getenv("SIM_SCENARIOS");
  const std::uint64_t runs = number != nullptr ? std::strtoull(number, nullptr, 10) : 500;
  const std::uint64_t first = one != nullptr ? std::strtoull(one, nullptr, 10) : 1;
  for (std::uint64_t seed = first; seed < first + (one != nullptr ? 1 : runs); ++seed) {
    SCOPED_TRACE("SIM_SEED=" + std::to_string(seed));
    Run::from_seed(seed).play();
    if (testing::Test::HasFatalFailure()) return;
  }
}

// Drives all ranks in turn until nothing moves.
void settle(std::vector<std::unique_ptr<Execution>>& ranks) {
  for (bool moved = true; moved;) {
    moved = false;
    for (auto& rank : ranks) moved |= rank->advance(0, With::kMemoryOnly);
  }
}

class TwoRanks : public testing::Test {
 protected:
  TwoRanks() : data_(2), group_(2, 3 * 2 * 4096, Way::kPull) {}

  void begin(OpKind kind, std::uint64_t count) {
    case_ = {kind, 2, count, 0};
    for (Rank r = 0; r < 2; ++r) {
      requests_.push_back(case_.request(r, data_[static_cast<std::size_t>(r)]));
      requests_.back().op_number = 1;
    }
    for (Rank r = 0; r < 2; ++r) {
      ranks_.push_back(
          std::make_unique<Execution>(group_[r], requests_[static_cast<std::size_t>(r)], 0));
    }
  }

  std::vector<test::OpData> data_;
  LocalGroup group_;
  test::OpCase case_;
  std::vector<OpRequest> requests_;
  std::vector<std::unique_ptr<Execution>> ranks_;
};

TEST_F(TwoRanks, WhatIsReadFromARankThatGaveUpDoesNotCount) {
  begin(OpKind::kAllGather, 1'000'000);
  // Rank 1 reads, and rank 0 as well, so that only its giving up is in the way of rank 1's success.
  for (int turn = 0; turn < 4; ++turn) ranks_[0]->advance(0, With::kMemoryOnly);
  while (group_.num_pulls == 0) ASSERT_TRUE(ranks_[1]->advance(0, With::kMemoryOnly));
  while (ranks_[0]->advance(0, With::kMemoryOnly)) {
  }
  ASSERT_FALSE(ranks_[1]->is_finished());
  ranks_[0]->abort(Status::error(StatusCode::kTimeout, "too slow"));
  settle(ranks_);
  ASSERT_TRUE(ranks_[1]->is_finished());
  EXPECT_EQ(ranks_[1]->status().code(), StatusCode::kPeerLost);
  EXPECT_EQ(ranks_[1]->status().rank(), 0);
}

TEST_F(TwoRanks, WithoutWindowsItGoesOverMessages) {
  group_[1].local.allocate_window = [](std::uint64_t) { return nullptr; };
  begin(OpKind::kAllReduce, 100'000);
  settle(ranks_);
  EXPECT_TRUE(ranks_[0]->needs_links() && ranks_[1]->needs_links());
}

TEST(Agreement, AnnouncedMemoryIsCheckedBeforeItBecomesAnAddress) {
  LocalGroup group(2, 3 * 2 * 4096, Way::kStreamedWindow);
  const LocalChannel& channel = group[0].local;
  std::vector<float> data(4096);
  OpRequest request;
  request.kind = OpKind::kAllReduce;
  request.dtype = DType::kFloat32;
  request.count = data.size();
  request.input = request.output = reinterpret_cast<std::byte*>(data.data());
  const std::uint64_t in_arena = std::uint64_t{1} << 63, bytes = request.bytes();
  const auto code = [&](const Announcement& theirs) {
    const std::vector<Announcement> all{{1, 1, 65, 1}, theirs};
    return collectives::decide(channel, group[0].shape, request, 0, 0, all).status().code();
  };
  EXPECT_EQ(code({8, 8, 65, 1}), StatusCode::kOk);
  EXPECT_EQ(code({in_arena | (kArenaBytes - bytes), 8, 65, 1}), StatusCode::kOk);
  for (const std::uint64_t place : {kArenaBytes - bytes + 4, kArenaBytes, kArenaBytes + 4,
                                    ~in_arena, ~in_arena - bytes, std::uint64_t{2}}) {
    EXPECT_EQ(code({in_arena | place, 8, 65, 1}), StatusCode::kInternal) << place;
    EXPECT_EQ(code({8, in_arena | place, 65, 1}), StatusCode::kInternal) << place;
  }
  for (const std::uint64_t window :
       {kSegmentBytes, kSegmentBytes + 1, kSegmentBytes - 3 * 2 * 4096 + 2, ~std::uint64_t{0}}) {
    EXPECT_EQ(code({8, 8, window, 1}), StatusCode::kInternal) << window;
  }
}

}  // namespace
}  // namespace pycomm

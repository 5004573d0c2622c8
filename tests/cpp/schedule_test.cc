// Every planner, proved by the checker for worlds 1 to 64; and proof that the checker can fail.
#include <gtest/gtest.h>

#include "base/rng.h"
#include "collectives/checker.h"

namespace pycomm::collectives {
namespace {

using Planner = Schedule (*)(const PlanRequest&);

struct Subject {
  const char* name;
  Planner plan;
  OpKind kind;
  bool in_rank_order = false;
};

const Subject kSubjects[] = {
    {"ring_all_reduce", plan_ring_all_reduce, OpKind::kAllReduce},
    {"recursive_all_reduce", plan_recursive_all_reduce, OpKind::kAllReduce},
    {"swap_all_reduce", plan_swap_all_reduce, OpKind::kAllReduce, true},
    {"direct_all_reduce", plan_direct_all_reduce, OpKind::kAllReduce, true},
    {"direct_reduce", plan_direct_reduce, OpKind::kReduce, true},
    {"scattered_reduce", plan_scattered_reduce, OpKind::kReduce, true},
    {"direct_reduce_scatter", plan_direct_reduce_scatter, OpKind::kReduceScatter, true},
    {"ring_all_gather", plan_ring_all_gather, OpKind::kAllGather},
    {"direct_all_gather", plan_direct_all_gather, OpKind::kAllGather},
    {"tree_broadcast", plan_tree_broadcast, OpKind::kBroadcast},
    {"direct_broadcast", plan_direct_broadcast, OpKind::kBroadcast},
    {"direct_gather", plan_direct_gather, OpKind::kGather},
    {"direct_scatter", plan_direct_scatter, OpKind::kScatter},
    {"direct_all_to_all", plan_direct_all_to_all, OpKind::kAllToAll},
    {"barrier", plan_barrier, OpKind::kBarrier},
    {"flat_all_reduce", plan_flat, OpKind::kAllReduce, true},
    {"flat_reduce", plan_flat, OpKind::kReduce, true},
    {"flat_reduce_scatter", plan_flat, OpKind::kReduceScatter, true},
    {"flat_all_gather", plan_flat, OpKind::kAllGather},
    {"flat_broadcast", plan_flat, OpKind::kBroadcast},
    {"flat_gather", plan_flat, OpKind::kGather},
    {"flat_scatter", plan_flat, OpKind::kScatter},
    {"flat_all_to_all", plan_flat, OpKind::kAllToAll},
    {"flat_barrier", plan_flat, OpKind::kBarrier},
};

std::vector<Schedule> plan_all(const Subject& subject, PlanRequest request) {
  std::vector<Schedule> schedules;
  for (Rank r = 0; r < request.world_size; ++r) {
    request.rank = r;
    schedules.push_back(subject.plan(request));
  }
  return schedules;
}

class EveryPlanner : public testing::TestWithParam<Subject> {};

TEST_P(EveryPlanner, IsProvedForWorldsUpTo64) {
  const Subject subject = GetParam();
  std::vector<int> worlds{23, 31, 32, 33, 48, 63, 64};
  for (int n = 1; n <= 17; ++n) worlds.push_back(n);
  for (const int n : worlds) {
    const auto world = static_cast<std::uint64_t>(n);
    for (const std::uint64_t count :
         {std::uint64_t{0}, std::uint64_t{1}, world - 1, 5 * world + 3, std::uint64_t{3000}}) {
      if (count == 3000 && n > 9) continue;  // several chunks a part
      PlanRequest request;
      request.kind = subject.kind;
      request.world_size = n;
      request.root = n / 3;
      request.count = subject.kind == OpKind::kBarrier ? 0 : count;
      request.element_bytes = 4;
      request.chunk_bytes = 256;
      request.in_rank_order = subject.in_rank_order;
      const std::vector<Schedule> schedules = plan_all(subject, request);
      for (const bool in_place : {false, true}) {
        const Status status = check_schedules(schedules, request, in_place);
        ASSERT_TRUE(status.is_ok()) << "world " << n << ", count " << count
                                    << (in_place ? " in place: " : ": ") << status.to_string();
      }
    }
  }
}

// Removing any one step of any rank, or aiming it elsewhere, must not go unnoticed.
TEST_P(EveryPlanner, IsRefutedWhenAnyStepIsBroken) {
  const Subject subject = GetParam();
  PlanRequest request;
  request.kind = subject.kind;
  request.world_size = 5;
  request.root = 1;
  request.count = subject.kind == OpKind::kBarrier ? 0 : 4000;
  request.element_bytes = 4;
  request.chunk_bytes = 2048;
  const std::vector<Schedule> good = plan_all(subject, request);
  ASSERT_TRUE(check_schedules(good, request).is_ok());
  int broken = 0;
  for (std::size_t r = 0; r < good.size(); ++r) {
    for (std::size_t s = 0; s < good[r].steps.size(); ++s) {
      if (good[r].steps[s].kind == StepKind::kScale) continue;  // its absence is arithmetic
      std::vector<Schedule> missing = good;
      for (Lane& lane : missing[r].lanes) {
        if (s < lane.first || s >= lane.first + lane.count) continue;
        // Move the step to the end of its lane, then drop it.
        auto& steps = missing[r].steps;
        std::rotate(steps.begin() + static_cast<std::ptrdiff_t>(s),
                    steps.begin() + static_cast<std::ptrdiff_t>(s) + 1,
                    steps.begin() + static_cast<std::ptrdiff_t>(lane.first + lane.count));
        --lane.count;
      }
      EXPECT_FALSE(check_schedules(missing, request).is_ok()) << "rank " << r << " step " << s;
      std::vector<Schedule> misled = good;
      misled[r].steps[s].step += 7;
      EXPECT_FALSE(check_schedules(misled, request).is_ok()) << "rank " << r << " step " << s;
      ++broken;
    }
  }
  EXPECT_GT(broken, 0);
}

INSTANTIATE_TEST_SUITE_P(All, EveryPlanner, testing::ValuesIn(kSubjects),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(AllToAll, UnevenPairsAreProvedForRandomCounts) {
  base::Rng rng(11);
  for (int n = 1; n <= 12; ++n) {
    for (int round = 0; round < 6; ++round) {
      const auto world = static_cast<std::size_t>(n);
      std::vector<Splits> splits(world);
      for (Splits& s : splits) {
        s.send.resize(world);
        s.recv.resize(world);
      }
      for (std::size_t from = 0; from < world; ++from) {
        for (std::size_t to = 0; to < world; ++to) {
          const std::uint64_t count = rng.below(3) == 0 ? 0 : rng.below(5000);
          splits[from].send[to] = splits[to].recv[from] = count;
        }
      }
      PlanRequest request;
      request.kind = OpKind::kAllToAllUneven;
      request.world_size = n;
      request.element_bytes = 4;
      request.chunk_bytes = 64;  // several messages a pair
      std::vector<Schedule> schedules;
      for (Rank r = 0; r < n; ++r) {
        request.rank = r;
        request.splits = &splits[static_cast<std::size_t>(r)];
        schedules.push_back(plan_direct_all_to_all(request));
      }
      const Status status = check_schedules(schedules, request, splits);
      ASSERT_TRUE(status.is_ok()) << "world " << n << ": " << status.to_string();
      if (n < 2) continue;
      std::vector<Splits> other = splits;
      ++other[0].send[1];
      EXPECT_FALSE(check_schedules(schedules, request, other).is_ok());
    }
  }
}

TEST(Checker, RefusesOverlappingLanesAndWrongOrder) {
  PlanRequest request;
  request.kind = OpKind::kAllReduce;
  request.world_size = 2;
  request.count = 8;
  request.element_bytes = 4;
  const Subject subject{"", plan_recursive_all_reduce, OpKind::kAllReduce};
  std::vector<Schedule> schedules = plan_all(subject, request);
  schedules[0].begin_lane(0);
  Step step{.kind = StepKind::kScale};
  step.count = 4;
  schedules[0].add(step);
  EXPECT_NE(check_schedules(schedules, request).message().find("same memory"), std::string::npos);

  // Both combine, but in opposite orders: sums agree on paper and differ in bits.
  schedules = plan_all(subject, request);
  for (Schedule& schedule : schedules) {
    schedule.steps.clear();
    schedule.lanes.clear();
  }
  for (Rank r = 0; r < 2; ++r) {
    Step send{.kind = StepKind::kSend, .peer = 1 - r};
    send.count = 8;
    Step recv = send;
    recv.kind = StepKind::kRecvCombine;
    auto& schedule = schedules[static_cast<std::size_t>(r)];
    schedule.begin_lane(0);
    schedule.add(send);
    schedule.add(recv);
  }
  EXPECT_NE(check_schedules(schedules, request).message().find("another order"), std::string::npos);
}

TEST(Parts, CoverTheWholeOnceAtAnyAlignment) {
  for (const std::uint64_t count : {0ull, 1ull, 63ull, 64ull, 1000ull, 4097ull}) {
    for (int n = 1; n <= 17; ++n) {
      for (const std::uint64_t align : {1ull, 16ull, 1024ull}) {
        std::uint64_t next = 0;
        for (int i = 0; i < n; ++i) {
          const Part part = part_of(count, n, i, align);
          ASSERT_EQ(part.offset, next);
          next += part.count;
        }
        ASSERT_EQ(next, count);
      }
    }
  }
}

TEST(LargePlans, MoveTheLeastBytesThatAreNeeded) {
  PlanRequest request;
  request.world_size = 8;
  request.count = 1 << 20;
  request.element_bytes = 4;
  const auto sent = [&](Planner plan) {
    std::uint64_t elements = 0;
    for (const Step& step : plan(request).steps) {
      if (step.kind == StepKind::kSend) elements += step.count;
      if (step.kind == StepKind::kSendAll) elements += 7 * step.count;
    }
    return elements;
  };
  constexpr std::uint64_t kAll = std::uint64_t{1} << 20;
  EXPECT_EQ(sent(plan_ring_all_reduce), 2 * 7 * kAll / 8);  // 2 (n-1)/n S
  EXPECT_EQ(sent(plan_direct_all_reduce), 2 * 7 * kAll / 8);
  EXPECT_EQ(sent(plan_direct_reduce_scatter), 7 * kAll);  // of an input of 8 parts
  request.rank = 3;
  EXPECT_EQ(sent(plan_scattered_reduce), 7 * kAll / 8 + kAll / 8);
}

}  // namespace
}  // namespace pycomm::collectives

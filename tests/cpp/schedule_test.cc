// Every planner, proved by the checker for worlds 1 to 64; and proof that the checker can fail.
#include <gtest/gtest.h>

#include "collectives/checker.h"

namespace pycomm::collectives {
namespace {

using Planner = Schedule (*)(const PlanRequest&);

struct Subject {
  const char* name;
  Planner plan;
  OpKind kind;
};

const Subject kSubjects[] = {
    {"ring_all_reduce", plan_ring_all_reduce, OpKind::kAllReduce},
    {"recursive_all_reduce", plan_recursive_all_reduce, OpKind::kAllReduce},
    {"flat_all_reduce", plan_flat, OpKind::kAllReduce},
    {"shared_all_reduce", plan_shared_all_reduce, OpKind::kAllReduce},
    {"ring_all_gather", plan_ring_all_gather, OpKind::kAllGather},
    {"flat_all_gather", plan_flat, OpKind::kAllGather},
    {"tree_broadcast", plan_tree_broadcast, OpKind::kBroadcast},
    {"flat_broadcast", plan_flat, OpKind::kBroadcast},
    {"barrier", plan_barrier, OpKind::kBarrier},
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

TEST_P(EveryPlanner, IsProvedForWorlds1To64) {
  const Subject subject = GetParam();
  for (int n = 1; n <= kCheckerWorldMax; ++n) {
    const auto world = static_cast<std::uint64_t>(n);
    for (const std::uint64_t count :
         {std::uint64_t{0}, std::uint64_t{1}, world - 1, 5 * world + 3, std::uint64_t{3000}}) {
      if (count == 3000 && n > 9 && n != 64) continue;  // several chunks a shard
      PlanRequest request;
      request.kind = subject.kind;
      request.world_size = n;
      request.root = n / 3;
      request.count = subject.kind == OpKind::kBarrier ? 0 : count;
      request.element_bytes = 4;
      request.chunk_bytes = 256;
      const Status status = check_schedules(plan_all(subject, request), request);
      ASSERT_TRUE(status.is_ok()) << "world " << n << ", count " << count << ": "
                                  << status.to_string();
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
      if (good[r].steps[s].kind != StepKind::kFold) {
        std::vector<Schedule> misled = good;
        misled[r].steps[s].step += 7;
        EXPECT_FALSE(check_schedules(misled, request).is_ok()) << "rank " << r << " step " << s;
      }
      ++broken;
    }
  }
  EXPECT_GT(broken, 0);
}

INSTANTIATE_TEST_SUITE_P(All, EveryPlanner, testing::ValuesIn(kSubjects),
                         [](const auto& info) { return std::string(info.param.name); });

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

TEST(Ring, MovesTheLeastBytesThatAreNeeded) {
  PlanRequest request;
  request.kind = OpKind::kAllReduce;
  request.world_size = 8;
  request.count = 1 << 20;
  request.element_bytes = 4;
  std::uint64_t sent = 0;
  for (const Step& step : plan_ring_all_reduce(request).steps) {
    if (step.kind == StepKind::kSend) sent += step.count;
  }
  EXPECT_EQ(sent, 2 * 7 * (std::uint64_t{1} << 20) / 8);  // 2 (n-1)/n S
}

}  // namespace
}  // namespace pycomm::collectives

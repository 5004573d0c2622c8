// The tuner against machines that are made up: it finds the fastest way, notices a change, wastes
// little, and reads back what it wrote and nothing else.
#include "collectives/tuner.h"

#include <gtest/gtest.h>

#include <array>

#include "base/rng.h"

namespace pycomm::collectives {
namespace {

constexpr Tuner::Ways kAll{true, true, true, true};
constexpr std::uint64_t kBytes = 1 << 20;

// Runs `times` operations on a machine where way w takes ns[w], give or take a tenth; returns how
// often each way was gone.
std::array<int, kNumWays> play(Tuner& tuner, const std::array<double, kNumWays>& ns, int times,
                               const Tuner::Ways& possible = kAll, std::uint64_t seed = 1) {
  base::Rng rng(seed);
  std::array<int, kNumWays> gone{};
  for (int i = 0; i < times; ++i) {
    const Way way = tuner.choose({OpKind::kAllReduce, kBytes}, possible);
    const auto index = static_cast<std::size_t>(way);
    EXPECT_TRUE(possible[index]);
    ++gone[index];
    const double noise = 0.9 + 0.2 * static_cast<double>(rng.below(1000)) / 1000;
    tuner.record({OpKind::kAllReduce, kBytes}, way, static_cast<base::TimeNs>(ns[index] * noise));
  }
  return gone;
}

TEST(Tuner, FindsTheFastestWayAndWastesLittle) {
  for (std::size_t best = 0; best < kNumWays; ++best) {
    Tuner tuner;
    std::array<double, kNumWays> ns{9'000, 9'000, 9'000, 9'000};
    ns[best] = 3'000;
    const auto gone = play(tuner, ns, 2'000);
    EXPECT_GT(gone[best], 1'950) << best;
  }
}

TEST(Tuner, NoticesThatTheMachineHasChanged) {
  Tuner tuner;
  play(tuner, {3'000, 9'000, 9'000, 9'000}, 1'000);
  const auto gone = play(tuner, {30'000, 4'000, 9'000, 9'000}, 300);
  EXPECT_GT(gone[1], 270);
}

TEST(Tuner, GoesOnlyWaysThatArePossible) {
  Tuner tuner;
  const auto gone = play(tuner, {9'000, 5'000, 1'000, 1'000}, 500, {true, true, false, false});
  EXPECT_EQ(gone[2] + gone[3], 0);
  EXPECT_GT(gone[1], 480);
  EXPECT_EQ(tuner.choose({OpKind::kBroadcast, 1}, {}), Way::kStreamedWindow);
}

TEST(Tuner, ReadsBackWhatItWrote) {
  Tuner tuner;
  play(tuner, {9'000, 2'000, 9'000, 9'000}, 200);
  const std::string text = tuner.to_text();
  ASSERT_NE(text.find("all_reduce"), std::string::npos);
  Tuner second;
  second.from_text(text);
  EXPECT_EQ(second.choose({OpKind::kAllReduce, kBytes}, kAll), Way::kCachedWindow);
  // Another size has been learnt nothing about.
  EXPECT_EQ(second.choose({OpKind::kAllReduce, 64 * kBytes}, kAll), Way::kStreamedWindow);
}

TEST(Tuner, KeepsWhatItWasToldOfSizesThatThisJobHasNotUsed) {
  Tuner tuner;
  const std::string told =
      "all_reduce 21 4000 2000 0 9000\nbroadcast 10 30 20 10 0\nmapped:reduce 9 7 8 0 0\n";
  tuner.from_text(told);
  EXPECT_EQ(tuner.to_text(), told);
}

TEST(Tuner, AWayThatWasRefusedIsNotAskedForAgainAndAgain) {
  Tuner tuner;
  int asked = 0;
  for (int i = 0; i < 1'000; ++i) {
    const Way way = tuner.choose({OpKind::kAllGather, kBytes}, kAll);
    const bool is_refused = way == Way::kPull;
    asked += is_refused;
    if (is_refused) tuner.refuse({OpKind::kAllGather, kBytes}, way);
    tuner.record({OpKind::kAllGather, kBytes}, is_refused ? Way::kStreamedWindow : way,
                 way == Way::kCachedWindow ? 1'000 : 5'000);
  }
  EXPECT_LT(asked, 20);
}

TEST(Tuner, TakesNothingFromATextThatItDidNotWrite) {
  for (const char* text :
       {"", "\n", "all_reduce", "all_reduce 21", "all_reduce 21 1 1", "nonsense 21 1 1 1 1",
        "all_reduce 4096 1 1 1 1", "all_reduce -1 1 1 1 1", "all_reduce 21 x 1 1 1",
        "all_reduce 21 99999999999999999999999 1 1 1", "all_reduce 21 9000000000000 1 1 1"}) {
    Tuner tuner;
    tuner.from_text(text);
    EXPECT_EQ(tuner.choose({OpKind::kAllReduce, kBytes}, kAll), Way::kStreamedWindow) << text;
    EXPECT_EQ(tuner.to_text(), "") << text;
  }
}

}  // namespace
}  // namespace pycomm::collectives

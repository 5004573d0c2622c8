// Whole collectives under the seeded simulator: delay, reordering, loss, partition, death. A
// failing scenario prints its seed; SIM_SEED=<seed> runs that one alone, and
// SIM_SCENARIOS=<n> runs as many as there is time for.
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>

#include "base/rng.h"
#include "collectives/execution.h"
#include "op_cases.h"
#include "transport/sim/network.h"

namespace pycomm {
namespace {

using collectives::Execution;
using collectives::GroupContext;
using transport::sim::Network;
using transport::sim::NetworkOptions;

struct Scenario {
  std::uint64_t seed = 0;
  int world_size = 2;
  int num_operations = 1;
  int victim = -1;  // killed at kill_at, if >= 0
  base::TimeNs kill_at = 0;
  bool has_partition = false;
  NetworkOptions network;

  static Scenario from_seed(std::uint64_t seed, bool with_death) {
    base::Rng rng(seed);
    Scenario s;
    s.seed = seed;
    s.world_size = static_cast<int>(2 + rng.below(7));
    s.num_operations = static_cast<int>(1 + rng.below(6));
    s.network.seed = rng.next();
    s.network.delay_max_ns = static_cast<std::int64_t>(1'000 + rng.below(500'000));
    s.network.loss_per_million = static_cast<std::uint32_t>(rng.below(100'000));
    s.network.bytes_per_ns = rng.below(2) == 0 ? 0.05 : 2.0;
    s.has_partition = rng.below(3) == 0;
    if (with_death) {
      s.victim = static_cast<int>(rng.below(static_cast<std::uint64_t>(s.world_size)));
      s.kill_at = static_cast<base::TimeNs>(rng.below(3'000'000));
    }
    return s;
  }
};

// One rank: its group, its data, the operation that it is in.
struct SimRank {
  GroupContext context;
  std::vector<std::unique_ptr<test::OpData>> data;
  std::unique_ptr<Execution> current;
  int next = 0;
  Status status;

  bool is_over(int num_operations) const {
    return !status.is_ok() || (next == num_operations && !current);
  }
};

class SimulatedRun {
 public:
  explicit SimulatedRun(const Scenario& scenario)
      : scenario_(scenario), network_(scenario.world_size, scenario.network) {
    base::Rng rng(scenario.seed ^ 0xdada);
    for (int i = 0; i < scenario.num_operations; ++i) {
      static constexpr std::uint64_t kCounts[] = {0, 1, 5, 300, 4'000, 60'000};
      cases_.push_back({static_cast<OpKind>(rng.below(kNumCollectives)), scenario.world_size,
                        kCounts[rng.below(6)], i % scenario.world_size});
    }
    const bool is_deterministic = rng.below(3) == 0;
    for (Rank r = 0; r < scenario.world_size; ++r) {
      auto rank = std::make_unique<SimRank>();
      rank->context.group = 77;
      rank->context.rank = r;
      rank->context.world_size = scenario.world_size;
      rank->context.chunk_bytes = 8 * 1024;
      rank->context.shape.recursive_bytes_max = 2 * 1024;
      rank->context.shape.is_deterministic = is_deterministic;
      for (Rank p = 0; p < scenario.world_size; ++p) {
        rank->context.links.push_back(p == r ? nullptr : network_.link(r, p));
      }
      ranks_.push_back(std::move(rank));
    }
  }

  // True if every surviving rank came to an end before the virtual deadline.
  bool run() {
    if (scenario_.has_partition) network_.partition(0, 1, 2'000'000);
    for (;;) {
      bool moved = false;
      bool all_over = true;
      for (Rank r = 0; r < scenario_.world_size; ++r) {
        if (network_.is_dead(r)) continue;
        moved |= advance(r);
        all_over &= ranks_[static_cast<std::size_t>(r)]->is_over(scenario_.num_operations);
      }
      if (all_over) return true;
      if (scenario_.victim >= 0 && network_.now_ns() >= scenario_.kill_at)
        network_.kill(scenario_.victim);
      if (!network_.step() && !moved) return false;
      if (network_.now_ns() > base::ms_to_ns(60'000)) return false;
    }
  }

  void expect_results() const {
    for (Rank r = 0; r < scenario_.world_size; ++r) {
      const SimRank& rank = *ranks_[static_cast<std::size_t>(r)];
      if (network_.is_dead(r)) continue;
      ASSERT_TRUE(rank.status.is_ok()) << rank.status.to_string();
      for (std::size_t i = 0; i < rank.data.size(); ++i) {
        ASSERT_EQ(cases_[i].first_wrong(r, *rank.data[i]), -1)
            << "rank " << r << " operation " << i << ", " << to_string(cases_[i].kind) << " of "
            << cases_[i].count;
      }
    }
  }

  // Either the rank finished everything, or it failed and blames someone.
  void expect_blame() const {
    for (Rank r = 0; r < scenario_.world_size; ++r) {
      const SimRank& rank = *ranks_[static_cast<std::size_t>(r)];
      if (network_.is_dead(r) || rank.status.is_ok()) continue;
      ASSERT_EQ(rank.status.code(), StatusCode::kPeerLost) << rank.status.to_string();
      ASSERT_EQ(rank.status.rank(), scenario_.victim) << rank.status.to_string();
    }
  }

 private:
  // What an engine does for its groups: a failure is told to the other ranks, and their word ends
  // the operation here.
  void tell_others(Rank r, const Status& status) {
    for (Rank p = 0; p < scenario_.world_size; ++p) {
      if (p != r) network_.link(r, p)->send_notice({77, status.code(), status.rank()});
    }
  }
  bool hear_others(Rank r) {
    SimRank& rank = *ranks_[static_cast<std::size_t>(r)];
    for (Rank p = 0; p < scenario_.world_size; ++p) {
      if (p == r) continue;
      for (const auto& notice : network_.link(r, p)->take_notices()) {
        if (rank.is_over(scenario_.num_operations)) continue;
        rank.status = Status::error(notice.code, "told", notice.rank);
        if (rank.current) rank.current->abort(rank.status);
        rank.current.reset();
        return true;
      }
    }
    return false;
  }

  bool advance(Rank r) {
    SimRank& rank = *ranks_[static_cast<std::size_t>(r)];
    if (!rank.status.is_ok()) return false;
    if (hear_others(r)) return true;
    bool moved = false;
    if (!rank.current && rank.next < scenario_.num_operations) {
      rank.current =
          std::make_unique<Execution>(rank.context, make_request(rank, r), network_.now_ns());
      ++rank.next;
      moved = true;
    }
    if (!rank.current) return moved;
    while (rank.current->advance(network_.now_ns())) moved = true;
    if (rank.current->is_finished()) {
      rank.status = rank.current->status();
      rank.current.reset();
      if (!rank.status.is_ok()) tell_others(r, rank.status);
      moved = true;
    }
    return moved;
  }

  OpRequest make_request(SimRank& rank, Rank r) {
    const auto i = static_cast<std::size_t>(rank.next);
    rank.data.push_back(std::make_unique<test::OpData>());
    OpRequest request = cases_[i].request(r, *rank.data.back());
    request.op_number = i + 1;
    return request;
  }

  const Scenario scenario_;
  Network network_;
  std::vector<test::OpCase> cases_;
  std::vector<std::unique_ptr<SimRank>> ranks_;
};

void for_each_seed(std::uint64_t first, const std::function<void(std::uint64_t)>& body) {
  if (const char* only = std::getenv("SIM_SEED")) return body(std::strtoull(only, nullptr, 10));
  const char* asked = std::getenv("SIM_SCENARIOS");
  const std::uint64_t count = asked != nullptr ? std::strtoull(asked, nullptr, 10) : 400;
  for (std::uint64_t seed = first; seed < first + count; ++seed) {
    body(seed);
    if (testing::Test::HasFatalFailure() || testing::Test::HasNonfatalFailure()) {
      std::printf("replay: SIM_SEED=%llu simulation_test\n", static_cast<unsigned long long>(seed));
      return;
    }
  }
}

TEST(Simulation, CollectivesAreRightUnderDelayLossReorderingAndPartition) {
  for_each_seed(1, [](std::uint64_t seed) {
    SimulatedRun run(Scenario::from_seed(seed, false));
    ASSERT_TRUE(run.run()) << "seed " << seed << " never ends";
    run.expect_results();
  });
}

TEST(Simulation, SurvivorsOfADeathEndAndBlameTheDead) {
  for_each_seed(1'000'000, [](std::uint64_t seed) {
    SimulatedRun run(Scenario::from_seed(seed, true));
    ASSERT_TRUE(run.run()) << "seed " << seed << " never ends";
    run.expect_blame();
  });
}

TEST(Simulation, ARunIsAFunctionOfItsSeed) {
  for (const std::uint64_t seed : {3ull, 17ull, 99ull}) {
    base::TimeNs ends[2];
    for (base::TimeNs& end : ends) {
      NetworkOptions options;
      options.seed = seed;
      Network network(2, options);
      std::vector<std::byte> data(100'000), into(100'000);
      Transfer send, recv;
      send.id = recv.id = {1, 1, 0, 0, 0};
      send.data = data.data();
      recv.data = into.data();
      send.bytes = recv.bytes = data.size();
      network.link(0, 1)->post(recv);
      network.link(1, 0)->send(send);
      while (network.step()) {
      }
      end = network.now_ns();
    }
    EXPECT_EQ(ends[0], ends[1]);
    EXPECT_GT(ends[0], 0);
  }
}

}  // namespace
}  // namespace pycomm

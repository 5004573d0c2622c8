// Links under a seeded virtual clock: delay, rate, reordering, loss (seen as a resend's delay),
// partition and death. All ranks live in one thread; step() moves time to the next event. A run is
// a function of its seed.
#pragma once

#include <memory>
#include <queue>
#include <vector>

#include "base/clock.h"
#include "base/rng.h"
#include "transport/core_link.h"

namespace pycomm::transport::sim {

struct NetworkOptions {
  std::uint64_t seed = 1;
  std::int64_t delay_min_ns = 1'000;
  std::int64_t delay_max_ns = 50'000;  // drawn per frame: frames overtake each other
  double bytes_per_ns = 1.0;           // of each direction of each link
  std::uint32_t loss_per_million = 0;  // each lost frame comes again after resend_ns
  std::int64_t resend_ns = 200'000;
  std::int64_t detection_ns = 1'000'000;  // from a death to its notice
  std::uint64_t eager_bytes_max = 1024;
  std::uint64_t eager_window_bytes = 16 * 1024;
};

class SimLink;

class Network final : public base::Clock {
 public:
  Network(int num_nodes, const NetworkOptions& options);
  ~Network() override;

  base::TimeNs now_ns() const override { return now_; }
  // The end at `node` of the link to `peer`; owned by the network.
  CoreLink* link(int node, int peer);

  // Moves the frames that links hold into flight, then time to the next event. False when nothing
  // is in flight.
  bool step();
  // The node stops at once: nothing more leaves it, its peers learn after detection_ns.
  void kill(int node);
  bool is_dead(int node) const { return dead_[static_cast<std::size_t>(node)]; }
  // Frames between a and b wait until `until`.
  void partition(int a, int b, base::TimeNs until);

 private:
  friend class SimLink;
  struct Event {
    base::TimeNs at;
    std::uint64_t order;  // ties in order of creation, so that runs repeat
    SimLink* to;
    FrameHeader header;
    std::vector<std::byte> payload;
    bool is_death = false;
  };
  struct Later {
    bool operator()(const Event& a, const Event& b) const {
      return a.at != b.at ? a.at > b.at : a.order > b.order;
    }
  };
  void collect();
  void depart(SimLink& from);

  const NetworkOptions options_;
  const int num_nodes_;
  base::Rng rng_;
  base::TimeNs now_ = 0;
  std::uint64_t next_order_ = 0;
  std::vector<std::unique_ptr<SimLink>> links_;  // node * num_nodes + peer
  std::vector<bool> dead_;
  std::priority_queue<Event, std::vector<Event>, Later> events_;
};

}  // namespace pycomm::transport::sim

#include "transport/sim/network.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"

namespace pycomm::transport::sim {

class SimLink final : public CoreLink {
 public:
  SimLink(int node, int peer, const CoreOptions& options)
      : CoreLink(options, nullptr), node_(node), peer_(peer) {}

  const char* transport() const override { return "sim"; }
  int fd() const override { return -1; }
  bool progress() override { return false; }  // the network moves the frames

  void deliver(const FrameHeader& header, const std::vector<std::byte>& payload) {
    if (!failure().is_ok()) return;
    Status status = core_.begin(header);
    if (status.is_ok()) {
      std::byte* target = core_.payload_target();
      if (target != nullptr && !payload.empty()) {
        std::memcpy(target, payload.data(), payload.size());
      }
      status = core_.end();
    }
    if (!status.is_ok()) fail(status);
  }

  MessageCore& core() { return core_; }
  int node() const { return node_; }
  int peer() const { return peer_; }

  base::TimeNs wire_free_at = 0;  // when the direction's last byte has left
  base::TimeNs last_arrival = 0;  // of any frame so far
  base::TimeNs partitioned_until = 0;

 private:
  const int node_;
  const int peer_;
};

Network::Network(int num_nodes, const NetworkOptions& options)
    : options_(options),
      num_nodes_(num_nodes),
      rng_(options.seed),
      dead_(static_cast<std::size_t>(num_nodes), false) {
  CoreOptions core;
  core.eager_bytes_max = options.eager_bytes_max;
  core.eager_window_bytes = options.eager_window_bytes;
  core.fragment_bytes_max = 16 * 1024;
  for (int node = 0; node < num_nodes; ++node) {
    for (int peer = 0; peer < num_nodes; ++peer) {
      links_.push_back(node == peer ? nullptr : std::make_unique<SimLink>(node, peer, core));
    }
  }
}

Network::~Network() = default;

CoreLink* Network::link(int node, int peer) {
  return links_[static_cast<std::size_t>(node * num_nodes_ + peer)].get();
}

void Network::depart(SimLink& from) {
  auto* to = static_cast<SimLink*>(link(from.peer(), from.node()));
  while (MessageCore::OutFrame* frame = from.core().front()) {
    Event event;
    event.to = to;
    event.header = frame->header;
    if (frame->header.payload_bytes > 0) {
      event.payload.assign(frame->payload, frame->payload + frame->header.payload_bytes);
    }
    from.wire_free_at =
        std::max(from.wire_free_at, now_) +
        static_cast<base::TimeNs>(static_cast<double>(sizeof(FrameHeader) + event.payload.size()) /
                                  options_.bytes_per_ns);
    const auto spread =
        static_cast<std::uint64_t>(options_.delay_max_ns - options_.delay_min_ns + 1);
    event.at = std::max(from.wire_free_at, from.partitioned_until) + options_.delay_min_ns +
               static_cast<base::TimeNs>(rng_.below(spread));
    while (rng_.below(1'000'000) < options_.loss_per_million) event.at += options_.resend_ns;
    // These three promise an order; everything else may overtake and be overtaken.
    const auto kind = static_cast<FrameKind>(event.header.kind);
    if (kind == FrameKind::kGoodbye || kind == FrameKind::kWrite || kind == FrameKind::kFetchAdd) {
      event.at = std::max(event.at, from.last_arrival);
    }
    from.last_arrival = std::max(from.last_arrival, event.at);
    event.order = next_order_++;
    if (!dead_[static_cast<std::size_t>(from.peer())]) events_.push(std::move(event));
    from.core().pop();
  }
}

void Network::collect() {
  for (const auto& link : links_) {
    if (link && !dead_[static_cast<std::size_t>(link->node())]) depart(*link);
  }
}

bool Network::step() {
  collect();
  if (events_.empty()) return false;
  const Event event = events_.top();
  events_.pop();
  PYCOMM_CHECK(event.at >= now_);
  now_ = event.at;
  if (dead_[static_cast<std::size_t>(event.to->node())]) return true;
  if (event.is_death) {
    event.to->fail(Status::error(StatusCode::kPeerLost, "its process ended without a goodbye"));
  } else {
    event.to->deliver(event.header, event.payload);
  }
  return true;
}

void Network::kill(int node) {
  if (is_dead(node)) return;
  dead_[static_cast<std::size_t>(node)] = true;
  for (int peer = 0; peer < num_nodes_; ++peer) {
    if (peer == node) continue;
    Event event;
    event.at = now_ + options_.detection_ns;
    event.order = next_order_++;
    event.to = static_cast<SimLink*>(link(peer, node));
    event.is_death = true;
    events_.push(std::move(event));
  }
}

void Network::partition(int a, int b, base::TimeNs until) {
  static_cast<SimLink*>(link(a, b))->partitioned_until = until;
  static_cast<SimLink*>(link(b, a))->partitioned_until = until;
}

}  // namespace pycomm::transport::sim

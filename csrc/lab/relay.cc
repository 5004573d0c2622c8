// The relay's loop: packets in from each site's device, through the model of their link, out to the
// device of the site that their destination lies in.
#include "pycomm/relay.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <queue>

#include "lab/link_model.h"
#include "lab/packet_edit.h"
#include "platform/system.h"
#include "platform/tun.h"

namespace pycomm::lab {
namespace {

using base::TimeNs;
using platform::real_clock;

constexpr int kReadsInARow = 64;
constexpr TimeNs kLookAtLeastEveryNs = 50'000'000;
constexpr std::uint32_t kSubnetMask = 0xffffff00;

struct Held {
  TimeNs at;
  std::uint64_t order;
  std::uint32_t to;
  std::uint32_t link;
  std::vector<std::uint8_t> bytes;
};
// The earliest is on top of the heap; of equals, what came first.
struct Later {
  bool operator()(const Held& a, const Held& b) const {
    return a.at != b.at ? a.at > b.at : a.order > b.order;
  }
};

class TunRelay final : public Relay {
 public:
  TunRelay(std::vector<Site> sites, std::vector<platform::UniqueFd> devices, std::uint64_t seed)
      : sites_(std::move(sites)), devices_(std::move(devices)), port_shifts_(sites_.size()) {
    base::Rng seeds(seed);
    for (std::size_t i = 0; i < sites_.size() * sites_.size(); ++i) {
      links_.emplace_back(seeds.next());
    }
    for (const auto& device : devices_) fds_.push_back(device.get());
  }

  void set_link(int from, int to, const LinkShape& shape) override {
    std::lock_guard lock(mutex_);
    links_[index(from, to)].set_shape(shape);
  }
  LinkReport report(int from, int to) const override {
    std::lock_guard lock(mutex_);
    return links_[index(from, to)].report();
  }
  void rebind(int site) override { ++port_shifts_[static_cast<std::size_t>(site)]; }
  void stop() override { is_stopping_ = true; }

  void run() override {
    while (!is_stopping_) {
      bool moved = false;
      {
        std::lock_guard lock(mutex_);
        for (std::size_t site = 0; site < sites_.size(); ++site) moved |= take_in(site);
        moved |= let_out();
      }
      if (moved) continue;
      TimeNs next = real_clock().now_ns() + kLookAtLeastEveryNs;
      if (!held_.empty()) next = std::min(next, held_.front().at);
      platform::await_any_readable(fds_, next);
    }
  }

 private:
  std::size_t index(int from, int to) const {
    return static_cast<std::size_t>(from) * sites_.size() + static_cast<std::size_t>(to);
  }

  bool take_in(std::size_t from) {
    const TimeNs now = real_clock().now_ns();
    for (int i = 0; i < kReadsInARow; ++i) {
      scratch_.resize(platform::kPacketBytesMax);
      const std::size_t bytes = platform::read_packet(fds_[from], scratch_.data(), scratch_.size());
      if (bytes == 0) return i > 0;
      const std::span packet(scratch_.data(), bytes);
      const auto to = find_site(packet);
      if (to == sites_.size() || to == from) continue;
      hold(from, to, packet, now);
    }
    return true;
  }

  // sites_.size() for what no site wants.
  std::size_t find_site(std::span<const std::uint8_t> packet) const {
    const auto destination = ipv4_destination(packet);
    if (!destination) return sites_.size();
    const auto found = std::find_if(sites_.begin(), sites_.end(), [&](const Site& site) {
      return site.subnet == (*destination & kSubnetMask);
    });
    return static_cast<std::size_t>(found - sites_.begin());
  }

  void hold(std::size_t from, std::size_t to, std::span<std::uint8_t> packet, TimeNs now) {
    const std::size_t link = from * sites_.size() + to;
    const Fate fate = links_[link].admit(static_cast<std::uint32_t>(packet.size()), now);
    if (fate.num_copies == 0) return;
    if (fate.is_marked) mark_congestion(packet);
    if (const int shift = port_shifts_[from]) shift_udp_port(packet, UdpPort::kSource, shift);
    if (const int shift = port_shifts_[to]) shift_udp_port(packet, UdpPort::kDestination, -shift);
    for (int copy = 0; copy < fate.num_copies; ++copy) {
      std::vector<std::uint8_t> bytes;
      if (!spare_.empty()) {
        bytes = std::move(spare_.back());
        spare_.pop_back();
      }
      bytes.assign(packet.begin(), packet.end());
      held_.push_back({fate.at[static_cast<std::size_t>(copy)], next_order_++,
                       static_cast<std::uint32_t>(to), static_cast<std::uint32_t>(link),
                       std::move(bytes)});
      std::push_heap(held_.begin(), held_.end(), Later());
    }
  }

  bool let_out() {
    const TimeNs now = real_clock().now_ns();
    bool moved = false;
    while (!held_.empty() && held_.front().at <= now) {
      std::pop_heap(held_.begin(), held_.end(), Later());
      Held packet = std::move(held_.back());
      held_.pop_back();
      LinkReport& report = links_[packet.link].report();
      report.late_ns_max = std::max(report.late_ns_max, now - packet.at);
      static_cast<void>(
          platform::write_packet(fds_[packet.to], packet.bytes.data(), packet.bytes.size()));
      spare_.push_back(std::move(packet.bytes));
      moved = true;
    }
    return moved;
  }

  const std::vector<Site> sites_;
  const std::vector<platform::UniqueFd> devices_;
  std::vector<int> fds_;
  mutable std::mutex mutex_;
  std::vector<LinkModel> links_;  // by from * sites + to
  std::vector<std::atomic<int>> port_shifts_;
  std::vector<Held> held_;  // a heap
  std::vector<std::vector<std::uint8_t>> spare_;
  std::vector<std::uint8_t> scratch_;
  std::uint64_t next_order_ = 0;
  std::atomic<bool> is_stopping_{false};
};

}  // namespace

Result<std::unique_ptr<Relay>> Relay::create(const std::vector<Site>& sites, std::uint64_t seed) {
  std::vector<platform::UniqueFd> devices;
  for (const Site& site : sites) {
    auto device = platform::open_tun(site.namespace_path, site.device);
    if (!device.is_ok()) return device.status();
    devices.push_back(std::move(device).value());
  }
  return std::unique_ptr<Relay>(new TunRelay(sites, std::move(devices), seed));
}

}  // namespace pycomm::lab

// A wide-area network in user space, for tests, benchmarks and people (`pycomm lab`): packets that
// sites (network namespaces) send to one another pass a relay that delays, loses, reorders,
// duplicates, marks and queues them. IPv4; UDP, TCP and ICMP alike. Nothing else of pycomm uses it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "pycomm/status.h"

namespace pycomm::lab {

// One direction between two sites.
struct LinkShape {
  std::int64_t delay_ns = 0;
  std::int64_t jitter_ns = 0;  // added to delay, uniform in [0, jitter_ns)
  bool reorders = false;       // jitter may let packets overtake each other
  double loss = 0;             // of each packet, independent
  // Gilbert-Elliott: a burst begins before a packet with this probability, ends so, and loses so.
  double burst_begins = 0;
  double burst_ends = 1;
  double burst_loss = 1;
  double duplicates = 0;
  std::uint64_t rate_bits_per_s = 0;  // of IP packets; 0 is without bound
  std::int64_t queue_ns = 0;          // longest time that a packet may wait for the rate
  bool marks_ecn = false;             // Congestion Experienced above a quarter of the queue
  std::uint32_t mtu_bytes = 0;        // longer IP packets vanish without a word; 0: none do
};

struct LinkReport {
  std::uint64_t num_in = 0;
  std::uint64_t num_out = 0;
  std::uint64_t bytes_out = 0;
  std::uint64_t num_lost = 0;      // at random, bursts included
  std::uint64_t num_overflow = 0;  // the queue was full
  std::uint64_t num_too_long = 0;
  std::int64_t queue_ns_max = 0;  // longest wait for the rate
  std::int64_t late_ns_max = 0;   // how far behind its time the relay itself was
};

// A site is a device in a namespace, and the /24 of IPv4 addresses that lie behind it.
struct Site {
  std::string namespace_path;  // such as /run/netns/name
  std::string device;          // is made, and gone with the relay
  std::uint32_t subnet = 0;    // host byte order, the last byte 0
};

// Thread: run() in one, the rest in any.
class Relay {
 public:
  virtual ~Relay() = default;
  // Makes the devices, down. Errors: kSystem (no /dev/net/tun, no CAP_NET_ADMIN).
  static Result<std::unique_ptr<Relay>> create(const std::vector<Site>& sites, std::uint64_t seed);

  virtual void set_link(int from, int to, const LinkShape& shape) = 0;
  virtual LinkReport report(int from, int to) const = 0;
  // A NAT before `site` forgets its mappings: UDP from there comes from other ports from now on,
  // and what is still on its way to the old ones is lost.
  virtual void rebind(int site) = 0;
  // Relays until stop().
  virtual void run() = 0;
  virtual void stop() = 0;
};

}  // namespace pycomm::lab

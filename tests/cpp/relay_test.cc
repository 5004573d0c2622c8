// The lab's link model and packet edits: what is asked for is what packets get.
#include <gtest/gtest.h>

#include <vector>

#include "lab/link_model.h"
#include "lab/packet_edit.h"

namespace pycomm::lab {
namespace {

constexpr base::TimeNs kMs = 1'000'000;

TEST(LinkModel, DelaysAndKeepsTheRateAndTheQueue) {
  LinkModel model(1);
  LinkShape shape;
  shape.delay_ns = 20 * kMs;
  shape.rate_bits_per_s = 8'000'000;  // a byte a microsecond
  shape.queue_ns = 5 * kMs;
  shape.marks_ecn = true;
  model.set_shape(shape);
  int num_through = 0, num_marked = 0;
  for (int i = 0; i < 10; ++i) {
    const Fate fate = model.admit(1'000, 0);
    if (fate.num_copies == 0) continue;
    EXPECT_EQ(fate.at[0], 20 * kMs + (++num_through) * kMs);
    num_marked += fate.is_marked;
  }
  EXPECT_EQ(num_through, 6);  // one on the wire, five waiting
  EXPECT_EQ(num_marked, 4);   // those that waited above a quarter of it
  EXPECT_EQ(model.report().num_overflow, 4u);
  EXPECT_EQ(model.report().queue_ns_max, 5 * kMs);
}

TEST(LinkModel, LosesItsShareAloneAndInBursts) {
  constexpr int kNum = 100'000;
  for (const bool in_bursts : {false, true}) {
    LinkModel model(7);
    LinkShape shape;
    if (in_bursts) {
      shape.burst_begins = 0.01;
      shape.burst_ends = 0.19;
    } else {
      shape.loss = 0.05;
    }
    model.set_shape(shape);
    int num_lost = 0, num_runs = 0;
    bool was_lost = false;
    for (int i = 0; i < kNum; ++i) {
      const bool is_lost = model.admit(100, i).num_copies == 0;
      num_lost += is_lost;
      num_runs += is_lost && !was_lost;
      was_lost = is_lost;
    }
    EXPECT_NEAR(num_lost, 0.05 * kNum, 0.006 * kNum);
    // Length of a run: 1 / 0.95 alone, 1 / 0.19 in bursts.
    EXPECT_NEAR(static_cast<double>(num_lost) / num_runs, in_bursts ? 1 / 0.19 : 1 / 0.95, 0.5);
  }
}

TEST(LinkModel, JitterKeepsTheOrderUnlessAskedNotTo) {
  for (const bool reorders : {false, true}) {
    LinkModel model(3);
    LinkShape shape;
    shape.jitter_ns = 10 * kMs;
    shape.reorders = reorders;
    model.set_shape(shape);
    int num_overtaken = 0;
    base::TimeNs before = 0;
    for (int i = 0; i < 1'000; ++i) {
      const Fate fate = model.admit(100, i * kMs);
      num_overtaken += fate.at[0] < before;
      before = fate.at[0];
    }
    EXPECT_EQ(num_overtaken > 100, reorders);
    if (!reorders) {
      EXPECT_EQ(num_overtaken, 0);
    }
  }
}

// The sum of all 16-bit words of a valid packet's checksummed part is 0xffff.
std::uint16_t sum_of(std::span<const std::uint8_t> bytes, std::uint32_t sum = 0) {
  for (std::size_t i = 0; i + 1 < bytes.size(); i += 2) sum += bytes[i] << 8 | bytes[i + 1];
  if (bytes.size() % 2 != 0) sum += bytes.back() << 8;
  while (sum > 0xffff) sum = (sum & 0xffff) + (sum >> 16);
  return static_cast<std::uint16_t>(sum);
}

std::vector<std::uint8_t> udp_packet(std::size_t payload_bytes, std::uint8_t ecn) {
  std::vector<std::uint8_t> p(28 + payload_bytes, 0x5a);
  const auto total = static_cast<std::uint16_t>(p.size());
  const std::uint8_t head[28] = {0x45,
                                 ecn,
                                 static_cast<std::uint8_t>(total >> 8),
                                 static_cast<std::uint8_t>(total),
                                 1,
                                 2,
                                 0,
                                 0,
                                 64,
                                 17,
                                 0,
                                 0,
                                 10,
                                 77,
                                 0,
                                 10,
                                 10,
                                 77,
                                 1,
                                 10,
                                 0x1b,
                                 0x58,
                                 0xff,
                                 0xff,
                                 static_cast<std::uint8_t>((total - 20) >> 8),
                                 static_cast<std::uint8_t>(total - 20),
                                 0,
                                 0};
  std::copy(std::begin(head), std::end(head), p.begin());
  const auto put = [&](std::size_t at, std::uint16_t sum) {
    p[at] = static_cast<std::uint8_t>(static_cast<std::uint16_t>(~sum) >> 8);
    p[at + 1] = static_cast<std::uint8_t>(~sum);
  };
  put(10, sum_of(std::span(p).first(20)));
  put(26, sum_of(std::span(p).subspan(20), 10 * 256 + 77 + 10 + 10 * 256 + 77 + 256 + 10 + 17 +
                                               static_cast<std::uint32_t>(p.size() - 20)));
  return p;
}

std::uint16_t udp_sum(std::span<const std::uint8_t> p) {
  return sum_of(p.subspan(20), 10 * 256 + 77 + 10 + 10 * 256 + 77 + 256 + 10 + 17 +
                                   static_cast<std::uint32_t>(p.size() - 20));
}

TEST(PacketEdit, PortsAndMarksChangeWithTheirChecksums) {
  for (const std::size_t bytes : {0u, 1u, 77u, 1400u}) {
    auto packet = udp_packet(bytes, 2);
    ASSERT_EQ(udp_sum(packet), 0xffff);
    for (const int shift : {1, -1, 300, 65'000}) {
      shift_udp_port(packet, UdpPort::kSource, shift);
      shift_udp_port(packet, UdpPort::kDestination, -shift);
      EXPECT_EQ(udp_sum(packet), 0xffff);
    }
    mark_congestion(packet);
    EXPECT_EQ(packet[1] & 3, 3);
    EXPECT_EQ(sum_of(std::span(packet).first(20)), 0xffff);
    auto unaware = udp_packet(bytes, 0);
    mark_congestion(unaware);
    EXPECT_EQ(unaware[1] & 3, 0);
    EXPECT_EQ(ipv4_destination(packet), 0x0a4d010au);
  }
}

TEST(PacketEdit, LeavesAloneWhatIsTooShortOrNotUdp) {
  auto packet = udp_packet(0, 0);
  packet[9] = 6;
  const auto before = packet;
  shift_udp_port(packet, UdpPort::kSource, 5);
  EXPECT_EQ(packet, before);
  for (std::size_t bytes = 0; bytes < 28; ++bytes) {
    auto cut = udp_packet(0, 2);
    cut.resize(bytes);
    shift_udp_port(cut, UdpPort::kSource, 5);
    mark_congestion(cut);
    EXPECT_EQ(ipv4_destination(cut).has_value(), bytes >= 20);
  }
}

}  // namespace
}  // namespace pycomm::lab

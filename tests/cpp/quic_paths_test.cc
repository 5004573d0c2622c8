// Several connections that carry one stream, under a virtual clock: bytes are striped by rate, and
// a path that fails costs nothing but time.
#include <gtest/gtest.h>

#include "quic_pair.h"

namespace pycomm {
namespace {

using base::TimeNs;
using test::Bulk;
using transport::quic::Ecn;
using transport::quic::Session;
using transport::quic::SessionOptions;
using transport::quic::Stream;

constexpr TimeNs kMs = 1'000'000;
constexpr TimeNs kSecond = 1'000'000'000;

lab::LinkShape wan(double rtt_ms, double rate_mbit, double loss = 0) {
  lab::LinkShape shape;
  shape.delay_ns = static_cast<TimeNs>(rtt_ms * kMs / 2);
  shape.rate_bits_per_s = static_cast<std::uint64_t>(rate_mbit * 1e6);
  shape.queue_ns = std::max<TimeNs>(2 * shape.delay_ns, 10 * kMs);
  shape.loss = loss;
  return shape;
}

// Sends `bytes` from end 0 to end 1 over paths of these shapes; or both exchange so many in
// messages of `message_bytes`, each after the other's last.
class Paths {
 public:
  Paths(std::uint64_t bytes, const std::vector<lab::LinkShape>& shapes, std::uint64_t seed = 1,
        std::uint64_t message_bytes = 0)
      : bytes_(bytes), message_bytes_(message_bytes) {
    const auto [client, server] = test::make_handed_over();
    const HandedOver states[2] = {client, server};
    SessionOptions options;
    for (int i = 0; i < 2; ++i) {
      bulk_[i] = std::make_unique<Bulk>(i == 0 || message_bytes > 0 ? bytes : 0);
      stream_[i] = std::make_unique<Stream>(*bulk_[i], *bulk_[i], options.receive_window_max);
    }
    for (std::size_t p = 0; p < shapes.size(); ++p) {
      Path& path = paths_.emplace_back();
      for (int i = 0; i < 2; ++i) {
        options.seed = seed * 100 + 2 * p + static_cast<std::uint64_t>(i);
        path.out[i] = lab::LinkModel(options.seed);
        path.out[i].set_shape(shapes[p]);
        path.session[i] = Session::create(states[i], options, *stream_[i], now).value();
      }
    }
  }

  // The virtual seconds until all has arrived and is known to have; -1: not within `limit`.
  double run(TimeNs limit) {
    const TimeNs begin = now, until = now + limit;
    while (!bulk_[0]->is_done_sending() || !bulk_[1]->is_done_sending()) {
      if (now >= until || num_paths(0) == 0) return -1;
      if (at_ > 0 && now >= at_) {
        at_ = 0;
        event_();
      }
      for (int i = 0; i < 2 && message_bytes_ > 0; ++i) {
        bulk_[i]->allow((bulk_[i]->prefix() / message_bytes_ + 1) * message_bytes_);
      }
      move();
      TimeNs next = at_ > 0 ? at_ : until;
      for (Path& path : paths_) {
        for (const auto& session : path.session) {
          if (session) next = std::min(next, session->next_deadline());
        }
      }
      if (!flying_.empty()) next = std::min(next, flying_.begin()->first.first);
      now = std::max(now + 1, next);
      deliver();
    }
    return static_cast<double>(now - begin) / 1e9;
  }
  // Calls f at a time from now.
  void at(TimeNs in, std::function<void()> f) {
    at_ = now + in;
    event_ = std::move(f);
  }
  void set_shape(std::size_t path, const lab::LinkShape& shape) {
    for (auto& out : paths_[path].out) out.set_shape(shape);
  }
  bool is_right() const {
    return bulk_[1]->has_received(bytes_) &&
           bulk_[0]->has_received(message_bytes_ > 0 ? bytes_ : 0);
  }
  std::size_t num_paths(int end) const {
    return static_cast<std::size_t>(std::count_if(
        paths_.begin(), paths_.end(), [&](const Path& p) { return p.session[end] != nullptr; }));
  }
  const Session& session(std::size_t path) { return *paths_[path].session[0]; }

  TimeNs now = kSecond;

 private:
  struct Path {
    lab::LinkModel out[2] = {lab::LinkModel(0), lab::LinkModel(0)};
    std::unique_ptr<Session> session[2];
  };
  struct Flying {
    std::size_t path;
    int to;
    std::vector<std::uint8_t> bytes;
  };

  void move() {
    std::vector<std::uint8_t> batch(64'000);
    for (int i = 0; i < 2; ++i) {
      for (std::size_t p = 0; p < paths_.size(); ++p) {
        Path& path = paths_[p];
        if (!path.session[i]) continue;
        path.session[i]->on_timer(now);
        for (std::size_t size = 0, bytes; (bytes = path.session[i]->send(batch, &size, now)) > 0;) {
          for (std::size_t at = 0; at < bytes; at += size) {
            const std::span<std::uint8_t> packet(batch.data() + at, std::min(size, bytes - at));
            const auto wire_bytes = static_cast<std::uint32_t>(packet.size() + 28);
            const lab::Fate fate = path.out[i].admit(wire_bytes, now);
            for (int copy = 0; copy < fate.num_copies; ++copy) {
              flying_.emplace(std::make_pair(fate.at[static_cast<std::size_t>(copy)], next_++),
                              Flying{p, 1 - i, {packet.begin(), packet.end()}});
            }
          }
        }
        if (!path.session[i]->failure().is_ok()) {
          path.session[i]->hand_back();
          path.session[i].reset();
        }
      }
    }
  }

  void deliver() {
    while (!flying_.empty() && flying_.begin()->first.first <= now) {
      Flying packet = std::move(flying_.begin()->second);
      flying_.erase(flying_.begin());
      Session* session = paths_[packet.path].session[packet.to].get();
      if (session != nullptr) session->receive(packet.bytes, session->peer(), Ecn::kEct0, now);
    }
  }

  const std::uint64_t bytes_, message_bytes_;
  std::unique_ptr<Bulk> bulk_[2];
  std::unique_ptr<Stream> stream_[2];
  std::deque<Path> paths_;
  std::map<std::pair<TimeNs, std::uint64_t>, Flying> flying_;
  std::uint64_t next_ = 0;
  TimeNs at_ = 0;
  std::function<void()> event_;
};

double seconds(std::uint64_t bytes, const std::vector<lab::LinkShape>& shapes) {
  Paths paths(bytes, shapes);
  const double took = paths.run(100 * kSecond);
  EXPECT_TRUE(paths.is_right());
  return took;
}

TEST(QuicPaths, RatesAddUp) {
  constexpr std::uint64_t kBytes = 10'000'000;
  const double one = seconds(kBytes, {wan(10, 25)});
  EXPECT_LT(seconds(kBytes, {wan(10, 25), wan(10, 25)}), 0.6 * one);
  // 10 MB are 80 Mbit.
  EXPECT_LT(seconds(kBytes, {wan(10, 50), wan(80, 12.5)}), 80.0 / 62.5 / 0.8);
  EXPECT_LT(seconds(kBytes, {wan(20, 25), wan(20, 25), wan(20, 25), wan(20, 5)}), 80.0 / 80 / 0.75);
}

TEST(QuicPaths, WhatIsShortIsNotHeldUpByAFarPath) {
  for (const std::uint64_t bytes : {1'000, 64'000, 500'000}) {
    const double alone = seconds(bytes, {wan(5, 500)});
    EXPECT_LT(seconds(bytes, {wan(200, 500), wan(5, 500)}), 1.1 * alone + 0.001) << bytes;
  }
}

TEST(QuicPaths, APathThatFailsLosesNothing) {
  for (const std::size_t dead : {0, 1}) {
    Paths paths(10'000'000, {wan(20, 25), wan(40, 25)});
    paths.at(kSecond, [&] {
      lab::LinkShape hole = wan(20, 25);
      hole.loss = 1;
      paths.set_shape(dead, hole);
    });
    const double took = paths.run(60 * kSecond);
    EXPECT_TRUE(paths.is_right());
    // A second of both, the rest over one; soon enough that nobody waits for the path's end.
    EXPECT_LT(took, 1.0 + 55.0 / 25 / 0.8);
    EXPECT_GT(took, 2.0);
    // It is given up in the end, and the other is not.
    EXPECT_EQ(paths.num_paths(0), 2u);
  }
}

TEST(QuicPaths, APathThatComesBackCarriesAgain) {
  Paths paths(20'000'000, {wan(20, 25), wan(20, 25)});
  lab::LinkShape hole = wan(20, 25);
  hole.loss = 1;
  paths.at(kSecond, [&] {
    paths.set_shape(0, hole);
    paths.at(kSecond, [&] { paths.set_shape(0, wan(20, 25)); });
  });
  const double took = paths.run(60 * kSecond);
  EXPECT_TRUE(paths.is_right());
  // Of 160 Mbit both carry 50 in the first second, one 25 in the next, and both the rest.
  EXPECT_LT(took, 2.0 + 85.0 / 50 / 0.6);
}

TEST(QuicPaths, ADeadPathIsLeftOutAndTheRestGoesOn) {
  Paths paths(60'000'000, {wan(20, 10), wan(20, 20)});
  lab::LinkShape hole = wan(20, 25);
  hole.loss = 1;
  paths.at(kSecond, [&] { paths.set_shape(0, hole); });
  EXPECT_GT(paths.run(60 * kSecond), 0);
  EXPECT_TRUE(paths.is_right());
  EXPECT_EQ(paths.num_paths(0), 1u);
}

TEST(QuicPaths, RanksThatWaitForEachOtherGoOnWhenAPathIsCut) {
  for (std::uint64_t seed = 1; seed <= 8; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Paths paths(15'000'000, {wan(20, 50), wan(20, 50)}, seed, 150'000);
    lab::LinkShape hole = wan(20, 50);
    hole.loss = 1;
    paths.at(kSecond + static_cast<TimeNs>(seed) * 7 * kMs,
             [&] { paths.set_shape(seed % 2, hole); });
    const double took = paths.run(60 * kSecond);
    EXPECT_GT(took, 0);
    EXPECT_LT(took, 8);  // and not when the path is given up, after 15
    EXPECT_TRUE(paths.is_right());
  }
}

TEST(QuicPaths, EverythingArrivesOnceAndRightInAnyWeather) {
  for (std::uint64_t seed = 1; seed <= 12; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    base::Rng rng(seed);
    std::vector<lab::LinkShape> shapes;
    for (std::uint64_t p = 0; p < 2 + seed % 3; ++p) {
      lab::LinkShape shape =
          wan(1 + static_cast<double>(rng.below(200)), 5 + static_cast<double>(rng.below(100)),
              static_cast<double>(rng.below(50)) / 1'000);
      shape.duplicates = static_cast<double>(rng.below(20)) / 100;
      shape.jitter_ns = static_cast<TimeNs>(rng.below(20)) * kMs;
      shape.reorders = rng.below(2) == 1;
      shapes.push_back(shape);
    }
    Paths paths(3'000'000, shapes, seed);
    paths.at(200 * kMs, [&] {
      shapes[0].loss = 1;
      paths.set_shape(0, shapes[0]);
    });
    EXPECT_GT(paths.run(60 * kSecond), 0);
    EXPECT_TRUE(paths.is_right());
  }
}

}  // namespace
}  // namespace pycomm

// A QUIC connection over bad networks, under a virtual clock: everything arrives once and right.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <functional>

#include "quic_pair.h"

namespace pycomm {
namespace {

using test::QuicPair;
using transport::quic::CongestionKind;

constexpr base::TimeNs kMs = 1'000'000;
constexpr base::TimeNs kSecond = 1'000'000'000;

lab::LinkShape wan(double rtt_ms, double loss, double rate_mbit = 200) {
  lab::LinkShape shape;
  shape.delay_ns = static_cast<base::TimeNs>(rtt_ms * kMs / 2);
  shape.loss = loss;
  shape.rate_bits_per_s = static_cast<std::uint64_t>(rate_mbit * 1e6);
  shape.queue_ns = std::max<base::TimeNs>(2 * shape.delay_ns, 10 * kMs);
  return shape;
}

void expect_both_done(QuicPair& pair, std::uint64_t a, std::uint64_t b) {
  for (const auto& end : pair.ends)
    EXPECT_TRUE(end.session->failure().is_ok()) << end.session->failure().message();
  EXPECT_TRUE(pair.ends[1].bulk->has_received(a));
  EXPECT_TRUE(pair.ends[0].bulk->has_received(b));
}

TEST(QuicSession, CarriesBytesBothWays) {
  for (const bool chacha20 : {false, true}) {
    QuicPair pair(3'000'000, 1'000'001, wan(1, 0), {}, chacha20);
    EXPECT_TRUE(pair.run_to_end(20 * kSecond));
    expect_both_done(pair, 3'000'000, 1'000'001);
    EXPECT_EQ(pair.ends[0].session->mtu(), 1472u);
  }
}

struct Weather {
  const char* name;
  double rtt_ms;
  double loss;
  std::function<void(lab::LinkShape&)> more;
};

class BadWeather : public testing::TestWithParam<std::tuple<int, CongestionKind>> {};

const Weather kWeathers[] = {
    {"fast", 1, 0, {}},
    {"far", 250, 0.001, {}},
    {"lossy", 40, 0.05, {}},
    {"bursts", 40, 0,
     [](auto& s) {
       s.burst_begins = 0.002;
       s.burst_ends = 0.1;
     }},
    {"reordering", 40, 0.01,
     [](auto& s) {
       s.jitter_ns = 15 * kMs;
       s.reorders = true;
     }},
    {"twice", 20, 0.01, [](auto& s) { s.duplicates = 0.3; }},
    {"small", 20, 0.01, [](auto& s) { s.mtu_bytes = 1280; }},
    {"marking", 20, 0, [](auto& s) { s.marks_ecn = true; }},
};

TEST_P(BadWeather, EverythingArrivesOnceAndRight) {
  const auto [index, congestion] = GetParam();
  const Weather& weather = kWeathers[index];
  const char* seeds = std::getenv("QUIC_SEEDS");
  const int num_seeds = seeds != nullptr ? std::atoi(seeds) : 2;
  for (int seed = 1; seed <= num_seeds; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    lab::LinkShape shape = wan(weather.rtt_ms, weather.loss);
    if (weather.more) weather.more(shape);
    test::SessionOptions options;
    options.seed = static_cast<std::uint64_t>(seed);
    options.congestion = congestion;
    QuicPair pair(4'000'000, 500'000, shape, options);
    EXPECT_TRUE(pair.run_to_end(300 * kSecond)) << weather.name;
    expect_both_done(pair, 4'000'000, 500'000);
  }
}

INSTANTIATE_TEST_SUITE_P(, BadWeather,
                         testing::Combine(testing::Range(0, 8),
                                          testing::Values(CongestionKind::kBbr,
                                                          CongestionKind::kCubic)),
                         [](const auto& info) {
                           return std::string(kWeathers[std::get<0>(info.param)].name) +
                                  (std::get<1>(info.param) == CongestionKind::kBbr ? "Bbr"
                                                                                   : "Cubic");
                         });

// Goodput of the stream over the link's rate for IP packets, after the start.
double share_of_rate(double rtt_ms, double loss, double rate_mbit, CongestionKind kind,
                     double* queue_ms) {
  test::SessionOptions options;
  options.congestion = kind;
  QuicPair pair(std::uint64_t{1} << 27, 0, wan(rtt_ms, loss, rate_mbit), options);
  pair.run(5 * kSecond, [] { return false; });
  const std::uint64_t before = pair.ends[1].bulk->prefix();
  pair.run(10 * kSecond, [] { return false; });
  *queue_ms = static_cast<double>(pair.ends[0].out.report().queue_ns_max) / kMs;
  return static_cast<double>(pair.ends[1].bulk->prefix() - before) * 8 / 10 / (rate_mbit * 1e6);
}

TEST(QuicSession, BbrKeepsALossyPathBusy) {
  double queue_ms = 0;
  EXPECT_GT(share_of_rate(40, 0, 60, CongestionKind::kBbr, &queue_ms), 0.90);
  EXPECT_GT(share_of_rate(40, 0.01, 60, CongestionKind::kBbr, &queue_ms), 0.80);
  EXPECT_GT(share_of_rate(200, 0.001, 60, CongestionKind::kBbr, &queue_ms), 0.75);
}

TEST(QuicSession, KeysChangeLongBeforeTheirLimit) {
  test::SessionOptions options;
  options.limits.packets_per_key_max = 2'000;
  QuicPair pair(18'000'000, 18'000'000, wan(20, 0.02), options);
  EXPECT_TRUE(pair.run_to_end(100 * kSecond));
  expect_both_done(pair, 18'000'000, 18'000'000);
  EXPECT_GT(pair.ends[0].session->counters().num_key_updates, 5u);
  EXPECT_EQ(pair.ends[0].session->counters().num_forged, 0u);
}

TEST(QuicSession, EitherSideMayChangeKeysAtAnyTime) {
  for (const int who : {0, 1, 2}) {
    QuicPair pair(2'000'000, 2'000'000, wan(20, 0.01));
    for (int i = 0; i < 20; ++i) {
      pair.run(30 * kMs, [] { return false; });
      if (who != 1) pair.ends[0].session->request_key_update();
      if (who != 0) pair.ends[1].session->request_key_update();
    }
    EXPECT_TRUE(pair.run_to_end(100 * kSecond));
    expect_both_done(pair, 2'000'000, 2'000'000);
  }
}

TEST(QuicSession, ARebindingGoesUnnoticed) {
  QuicPair pair(5'000'000, 100'000, wan(30, 0.01));
  for (std::uint16_t port = 1001; port < 1006; ++port) {
    pair.run(80 * kMs, [] { return false; });
    pair.ends[0].address.port = port;
  }
  EXPECT_TRUE(pair.run_to_end(100 * kSecond));
  expect_both_done(pair, 5'000'000, 100'000);
  EXPECT_EQ(pair.ends[1].session->peer().port, 1005);
  EXPECT_GE(pair.ends[1].session->counters().num_migrations, 3u);
}

TEST(QuicSession, ARebindingInSilenceIsAnsweredWithinWhatSmallPacketsAllow) {
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    test::SessionOptions options;
    options.seed = seed;
    QuicPair pair(0, 20'000'000, wan(20, 0.01, 100), options);
    pair.run(500 * kMs, [] { return false; });
    // Everything to the client's old address is swallowed until the server's window is full of it,
    // and the client, which only listens, falls silent.
    pair.tamper = [&](int from, std::vector<std::uint8_t>&) {
      return from == 0 || pair.ends[1].session->peer().port == 2000;
    };
    pair.run(500 * kMs, [] { return false; });
    const std::uint64_t before = pair.ends[0].bulk->prefix();
    pair.ends[0].address = {"client", 2000};
    const base::TimeNs begin = pair.now;
    while (pair.ends[0].bulk->prefix() < before + 3'000'000 && pair.now < begin + 3 * kSecond) {
      pair.ends[0].session->ping();
      pair.run(400 * kMs, [] { return false; });
    }
    EXPECT_LT(pair.now, begin + 3 * kSecond);
    EXPECT_TRUE(pair.run_to_end(20 * kSecond));
    expect_both_done(pair, 0, 20'000'000);
  }
}

TEST(QuicSession, APathThatShrinksIsNoticedAndLossAloneIsNot) {
  lab::LinkShape shape = wan(30, 0.05);
  QuicPair lossy(4'000'000, 0, shape);
  EXPECT_TRUE(lossy.run_to_end(100 * kSecond));
  EXPECT_EQ(lossy.ends[0].session->mtu(), 1472u);
  shape.loss = 0;
  QuicPair shrinking(20'000'000, 0, shape);
  shrinking.run(300 * kMs, [] { return false; });
  ASSERT_EQ(shrinking.ends[0].session->mtu(), 1472u);
  shape.mtu_bytes = 1280;
  shrinking.set_shape(shape);
  EXPECT_TRUE(shrinking.run_to_end(100 * kSecond));
  expect_both_done(shrinking, 20'000'000, 0);
  EXPECT_LE(shrinking.ends[0].session->mtu(), 1252u);
  EXPECT_GE(shrinking.ends[0].session->mtu(), 1240u);
}

TEST(QuicSession, SilenceIsKeptAliveAndDeathIsNoticed) {
  QuicPair pair(1'000, 1'000, wan(30, 0));
  EXPECT_TRUE(pair.run_to_end(kSecond));
  pair.run(120 * kSecond, [] { return false; });
  for (const auto& end : pair.ends) EXPECT_TRUE(end.session->failure().is_ok());
  pair.tamper = [](int from, auto&) { return from == 0; };  // the server is gone
  pair.run(60 * kSecond, [] { return false; });
  EXPECT_EQ(pair.ends[0].session->failure().code(), StatusCode::kPeerLost);
}

TEST(QuicSession, HellosEndWhateverIsLostOfThem) {
  for (std::uint64_t seed = 1; seed <= 30; ++seed) {
    test::SessionOptions options;
    options.seed = seed;
    QuicPair pair(100, 100, wan(20, 0.4), options);
    EXPECT_TRUE(pair.run_to_end(20 * kSecond));
    pair.run(3 * kSecond, [] { return false; });
    const auto before = pair.ends[0].session->counters().packets_sent;
    pair.run(10 * kSecond, [] { return false; });  // but for keep-alives and their repetitions
    EXPECT_LT(pair.ends[0].session->counters().packets_sent, before + 40) << "seed " << seed;
  }
}

TEST(QuicSession, SmallTalkDoesNotPutOffTheTimeout) {
  QuicPair pair(1'000'000, 0, wan(20, 0));
  EXPECT_TRUE(pair.run_to_end(20 * kSecond));
  lab::LinkShape hole = wan(20, 0);
  hole.loss = 1;
  pair.set_shape(hole);
  const base::TimeNs begin = pair.now;
  while (pair.ends[0].session->is_useful() && pair.now < begin + 10 * kSecond) {
    pair.ends[0].session->ping();  // more often than any timeout
    pair.run(5 * kMs, [] { return false; });
  }
  EXPECT_LT(pair.now, begin + kSecond);
}

TEST(QuicSession, NobodyListeningIsNoticedSoonButAForgedWordIsNot) {
  QuicPair pair(1'000, 1'000, wan(30, 0));
  pair.run_to_end(kSecond);
  pair.ends[0].session->on_unreachable(pair.now);
  pair.run(5 * kSecond, [] { return false; });
  EXPECT_TRUE(pair.ends[0].session->failure().is_ok());  // the peer answered the question
  pair.tamper = [](int from, auto&) { return from == 0; };
  pair.ends[0].session->on_unreachable(pair.now);
  pair.run(kSecond, [] { return false; });
  EXPECT_EQ(pair.ends[0].session->failure().code(), StatusCode::kPeerLost);
}

TEST(QuicSession, ForgedTruncatedAndReplayedPacketsMoveNothing) {
  QuicPair pair(2'000'000, 200'000, wan(10, 0));
  base::Rng rng(5);
  std::vector<std::vector<std::uint8_t>> old;
  std::uint64_t num_forged = 0;
  pair.tamper = [&](int from, std::vector<std::uint8_t>& packet) {
    QuicPair::End& other = pair.ends[1 - from];
    if (old.size() < 2'000) old.push_back(packet);
    auto forged = packet;
    switch (rng.below(4)) {
      case 0:
        forged[rng.below(forged.size())] ^= static_cast<std::uint8_t>(1 + rng.below(255));
        break;
      case 1: forged.resize(rng.below(forged.size())); break;
      case 2: forged = old[rng.below(old.size())]; break;
      default:
        for (auto& byte : forged) byte = static_cast<std::uint8_t>(rng.next());
    }
    const auto before = other.bulk->prefix();
    other.session->receive(forged, pair.ends[from].address, test::Ecn::kNone, pair.now);
    num_forged += other.bulk->prefix() == before;
    return true;
  };
  EXPECT_TRUE(pair.run_to_end(100 * kSecond));
  expect_both_done(pair, 2'000'000, 200'000);
  EXPECT_GT(num_forged, 1'000u);
}

TEST(QuicSession, AStatelessResetIsKnownByItsToken) {
  QuicPair pair(10, 10, wan(10, 0));
  const std::string token(16, '1');
  const std::span bytes(reinterpret_cast<const std::uint8_t*>(token.data()), token.size());
  EXPECT_TRUE(pair.ends[0].session->is_reset_token(bytes));
  EXPECT_FALSE(pair.ends[1].session->is_reset_token(bytes));
}

TEST(QuicSession, APingIsLongEnoughForAStatelessReset) {
  QuicPair pair(1'000, 0, wan(5, 0));
  EXPECT_TRUE(pair.run_to_end(20 * kSecond));
  pair.run(kSecond, [] { return false; });
  pair.ends[0].session->ping();
  std::vector<std::uint8_t> batch(64'000);
  std::size_t size = 0;
  EXPECT_GT(pair.ends[0].session->send(batch, &size, pair.now), 41u);  // RFC 9000 section 10.3
}

TEST(QuicSession, AGoodbyeEndsTheOther) {
  QuicPair pair(10, 10, wan(10, 0));
  pair.run_to_end(kSecond);
  pair.ends[0].session->close("done");
  pair.run(kSecond, [] { return false; });
  EXPECT_NE(pair.ends[1].session->failure().message().find("done"), std::string::npos);
}

TEST(QuicStream, HolesThatNoNetworkMakesAreAViolation) {
  test::Bulk bulk(0);
  transport::quic::Stream stream(bulk, bulk, std::uint64_t{1} << 28);
  std::uint64_t count = 0;
  for (bool goes_on = true; goes_on; ++count) {
    const std::uint64_t offset = 2 * count + 1;
    const std::uint8_t byte = test::Bulk::at(offset);
    goes_on = stream.on_bytes(offset, {&byte, 1}, 0);
  }
  EXPECT_GT(count, 60'000u);  // a whole window of packets, every third lost
  EXPECT_LT(count, 70'000u);
}

TEST(QuicQlog, ADiskThatIsFullEndsTheTraceAndNotTheConnection) {
  const std::string folder = testing::TempDir() + "/qlog" + std::to_string(::getpid());
  std::filesystem::create_directory(folder);
  EXPECT_FALSE(transport::quic::Qlog::open(folder, "nowhere/x", true, 0).is_ok());
  auto qlog = transport::quic::Qlog::open(folder, "trace", true, 0);
  ASSERT_TRUE(qlog.is_ok());
  EXPECT_FALSE(transport::quic::Qlog::open(folder, "trace", true, 0).is_ok());  // never over one
  rlimit before;
  getrlimit(RLIMIT_FSIZE, &before);
  const rlimit small{100'000, before.rlim_max};
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  {
    test::SessionOptions options;
    options.qlog = std::move(qlog).value();
    QuicPair pair(2'000'000, 0, wan(5, 0.01), options);
    EXPECT_TRUE(pair.run_to_end(20 * kSecond));
    expect_both_done(pair, 2'000'000, 0);
  }
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_LE(std::filesystem::file_size(folder + "/trace.sqlog"), 100'000u);
  EXPECT_GT(std::filesystem::file_size(folder + "/trace.sqlog"), 50'000u);
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace pycomm

// Messages over pairs of RDMA links, for tests.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/rng.h"
#include "rdma_pair.h"

namespace pycomm::test {

inline constexpr Signature kSignature =
    make_signature(OpKind::kAllReduce, DType::kFloat32, ReduceOp::kSum, 0, 7);

inline std::vector<std::byte> pattern(std::uint64_t bytes, std::uint64_t seed) {
  base::Rng rng(seed);
  std::vector<std::byte> data(bytes);
  for (std::uint64_t at = 0; at < bytes; at += sizeof(std::uint64_t)) {
    const std::uint64_t word = rng.next();
    std::memcpy(data.data() + at, &word, std::min<std::uint64_t>(sizeof word, bytes - at));
  }
  return data;
}

inline Transfer make_transfer(std::uint64_t op, std::vector<std::byte>& data) {
  Transfer t;
  t.id = {99, op, 0, 1, 0};
  t.signature = kSignature;
  t.data = data.data();
  t.bytes = data.size();
  return t;
}

inline RdmaStats stats(const std::shared_ptr<transport::CoreLink>& link) {
  return *transport::rdma::link_stats(*link);
}

template <class Condition>
bool pump_until(RdmaPair& pair, Condition done, int turns = 2'000'000) {
  for (int i = 0; i < turns; ++i) {
    if (done()) return true;
    pair.pump();
  }
  return done();
}

// One message of each size both ways at once.
inline void expect_moves(RdmaPair& pair, std::uint64_t first_op, std::uint64_t bytes) {
  auto from_a = pattern(bytes, first_op), from_b = pattern(bytes, first_op + 1);
  std::vector<std::byte> at_a(bytes), at_b(bytes);
  Transfer send_a = make_transfer(first_op, from_a), recv_b = make_transfer(first_op, at_b);
  Transfer send_b = make_transfer(first_op + 1, from_b), recv_a = make_transfer(first_op + 1, at_a);
  pair.b->post(recv_b);
  pair.a->post(recv_a);
  pair.a->send(send_a);
  pair.b->send(send_b);
  ASSERT_TRUE(pump_until(pair, [&] {
    return send_a.is_finished() && send_b.is_finished() && recv_a.is_finished() &&
           recv_b.is_finished();
  }));
  ASSERT_EQ(recv_a.state, TransferState::kDone) << recv_a.status.to_string();
  ASSERT_EQ(recv_b.state, TransferState::kDone) << recv_b.status.to_string();
  EXPECT_EQ(from_a, at_b);
  EXPECT_EQ(from_b, at_a);
}

inline const RdmaSetup kOneRail{{{"one"}, {"two"}}};
inline RdmaSetup two_rails(std::uint64_t seed) {
  RdmaSetup setup{{{"one", "three"}, {"two", "four"}}};
  setup.seed = seed;
  return setup;
}

}  // namespace pycomm::test

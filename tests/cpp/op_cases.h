// Any collective on whole numbers that are exact in any order of addition, with what every rank
// must hold afterwards.
#pragma once

#include <memory>
#include <vector>

#include "pycomm/operation.h"

namespace pycomm::test {

// One rank's memory in one operation.
struct OpData {
  std::vector<float> input;
  std::vector<float> output;
};

struct OpCase {
  OpKind kind = OpKind::kBarrier;
  int world_size = 1;
  std::uint64_t count = 0;
  Rank root = 0;

  // Element i of what rank r gives.
  static float value(Rank r, std::uint64_t i) {
    return static_cast<float>((static_cast<std::uint64_t>(r) + 1) * (1 + i % 13));
  }
  static constexpr float kUntouched = -1.0f;

  // Elements that `from` sends to `to` in an uneven all_to_all; a third of the pairs has none.
  std::uint64_t split(Rank from, Rank to) const {
    return (count / 8 + 1) * static_cast<std::uint64_t>((from + 2 * to) % 3);
  }
  // What lies before the part for (or from) `peer` in rank r's input (or output).
  std::uint64_t sent_before(Rank r, Rank peer) const {
    std::uint64_t sum = 0;
    for (Rank p = 0; p < peer; ++p) sum += split(r, p);
    return sum;
  }
  std::uint64_t received_before(Rank r, Rank peer) const {
    std::uint64_t sum = 0;
    for (Rank p = 0; p < peer; ++p) sum += split(p, r);
    return sum;
  }

  // Fills `data`, which must stay where it is, and asks for the operation on it.
  OpRequest request(Rank r, OpData& data) const {
    const auto n = static_cast<std::uint64_t>(world_size);
    OpRequest request;
    request.kind = kind;
    request.dtype = DType::kFloat32;
    request.count = kind == OpKind::kBarrier ? 0 : count;
    request.root = root;
    std::uint64_t input = request.count, output = request.count;
    if (kind == OpKind::kReduceScatter || kind == OpKind::kScatter || kind == OpKind::kAllToAll) {
      input *= n;
    }
    if (kind == OpKind::kAllGather || kind == OpKind::kGather || kind == OpKind::kAllToAll) {
      output *= n;
    }
    if (kind == OpKind::kAllToAllUneven) {
      auto splits = std::make_shared<Splits>();
      for (Rank p = 0; p < world_size; ++p) {
        splits->send.push_back(split(r, p));
        splits->recv.push_back(split(p, r));
      }
      request.splits = splits;
      request.count = 0;
      input = sent_before(r, world_size);
      output = received_before(r, world_size);
    }
    data.input.resize(input);
    for (std::uint64_t k = 0; k < input; ++k) data.input[k] = value(r, k);
    data.output.assign(output, kUntouched);
    request.input = reinterpret_cast<const std::byte*>(data.input.data());
    request.output = reinterpret_cast<std::byte*>(data.output.data());
    return request;
  }

  float sum_at(std::uint64_t k) const {
    float sum = 0;
    for (Rank p = 0; p < world_size; ++p) sum += value(p, k);
    return sum;
  }

  // Element k of rank r's output afterwards.
  float expected(Rank r, std::uint64_t k) const {
    const std::uint64_t mine = static_cast<std::uint64_t>(r) * count;
    const auto gathered = [&] { return value(static_cast<Rank>(k / count), k % count); };
    switch (kind) {
      case OpKind::kAllReduce: return sum_at(k);
      case OpKind::kReduceScatter: return sum_at(mine + k);
      case OpKind::kReduce: return r == root ? sum_at(k) : kUntouched;
      case OpKind::kBroadcast: return value(root, k);
      case OpKind::kScatter: return value(root, mine + k);
      case OpKind::kAllGather: return gathered();
      case OpKind::kGather: return r == root ? gathered() : kUntouched;
      case OpKind::kAllToAll: return value(static_cast<Rank>(k / count), mine + k % count);
      case OpKind::kAllToAllUneven: {
        Rank from = 0;
        while (received_before(r, from + 1) <= k) ++from;
        return value(from, sent_before(from, r) + k - received_before(r, from));
      }
      default: return kUntouched;
    }
  }

  // The first element that is wrong, or -1.
  std::int64_t first_wrong(Rank r, const OpData& data) const {
    for (std::uint64_t k = 0; k < data.output.size(); ++k) {
      if (data.output[k] != expected(r, k)) return static_cast<std::int64_t>(k);
    }
    for (std::uint64_t k = 0; k < data.input.size(); ++k) {
      if (data.input[k] != value(r, k)) return static_cast<std::int64_t>(k);  // read only
    }
    return -1;
  }
};

}  // namespace pycomm::test

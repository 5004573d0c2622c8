// Rings: bandwidth-optimal, every rank talks to two neighbours.
// Source: P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
// workstations", JPDC 69(2), 2009. An all_reduce moves 2 (n-1)/n S bytes per rank.
#include <algorithm>

#include "collectives/schedule.h"

namespace pycomm::collectives {
namespace {

std::uint64_t chunk_elements(const PlanRequest& request) {
  return std::max<std::uint64_t>(request.chunk_bytes / request.element_bytes, 1);
}

// Number of chunks of the largest shard; shards shorter than that have fewer, or none.
std::uint64_t num_chunks(std::uint64_t largest, std::uint64_t chunk) {
  return std::max<std::uint64_t>((largest + chunk - 1) / chunk, 1);
}

// Cuts start at whole cache lines where the buffer does.
std::uint64_t shard_align(const PlanRequest& request) {
  return std::max<std::uint64_t>(64 / request.element_bytes, 1);
}

}  // namespace

Part part_of(std::uint64_t count, int n, int i, std::uint64_t align) {
  const std::uint64_t units = (count + align - 1) / align;
  const auto parts = static_cast<std::uint64_t>(n);
  const auto index = static_cast<std::uint64_t>(i);
  const auto cut = [&](std::uint64_t k) {
    return std::min(count, (units / parts * k + std::min(k, units % parts)) * align);
  };
  return {cut(index), cut(index + 1) - cut(index)};
}

// Shard s starts at rank s and travels right. `hop` h carries it from rank s + h to s + h + 1: the
// first n - 1 hops reduce, the next n - 1 spread the result. A rank at distance k from s therefore
// receives at hop k - 1 and sends at hop k, then again n hops later.
Schedule plan_ring_all_reduce(const PlanRequest& request) {
  Schedule schedule{.name = "ring"};
  const int n = request.world_size;
  if (n == 1 || request.count == 0) return schedule;
  const Rank left = (request.rank + n - 1) % n;
  const Rank right = (request.rank + 1) % n;
  const std::uint64_t chunk = chunk_elements(request);
  const std::uint64_t align = shard_align(request);
  const std::uint64_t chunks = num_chunks(part_of(request.count, n, 0, align).count, chunk);
  for (std::uint64_t c = 0; c < chunks; ++c) {
    for (int k = 0; k < n; ++k) {
      const int shard = (request.rank + n - k) % n;
      const Part part = part_of(request.count, n, shard, align);
      if (c * chunk >= part.count) continue;
      Step step{.kind = StepKind::kSend};
      step.offset = part.offset + c * chunk;
      step.count = std::min(chunk, part.count - c * chunk);
      step.chunk = static_cast<std::uint32_t>(c * static_cast<std::uint64_t>(n)) +
                   static_cast<std::uint32_t>(shard);
      const auto add = [&](StepKind kind, Rank peer, int hop) {
        step.kind = kind;
        step.peer = peer;
        step.step = static_cast<std::uint32_t>(hop);
        schedule.add(step);
      };
      schedule.begin_lane(0);
      if (k > 0) add(StepKind::kRecvCombine, left, k - 1);
      if (k == n - 1) add(StepKind::kScale, kNoRank, 0);
      add(StepKind::kSend, right, k);
      if (k < n - 1) add(StepKind::kRecv, left, n - 1 + k);
      if (k < n - 2) add(StepKind::kSend, right, n + k);
    }
  }
  return schedule;
}

Schedule plan_ring_all_gather(const PlanRequest& request) {
  Schedule schedule{.name = "ring"};
  const int n = request.world_size;
  if (n == 1 || request.count == 0) return schedule;
  const Rank left = (request.rank + n - 1) % n;
  const Rank right = (request.rank + 1) % n;
  const std::uint64_t chunk = chunk_elements(request);
  const std::uint64_t chunks = num_chunks(request.count, chunk);
  for (std::uint64_t c = 0; c < chunks; ++c) {
    for (int k = 0; k < n; ++k) {
      const int shard = (request.rank + n - k) % n;
      Step step{.kind = StepKind::kSend};
      step.offset = static_cast<std::uint64_t>(shard) * request.count + c * chunk;
      step.count = std::min(chunk, request.count - c * chunk);
      step.chunk = static_cast<std::uint32_t>(c * static_cast<std::uint64_t>(n)) +
                   static_cast<std::uint32_t>(shard);
      schedule.begin_lane(0);
      if (k > 0) {
        step.kind = StepKind::kRecv;
        step.peer = left;
        step.step = static_cast<std::uint32_t>(k - 1);
        schedule.add(step);
      }
      if (k < n - 1) {
        step.kind = StepKind::kSend;
        step.peer = right;
        step.step = static_cast<std::uint32_t>(k);
        schedule.add(step);
      }
    }
  }
  return schedule;
}

}  // namespace pycomm::collectives

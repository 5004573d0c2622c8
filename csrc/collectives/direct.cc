// Schedules in which every rank deals with every other directly: one hop, whatever the number of
// ranks, and folds in the order of the ranks. On one host that is the least work; across hosts it
// is for operations that have no better form, for small messages, and for reductions that must
// round once.
//
// Lanes are ordered by chunk, then from this rank upwards: so nobody waits for a chunk that its
// owner has not come to (schedule_run.cc bounds lanes in flight), and not everyone starts at rank
// 0.
#include <algorithm>

#include "collectives/schedule.h"

namespace pycomm::collectives {
namespace {

constexpr std::uint64_t kFoldChunkBytesMin = 16 * 1024;
// Bytes that are only moved need no cache, and a message costs a microsecond.
constexpr std::uint64_t kMoveChunks = 16;

std::uint64_t elements_of(const PlanRequest& request, std::uint64_t bytes) {
  return std::max<std::uint64_t>(bytes / request.element_bytes, 1);
}

std::uint64_t line_elements(const PlanRequest& request) { return elements_of(request, 64); }

std::uint64_t move_chunk(const PlanRequest& request) {
  return elements_of(request, kMoveChunks * request.chunk_bytes);
}

// The parts of all ranks that one fold reads fit a chunk together.
std::uint64_t fold_chunk(const PlanRequest& request) {
  const auto others = static_cast<std::uint64_t>(std::max(request.world_size - 1, 1));
  const std::uint64_t least = std::min(kFoldChunkBytesMin, request.chunk_bytes);
  const std::uint64_t bytes = std::max(request.chunk_bytes / others, least);
  const std::uint64_t line = line_elements(request);
  return (elements_of(request, bytes) + line - 1) / line * line;
}

std::uint64_t num_chunks(std::uint64_t count, std::uint64_t chunk) {
  return (count + chunk - 1) / chunk;
}

struct Cut {
  std::uint64_t offset;
  std::uint64_t count;
};

Cut cut_of(std::uint64_t count, std::uint64_t chunk, std::uint64_t c) {
  return {c * chunk, std::min(chunk, count - c * chunk)};
}

// A message of part `owner`, chunk `c`.
std::uint32_t chunk_name(const PlanRequest& request, std::uint64_t c, Rank owner) {
  return static_cast<std::uint32_t>(c * static_cast<std::uint64_t>(request.world_size)) +
         static_cast<std::uint32_t>(owner);
}

Step make_step(StepKind kind, BufferId buffer, Rank peer, std::uint64_t offset, std::uint64_t count,
               std::uint32_t chunk, std::uint32_t name = 0) {
  Step step{.kind = kind, .buffer = buffer, .peer = peer, .step = name, .chunk = chunk};
  step.offset = offset;
  step.count = count;
  return step;
}

Step make_fold(BufferId buffer, std::uint64_t offset, BufferId own, std::uint64_t own_offset,
               std::uint64_t count, std::uint32_t chunk) {
  Step step = make_step(StepKind::kGatherFold, buffer, kNoRank, offset, count, chunk);
  step.own = own;
  step.own_offset = own_offset;
  return step;
}

void add_lane(Schedule& schedule, const Step& step) {
  schedule.begin_lane(0);
  schedule.add(step);
}

bool is_trivial(const PlanRequest& request) {
  return request.world_size == 1 || request.count == 0;
}

// Calls body(chunk index, owner, offset and count of that chunk of the owner's part) in lane order.
template <class Body>
void for_each_part(const PlanRequest& request, std::uint64_t align, std::uint64_t chunk,
                   Body&& body) {
  const int n = request.world_size;
  const std::uint64_t chunks = num_chunks(part_of(request.count, n, 0, align).count, chunk);
  for (std::uint64_t c = 0; c < chunks; ++c) {
    for (int k = 0; k < n; ++k) {
      const Rank owner = (request.rank + k) % n;
      const Part part = part_of(request.count, n, owner, align);
      if (c * chunk >= part.count) continue;
      const Cut cut = cut_of(part.count, chunk, c);
      body(c, owner, part.offset + cut.offset, cut.count);
    }
  }
}

Schedule all_reduce_in_parts(const PlanRequest& request, std::uint64_t align, std::uint64_t chunk,
                             Schedule schedule) {
  if (is_trivial(request)) return schedule;
  for_each_part(
      request, align, chunk,
      [&](std::uint64_t c, Rank owner, std::uint64_t offset, std::uint64_t count) {
        const std::uint32_t name = chunk_name(request, c, owner);
        const auto add = [&](StepKind kind, std::uint32_t step) {
          schedule.add(make_step(kind, BufferId::kOutput, owner, offset, count, name, step));
        };
        schedule.begin_lane(0);
        if (owner == request.rank) {
          schedule.add(
              make_fold(BufferId::kOutput, offset, BufferId::kOutput, offset, count, name));
          add(StepKind::kSendAll, 1);
        } else {
          add(StepKind::kSend, 0);
          add(StepKind::kRecv, 1);
        }
      });
  return schedule;
}

}  // namespace

// ---------------------------------------------------------------- reductions

Schedule plan_swap_all_reduce(const PlanRequest& request) {
  Schedule schedule{.name = "swap"};
  if (is_trivial(request)) return schedule;
  const std::uint64_t chunk = fold_chunk(request);
  for (std::uint64_t c = 0; c < num_chunks(request.count, chunk); ++c) {
    const Cut cut = cut_of(request.count, chunk, c);
    add_lane(schedule, make_step(StepKind::kSwapFold, BufferId::kOutput, kNoRank, cut.offset,
                                 cut.count, static_cast<std::uint32_t>(c)));
  }
  return schedule;
}

Schedule plan_direct_all_reduce(const PlanRequest& request) {
  return all_reduce_in_parts(request, line_elements(request), fold_chunk(request),
                             Schedule{.name = "direct"});
}

Schedule plan_direct_reduce_scatter(const PlanRequest& request) {
  Schedule schedule{.name = "direct"};
  if (is_trivial(request)) return schedule;
  const std::uint64_t chunk = fold_chunk(request);
  for (std::uint64_t c = 0; c < num_chunks(request.count, chunk); ++c) {
    const Cut cut = cut_of(request.count, chunk, c);
    for (int k = 0; k < request.world_size; ++k) {
      const Rank owner = (request.rank + k) % request.world_size;
      const std::uint64_t offset = static_cast<std::uint64_t>(owner) * request.count + cut.offset;
      const std::uint32_t name = chunk_name(request, c, owner);
      add_lane(
          schedule,
          owner == request.rank
              ? make_fold(BufferId::kOutput, cut.offset, BufferId::kInput, offset, cut.count, name)
              : make_step(StepKind::kSend, BufferId::kInput, owner, offset, cut.count, name));
    }
  }
  return schedule;
}

Schedule plan_direct_reduce(const PlanRequest& request) {
  Schedule schedule{.name = "direct"};
  if (is_trivial(request)) return schedule;
  const std::uint64_t chunk = fold_chunk(request);
  for (std::uint64_t c = 0; c < num_chunks(request.count, chunk); ++c) {
    const Cut cut = cut_of(request.count, chunk, c);
    const auto name = static_cast<std::uint32_t>(c);
    add_lane(schedule, request.rank == request.root
                           ? make_fold(BufferId::kOutput, cut.offset, BufferId::kInput, cut.offset,
                                       cut.count, name)
                           : make_step(StepKind::kSend, BufferId::kInput, request.root, cut.offset,
                                       cut.count, name));
  }
  return schedule;
}

// A reduce_scatter and a gather, chunk by chunk. R. Rabenseifner, "Optimization of collective
// reduction operations", ICCS 2004.
Schedule plan_scattered_reduce(const PlanRequest& request) {
  Schedule schedule{.name = "scattered"};
  if (is_trivial(request)) return schedule;
  const bool is_root = request.rank == request.root;
  for_each_part(
      request, line_elements(request), fold_chunk(request),
      [&](std::uint64_t c, Rank owner, std::uint64_t offset, std::uint64_t count) {
        const std::uint32_t name = chunk_name(request, c, owner);
        schedule.begin_lane(0);
        if (owner == request.rank) {
          schedule.add(make_fold(is_root ? BufferId::kOutput : BufferId::kLane,
                                 is_root ? offset : 0, BufferId::kInput, offset, count, name));
          if (!is_root) {
            schedule.add(
                make_step(StepKind::kSend, BufferId::kLane, request.root, 0, count, name, 1));
          }
          return;
        }
        schedule.add(make_step(StepKind::kSend, BufferId::kInput, owner, offset, count, name));
        if (is_root) {
          schedule.add(
              make_step(StepKind::kRecv, BufferId::kOutput, owner, offset, count, name, 1));
        }
      });
  return schedule;
}

// ---------------------------------------------------------------- moves

// Peers read the input, not this rank's fresh copy of it in the output, which its cache still
// holds.
Schedule plan_direct_all_gather(const PlanRequest& request) {
  Schedule schedule{.name = "direct"};
  if (is_trivial(request)) return schedule;
  const std::uint64_t chunk = move_chunk(request);
  for (std::uint64_t c = 0; c < num_chunks(request.count, chunk); ++c) {
    const Cut cut = cut_of(request.count, chunk, c);
    add_lane(schedule, make_step(StepKind::kSendAll, BufferId::kInput, kNoRank, cut.offset,
                                 cut.count, chunk_name(request, c, request.rank)));
    for (int k = 1; k < request.world_size; ++k) {
      const Rank owner = (request.rank + k) % request.world_size;
      add_lane(schedule, make_step(StepKind::kRecv, BufferId::kOutput, owner,
                                   static_cast<std::uint64_t>(owner) * request.count + cut.offset,
                                   cut.count, chunk_name(request, c, owner)));
    }
  }
  return schedule;
}

Schedule plan_direct_broadcast(const PlanRequest& request) {
  Schedule schedule{.name = "direct"};
  if (is_trivial(request)) return schedule;
  const bool is_root = request.rank == request.root;
  const std::uint64_t chunk = move_chunk(request);
  for (std::uint64_t c = 0; c < num_chunks(request.count, chunk); ++c) {
    const Cut cut = cut_of(request.count, chunk, c);
    add_lane(schedule, make_step(is_root ? StepKind::kSendAll : StepKind::kRecv, BufferId::kOutput,
                                 is_root ? kNoRank : request.root, cut.offset, cut.count,
                                 static_cast<std::uint32_t>(c)));
  }
  return schedule;
}

namespace {

// The root's side has a part for every rank; the others' has one.
Schedule plan_rooted(const PlanRequest& request, StepKind at_root, BufferId root_buffer,
                     StepKind elsewhere, BufferId other_buffer) {
  Schedule schedule{.name = "direct"};
  if (is_trivial(request)) return schedule;
  const std::uint64_t chunk = move_chunk(request);
  for (std::uint64_t c = 0; c < num_chunks(request.count, chunk); ++c) {
    const Cut cut = cut_of(request.count, chunk, c);
    const auto name = static_cast<std::uint32_t>(c);
    if (request.rank != request.root) {
      add_lane(schedule,
               make_step(elsewhere, other_buffer, request.root, cut.offset, cut.count, name));
      continue;
    }
    for (int k = 1; k < request.world_size; ++k) {
      const Rank peer = (request.rank + k) % request.world_size;
      add_lane(schedule, make_step(at_root, root_buffer, peer,
                                   static_cast<std::uint64_t>(peer) * request.count + cut.offset,
                                   cut.count, name));
    }
  }
  return schedule;
}

}  // namespace

Schedule plan_direct_gather(const PlanRequest& request) {
  return plan_rooted(request, StepKind::kRecv, BufferId::kOutput, StepKind::kSend,
                     BufferId::kInput);
}

Schedule plan_direct_scatter(const PlanRequest& request) {
  return plan_rooted(request, StepKind::kSend, BufferId::kInput, StepKind::kRecv,
                     BufferId::kOutput);
}

// An uneven pair exchanges at least one message, so that ranks that disagree on its count learn it.
Schedule plan_direct_all_to_all(const PlanRequest& request) {
  Schedule schedule{.name = "direct"};
  const int n = request.world_size;
  if (n == 1 || (request.splits == nullptr && request.count == 0)) return schedule;
  const std::uint64_t chunk = move_chunk(request);
  const auto parts = [&](const std::vector<std::uint64_t>* counts) {
    std::vector<Cut> result;
    std::uint64_t offset = 0;
    for (std::size_t r = 0; r < static_cast<std::size_t>(n); ++r) {
      const std::uint64_t count = counts ? (*counts)[r] : request.count;
      result.push_back({offset, count});
      offset += count;
    }
    return result;
  };
  const std::vector<Cut> to = parts(request.splits ? &request.splits->send : nullptr);
  const std::vector<Cut> from = parts(request.splits ? &request.splits->recv : nullptr);
  const auto add = [&](StepKind kind, BufferId buffer, Rank peer, const Cut& part,
                       std::uint64_t c) {
    if (c > 0 && c * chunk >= part.count) return false;
    const Cut cut = cut_of(part.count, chunk, c);
    add_lane(schedule, make_step(kind, buffer, peer, part.offset + cut.offset, cut.count,
                                 static_cast<std::uint32_t>(c)));
    return true;
  };
  bool is_more = true;
  for (std::uint64_t c = 0; is_more; ++c) {
    is_more = false;
    for (int k = 1; k < n; ++k) {
      const Rank peer = (request.rank + k) % n;
      const Rank source = (request.rank + n - k) % n;
      is_more |=
          add(StepKind::kSend, BufferId::kInput, peer, to[static_cast<std::size_t>(peer)], c);
      is_more |= add(StepKind::kRecv, BufferId::kOutput, source,
                     from[static_cast<std::size_t>(source)], c);
    }
  }
  return schedule;
}

// ---------------------------------------------------------------- expansions of the flat exchange

namespace {

// Everyone hears from everyone, which is a barrier; the root's message carries the bytes.
Schedule plan_flat_broadcast(const PlanRequest& request) {
  Schedule schedule{.name = "flat"};
  for (Rank p = 0; p < request.world_size; ++p) {
    if (p == request.rank) continue;
    const std::uint64_t mine = request.rank == request.root ? request.count : 0;
    const std::uint64_t theirs = p == request.root ? request.count : 0;
    add_lane(schedule, make_step(StepKind::kSend, BufferId::kOutput, p, 0, mine, 0));
    add_lane(schedule, make_step(StepKind::kRecv, BufferId::kOutput, p, 0, theirs, 0));
  }
  return schedule;
}

Schedule plan_flat_steps(const PlanRequest& request) {
  switch (request.kind) {
    case OpKind::kAllReduce: return plan_swap_all_reduce(request);
    case OpKind::kReduce: return plan_direct_reduce(request);
    case OpKind::kReduceScatter: return plan_direct_reduce_scatter(request);
    case OpKind::kAllGather: return plan_direct_all_gather(request);
    case OpKind::kGather: return plan_direct_gather(request);
    case OpKind::kScatter: return plan_direct_scatter(request);
    case OpKind::kAllToAll: return plan_direct_all_to_all(request);
    default: return plan_flat_broadcast(request);
  }
}

}  // namespace

Schedule plan_flat(const PlanRequest& request) {
  Schedule schedule = plan_flat_steps(request);
  schedule.name = "flat";
  schedule.fused = Fused::kFlat;
  return schedule;
}

}  // namespace pycomm::collectives

// An operation among ranks of one host, as data: who gives what to whom, in rounds of chunks.
//
//   give     every rank, or the root, gives a span of its input to others
//   fold     whoever was given to folds it with its own, where the operation reduces
//   take     what was given, or the folded results, goes to where it belongs
//
// Givers either copy through a window of shared memory, chunk by chunk, so that everything between
// the two tensors stays in the cache; or takers read the giver's tensor itself, through a mapping
// or with the kernel's help. Folded results are pushed into tensors that all can write, else they
// go through the window. Which of these is a function of what all ranks announced, hence alike.
#pragma once

#include <cstdint>

#include "collectives/schedule.h"
#include "pycomm/operation.h"

namespace pycomm::collectives {

// Of a tensor: elements [offset, offset + count).
using Span = Part;

struct LocalPlan {
  OpKind kind = OpKind::kBarrier;
  int world_size = 1;
  Rank root = 0;
  std::uint64_t count = 0;         // of one rank's part
  std::uint64_t align = 1;         // parts of a reduction begin at multiples, in elements
  const Splits* splits = nullptr;  // mine, of an uneven all_to_all
  Rank rank = 0;                   // mine
  std::uint64_t chunk = 1;         // elements of a round
  std::uint64_t rounds = 0;
  bool is_direct = false;       // takers read givers' tensors, else windows
  bool swaps = false;           // everyone is given everything, and folds all of it
  bool pushes = false;          // folded results go straight into the tensors of all takers
  bool is_streamed = false;     // results bypass the cache
  bool caches_windows = false;  // else what goes into windows does

  bool folds() const { return reduces(kind); }
  // Whether a giver's chunk is the same for everyone.
  bool is_common() const {
    return swaps || kind == OpKind::kAllGather || kind == OpKind::kGather ||
           kind == OpKind::kBroadcast;
  }
  bool is_giver(Rank r) const {
    return r == root || (kind != OpKind::kBroadcast && kind != OpKind::kScatter);
  }

  // What `from` gives to `to`, another rank, of its input; nothing if the count is 0.
  Span given(Rank from, Rank to) const;
  // Where this rank's output has what `from` gave it, or `from`'s folded part.
  std::uint64_t taken_at(Rank from) const;
  // The part of a reduction that r folds: of everyone's input, and of the output.
  Span folded(Rank r) const;
  // Whether r takes what others have folded.
  bool takes_results(Rank r) const {
    return has_results() && (kind == OpKind::kAllReduce || r == root);
  }
  // What this rank gives itself: [from, count) of its input, at `at` of its output.
  Span own(std::uint64_t* at) const;
  bool has_results() const {
    return (kind == OpKind::kAllReduce && !swaps) || kind == OpKind::kReduce;
  }

  // The larger of all spans, which says how many rounds there are; alike on every rank but for
  // uneven splits, where the caller knows.
  std::uint64_t longest() const;
};

// [c * chunk, ...) of a span, empty behind its end.
inline Span chunk_of(const Span& span, std::uint64_t chunk, std::uint64_t c) {
  const std::uint64_t first = c * chunk;
  if (first >= span.count) return {span.offset + span.count, 0};
  return {span.offset + first, span.count - first < chunk ? span.count - first : chunk};
}

}  // namespace pycomm::collectives

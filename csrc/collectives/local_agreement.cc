#include "collectives/local_agreement.h"

#include <algorithm>

#include "collectives/validate.h"

namespace pycomm::collectives {
namespace {

constexpr std::uint64_t kInArena = std::uint64_t{1} << 63;
constexpr std::uint64_t kPageBytes = 4096;
// Parts of large reductions begin at pages, of small ones at cache lines.
constexpr std::uint64_t kPagePartsBytesMin = 256 * 1024;

bool is_mapped(std::uint64_t place) { return (place & kInArena) != 0; }

// Peers work on whole elements: what is not aligned to them counts as private.
std::uint64_t place_of(const LocalChannel& channel, Rank rank, const std::byte* data,
                       std::uint64_t bytes, std::uint64_t element_bytes) {
  if (data == nullptr) return 0;
  const std::byte* arena = channel.arenas[static_cast<std::size_t>(rank)];
  const bool is_inside =
      arena != nullptr && data >= arena && data + bytes <= arena + channel.arena_bytes;
  const auto offset = static_cast<std::uint64_t>(data - arena);
  if (is_inside && offset % element_bytes == 0) return kInArena | offset;
  return reinterpret_cast<std::uint64_t>(data);
}

// Above this, folding everything everywhere cannot pay.
constexpr std::uint64_t kSwapBytesMax = 512 * 1024;

// Of what all ranks know alike: whether an operation of this kind and size could go a way.
bool could_go(Way way, const OpRequest& request, int world_size) {
  switch (way) {
    case Way::kPull: return !reduces(request.kind) && request.kind != OpKind::kAllToAllUneven;
    case Way::kSwap:
      return request.kind == OpKind::kAllReduce &&
             request.bytes() * static_cast<std::uint64_t>(world_size - 1) <= kSwapBytesMax;
    default: return true;
  }
}

Way choose_way(const LocalChannel& channel, const GroupShape& shape, const OpRequest& request,
               const Sizes& sizes, int world_size, bool is_mapped) {
  if (shape.way) return *shape.way;
  if (channel.tuner == nullptr) {
    return Tuner::first_guess(request.kind, request.bytes(), shape.is_crowded);
  }
  Tuner::Ways possible{};
  for (std::size_t way = 0; way < possible.size(); ++way) {
    possible[way] = could_go(static_cast<Way>(way), request, world_size);
  }
  possible[static_cast<std::size_t>(Way::kPull)] &=
      channel.puller != nullptr && !request.input_parts && !is_mapped;
  possible[static_cast<std::size_t>(Way::kSwap)] &= !is_mapped;
  return channel.tuner->choose({request.kind, sizes.input + sizes.output, is_mapped}, possible);
}

// Whether results are so large that the cache would not keep them. In place they are in it already.
// For this rank alone: peers need not agree.
bool streams(const GroupShape& shape, const OpRequest& request, const Sizes& sizes) {
  if (reduces(request.kind) && request.input == request.output) return false;
  const std::uint64_t least =
      reduces(request.kind) ? 2 * shape.stream_bytes_min : shape.stream_bytes_min;
  return sizes.output >= least;
}

}  // namespace

Announcement make_announcement(LocalChannel& channel, const GroupShape& shape,
                               const OpRequest& request, Rank rank, int world_size) {
  if (channel.window == nullptr && channel.allocate_window) {
    channel.window = channel.allocate_window(channel.window_bytes);
  }
  const Sizes sizes = sizes_of(request, world_size);
  const std::uint64_t element = dtype_bytes(request.dtype);
  Announcement mine;
  if (!request.splits) {
    if (!request.input_parts)
      mine.input = place_of(channel, rank, request.input, sizes.input, element);
    if (!request.output_parts)
      mine.output = place_of(channel, rank, request.output, sizes.output, element);
  }
  mine.pulls = channel.puller != nullptr ? 1 : 0;
  if (rank == 0) {
    mine.way = static_cast<std::uint32_t>(
        choose_way(channel, shape, request, sizes, world_size, is_mapped(mine.input)));
  }
  if (channel.window != nullptr) {
    const std::byte* segment = channel.segments[static_cast<std::size_t>(rank)];
    mine.window = static_cast<std::uint64_t>(channel.window - segment) + 1;
  }
  return mine;
}

Result<LocalDecision> decide(const LocalChannel& channel, const GroupShape& shape,
                             const OpRequest& request, Rank rank, std::uint64_t longest_split,
                             const std::vector<Announcement>& announced) {
  const int n = static_cast<int>(announced.size());
  const std::uint64_t element_bytes = dtype_bytes(request.dtype);
  const Sizes sizes = sizes_of(request, n);
  LocalPlan plan;
  plan.kind = request.kind;
  plan.world_size = n;
  plan.root = request.root;
  plan.count = request.count;
  plan.align = std::max<std::uint64_t>(
      (request.bytes() >= kPagePartsBytesMin ? kPageBytes : base::kCacheLineBytes) / element_bytes,
      1);
  plan.splits = request.splits.get();
  plan.rank = rank;

  LocalDecision decision;
  bool all_have_windows = true, all_are_mapped = true, all_can_be_read = !request.splits;
  bool takers_are_mapped = true, all_pull = true;
  const auto bad = [](Rank p) {
    return Status::error(StatusCode::kInternal,
                         "rank " + std::to_string(p) + " announced memory it does not have", p);
  };
  for (Rank p = 0; p < n; ++p) {
    const auto index = static_cast<std::size_t>(p);
    const Announcement& theirs = announced[index];
    // A peer's word about its memory is checked before it becomes an address.
    const auto mapped = [&](std::uint64_t place, std::uint64_t bytes, std::byte** at) {
      const std::uint64_t offset = place & ~kInArena;
      const bool fits = offset <= channel.arena_bytes && bytes <= channel.arena_bytes - offset &&
                        offset % element_bytes == 0;
      *at = channel.arenas[index] + offset;
      return fits && channel.arenas[index] != nullptr;
    };
    LocalPeer peer;
    if (is_mapped(theirs.input)) {
      if (!mapped(theirs.input, sizes.input, &peer.input)) return bad(p);
    } else {
      peer.address = theirs.input;
    }
    if (is_mapped(theirs.output) && !mapped(theirs.output, sizes.output, &peer.output)) {
      return bad(p);
    }
    if (theirs.window > 0) {
      const bool fits = theirs.window - 1 < channel.segment_bytes &&
                        channel.window_bytes <= channel.segment_bytes - (theirs.window - 1);
      if (!fits) return bad(p);
      peer.window = channel.segments[index] + (theirs.window - 1);
    }
    all_pull &= theirs.pulls != 0;
    all_have_windows &= peer.window != nullptr;
    if (plan.is_giver(p)) {
      all_are_mapped &= peer.input != nullptr;
      all_can_be_read &= theirs.input != 0;
    }
    if (plan.has_results() && plan.takes_results(p)) takers_are_mapped &= peer.output != nullptr;
    decision.peers.push_back(peer);
  }
  // Alike on every rank: from what all announced, and from nothing else. A word that is no Way is
  // as good as one that cannot be gone.
  const auto word = static_cast<Way>(announced[0].way);
  const bool is_way = announced[0].way < kNumWays && could_go(word, request, n);
  if (is_way && (word != Way::kPull || (all_pull && all_can_be_read))) decision.way = word;
  decision.is_as_announced = decision.way == word;
  const bool is_mapped_all = all_are_mapped && all_can_be_read;
  decision.is_mapped = is_mapped_all;
  // Mapped tensors that are only read leave nothing to choose.
  decision.is_a_choice = !is_mapped_all || (plan.has_results() && takers_are_mapped);
  plan.is_direct = is_mapped_all || decision.way == Way::kPull;
  plan.swaps = !plan.is_direct && decision.way == Way::kSwap;
  plan.pushes = plan.is_direct && plan.has_results() && takers_are_mapped;
  const bool needs_windows = !plan.is_direct || (plan.has_results() && !plan.pushes);
  if (needs_windows && !all_have_windows) return decision;
  plan.caches_windows =
      decision.way == Way::kCachedWindow || (decision.way == Way::kSwap && shape.is_crowded);
  plan.is_streamed = streams(shape, request, sizes);
  cut_into_rounds(plan, request.splits ? longest_split : plan.longest(), element_bytes,
                  channel.window_bytes);
  decision.plan = plan;
  return decision;
}

}  // namespace pycomm::collectives

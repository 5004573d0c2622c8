// What lies in a process's segment. Only the owner writes it; peers map it read-only and trust
// nothing in it: every value is read once and checked before use.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/spin.h"
#include "transport/frame.h"

namespace pycomm::transport::shm {

inline constexpr std::uint64_t kSegmentMagic = 0x31676573'6d6f6379ull;
inline constexpr std::uint64_t kSegmentBytes = std::uint64_t{1} << 30;  // address space, not pages

// How the owner sleeps, at the start of the segment.
struct alignas(base::kCacheLineBytes) SegmentHeader {
  std::uint64_t magic;
  // One cache line that publishers look at after they wrote something for the owner.
  alignas(base::kCacheLineBytes) std::atomic<std::uint32_t> bell_armed;  // BellArmed
  std::atomic<std::uint32_t> flat_sleepers;  // threads in a futex wait on a peer's flat slot
};

// When to ring the owner's doorbell.
enum BellArmed : std::uint32_t { kBellOff = 0, kBellMessages = 1, kBellAll = 2 };

inline constexpr std::uint64_t kNumFrames = 256;
inline constexpr std::uint64_t kNumBlocks = 32;
inline constexpr std::uint64_t kBlockBytes = 64 * 1024;
inline constexpr std::uint32_t kNumAnnouncements = 256;
inline constexpr std::uint32_t kNumRegions = 128;

// A region that the owner exposes to this peer; `region` is stored last, 0 is "none".
struct RegionEntry {
  std::atomic<std::uint64_t> region_plus_one;
  std::uint64_t in_arena;
  std::uint64_t offset;
  std::uint64_t bytes;
};

// One direction of a link: frames and payload blocks from the owner to one peer, and how far the
// owner has consumed the peer's outbox. Frames are consumed in order, so blocks are too.
struct Outbox {
  alignas(base::kCacheLineBytes) std::atomic<std::uint64_t> head;  // frames published
  alignas(base::kCacheLineBytes) std::atomic<std::uint64_t> tail;  // of the peer's frames
  std::atomic<std::uint64_t> block_tail;                           // of the peer's blocks
  // Odd while the announcement stands; a pull counts only if it did not change meanwhile.
  alignas(base::kCacheLineBytes) std::atomic<std::uint64_t> announcements[kNumAnnouncements];
  alignas(base::kCacheLineBytes) RegionEntry regions[kNumRegions];
  alignas(base::kCacheLineBytes) FrameHeader frames[kNumFrames];
  alignas(4096) std::byte blocks[kNumBlocks][kBlockBytes];
};

}  // namespace pycomm::transport::shm

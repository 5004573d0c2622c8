// Which way an operation among ranks of one host goes is found out by doing it: the first rank
// times what it does, tells the others its choice with every announcement, and tries the other ways
// now and then, since neighbours on the machine, or the hypervisor, change what is best.
//
// A way never changes a result: folds are in the order of the ranks on all of them.
// Thread: the owner of the group.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "base/clock.h"
#include "pycomm/operation.h"

namespace pycomm::collectives {

// How what a rank gives reaches the others.
enum class Way : std::uint8_t {
  kStreamedWindow,  // copied past the cache into a window: where caches are far apart
  kCachedWindow,    // copied into a window: where ranks share a cache
  kPull,            // read where it lies, by the kernel
  kSwap,            // everything to everyone, and everyone folds all: where turns count, not bytes
};
inline constexpr int kNumWays = 4;

class Tuner {
 public:
  // The way of the next operation, of those that are `possible`.
  using Ways = std::array<bool, kNumWays>;
  // Tensors that all can map are another matter than private ones.
  struct What {
    OpKind kind;
    std::uint64_t bytes;
    bool is_mapped = false;
  };
  Way choose(const What& what, const Ways& possible);
  // What it took, from when all had arrived.
  void record(const What& what, Way way, base::TimeNs spent);

  // That it cannot be gone, whatever this rank thought.
  void refuse(const What& what, Way way);

  // One line a kind and size: what was learnt, for a file; and back. A text that is not of
  // to_text() is not taken, or only the lines before it are.
  std::string to_text() const;
  void from_text(const std::string& text);

  // What is taken before anything is known.
  static Way first_guess(OpKind kind, std::uint64_t bytes, bool is_crowded);

 private:
  struct Arm {
    double ns = 0;  // smoothed
    std::uint32_t count = 0;
  };
  struct Cell {
    std::array<Arm, kNumWays> arms;
    bool is_loaded = false;  // and is written again
    std::uint32_t since_trial = 0;
    std::uint32_t strikes = 0;  // surprises in a row
  };
  static constexpr int kClasses = 40;  // of sizes, by powers of two

  Cell& cell(const What& what);

  std::array<std::array<Cell, kClasses>, 2 * kNumCollectives> cells_{};  // private, then mapped
};

}  // namespace pycomm::collectives

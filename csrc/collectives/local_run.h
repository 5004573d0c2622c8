// Runs a LocalPlan in one rank: rounds of copies, folds and copies, paced by one counter a rank.
//
// Positions. Every rank counts how far it is, alike: in iteration i it gives round i (3 i + 1),
// folds round i - fold_lag (3 i + 2) and takes round i - take_lag (3 i + 3), whether or not it has
// anything to do there. So a rank knows from its peers' counters alone which of their chunks are
// ready, and which of its own have been read. The lags let a rank work on what its peers finished
// one iteration ago. Counters go on from operation to operation.
// Windows have kWindowRounds rounds, each with a cell for every rank: cell p of rank g's window is
// what g gives to p; cell g is what g gives to everyone. Where tensors are read directly, a round
// has one cell, for results.
// Trust: counters and windows of others are read-only here and every value only says when to read;
// what a peer announces as its tensor is checked before it becomes an address (local_agreement.cc).
// Thread: the owner of the group. Sans-IO: memory, atomics, and Puller.
#pragma once

#include <atomic>
#include <functional>
#include <vector>

#include "collectives/local_mark.h"
#include "collectives/local_plan.h"
#include "collectives/scratch_pool.h"
#include "collectives/tuner.h"
#include "kernels/reduce.h"
#include "pycomm/status.h"

namespace pycomm::collectives {

inline constexpr std::uint64_t kWindowRounds = 3;

// Reads memory that another rank has announced and not mapped.
class Puller {
 public:
  virtual ~Puller() = default;
  // Errors: kPeerLost, kSystem.
  virtual Status pull(Rank peer, std::uint64_t address, std::byte* out, std::uint64_t bytes) = 0;
};

// Bytes of finished operations, of one pair. Thread: any reads.
struct LocalCounters {
  std::atomic<std::uint64_t> sent{0};
  std::atomic<std::uint64_t> received{0};
  std::atomic<std::uint64_t> staged{0};  // through this rank's windows or the peer's
  std::atomic<std::uint64_t> direct{0};
};

// What the ranks of a group share for this, for as long as the group lives.
struct LocalChannel {
  std::vector<const LocalMark*> marks;  // by rank
  LocalMark* mine = nullptr;
  std::uint64_t base = 0;                  // of the next operation, alike on every rank
  std::vector<const std::byte*> segments;  // what each rank alone writes, as mapped here
  std::uint64_t segment_bytes = 0;
  std::vector<std::byte*> arenas;  // tensors that all ranks may write, as mapped here
  std::uint64_t arena_bytes = 0;
  std::byte* window = nullptr;  // in my segment; null until first used
  std::uint64_t window_bytes = 0;
  std::function<std::byte*(std::uint64_t)> allocate_window;  // null if memory is short
  Puller* puller = nullptr;                                  // null if this rank may not
  std::unique_ptr<LocalCounters[]> counters;                 // by rank
  std::unique_ptr<Tuner> tuner;                              // rank 0's, unless it is off
  const base::Clock* clock = nullptr;                        // the tuner's
};

// Where a rank's tensors and window are, as seen from here.
struct LocalPeer {
  const std::byte* window = nullptr;
  std::byte* input = nullptr;   // mapped
  std::byte* output = nullptr;  // mapped
  std::uint64_t address = 0;    // of an input that is not
};

class LocalRun {
 public:
  LocalRun(LocalChannel& channel, const OpRequest& request, const LocalPlan& plan,
           std::vector<LocalPeer> peers, ScratchPool& scratch);
  ~LocalRun();
  LocalRun(const LocalRun&) = delete;
  LocalRun& operator=(const LocalRun&) = delete;

  // Does the next phase, a chunk or so of work, if peers are far enough; false if they are not.
  bool advance();
  bool is_done() const { return stage_ == Stage::kDone; }
  const Status& failure() const { return failure_; }
  // Whether the last advance() that moved said something that peers may wait for.
  bool take_published() { return std::exchange(published_, false); }
  // Who it waits for.
  Rank waits_for() const { return waits_for_; }
  // Whether peers may still write this rank's output.
  bool is_exposed() const { return plan_.pushes; }
  // Where that one's position is, and what it was when looked at.
  const std::atomic<std::uint64_t>* word_of(Rank peer) const {
    return &channel_.marks[static_cast<std::size_t>(peer)]->position;
  }
  std::uint64_t seen_position() const { return seen_position_; }

 private:
  enum class Stage { kGive, kFold, kTake, kClose, kDone };

  bool has_reached(Rank peer, std::uint64_t position);
  bool all_reached(std::uint64_t position, bool (LocalRun::*concerns)(Rank) const);
  bool may_give(std::uint64_t c);
  bool may_fold(std::uint64_t c);
  bool may_take(std::uint64_t c);
  void give(std::uint64_t c);
  void fold(std::uint64_t c);
  void take(std::uint64_t c);
  void take_from(Rank peer, std::uint64_t c);
  void publish(std::uint64_t position);
  bool close();
  void count();
  kernels::Stores stores() const {
    return plan_.is_streamed ? kernels::Stores::kStreamed : kernels::Stores::kCached;
  }
  // A store to a line that another processor's cache holds waits for that cache: past it is faster,
  // but among ranks of one processor.
  kernels::Stores window_stores() const {
    return plan_.caches_windows ? kernels::Stores::kCached : kernels::Stores::kStreamed;
  }
  bool reads_me(Rank peer) const;
  bool touches_me(Rank peer) const;
  bool takes_my_result(Rank peer) const;
  bool i_read(Rank peer) const;
  bool i_take_result_of(Rank peer) const;
  std::uint64_t bytes_of(std::uint64_t elements) const { return elements * element_bytes_; }
  std::uint64_t cell_offset(std::uint64_t c, Rank cell) const;
  // What `peer` gives in round c; null after a failure. Pulled to `scratch` where it must be.
  const std::byte* source(Rank peer, const Span& span, std::uint64_t c, std::byte* scratch);

  LocalChannel& channel_;
  const OpRequest& request_;
  const LocalPlan plan_;
  const std::vector<LocalPeer> peers_;
  ScratchPool& pool_;
  ScratchPool::Buffer scratch_;
  std::uint64_t scratch_bytes_ = 0;
  const std::uint64_t element_bytes_;
  const int n_;
  const std::uint64_t fold_lag_;
  const std::uint64_t take_lag_;
  const std::uint64_t iterations_;
  std::uint64_t iteration_ = 0;
  Stage stage_ = Stage::kGive;
  Rank waits_for_ = kNoRank;
  std::uint64_t seen_position_ = 0;
  bool published_ = false;
  Status failure_;
};

// Chunk and rounds, from the plan's shape and where data goes through.
void cut_into_rounds(LocalPlan& plan, std::uint64_t longest, std::uint64_t element_bytes,
                     std::uint64_t window_bytes);

}  // namespace pycomm::collectives

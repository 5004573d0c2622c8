// One operation on its way: it announces itself, runs a fused step or a schedule over links, and
// ends with a status. advance() never blocks, so that an engine, a waiting caller or the simulator
// can drive it.
//
// Thread: whoever owns the group (see Group in communicator/), which also holds the links' lock.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "base/clock.h"
#include "collectives/flat_exchange.h"
#include "collectives/local_run.h"
#include "collectives/scratch_pool.h"
#include "collectives/select.h"
#include "collectives/validate.h"
#include "pycomm/operation.h"
#include "pycomm/transport.h"

namespace pycomm::collectives {

// kTimeout, naming the ranks that were waited for.
Status timed_out(const std::vector<Rank>& late, std::int64_t timeout_ms);

// Called after a slot was published: wakes peers that sleep. The communicator's; the simulator
// needs none.
class Waker {
 public:
  virtual ~Waker() = default;
  virtual void wake_peers() = 0;
};

// All that an operation needs of its group.
struct GroupContext {
  std::string name;
  std::uint64_t group = 0;
  std::uint32_t epoch = 0;
  Rank rank = 0;
  int world_size = 1;
  GroupShape shape;
  std::uint64_t chunk_bytes = 256 * 1024;
  std::vector<Link*> links;            // by rank; null at my own
  std::unique_ptr<FlatExchange> flat;  // null unless shape.shares_memory
  LocalChannel local;                  // likewise
  Waker* waker = nullptr;
  ScratchPool scratch;
  std::vector<std::shared_ptr<void>> quarantine;  // memory that peers may still write
  // By rank, set by the engine: it has left the group, and everything that it sent has arrived.
  std::unique_ptr<std::atomic<bool>[]> departed;

  bool has_departed(Rank peer) const {
    return departed && departed[static_cast<std::size_t>(peer)].load(std::memory_order_acquire);
  }
};

// A word of another rank, and what it was; null if there is nothing to wait for.
struct WaitingWord {
  const std::atomic<std::uint64_t>* word = nullptr;
  std::uint64_t seen = 0;

  bool has_changed() const {
    return word == nullptr || word->load(std::memory_order_acquire) != seen;
  }
};

class ScheduleRun;

class Execution {
 public:
  // The request's timeout counts from `now`.
  Execution(GroupContext& group, const OpRequest& request, base::TimeNs now);
  ~Execution();

  // Whether the caller of advance() holds the links' lock too.
  enum class With { kMemoryOnly, kLinks };
  // Moves what can move; true if anything did. After is_finished() it does nothing.
  bool advance(base::TimeNs now, With with = With::kLinks);
  // It goes on over messages.
  bool needs_links() const { return stage_ == Stage::kPlanned || stage_ == Stage::kMessages; }
  // What changes before advance() can move anything, unless links are needed.
  WaitingWord waiting_word() const;
  bool is_finished() const { return stage_ == Stage::kFinished; }
  const Status& status() const { return status_; }
  const OpRequest& request() const { return request_; }
  base::TimeNs deadline() const { return deadline_; }
  // The peers that it waits for right now.
  std::vector<Rank> waits_for() const;

  // Ends it with `status`; no link touches its memory afterwards.
  void abort(const Status& status);

 private:
  enum class Stage { kStart, kFlat, kAnnounced, kLocal, kPlanned, kMessages, kFinished };

  bool start();
  bool await_flat();
  Status after_announcement();
  bool advance_local();
  void announce();
  Tuner::What what(bool is_mapped) const;
  void note_time();
  std::uint64_t announcement_bytes() const;
  std::uint64_t announced_split(Rank from, Rank to, bool is_sent) const;
  std::uint64_t longest_split() const;
  void read_splits();
  Status compare_splits() const;
  void place_own_part();
  bool can_place_later() const;
  void start_messages();
  void finish(Status status);
  // A rank that has not arrived, or kNoRank; fails the operation if that one cannot any more.
  Rank missing_peer();
  bool is_lost(Rank peer);

  GroupContext& group_;
  OpRequest request_;
  const Signature signature_;
  const base::TimeNs deadline_;
  Stage stage_ = Stage::kStart;
  Status status_;
  std::unique_ptr<ScheduleRun> run_;
  std::optional<LocalRun> local_;
  WaitingWord waiting_;                          // for announcements
  std::vector<std::uint64_t> announced_splits_;  // of each rank what it sends, then what it expects
  std::optional<Way> way_;                       // that is timed
  bool is_mapped_ = false;
  base::TimeNs local_since_ = 0;
};

}  // namespace pycomm::collectives

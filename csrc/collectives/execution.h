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
#include "collectives/scratch_pool.h"
#include "collectives/select.h"
#include "pycomm/operation.h"
#include "pycomm/transport.h"

namespace pycomm::collectives {

// Errors: kInvalidUsage with what is wrong; checked before anything is sent.
Status validate(const OpRequest& request, Rank rank, int world_size);

// kTimeout, naming the ranks that were waited for.
Status timed_out(const std::vector<Rank>& late, std::int64_t timeout_ms);

// Tensors that every rank of the group can read and write in place.
struct SharedTensors {
  std::vector<std::byte*> bases;  // of each rank's arena as mapped here
  std::uint64_t bytes = 0;        // of each arena
};

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
  SharedTensors shared;
  Waker* waker = nullptr;
  ScratchPool scratch;
  std::vector<std::shared_ptr<void>> quarantine;  // memory that peers may still write
  // By rank, set by the engine: it has left the group, and everything that it sent has arrived.
  std::unique_ptr<std::atomic<bool>[]> departed;

  bool has_departed(Rank peer) const {
    return departed && departed[static_cast<std::size_t>(peer)].load(std::memory_order_acquire);
  }
};

class ScheduleRun;

class Execution {
 public:
  // The request's timeout counts from `now`.
  Execution(GroupContext& group, const OpRequest& request, base::TimeNs now);
  ~Execution();

  // Moves what can move; true if anything did. After is_finished() it does nothing.
  bool advance(base::TimeNs now);
  bool is_finished() const { return stage_ == Stage::kFinished; }
  const Status& status() const { return status_; }
  const OpRequest& request() const { return request_; }
  base::TimeNs deadline() const { return deadline_; }
  // The peers that it waits for right now.
  std::vector<Rank> waits_for() const;

  // Ends it with `status`; no link touches its memory afterwards.
  void abort(const Status& status);

 private:
  enum class Stage { kStart, kFlat, kAnnounced, kShared, kClosing, kMessages, kFinished };

  bool start();
  bool await_flat();
  bool after_announcement();
  bool reduce_shared();
  void announce();
  Status compare_splits() const;
  void place_own_part();
  bool can_place_later() const;
  void start_messages();
  void finish(Status status);
  // A rank that has not arrived, or kNoRank; fails the operation if that one cannot any more.
  Rank missing_peer();

  GroupContext& group_;
  OpRequest request_;
  const Signature signature_;
  const base::TimeNs deadline_;
  Stage stage_ = Stage::kStart;
  Status status_;
  std::unique_ptr<ScheduleRun> run_;
  std::vector<std::byte*> shared_outputs_;
  std::uint64_t shared_done_ = 0;  // elements of my part
};

}  // namespace pycomm::collectives

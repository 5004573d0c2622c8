// ShardBarrier over the links of a group. Whoever can map a peer's counters reads them there;
// everyone else has counters added to its own memory.
#pragma once

#include <atomic>
#include <list>
#include <memory>
#include <vector>

#include "communicator/engine.h"
#include "pycomm/shard_barrier.h"

namespace pycomm::communicator {

class ShardBarrierImpl final : public ShardBarrier, private Tended {
 public:
  ShardBarrierImpl(std::shared_ptr<Engine> engine, std::shared_ptr<Group> group, int num_shards)
      : engine_(std::move(engine)), group_(std::move(group)), num_shards_(num_shards) {}
  ~ShardBarrierImpl() override;

  // Exposes this rank's counters. The ranks meet between this and attach(). Errors: kSystem.
  Status open(std::uint64_t index);
  // Finds the peers'. Errors: kTimeout, kPeerLost.
  Status attach();

  int num_shards() const override { return num_shards_; }
  Status arrive(int shard) override;
  bool is_complete(int shard) override;
  Status wait(int shard, std::int64_t timeout_ms) override;

 private:
  // A line of cache each, so that shards do not disturb one another.
  struct alignas(64) Counter {
    std::atomic<std::uint64_t> value{0};
  };
  // What a peer's counter of this rank has been told, with the engine's lock.
  struct Told {
    std::uint64_t wanted = 0;  // arrivals of this rank
    std::uint64_t added = 0;   // of them told, if nothing is in doubt
    int num_under_way = 0;
    bool is_doubtful = false;  // an addition's fate is unknown
  };
  struct Peer {
    Rank rank = kNoRank;
    std::shared_ptr<transport::CoreLink> link;
    const Counter* theirs = nullptr;      // mapped: the peer's own arrivals
    std::unique_ptr<Counter[]> arrivals;  // else: what it adds here
    std::vector<Told> told;               // by shard
  };
  // An addition to a peer's counter (or its new value, where a NIC has no atomics), or the look at
  // one of unknown fate.
  struct Word {
    Transfer transfer;
    std::uint64_t value = 0;
    Peer* peer = nullptr;
    int shard = 0;
    bool is_look = false;
  };

  std::uint64_t count_of(const Peer& peer, int shard) const {
    const Counter* counters = peer.theirs != nullptr ? peer.theirs : peer.arrivals.get();
    return counters[shard].value.load(std::memory_order_acquire);
  }
  Status check(int shard) const;
  // With the engine's lock.
  void tell(Peer& peer, int shard);
  Word& begin_word(Peer& peer, int shard);
  // By the engine, whoever moves it: a peer may wait for an addition that this rank's caller has
  // long left behind.
  void tend() override;
  Status late(int shard, std::int64_t timeout_ms) const;

  const std::shared_ptr<Engine> engine_;
  const std::shared_ptr<Group> group_;
  const int num_shards_;
  const std::uint64_t generation_ = fork_generation();
  std::uint64_t region_ = 0;
  Counter* mine_ = nullptr;  // arrivals of this rank, where peers can map them
  std::unique_ptr<Counter[]> own_memory_;
  std::vector<Peer> peers_;
  bool all_are_mapped_ = true;
  std::list<Word> words_;  // under way
  std::uint64_t next_word_ = 0;
};

}  // namespace pycomm::communicator

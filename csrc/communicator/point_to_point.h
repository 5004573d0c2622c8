// Sends and receives of a group, beside the queue of its collectives: any number at once, matched
// by (pair of ranks, tag) in the order of the calls. A receive from any source takes the first
// message with its tag that some rank has offered.
//
// Names. Both sides count the messages of a pair and tag; the k-th travels as operation
// kPointToPointOp + k, step tag. Collectives count operations from 0, so names never meet. A count
// is kept for every (peer, tag) ever used: use few tags, not a fresh one a step.
//
// Thread: whoever holds the engine's mutex.
#pragma once

#include <deque>
#include <list>
#include <map>
#include <memory>

#include "collectives/execution.h"

namespace pycomm::communicator {

class QueuedOperation;

inline constexpr std::uint64_t kPointToPointOp = std::uint64_t{1} << 62;

class PointToPoint {
 public:
  explicit PointToPoint(collectives::GroupContext& context) : context_(context) {}

  // The request's timeout counts from `now`.
  void start(std::shared_ptr<QueuedOperation> operation, base::TimeNs now);
  // What ended on its way: the operation, its status, and who sent.
  struct Ended {
    std::shared_ptr<QueuedOperation> operation;
    Status status;
    Rank source = kNoRank;
  };
  // Moves what can move and hands out what is over.
  bool advance(base::TimeNs now, std::vector<Ended>* ended);
  // Withdraws everything.
  std::vector<std::shared_ptr<QueuedOperation>> cancel();

  int num_pending() const { return static_cast<int>(pending_.size()); }
  base::TimeNs next_deadline() const;

 private:
  struct Pending {
    std::shared_ptr<QueuedOperation> operation;
    base::TimeNs deadline = 0;
    Rank peer = kNoRank;  // kAnySource until matched
    Transfer transfer;
  };
  using Channel = std::pair<Rank, std::uint32_t>;  // peer, tag

  Link& link(Rank peer) const { return *context_.links[static_cast<std::size_t>(peer)]; }
  TransferId name_of(std::uint32_t tag, std::uint64_t number) const;
  // Offers the transfer to its link, once it is known which; false while it is not.
  bool offer(Pending& pending);
  Rank find_offer(std::uint32_t tag);
  std::vector<Rank> possible_peers(Rank peer) const;
  bool has_nobody_left() const;
  Status explain(const Pending& pending) const;

  collectives::GroupContext& context_;
  std::list<Pending> pending_;  // in the order of the calls; transfers do not move
  std::map<Channel, std::uint64_t> sent_;
  std::map<Channel, std::uint64_t> received_;
};

}  // namespace pycomm::communicator

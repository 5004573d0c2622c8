#include "communicator/point_to_point.h"

#include <algorithm>
#include <set>

#include "communicator/group.h"

namespace pycomm::communicator {

TransferId PointToPoint::name_of(std::uint32_t tag, std::uint64_t number) const {
  return {context_.group, kPointToPointOp + number, context_.epoch, tag, 0};
}

void PointToPoint::start(std::shared_ptr<QueuedOperation> operation, base::TimeNs now) {
  Pending& pending = pending_.emplace_back();
  pending.operation = std::move(operation);
  const OpRequest& request = pending.operation->request();
  pending.deadline = base::deadline_after(now, request.timeout_ms);
  pending.peer = request.root;
  pending.transfer.signature = request.signature();
  pending.transfer.bytes = request.bytes();
  pending.transfer.is_announced = true;
  // A transfer's bytes are never written by a send.
  pending.transfer.data =
      request.kind == OpKind::kSend ? const_cast<std::byte*>(request.input) : request.output;
  if (request.kind == OpKind::kSend) {
    pending.transfer.id = name_of(request.tag, sent_[{pending.peer, request.tag}]++);
    link(pending.peer).send(pending.transfer);
  }
}

Rank PointToPoint::find_offer(std::uint32_t tag) {
  for (Rank p = 0; p < context_.world_size; ++p) {
    if (p == context_.rank) continue;
    const auto next = received_.find({p, tag});
    const std::uint64_t number = next == received_.end() ? 0 : next->second;
    if (link(p).is_offered(name_of(tag, number))) return p;
  }
  return kNoRank;
}

bool PointToPoint::offer(Pending& pending) {
  const std::uint32_t tag = pending.operation->request().tag;
  if (pending.peer == kAnySource) {
    const Rank found = find_offer(tag);
    if (found == kNoRank) return false;
    pending.peer = found;
  }
  pending.transfer.id = name_of(tag, received_[{pending.peer, tag}]++);
  link(pending.peer).post(pending.transfer);
  return true;
}

bool PointToPoint::advance(base::TimeNs now, std::vector<Ended>* ended) {
  bool moved = false;
  // Receives match in the order of the calls: one that may take any message of its tag holds up
  // the later ones of that tag.
  std::set<std::uint32_t> held_tags;
  for (auto it = pending_.begin(); it != pending_.end();) {
    Pending& pending = *it;
    const OpRequest& request = pending.operation->request();
    Transfer& transfer = pending.transfer;
    if (transfer.state == TransferState::kIdle && !held_tags.contains(request.tag)) {
      if (offer(pending)) {
        moved = true;
      } else {
        held_tags.insert(request.tag);
      }
    }
    const bool is_known = pending.peer >= 0;
    if (is_known && transfer.state == TransferState::kPending &&
        context_.has_departed(pending.peer)) {
      link(pending.peer).cancel(transfer);
      transfer.state = TransferState::kFailed;
      transfer.status = Status::error(StatusCode::kPeerLost, "it left the group");
    }
    Status status;
    if (!is_known && has_nobody_left()) {
      status = Status::error(StatusCode::kPeerLost, "every other rank has left the group");
    } else if (transfer.state == TransferState::kFailed) {
      status = explain(pending);
    } else if (transfer.state != TransferState::kDone) {
      if (now < pending.deadline) {
        ++it;
        continue;
      }
      if (transfer.state == TransferState::kPending) link(pending.peer).cancel(transfer);
      status = collectives::timed_out(possible_peers(pending.peer), request.timeout_ms);
    }
    ended->push_back({std::move(pending.operation), status, pending.peer});
    it = pending_.erase(it);
    moved = true;
  }
  return moved;
}

bool PointToPoint::has_nobody_left() const {
  for (Rank p = 0; p < context_.world_size; ++p) {
    if (p != context_.rank && !context_.has_departed(p)) return false;
  }
  return true;
}

std::vector<Rank> PointToPoint::possible_peers(Rank peer) const {
  if (peer != kAnySource) return {peer};
  std::vector<Rank> all;
  for (Rank p = 0; p < context_.world_size; ++p) {
    if (p != context_.rank) all.push_back(p);
  }
  return all;
}

Status PointToPoint::explain(const Pending& pending) const {
  const Status& status = pending.transfer.status;
  const std::string who = "rank " + std::to_string(pending.peer);
  if (status.code() == StatusCode::kPeerLost) {
    return Status::error(status.code(), who + " was lost: " + status.message(), pending.peer);
  }
  if (status.code() == StatusCode::kInvalidUsage) {
    return Status::error(status.code(),
                         who + " sends something else with tag " +
                             std::to_string(pending.transfer.id.step) + ": " + status.message(),
                         pending.peer);
  }
  return Status::error(status.code(), "transfer with " + who + ": " + status.message(),
                       pending.peer);
}

std::vector<std::shared_ptr<QueuedOperation>> PointToPoint::cancel() {
  std::vector<std::shared_ptr<QueuedOperation>> operations;
  for (Pending& pending : pending_) {
    if (pending.transfer.state == TransferState::kPending) {
      link(pending.peer).cancel(pending.transfer);
    }
    operations.push_back(std::move(pending.operation));
  }
  pending_.clear();
  return operations;
}

base::TimeNs PointToPoint::next_deadline() const {
  base::TimeNs next = base::kNever;
  for (const Pending& pending : pending_) next = std::min(next, pending.deadline);
  return next;
}

}  // namespace pycomm::communicator

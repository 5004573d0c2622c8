#include "transport/message_core.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "base/check.h"

namespace pycomm::transport {
namespace {

// In Transfer::slot; above a token, and above a key of an announcement, which is one more than 32
// bits hold.
constexpr std::uint64_t kGranted = std::uint64_t{1} << 40;

}  // namespace

std::string describe_mismatch(const Transfer& mine, Signature theirs, std::uint64_t their_bytes) {
  std::string text = "operation " + std::to_string(mine.id.op) + ": here " +
                     describe_signature(mine.signature) + ", there " + describe_signature(theirs);
  if (mine.signature == theirs) {
    text += " (messages of " + std::to_string(mine.bytes) + " and " + std::to_string(their_bytes) +
            " bytes)";
  }
  return text;
}

MessageCore::MessageCore(const CoreOptions& options, PullPort* pull_port, GrantPort* grant_port)
    : options_(options),
      pull_port_(pull_port),
      grant_port_(grant_port),
      window_(options.eager_window_bytes) {
  PYCOMM_CHECK(pull_port != nullptr || (!options.pulls && !options.peer_pulls));
  PYCOMM_CHECK(options.eager_window_bytes >= 2 * (options.eager_bytes_max + kOverheadBytes));
}

// ---------------------------------------------------------------- transfers

void MessageCore::finish(Transfer& transfer, Status status) {
  if ((transfer.slot & kGranted) != 0) {
    grant_port_->end_grant(static_cast<std::uint32_t>(transfer.slot), status.is_ok());
    transfer.slot = 0;
  }
  transfer.state = status.is_ok() ? TransferState::kDone : TransferState::kFailed;
  transfer.status = std::move(status);
}

bool MessageCore::is_retired(const TransferId& id) const {
  const auto it = retired_below_.find(id.group);
  return it != retired_below_.end() && id.op < it->second;
}

void MessageCore::post(Transfer& transfer) {
  transfer.state = TransferState::kPending;
  transfer.bytes_done = 0;
  transfer.slot = 0;
  if (!failure_.is_ok()) return finish(transfer, failure_);
  const auto it = unexpected_.find(transfer.id);
  if (it != unexpected_.end()) {
    Unexpected& waiting = it->second;
    if (static_cast<FrameKind>(waiting.header.kind) == FrameKind::kRequest) {
      const FrameHeader header = waiting.header;
      unexpected_.erase(it);
      posts_.emplace(transfer.id, &transfer);
      return accept_request(transfer, header);
    }
    if (!waiting.complete) {
      waiting.claimed = &transfer;
      return;
    }
    if (matches(transfer, waiting.header)) {
      if (transfer.bytes > 0) std::memcpy(transfer.data, waiting.bytes.data(), transfer.bytes);
      counters_.bytes_staged += transfer.bytes;
      finish(transfer, Status());
    }
    give_window_back(waiting.bytes.size());
    unexpected_.erase(it);
    return;
  }
  if (departed_) {
    return finish(transfer, Status::error(StatusCode::kPeerLost, "the peer has left the group"));
  }
  const bool fresh = posts_.emplace(transfer.id, &transfer).second;
  PYCOMM_CHECK(fresh);
  if (transfer.bytes > options_.eager_bytes_max && !options_.pulls && !transfer.is_announced) {
    emit_clear(transfer);
  }
}

void MessageCore::send(Transfer& transfer) {
  transfer.state = TransferState::kPending;
  transfer.bytes_done = 0;
  transfer.slot = 0;
  // A peer that left needs nothing more; bytes for it are as good as delivered.
  if (departed_) return finish(transfer, Status());
  if (!failure_.is_ok()) return finish(transfer, failure_);
  const std::uint64_t cost = transfer.bytes + kOverheadBytes;
  if (transfer.bytes <= options_.eager_bytes_max && window_ >= cost) {
    window_ -= cost;
    emit_payload(FrameKind::kEager, transfer, 0, transfer.bytes);
    return;
  }
  const auto early = early_clears_.find(transfer.id);
  if (early != early_clears_.end()) {
    const EarlyClear clear = early->second;
    early_clears_.erase(early);
    return start_data(transfer, clear.header, clear.grant);
  }
  const bool fresh = sends_.emplace(transfer.id, &transfer).second;
  PYCOMM_CHECK(fresh);
  const bool is_small = transfer.bytes <= options_.eager_bytes_max;
  if (!is_small && !options_.peer_pulls && !transfer.is_announced) return;  // the post clears it
  std::uint32_t slot = 0;
  FrameHeader header;
  header.kind = static_cast<std::uint8_t>(FrameKind::kRequest);
  header.set_id(transfer.id);
  header.signature = transfer.signature;
  header.message_bytes = transfer.bytes;
  if (!is_small && options_.peer_pulls &&
      pull_port_->announce(transfer.data, transfer.bytes, &slot)) {
    header.argument = reinterpret_cast<std::uint64_t>(transfer.data);
    header.key = slot;
    transfer.slot = std::uint64_t{slot} + 1;  // zero: not announced
  } else {
    transfer.slot = 0;
  }
  outgoing_.push_back({header, nullptr, nullptr, {}, false});
}

void MessageCore::cancel(Transfer& transfer) {
  if (transfer.is_finished() || transfer.state == TransferState::kIdle) return;
  // A post and a send of one exchange have the same name.
  const auto drop = [&](Map& map) {
    const auto it = map.find(transfer.id);
    const bool is_it = it != map.end() && it->second == &transfer;
    if (is_it) map.erase(it);
    return is_it;
  };
  drop(posts_);
  drop(fetches_);
  drop(writes_);
  if (drop(sends_) && transfer.slot > 0) {
    pull_port_->revoke(static_cast<std::uint32_t>(transfer.slot - 1));
  }
  if (const auto it = unexpected_.find(transfer.id);
      it != unexpected_.end() && it->second.claimed == &transfer) {
    it->second.claimed = nullptr;
  }
  if (incoming_.transfer == &transfer) {
    incoming_.transfer = nullptr;
    incoming_.target = nullptr;
  }
  for (std::size_t i = 0; i < outgoing_.size();) {
    OutFrame& frame = outgoing_[i];
    if (frame.transfer != &transfer) {
      ++i;
      continue;
    }
    frame.transfer = nullptr;
    if (frame.started) {  // half of it is on the wire: the rest must follow, from a copy
      frame.owned.assign(frame.payload, frame.payload + frame.header.payload_bytes);
      frame.payload = frame.owned.data();
      ++i;
    } else {
      if (static_cast<FrameKind>(frame.header.kind) == FrameKind::kEager) {
        window_ += frame.header.payload_bytes + kOverheadBytes;
      }
      outgoing_.erase(outgoing_.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
  finish(transfer, Status::error(StatusCode::kAborted, "cancelled"));
}

void MessageCore::retire(std::uint64_t group, std::uint64_t op) {
  std::uint64_t& below = retired_below_[group];
  below = std::max(below, op);
  const bool is_dead = op == UINT64_MAX;
  if (is_dead) {
    dead_groups_.push_back(group);
    if (dead_groups_.size() > kDeadGroupsMax) {
      retired_below_.erase(dead_groups_.front());
      dead_groups_.pop_front();
    }
  }
  for (auto it = unexpected_.begin(); it != unexpected_.end();) {
    Unexpected& waiting = it->second;
    if (it->first.group != group || it->first.op >= op) {
      ++it;
      continue;
    }
    if (!is_dead) note_whereabouts(waiting.header);
    if (incoming_.to_unexpected && incoming_.header.id() == it->first) {
      incoming_.to_unexpected = false;  // its last bytes go nowhere, and give the window back
      incoming_.target = nullptr;
    } else if (static_cast<FrameKind>(waiting.header.kind) == FrameKind::kEager) {
      give_window_back(waiting.bytes.size());
    }
    it = unexpected_.erase(it);
  }
  if (!early_clears_.empty()) {
    std::erase_if(early_clears_, [&](const auto& item) {
      const bool is_over = item.first.group == group && item.first.op < op;
      if (is_over && !is_dead) note_whereabouts(item.second.header);
      return is_over;
    });
  }
}

bool MessageCore::is_offered(const TransferId& id) const {
  const auto it = unexpected_.find(id);
  return it != unexpected_.end() && it->second.claimed == nullptr;
}

// ---------------------------------------------------------------- outgoing

void MessageCore::emit(FrameKind kind, const TransferId& id, std::uint64_t argument,
                       std::uint32_t key) {
  FrameHeader header;
  header.kind = static_cast<std::uint8_t>(kind);
  header.set_id(id);
  header.argument = argument;
  header.key = key;
  outgoing_.push_back({header, nullptr, nullptr, {}, false});
}

void MessageCore::emit_clear(Transfer& transfer) {
  if ((transfer.slot & kGranted) != 0) return;  // cleared already, whatever announces it again
  if (grant_port_ != nullptr && transfer.bytes > options_.eager_bytes_max) {
    const std::uint32_t token = grant_port_->grant(transfer);
    if (token != 0) transfer.slot = kGranted | token;
  }
  emit(FrameKind::kClear, transfer.id, 0, static_cast<std::uint32_t>(transfer.slot));
  outgoing_.back().header.signature = transfer.signature;
  outgoing_.back().header.message_bytes = transfer.bytes;
}

// The receiver has cleared it.
void MessageCore::start_data(Transfer& transfer, const FrameHeader& clear, const Grant& grant) {
  if (grant.token == 0) return emit_data(transfer);
  if (clear.signature == transfer.signature && clear.message_bytes == transfer.bytes) {
    writes_.emplace(transfer.id, &transfer);
    due_writes_.emplace_back(transfer.id, grant);
    return;
  }
  // Nothing may be written there; what this side has tells the receiver.
  emit(FrameKind::kData, transfer.id, 0);
  outgoing_.back().header.signature = transfer.signature;
  outgoing_.back().header.message_bytes = transfer.bytes;
  finish(transfer,
         Status::error(StatusCode::kInvalidUsage,
                       describe_mismatch(transfer, clear.signature, clear.message_bytes)));
}

bool MessageCore::next_write(OutWrite* out) {
  while (!due_writes_.empty()) {
    const auto [id, grant] = due_writes_.front();
    due_writes_.pop_front();
    const auto it = writes_.find(id);
    if (it == writes_.end()) continue;  // cancelled meanwhile
    *out = {it->second, grant};
    return true;
  }
  return false;
}

void MessageCore::forget_grant(std::uint32_t token) {
  for (auto& [id, early] : early_clears_) {
    if (early.grant.token == token) early.grant = Grant{};  // then in frames, which nobody wants
  }
  for (std::size_t i = 0; i < due_writes_.size();) {
    const auto [id, grant] = due_writes_[i];
    if (grant.token != token) {
      ++i;
      continue;
    }
    due_writes_.erase(due_writes_.begin() + static_cast<std::ptrdiff_t>(i));
    if (const auto it = writes_.find(id); it != writes_.end()) finish_write(*it->second, Status());
  }
}

void MessageCore::finish_write(Transfer& transfer, Status status) {
  if (writes_.erase(transfer.id) == 0) return;
  if (status.is_ok()) {
    counters_.bytes_sent += transfer.bytes;
    ++counters_.messages_sent;
  }
  finish(transfer, std::move(status));
}

void MessageCore::emit_payload(FrameKind kind, Transfer& transfer, std::uint64_t offset,
                               std::uint64_t bytes) {
  FrameHeader header;
  header.kind = static_cast<std::uint8_t>(kind);
  header.set_id(transfer.id);
  header.signature = transfer.signature;
  header.message_bytes = transfer.bytes;
  header.payload_bytes = static_cast<std::uint32_t>(bytes);
  header.argument = offset;
  outgoing_.push_back({header, transfer.data + offset, &transfer, {}, false});
}

void MessageCore::emit_data(Transfer& transfer) {
  std::uint64_t offset = 0;
  do {
    const std::uint64_t bytes = std::min(transfer.bytes - offset, options_.fragment_bytes_max);
    emit_payload(FrameKind::kData, transfer, offset, bytes);
    offset += bytes;
  } while (offset < transfer.bytes);
}

void MessageCore::pop() {
  OutFrame& frame = outgoing_.front();
  const std::uint64_t bytes = frame.header.payload_bytes;
  counters_.bytes_sent += bytes;
  if (Transfer* transfer = frame.transfer) {
    transfer->bytes_done += bytes;
    if (transfer->bytes_done == transfer->bytes) {
      ++counters_.messages_sent;
      finish(*transfer, Status());
    }
  }
  outgoing_.pop_front();
}

void MessageCore::give_window_back(std::uint64_t bytes) {
  window_owed_ += bytes + kOverheadBytes;
  if (window_owed_ * 2 < options_.eager_window_bytes || said_goodbye_) return;
  emit(FrameKind::kCredit, TransferId{}, window_owed_);
  window_taken_ -= window_owed_;
  window_owed_ = 0;
}

void MessageCore::queue_goodbye() {
  if (said_goodbye_ || !failure_.is_ok()) return;
  said_goodbye_ = true;
  emit(FrameKind::kGoodbye, TransferId{}, 0);
}

}  // namespace pycomm::transport

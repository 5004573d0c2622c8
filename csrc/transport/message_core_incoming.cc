// MessageCore, the receiving half: every frame is checked before it has an effect.
#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "transport/message_core.h"

namespace pycomm::transport {
namespace {

Status protocol_error(const std::string& what) {
  return Status::error(StatusCode::kInternal, "the peer broke the protocol: " + what);
}

}  // namespace

bool MessageCore::matches(Transfer& transfer, const FrameHeader& header) {
  if (transfer.signature == header.signature && transfer.bytes == header.message_bytes) {
    return true;
  }
  finish(transfer,
         Status::error(StatusCode::kInvalidUsage,
                       describe_mismatch(transfer, header.signature, header.message_bytes)));
  return false;
}

Status MessageCore::begin(const FrameHeader& header, const Grant& grant) {
  incoming_ = Incoming{header, nullptr, nullptr, false};
  if (header.kind == 0 || header.kind > kFrameKindMax) {
    return protocol_error("frame kind " + std::to_string(header.kind));
  }
  if (departed_) return protocol_error("a frame after goodbye");
  const auto kind = static_cast<FrameKind>(header.kind);
  const bool has_payload =
      kind == FrameKind::kEager || kind == FrameKind::kData || kind == FrameKind::kWrite;
  if (!has_payload && header.payload_bytes != 0) return protocol_error("an unwanted payload");
  switch (kind) {
    case FrameKind::kEager: return begin_eager(header);
    case FrameKind::kData: return begin_data(header);
    case FrameKind::kWrite: return begin_write(header);
    case FrameKind::kRequest: return on_request(header);
    case FrameKind::kClear: return on_clear(header, grant);
    case FrameKind::kPulled: on_pulled(header); return Status();
    case FrameKind::kCredit:
      if (header.argument > options_.eager_window_bytes - window_) {
        return protocol_error("more window than there is");
      }
      window_ += header.argument;
      return Status();
    case FrameKind::kGoodbye: on_goodbye(); return Status();
    case FrameKind::kFetchAdd: on_fetch_add(header); return Status();
    case FrameKind::kFetchReply: on_fetch_reply(header); return Status();
    case FrameKind::kGroupFailed: on_group_failed(header); return Status();
    case FrameKind::kWhereabouts: note_whereabouts(header); return Status();
  }
  return Status();
}

Status MessageCore::begin_eager(const FrameHeader& header) {
  if (header.payload_bytes != header.message_bytes ||
      header.payload_bytes > options_.eager_bytes_max) {
    return protocol_error("an eager message of " + std::to_string(header.payload_bytes) + " bytes");
  }
  window_taken_ += header.payload_bytes + kOverheadBytes;
  if (window_taken_ > options_.eager_window_bytes) return protocol_error("more than the window");
  const TransferId id = header.id();
  if (is_retired(id)) note_whereabouts(header);
  if (is_retired(id) || unexpected_.contains(id)) return Status();  // late or double: thrown away
  if (const auto it = posts_.find(id); it != posts_.end()) {
    Transfer& transfer = *it->second;
    posts_.erase(it);
    if (matches(transfer, header)) {
      incoming_.transfer = &transfer;
      incoming_.target = transfer.data;
    }
    return Status();
  }
  if (unexpected_.size() >= kPendingMax) return protocol_error("too many unexpected messages");
  Unexpected& waiting = unexpected_[id];
  waiting.header = header;
  waiting.bytes.resize(header.payload_bytes);
  incoming_.to_unexpected = true;
  incoming_.target = waiting.bytes.data();
  return Status();
}

Status MessageCore::begin_data(const FrameHeader& header) {
  const auto it = posts_.find(header.id());
  if (it == posts_.end()) return Status();  // cancelled or retired here: thrown away
  Transfer& transfer = *it->second;
  if (!matches(transfer, header)) {
    posts_.erase(header.id());
    return Status();
  }
  if (header.argument > transfer.bytes || header.payload_bytes > transfer.bytes - header.argument ||
      header.payload_bytes > transfer.bytes - transfer.bytes_done) {
    return protocol_error("data beyond the end of a message");
  }
  incoming_.transfer = &transfer;
  incoming_.target = transfer.data + header.argument;
  return Status();
}

Status MessageCore::end() {
  const FrameHeader& header = incoming_.header;
  counters_.bytes_received += header.payload_bytes;
  const auto kind = static_cast<FrameKind>(header.kind);
  if (kind == FrameKind::kEager) {
    end_eager();
  } else if (kind == FrameKind::kData && incoming_.transfer != nullptr) {
    Transfer& transfer = *incoming_.transfer;
    transfer.bytes_done += header.payload_bytes;
    if (transfer.bytes_done == transfer.bytes) {
      ++counters_.messages_received;
      posts_.erase(transfer.id);
      finish(transfer, Status());
    }
  }
  incoming_ = Incoming{};
  return Status();
}

void MessageCore::end_eager() {
  const FrameHeader& header = incoming_.header;
  if (incoming_.transfer != nullptr) {
    ++counters_.messages_received;
    finish(*incoming_.transfer, Status());
    give_window_back(header.payload_bytes);
    return;
  }
  if (!incoming_.to_unexpected) {
    give_window_back(header.payload_bytes);
    return;
  }
  ++counters_.messages_received;
  const auto it = unexpected_.find(header.id());
  PYCOMM_CHECK(it != unexpected_.end());
  it->second.complete = true;
  if (Transfer* claimed = it->second.claimed) {
    if (matches(*claimed, header)) {
      if (claimed->bytes > 0) std::memcpy(claimed->data, it->second.bytes.data(), claimed->bytes);
      counters_.bytes_staged += claimed->bytes;
      finish(*claimed, Status());
    }
    give_window_back(it->second.bytes.size());
    unexpected_.erase(it);
  }
}

Status MessageCore::on_request(const FrameHeader& header) {
  const TransferId id = header.id();
  if (is_retired(id)) note_whereabouts(header);
  if (is_retired(id) || unexpected_.contains(id)) return Status();
  if (const auto it = posts_.find(id); it != posts_.end()) {
    accept_request(*it->second, header);
    return Status();
  }
  if (unexpected_.size() >= kPendingMax) return protocol_error("too many announcements");
  unexpected_[id].header = header;
  return Status();
}

// The transfer is in posts_.
void MessageCore::accept_request(Transfer& transfer, const FrameHeader& header) {
  if (!matches(transfer, header)) {
    posts_.erase(transfer.id);
    return;
  }
  const bool may_pull = options_.pulls && header.argument != 0;
  if (!may_pull) return emit_clear(transfer);
  due_.push_back(header);
}

bool MessageCore::pull_next() {
  while (!due_.empty()) {
    const FrameHeader header = due_.front();
    due_.pop_front();
    const auto it = posts_.find(header.id());
    if (it == posts_.end()) continue;  // cancelled meanwhile
    pull(*it->second, header);
    return true;
  }
  return false;
}

void MessageCore::pull(Transfer& transfer, const FrameHeader& header) {
  posts_.erase(transfer.id);
  Status status = pull_port_->pull(header.key, header.argument, transfer.data, transfer.bytes);
  if (status.is_ok()) {
    counters_.bytes_received += transfer.bytes;
    counters_.bytes_direct += transfer.bytes;
    ++counters_.messages_received;
    emit(FrameKind::kPulled, transfer.id, 0, header.key);
  }
  finish(transfer, std::move(status));
}

Status MessageCore::on_clear(const FrameHeader& header, const Grant& grant) {
  const TransferId id = header.id();
  if (is_retired(id)) {
    note_whereabouts(header);
    return Status();
  }
  const auto it = sends_.find(id);
  if (it == sends_.end()) {
    if (early_clears_.size() >= kPendingMax) return protocol_error("too many clearances");
    early_clears_.emplace(id, EarlyClear{header, grant});
    return Status();
  }
  Transfer& transfer = *it->second;
  if (transfer.slot > 0) return protocol_error("a clearance for an announced message");
  sends_.erase(it);
  start_data(transfer, header, grant);
  return Status();
}

void MessageCore::on_pulled(const FrameHeader& header) {
  const auto it = sends_.find(header.id());
  if (it == sends_.end()) return;  // cancelled here meanwhile
  Transfer& transfer = *it->second;
  if (transfer.slot != std::uint64_t{header.key} + 1) return;
  sends_.erase(it);
  pull_port_->revoke(header.key);
  counters_.bytes_sent += transfer.bytes;
  counters_.bytes_direct += transfer.bytes;
  ++counters_.messages_sent;
  finish(transfer, Status());
}

void MessageCore::send_notice(const GroupNotice& notice) {
  if (!failure_.is_ok() || departed_ || said_goodbye_) return;
  TransferId id;
  id.group = notice.group;
  emit(FrameKind::kGroupFailed, id, static_cast<std::uint64_t>(notice.code),
       static_cast<std::uint32_t>(notice.rank + 1));
}

void MessageCore::on_group_failed(const FrameHeader& header) {
  constexpr std::size_t kNoticesMax = 1024;  // the engine takes them at every turn
  const bool is_code = header.argument <= static_cast<std::uint64_t>(StatusCode::kInternal);
  if (!is_code || notices_.size() >= kNoticesMax) return;
  notices_.push_back(
      {header.group, static_cast<StatusCode>(header.argument), static_cast<Rank>(header.key) - 1});
}

void MessageCore::send_whereabouts(const Whereabouts& mine) {
  if (!failure_.is_ok() || departed_ || said_goodbye_) return;
  TransferId id;
  id.group = mine.group;
  id.op = mine.op;
  emit(FrameKind::kWhereabouts, id, 0);
  outgoing_.back().header.signature = mine.signature;
}

void MessageCore::note_whereabouts(const FrameHeader& header) {
  constexpr std::size_t kWhereaboutsMax = 1024;  // the engine takes them at every turn
  if (whereabouts_.size() >= kWhereaboutsMax) return;
  whereabouts_.push_back({header.group, header.op, header.signature});
}

// Everything the peer ever sent has been taken in: what is still open here stays so.
void MessageCore::on_goodbye() {
  departed_ = true;
  const Status left = Status::error(StatusCode::kPeerLost, "the peer has left the group");
  for (Map* map : {&posts_, &writes_, &fetches_}) {
    for (auto& [id, transfer] : *map) finish(*transfer, left);
    map->clear();
  }
  for (auto& [id, transfer] : sends_) {
    if (transfer->slot > 0) pull_port_->revoke(static_cast<std::uint32_t>(transfer->slot - 1));
    finish(*transfer, left);
  }
  sends_.clear();
}

void MessageCore::fail(const Status& status) {
  if (!failure_.is_ok()) return;
  failure_ = status;
  for (Map* map : {&posts_, &sends_, &writes_, &fetches_}) {
    for (auto& [id, transfer] : *map) finish(*transfer, status);
    map->clear();
  }
  for (OutFrame& frame : outgoing_) {
    if (frame.transfer != nullptr && !frame.transfer->is_finished()) {
      finish(*frame.transfer, status);
    }
  }
  outgoing_.clear();
  for (auto& [id, waiting] : unexpected_) {
    if (waiting.claimed != nullptr) finish(*waiting.claimed, status);
  }
  if (incoming_.transfer != nullptr && !incoming_.transfer->is_finished()) {
    finish(*incoming_.transfer, status);
  }
  incoming_ = Incoming{};
  unexpected_.clear();
  early_clears_.clear();
  regions_.clear();
  due_.clear();
  due_writes_.clear();
}

}  // namespace pycomm::transport

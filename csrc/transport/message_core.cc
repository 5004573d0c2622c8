#include "transport/message_core.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "base/check.h"

namespace pycomm::transport {
namespace {

// What one unexpected message costs beside its bytes, so that empty ones are bounded too.
constexpr std::uint64_t kOverheadBytes = 128;
// Announcements and clearances that may wait for their other half: far above any schedule's need.
constexpr std::size_t kPendingMax = 1 << 17;
constexpr std::size_t kDeadGroupsMax = 1024;

Status protocol_error(const std::string& what) {
  return Status::error(StatusCode::kInternal, "the peer broke the protocol: " + what);
}

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

MessageCore::MessageCore(const CoreOptions& options, PullPort* pull_port)
    : options_(options), pull_port_(pull_port), window_(options.eager_window_bytes) {
  PYCOMM_CHECK(pull_port != nullptr || (!options.pulls && !options.peer_pulls));
  PYCOMM_CHECK(options.eager_window_bytes >= 2 * (options.eager_bytes_max + kOverheadBytes));
}

// ---------------------------------------------------------------- transfers

void MessageCore::finish(Transfer& transfer, Status status) {
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
  if (transfer.bytes > options_.eager_bytes_max && !options_.pulls) {
    emit(FrameKind::kClear, transfer.id, 0);
  }
}

void MessageCore::send(Transfer& transfer) {
  transfer.state = TransferState::kPending;
  transfer.bytes_done = 0;
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
    early_clears_.erase(early);
    emit_data(transfer);
    return;
  }
  const bool fresh = sends_.emplace(transfer.id, &transfer).second;
  PYCOMM_CHECK(fresh);
  const bool is_small = transfer.bytes <= options_.eager_bytes_max;
  if (!is_small && !options_.peer_pulls) return;  // the post will clear it
  std::uint32_t slot = 0;
  FrameHeader header;
  header.kind = static_cast<std::uint8_t>(FrameKind::kRequest);
  header.set_id(transfer.id);
  header.signature = transfer.signature;
  header.message_bytes = transfer.bytes;
  if (!is_small && pull_port_->announce(&slot)) {
    header.argument = reinterpret_cast<std::uint64_t>(transfer.data);
    header.key = slot;
    transfer.slot = slot + 1;  // zero: not announced
  } else {
    transfer.slot = 0;
  }
  outgoing_.push_back({header, nullptr, nullptr, {}, false});
}

void MessageCore::cancel(Transfer& transfer) {
  if (transfer.is_finished() || transfer.state == TransferState::kIdle) return;
  posts_.erase(transfer.id);
  fetches_.erase(transfer.id);
  if (sends_.erase(transfer.id) > 0 && transfer.slot > 0) {
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
      return item.first.group == group && item.first.op < op;
    });
  }
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
  window_owed_ = 0;
}

void MessageCore::queue_goodbye() {
  if (said_goodbye_ || !failure_.is_ok()) return;
  said_goodbye_ = true;
  emit(FrameKind::kGoodbye, TransferId{}, 0);
}

// ---------------------------------------------------------------- incoming

bool MessageCore::matches(Transfer& transfer, const FrameHeader& header) {
  if (transfer.signature == header.signature && transfer.bytes == header.message_bytes) {
    return true;
  }
  finish(transfer, Status::error(StatusCode::kInvalidUsage,
                                 describe_mismatch(transfer, header.signature,
                                                   header.message_bytes)));
  return false;
}

Status MessageCore::begin(const FrameHeader& header) {
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
    case FrameKind::kClear: return on_clear(header);
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
  }
  return Status();
}

Status MessageCore::begin_eager(const FrameHeader& header) {
  if (header.payload_bytes != header.message_bytes ||
      header.payload_bytes > options_.eager_bytes_max) {
    return protocol_error("an eager message of " + std::to_string(header.payload_bytes) + " bytes");
  }
  const TransferId id = header.id();
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
  if (!may_pull) return emit(FrameKind::kClear, transfer.id, 0);
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

Status MessageCore::on_clear(const FrameHeader& header) {
  const TransferId id = header.id();
  if (is_retired(id)) return Status();
  const auto it = sends_.find(id);
  if (it == sends_.end()) {
    if (early_clears_.size() >= kPendingMax) return protocol_error("too many clearances");
    early_clears_.emplace(id, true);
    return Status();
  }
  Transfer& transfer = *it->second;
  if (transfer.slot > 0) return protocol_error("a clearance for an announced message");
  sends_.erase(it);
  emit_data(transfer);
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
  const bool is_code = header.argument > 0 &&
                       header.argument <= static_cast<std::uint64_t>(StatusCode::kInternal);
  if (!is_code || notices_.size() >= kNoticesMax) return;
  notices_.push_back({header.group, static_cast<StatusCode>(header.argument),
                      static_cast<Rank>(header.key) - 1});
}

// Everything the peer ever sent has been taken in: what is still open here stays so.
void MessageCore::on_goodbye() {
  departed_ = true;
  const Status left = Status::error(StatusCode::kPeerLost, "the peer has left the group");
  for (Map* map : {&posts_, &fetches_}) {
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
  for (Map* map : {&posts_, &sends_, &fetches_}) {
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
}

// ---------------------------------------------------------------- remote memory

Status MessageCore::expose(std::uint64_t region, std::byte* data, std::uint64_t bytes,
                           RegionKind kind) {
  if (kind == RegionKind::kDevice) {
    return Status::error(StatusCode::kInvalidUsage, "device memory cannot be exposed here");
  }
  if (reinterpret_cast<std::uintptr_t>(data) % alignof(std::uint64_t) != 0) {
    return Status::error(StatusCode::kInvalidUsage, "a region must be aligned to 8 bytes");
  }
  if (!regions_.emplace(region, Region{data, bytes}).second) {
    return Status::error(StatusCode::kInvalidUsage, "the region is exposed already");
  }
  return Status();
}

void MessageCore::withdraw(std::uint64_t region) {
  const auto it = regions_.find(region);
  if (it == regions_.end()) return;
  const bool is_arriving = incoming_.header.kind == static_cast<std::uint8_t>(FrameKind::kWrite) &&
                           incoming_.header.signature == region;
  if (is_arriving) incoming_.target = nullptr;
  regions_.erase(it);
}

MessageCore::Region* MessageCore::region_at(std::uint64_t region, std::uint64_t offset,
                                            std::uint64_t bytes) {
  const auto it = regions_.find(region);
  if (it == regions_.end() || offset > it->second.bytes || bytes > it->second.bytes - offset) {
    return nullptr;
  }
  return &it->second;
}

void MessageCore::read(Transfer& transfer, std::uint64_t, std::uint64_t) {
  finish(transfer, Status::error(StatusCode::kInvalidUsage, "this link cannot read remote memory"));
}

void MessageCore::write(Transfer& transfer, std::uint64_t region, std::uint64_t offset) {
  transfer.state = TransferState::kPending;
  transfer.bytes_done = 0;
  if (!failure_.is_ok()) return finish(transfer, failure_);
  std::uint64_t sent = 0;
  do {
    const std::uint64_t bytes = std::min(transfer.bytes - sent, options_.fragment_bytes_max);
    emit_payload(FrameKind::kWrite, transfer, sent, bytes);
    FrameHeader& header = outgoing_.back().header;
    header.signature = region;
    header.argument = offset + sent;
    sent += bytes;
  } while (sent < transfer.bytes);
}

void MessageCore::fetch_add(Transfer& transfer, std::uint64_t region, std::uint64_t offset,
                            std::uint64_t delta) {
  transfer.state = TransferState::kPending;
  if (!failure_.is_ok()) return finish(transfer, failure_);
  if (departed_) {
    return finish(transfer, Status::error(StatusCode::kPeerLost, "the peer has left the group"));
  }
  const bool fresh = fetches_.emplace(transfer.id, &transfer).second;
  PYCOMM_CHECK(fresh && transfer.bytes == sizeof(std::uint64_t));
  emit(FrameKind::kFetchAdd, transfer.id, offset);
  outgoing_.back().header.signature = region;
  outgoing_.back().header.message_bytes = delta;
}

Status MessageCore::begin_write(const FrameHeader& header) {
  Region* region = region_at(header.signature, header.argument, header.payload_bytes);
  // A region withdrawn meanwhile is no crime of the peer's: its bytes go nowhere.
  if (region != nullptr) incoming_.target = region->data + header.argument;
  return Status();
}

void MessageCore::on_fetch_add(const FrameHeader& header) {
  Region* region = region_at(header.signature, header.argument, sizeof(std::uint64_t));
  if (region == nullptr || header.argument % sizeof(std::uint64_t) != 0) {
    return emit(FrameKind::kFetchReply, header.id(), 0, 1);
  }
  auto* counter = reinterpret_cast<std::uint64_t*>(region->data + header.argument);
  const std::uint64_t old = std::atomic_ref(*counter).fetch_add(header.message_bytes);
  emit(FrameKind::kFetchReply, header.id(), old);
}

void MessageCore::on_fetch_reply(const FrameHeader& header) {
  const auto it = fetches_.find(header.id());
  if (it == fetches_.end()) return;
  Transfer& transfer = *it->second;
  fetches_.erase(it);
  if (header.key != 0) {
    return finish(transfer, Status::error(StatusCode::kInvalidUsage,
                                          "the peer exposes no such region or offset"));
  }
  std::memcpy(transfer.data, &header.argument, sizeof header.argument);
  finish(transfer, Status());
}

}  // namespace pycomm::transport

// MessageCore, remote memory: writes and counters that the receiving side's engine carries out.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "base/check.h"
#include "transport/message_core.h"

namespace pycomm::transport {

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

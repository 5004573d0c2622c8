// RdmaLink, the receiving half: cells, and what the NIC has put where it belongs.
#include <algorithm>
#include <cstring>

#include "transport/rdma/link.h"

namespace pycomm::transport::rdma {
namespace {

using platform::verbs::Completion;

Status protocol_error(const std::string& what) {
  return Status::error(StatusCode::kInternal, "the peer broke the protocol: " + what);
}

}  // namespace

Status RdmaLink::take_message(Rail& rail, const Completion& completion) {
  ++rail.received;
  if (completion.has_immediate) {
    take_written(completion.immediate, completion.bytes);
  } else {
    const std::byte* cell = rail.received_cell(completion);
    CellHeader header;
    if (completion.bytes < sizeof header) return protocol_error("a message without a header");
    std::memcpy(&header, cell, sizeof header);
    if (header.kind == static_cast<std::uint8_t>(CellHeader::Kind::kProbe)) {
      rail.heard_probe = true;
    } else {
      PYCOMM_RETURN_IF_ERROR(take_cell(cell, completion.bytes));
    }
  }
  const Status status = rail.recycle(completion);
  if (!status.is_ok()) rail.break_for(status);
  return Status();
}

Status RdmaLink::take_cell(const std::byte* cell, std::uint32_t bytes) {
  CellHeader header;
  FrameHeader frame;
  if (bytes < kCellOverhead) return protocol_error("a cell that is too short");
  std::memcpy(&header, cell, sizeof header);
  std::memcpy(&frame, cell + sizeof header, sizeof frame);
  switch (static_cast<CellHeader::Kind>(header.kind)) {
    case CellHeader::Kind::kRegion: {
      PeerRegion region;
      region.bytes = frame.message_bytes;
      region.grant.address = header.address;
      std::copy(std::begin(header.keys), std::end(header.keys), region.grant.keys.begin());
      constexpr std::size_t kRegionsMax = 1 << 16;
      const bool is_new = !peer_regions_.contains(frame.signature);
      if (is_new && peer_regions_.size() >= kRegionsMax) return protocol_error("too many regions");
      peer_regions_[frame.signature] = region;
      return Status();
    }
    case CellHeader::Kind::kRegionGone: forget_region(frame.signature); return Status();
    case CellHeader::Kind::kFrame: break;
    default: return protocol_error("cell kind " + std::to_string(header.kind));
  }
  if (frame.payload_bytes != bytes - kCellOverhead)
    return protocol_error("a cell of another length");
  Grant grant;
  if (frame.kind == static_cast<std::uint8_t>(FrameKind::kClear)) {
    grant.token = is_gone(header.token) ? 0 : header.token;
    grant.address = header.address;
    std::copy(std::begin(header.keys), std::end(header.keys), grant.keys.begin());
  }
  if (frame.kind == static_cast<std::uint8_t>(FrameKind::kGoodbye)) {
    goodbye_ = frame;
    return Status();
  }
  PYCOMM_RETURN_IF_ERROR(core_.begin(frame, grant));
  if (std::byte* target = core_.payload_target(); target != nullptr && frame.payload_bytes > 0) {
    std::memcpy(target, cell + kCellOverhead, frame.payload_bytes);
    core_.counters().bytes_staged += frame.payload_bytes;
  }
  return core_.end();
}

// All that the peer ever sent had been acknowledged when it said so; what came over other rails is
// taken in first.
void RdmaLink::take_goodbye() {
  const FrameHeader frame = *std::exchange(goodbye_, std::nullopt);
  for (bool moved = true; moved && failure().is_ok();) {
    moved = false;
    for (std::size_t r = 0; r < rails_.size(); ++r) moved |= poll_rail(r);
  }
  // What it takes no more is nobody's to read or write any longer.
  const bool is_under_way = std::any_of(
      jobs_.begin(), jobs_.end(), [](const auto& job) { return job.second->bytes_under_way > 0; });
  if (is_under_way) revoke();
  end_jobs(Status::error(StatusCode::kPeerLost, "the peer has left the group"));
  Status status = core_.begin(frame);
  if (status.is_ok()) status = core_.end();
  if (!status.is_ok()) fail(status);
}

// The NIC has put a piece of a granted message where it belongs.
void RdmaLink::take_written(std::uint32_t token, std::uint32_t bytes) {
  const auto it = grants_.find(token);
  if (it == grants_.end()) return;  // taken back meanwhile
  const Transfer& transfer = *it->second.transfer;
  FrameHeader header;
  header.kind = static_cast<std::uint8_t>(FrameKind::kData);
  header.set_id(transfer.id);
  header.signature = transfer.signature;
  header.message_bytes = transfer.bytes;
  header.payload_bytes = bytes;
  header.argument = std::min(transfer.bytes_done, transfer.bytes);
  Status status = core_.begin(header);
  if (status.is_ok()) {
    core_.counters().bytes_direct += bytes;
    status = core_.end();
  }
  if (!status.is_ok()) fail(status);
}

}  // namespace pycomm::transport::rdma

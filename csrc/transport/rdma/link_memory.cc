// RdmaLink, memory: what this side grants for one message, and regions that both sides know.
#include <algorithm>
#include <cstring>

#include "platform/system.h"
#include "transport/rdma/link.h"

namespace pycomm::transport::rdma {
namespace {

using platform::verbs::kLocalWrite;
using platform::verbs::kRemoteAtomic;
using platform::verbs::kRemoteRead;
using platform::verbs::kRemoteWrite;

}  // namespace

// ---------------------------------------------------------------- grants

std::uint32_t RdmaLink::grant(Transfer& transfer) {
  Granted granted{&transfer, {}};
  for (std::size_t r = 0; r < rails_.size(); ++r) {
    if (!rails_[r]) continue;
    auto memory = rails_[r]->registrations().acquire(transfer.data, transfer.bytes,
                                                     kLocalWrite | kRemoteWrite);
    if (!memory.is_ok()) return 0;
    granted.registered[r] = std::move(memory).value();
  }
  // Zero means none.
  while (next_token_ == 0 || grants_.contains(next_token_)) ++next_token_;
  grants_.emplace(next_token_, std::move(granted));
  return next_token_++;
}

void RdmaLink::end_grant(std::uint32_t token, bool is_complete) {
  if (!is_complete && failure().is_ok()) {
    revoke();
    // Said before any rail is there again, so that what was cut off is not written after all.
    ControlMessage message;
    message.kind = static_cast<std::uint8_t>(ControlMessage::Kind::kGone);
    message.token = token;
    control_out_.append(reinterpret_cast<const char*>(&message), sizeof message);
  }
  grants_.erase(token);
}

// The peer's word that it takes a grant back; the announcement of it may still be under way.
void RdmaLink::forget_grant(std::uint32_t token) {
  constexpr std::size_t kGoneMax = 4096;
  gone_.push_back(token);
  if (gone_.size() > kGoneMax) gone_.pop_front();
  core_.forget_grant(token);
  std::vector<std::shared_ptr<Job>> unwanted;
  for (const auto& [transfer, job] : jobs_) {
    if (job->kind == Job::Kind::kGranted && job->grant.token == token) unwanted.push_back(job);
  }
  for (const auto& job : unwanted) {
    job->is_unwanted = true;
    end_piece(job, 0);
  }
}

bool RdmaLink::is_gone(std::uint32_t token) const {
  return token != 0 && std::find(gone_.begin(), gone_.end(), token) != gone_.end();
}

// A clearance that goes again, whose grant was taken back meanwhile, grants nothing.
void RdmaLink::scrub_clear(std::vector<std::byte>* cell) const {
  CellHeader header;
  std::memcpy(&header, cell->data(), sizeof header);
  if (header.token == 0 || grants_.contains(header.token)) return;
  header.token = 0;
  std::memcpy(cell->data(), &header, sizeof header);
}

// Ends every access, of the peer here and of this side there. What it cuts off beside what is meant
// is sent again.
void RdmaLink::revoke() {
  const base::TimeNs now = platform::real_clock().now_ns();
  for (std::size_t r = 0; r < rails_.size(); ++r) {
    if (rails_[r]) break_rail(r, 0, "", now);
  }
}

// ---------------------------------------------------------------- regions

Status RdmaLink::expose(std::uint64_t region, std::byte* data, std::uint64_t bytes,
                        RegionKind kind) {
  if (reinterpret_cast<std::uintptr_t>(data) % alignof(std::uint64_t) != 0) {
    return Status::error(StatusCode::kInvalidUsage, "a region must be aligned to 8 bytes");
  }
  if (exposed_.contains(region)) {
    return Status::error(StatusCode::kInvalidUsage, "the region is exposed already");
  }
  Exposed exposed{data, bytes, {}};
  for (std::size_t r = 0; r < rails_.size(); ++r) {
    if (!rails_[r]) continue;
    constexpr unsigned kAll = kLocalWrite | kRemoteWrite | kRemoteRead | kRemoteAtomic;
    Registrations& registrations = rails_[r]->registrations();
    auto memory = kind == RegionKind::kDevice ? registrations.acquire_device(data, bytes, kAll)
                                              : registrations.acquire_apart(data, bytes, kAll);
    if (!memory.is_ok()) return memory.status();
    exposed.registered[r] = std::move(memory).value();
  }
  exposed_.emplace(region, std::move(exposed));
  region_words_.push_back(region);
  return Status();
}

void RdmaLink::withdraw(std::uint64_t region) {
  // Its registrations are nobody else's: the key ends here.
  if (exposed_.erase(region) > 0) region_words_.push_back(region);
}

void RdmaLink::read(Transfer& transfer, std::uint64_t region, std::uint64_t offset) {
  start_region_job(Job::Kind::kRead, transfer, region, offset, 0);
}

void RdmaLink::write(Transfer& transfer, std::uint64_t region, std::uint64_t offset) {
  start_region_job(Job::Kind::kWrite, transfer, region, offset, 0);
}

void RdmaLink::fetch_add(Transfer& transfer, std::uint64_t region, std::uint64_t offset,
                         std::uint64_t delta) {
  start_region_job(Job::Kind::kFetchAdd, transfer, region, offset, delta);
}

void RdmaLink::start_region_job(Job::Kind kind, Transfer& transfer, std::uint64_t region,
                                std::uint64_t offset, std::uint64_t add) {
  transfer.state = TransferState::kPending;
  transfer.bytes_done = 0;
  transfer.slot = 0;
  const auto end = [&](Status status) {
    transfer.state = status.is_ok() ? TransferState::kDone : TransferState::kFailed;
    transfer.status = std::move(status);
  };
  if (!failure().is_ok()) return end(failure());
  if (peer_departed()) {
    return end(Status::error(StatusCode::kPeerLost, "the peer has left the group"));
  }
  if (kind == Job::Kind::kFetchAdd && !has_atomics_) {
    return end(Status::error(StatusCode::kInvalidUsage, "one of the two NICs has no atomics"));
  }
  if (transfer.bytes == 0) return end(Status());
  auto job = std::make_shared<Job>();
  job->kind = kind;
  job->transfer = &transfer;
  job->add = add;
  jobs_[&transfer] = job;
  region_jobs_.push_back({region, offset, std::move(job), false});
}

// It is remembered for a while, so that what comes too late fails instead of waiting.
void RdmaLink::forget_region(std::uint64_t region) {
  constexpr std::size_t kGoneMax = 1024;
  peer_regions_[region] = PeerRegion();
  gone_regions_.push_back(region);
  if (gone_regions_.size() <= kGoneMax) return;
  const auto it = peer_regions_.find(gone_regions_.front());
  gone_regions_.pop_front();
  if (it != peer_regions_.end() && it->second.bytes == 0) peer_regions_.erase(it);
}

// What waits for a region that nobody has shown does not count: it may never come.
bool RdmaLink::has_region_work() const {
  return std::any_of(region_jobs_.begin(), region_jobs_.end(), [&](const RegionJob& waiting) {
    return waiting.job->has_piece() &&
           (waiting.is_resolved || peer_regions_.contains(waiting.region));
  });
}

// Whether the region is known by now; what does not fit into it fails.
bool RdmaLink::resolve(RegionJob& waiting) {
  const auto it = peer_regions_.find(waiting.region);
  if (it == peer_regions_.end()) return false;
  const PeerRegion& region = it->second;
  const Job& job = *waiting.job;
  const std::uint64_t bytes = job.transfer->bytes;
  const bool is_aligned = job.kind != Job::Kind::kFetchAdd ||
                          (waiting.offset % 8 == 0 && bytes == sizeof(std::uint64_t));
  if (waiting.offset > region.bytes || bytes > region.bytes - waiting.offset || !is_aligned) {
    finish_job(waiting.job, Status::error(StatusCode::kInvalidUsage,
                                          "the peer exposes no such region or offset"));
    return true;
  }
  waiting.job->grant = region.grant;
  waiting.job->grant.address += waiting.offset;
  waiting.is_resolved = true;
  return true;
}

}  // namespace pycomm::transport::rdma

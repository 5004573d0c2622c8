#include "transport/rdma/link.h"

#include <algorithm>
#include <cstring>

#include "platform/system.h"

namespace pycomm::transport::rdma {
namespace {

using platform::real_clock;
using platform::verbs::Completion;
using platform::verbs::describe_status;

// More than a rail can have.
constexpr int kCompletionsPerTurn = 512;
constexpr std::uint64_t kTurnsPerLook = 64;
// A message that several rails share is cut into as many pieces, within these bounds.
constexpr std::uint64_t kPieceBytesMin = 64 * 1024, kPieceBytesMax = 1024 * 1024;

CoreOptions core_options(const LinkOptions& options) {
  CoreOptions core;
  core.eager_bytes_max = std::min(options.eager_bytes_max, kCellPayloadMax);
  core.fragment_bytes_max = kCellPayloadMax;
  return core;
}

}  // namespace

RdmaLink::RdmaLink(std::unique_ptr<platform::ByteStream> stream, const Place& place,
                   const LinkOptions& options, platform::Poller poller, base::TimeNs now)
    : CoreLink(core_options(options), nullptr, this),
      stream_(std::move(stream)),
      place_(place),
      options_(options),
      poller_(std::move(poller)),
      opened_at_(now) {
  ControlMessage offer;
  offer.kind = static_cast<std::uint8_t>(ControlMessage::Kind::kOffer);
  offer.num_rails = static_cast<std::uint8_t>(std::min(place_.ports.size(), kRailsMax));
  offer.mask = std::all_of(place_.ports.begin(), place_.ports.end(),
                           [](const auto& port) { return port->info().has_atomics; });
  control_out_.append(reinterpret_cast<const char*>(&offer), sizeof offer);
}

// Work may hold memory of several rails: it goes before any of them.
RdmaLink::~RdmaLink() {
  for (const auto& rail : rails_) {
    if (rail) rail->take_posted();
  }
}

// ---------------------------------------------------------------- sleeping

std::vector<int> RdmaLink::fds() const {
  std::vector<int> all = {poller_.fd(), stream_->fd()};
  for (const auto& rail : rails_) {
    if (rail) all.push_back(rail->domain().fd());
  }
  return all;
}

void RdmaLink::arm() {
  if (std::exchange(is_armed_, true)) return;
  for (const auto& rail : rails_) {
    if (!rail) continue;
    const Status status = rail->domain().arm();
    // Without it the next deadline looks.
    if (!status.is_ok()) is_armed_ = false;
  }
}

void RdmaLink::on_ready() {
  is_armed_ = false;
  is_stream_ready_ = true;
  for (const auto& rail : rails_) {
    if (rail) rail->domain().clear_events();
  }
}

// ---------------------------------------------------------------- progress

bool RdmaLink::progress() {
  if (!failure().is_ok()) return false;
  if (establishment_ == Establishment::kRefused) return false;  // the stream is another's
  if (has_ended_) {
    const bool drops = core_.front() != nullptr;
    end_after_goodbye();
    return drops;
  }
  const base::TimeNs now = real_clock().now_ns();
  bool moved = false;
  for (std::size_t r = 0; r < rails_.size(); ++r) moved |= poll_rail(r);
  if (goodbye_) take_goodbye();
  // The stream says something rarely, and a look at it is a system call.
  const bool awaits_word =
      establishment_ != Establishment::kDone || stream_ended_at_ != 0 ||
      std::any_of(rails_.begin(), rails_.end(), [](const auto& rail) {
        return rail && rail->state != Rail::State::kUp && rail->state != Rail::State::kIdle;
      });
  if (awaits_word || is_stream_ready_ || ++turns_ % kTurnsPerLook == 0) moved |= read_control(now);
  run_rails(now);
  if (establishment_ == Establishment::kDone && failure().is_ok()) moved |= transmit();
  write_control();
  return moved;
}

bool RdmaLink::poll_rail(std::size_t r) {
  Rail* rail = rails_[r].get();
  if (rail == nullptr) return false;
  bool moved = false;
  for (int taken = 0; taken < kCompletionsPerTurn;) {
    Completion done[16];
    const int n = rail->poll(done, 16);
    if (n < 0) {
      fail(Status::error(StatusCode::kSystem, rail->port().name() + ": its completions are lost"));
      return true;
    }
    if (n == 0) break;
    taken += n;
    moved = true;
    rail->moved_at = real_clock().now_ns();
    for (int i = 0; i < n && failure().is_ok(); ++i) {
      const Completion& completion = done[i];
      if (completion.status == 0 && completion.is_receive) {
        const Status status = take_message(*rail, completion);
        if (!status.is_ok()) fail(status);
      } else if (completion.status == 0) {
        rail->complete_sends(completion.id,
                             [&](const Rail::Posted& entry) { on_sent(*rail, entry); });
      } else {
        // What the peer refuses is the fault of that one piece of work; the rest goes on.
        const auto& posted = rail->posted();
        const auto at = std::find_if(posted.begin(), posted.end(), [&](const Rail::Posted& entry) {
          return entry.id == completion.id;
        });
        std::shared_ptr<Job> refused;
        if (at != posted.end() && completion.status == platform::verbs::kStatusRemoteAccess) {
          refused = at->job;
        }
        break_rail(r, completion.status, describe_status(completion.status), real_clock().now_ns());
        if (refused && refused->transfer != nullptr) {
          // Other pieces of it may be on other rails.
          if (rails_.size() > 1) revoke();
          finish_job(refused, Status::error(StatusCode::kInvalidUsage,
                                            "the peer exposes no such memory: " +
                                                describe_status(completion.status)));
        }
      }
    }
    if (!failure().is_ok()) return true;
  }
  if (rail->state == Rail::State::kUp) rail->give_credits_back();
  return moved;
}

// Those of granted memory are ended by the core, which knows them too.
void RdmaLink::end_jobs(const Status& status) {
  for (const auto& [transfer, job] : std::exchange(jobs_, {})) {
    job->transfer = nullptr;
    if (job->kind == Job::Kind::kGranted) continue;
    transfer->state = TransferState::kFailed;
    transfer->status = status;
  }
  writes_.clear();
  region_jobs_.clear();
}

void RdmaLink::end_piece(const std::shared_ptr<Job>& job, std::uint64_t bytes) {
  job->bytes_under_way -= bytes;
  if (job->is_complete()) finish_job(job, Status());
}

void RdmaLink::on_sent(Rail& rail, const Rail::Posted& entry) {
  if (entry.is_probe) rail.sent_probe_arrived = true;
  if (entry.is_goodbye) is_goodbye_under_way_ = false;
  if (!entry.job) return;
  rail.bytes_under_way -= entry.bytes;
  Transfer* transfer = entry.job->transfer;
  const bool lands_here =
      entry.job->kind == Job::Kind::kRead || entry.job->kind == Job::Kind::kFetchAdd;
  if (transfer != nullptr && lands_here && entry.cell >= 0) {
    std::memcpy(transfer->data + entry.offset, rail.landed(entry), entry.bytes);
    if (entry.job->kind == Job::Kind::kRead) core_.counters().bytes_staged += entry.bytes;
  }
  end_piece(entry.job, entry.bytes);
}

void RdmaLink::finish_job(const std::shared_ptr<Job>& job, Status status) {
  Transfer* transfer = std::exchange(job->transfer, nullptr);
  if (transfer == nullptr) return;
  jobs_.erase(transfer);
  for (auto& memory : job->registered) memory.reset();
  if (job->kind == Job::Kind::kGranted) return core_.finish_write(*transfer, std::move(status));
  if (status.is_ok() && job->kind == Job::Kind::kWrite)
    core_.counters().bytes_sent += transfer->bytes;
  if (status.is_ok() && job->kind == Job::Kind::kRead) {
    core_.counters().bytes_received += transfer->bytes;
  }
  transfer->state = status.is_ok() ? TransferState::kDone : TransferState::kFailed;
  transfer->status = std::move(status);
}

// ---------------------------------------------------------------- sending

// While it is open what has arrived on a broken rail, frames wait, so that they stay in order.
bool RdmaLink::may_send_frames() const {
  return std::none_of(rails_.begin(), rails_.end(),
                      [](const auto& rail) { return rail && rail->state == Rail::State::kBroken; });
}

bool RdmaLink::transmit() {
  bool moved = false;
  Rail* primary = choose_primary();
  if (primary != nullptr && may_send_frames()) {
    moved |= transmit_again(*primary);
    if (again_.empty()) moved |= transmit_frames(*primary);
    if (again_.empty() && primary->state == Rail::State::kUp) moved |= transmit_regions();
  }
  return transmit_writes() || moved;
}

bool RdmaLink::transmit_again(Rail& rail) {
  bool moved = false;
  while (!again_.empty() && rail.can_send(true) && rail.has_cell()) {
    std::vector<std::byte>& cell = again_.front();
    scrub_clear(&cell);
    std::memcpy(rail.free_cell(), cell.data(), cell.size());
    // A goodbye that was lost is the last of them, and stays the last.
    const bool is_goodbye = is_goodbye_under_way_ && again_.size() == 1;
    ++num_again_;
    moved = true;
    const Status status =
        rail.send_cell(static_cast<std::uint32_t>(cell.size()), is_goodbye, is_goodbye, false);
    again_.pop_front();
    if (!status.is_ok()) rail.break_for(status);
    if (rail.must_break) break;
  }
  return moved;
}

bool RdmaLink::transmit_frames(Rail& rail) {
  bool moved = false;
  const auto has_room = [&] { return rail.can_send(true) && rail.has_cell() && !rail.must_break; };
  while (!region_words_.empty() && has_room()) {
    const std::uint64_t region = region_words_.front();
    region_words_.pop_front();
    moved = true;
    const Status status = put_region_word(rail, region);
    if (!status.is_ok()) rail.break_for(status);
  }
  while (core_.front() != nullptr && has_room()) {
    const MessageCore::OutFrame& frame = *core_.front();
    const bool is_goodbye = frame.header.kind == static_cast<std::uint8_t>(FrameKind::kGoodbye);
    if (is_goodbye) {
      const bool is_last = writes_.empty() && !core_.has_write_due() && !has_region_work() &&
                           std::none_of(jobs_.begin(), jobs_.end(), [](const auto& job) {
                             return job.second->bytes_under_way > 0;
                           });
      if (!is_last) break;
      is_goodbye_under_way_ = true;
    }
    moved = true;
    const Status status = put_frame(rail, frame);
    core_.counters().bytes_staged += frame.header.payload_bytes;
    core_.pop();
    if (!status.is_ok()) rail.break_for(status);
  }
  return moved;
}

Status RdmaLink::put_frame(Rail& rail, const MessageCore::OutFrame& frame) {
  std::byte* cell = rail.free_cell();
  CellHeader header;
  header.kind = static_cast<std::uint8_t>(CellHeader::Kind::kFrame);
  if (frame.header.kind == static_cast<std::uint8_t>(FrameKind::kClear) && frame.header.key != 0) {
    // One that was taken back meanwhile: the bytes then come in frames, and nobody wants them.
    if (const auto it = grants_.find(frame.header.key); it != grants_.end()) {
      header.token = frame.header.key;
      header.address = reinterpret_cast<std::uint64_t>(it->second.transfer->data);
      for (std::size_t r = 0; r < rails_.size(); ++r) {
        if (it->second.registered[r]) header.keys[r] = it->second.registered[r]->remote_key();
      }
    }
  }
  std::memcpy(cell, &header, sizeof header);
  std::memcpy(cell + sizeof header, &frame.header, sizeof frame.header);
  const std::uint32_t payload = frame.header.payload_bytes;
  if (payload > 0) std::memcpy(cell + kCellOverhead, frame.payload, payload);
  const bool is_goodbye = frame.header.kind == static_cast<std::uint8_t>(FrameKind::kGoodbye);
  return rail.send_cell(kCellOverhead + payload, is_goodbye, is_goodbye, false);
}

Status RdmaLink::put_region_word(Rail& rail, std::uint64_t region) {
  CellHeader header;
  FrameHeader frame;
  frame.signature = region;
  header.kind = static_cast<std::uint8_t>(CellHeader::Kind::kRegionGone);
  if (const auto it = exposed_.find(region); it != exposed_.end()) {
    header.kind = static_cast<std::uint8_t>(CellHeader::Kind::kRegion);
    header.address = reinterpret_cast<std::uint64_t>(it->second.data);
    frame.message_bytes = it->second.bytes;
    for (std::size_t r = 0; r < rails_.size(); ++r) {
      if (it->second.registered[r]) header.keys[r] = it->second.registered[r]->remote_key();
    }
  }
  std::byte* cell = rail.free_cell();
  std::memcpy(cell, &header, sizeof header);
  std::memcpy(cell + sizeof header, &frame, sizeof frame);
  return rail.send_cell(kCellOverhead, false, false, false);
}

// In the order of the calls, over one rail: a write comes before the fetch_add behind it.
bool RdmaLink::transmit_regions() {
  bool moved = false;
  while (!region_jobs_.empty()) {
    RegionJob& waiting = region_jobs_.front();
    if (!waiting.job->has_piece()) {  // cancelled, refused, or all of it is under way
      region_jobs_.pop_front();
      continue;
    }
    if (!waiting.is_resolved && !resolve(waiting)) return moved;
    if (!waiting.job->has_piece()) continue;
    Rail& rail = *primary_;
    if (!rail.can_send(false) || !rail.has_cell() || rail.must_break) return moved;
    const std::size_t r = index_of(rail);
    const std::uint64_t before = waiting.job->bytes_under_way;
    if (waiting.job->kind == Job::Kind::kFetchAdd) ++num_atomics_;
    const Status status = rail.send_piece(waiting.job, r, UINT64_MAX, &core_.counters());
    rail.bytes_under_way += waiting.job->bytes_under_way - before;
    moved = true;
    if (!status.is_ok()) rail.break_for(status);
  }
  return moved;
}

bool RdmaLink::transmit_writes() {
  bool moved = false;
  for (MessageCore::OutWrite due; core_.next_write(&due);) {
    auto job = std::make_shared<Job>();
    job->transfer = due.transfer;
    job->grant = due.grant;
    jobs_[due.transfer] = job;
    writes_.push_back(std::move(job));
  }
  const std::uint64_t num_rails = num_up();
  while (!writes_.empty()) {
    const std::shared_ptr<Job> job = writes_.front();
    if (!job->has_piece()) {
      writes_.pop_front();
      continue;
    }
    // The rail with the least under way: so each carries what it can.
    Rail* best = nullptr;
    for (const auto& rail : rails_) {
      const bool can = rail && rail->state == Rail::State::kUp && !rail->must_break &&
                       rail->can_send(true) && rail->has_cell();
      if (can && (best == nullptr || rail->bytes_under_way < best->bytes_under_way)) {
        best = rail.get();
      }
    }
    if (best == nullptr) return moved;
    const std::uint64_t before = job->bytes_under_way;
    const std::uint64_t share = (job->transfer->bytes + num_rails - 1) / num_rails;
    const std::uint64_t piece_max =
        num_rails > 1 ? std::clamp(share, kPieceBytesMin, kPieceBytesMax) : UINT64_MAX;
    const Status status = best->send_piece(job, index_of(*best), piece_max, &core_.counters());
    best->bytes_under_way += job->bytes_under_way - before;
    moved = true;
    if (!status.is_ok()) best->break_for(status);
  }
  return moved;
}

// ---------------------------------------------------------------- the end

void RdmaLink::cancel(Transfer& transfer) {
  if (transfer.is_finished() || transfer.state == TransferState::kIdle) return;
  std::shared_ptr<Job> job;
  if (const auto it = jobs_.find(&transfer); it != jobs_.end()) {
    job = it->second;
    jobs_.erase(it);
    job->transfer = nullptr;
  }
  // The NIC may be reading or writing the span right now.
  if (job && job->bytes_under_way > 0) revoke();
  if (job && job->kind != Job::Kind::kGranted) {
    transfer.state = TransferState::kFailed;
    transfer.status = Status::error(StatusCode::kAborted, "cancelled");
    return;
  }
  core_.cancel(transfer);
}

void RdmaLink::fail(const Status& status) {
  if (!failure().is_ok()) return;
  // Before anyone is told: nothing of theirs is touched any more.
  for (const auto& rail : rails_) {
    if (rail && !rail->break_off().is_ok()) rail->end();
    if (rail) rail->state = Rail::State::kBroken;
  }
  core_.fail(status);
  end_jobs(status);
  again_.clear();
}

bool RdmaLink::is_flushed() const {
  return core_.is_idle() && writes_.empty() && again_.empty() && region_words_.empty() &&
         !has_region_work() && control_out_.empty() && !is_goodbye_under_way_;
}

RdmaStats RdmaLink::stats() const {
  RdmaStats stats;
  for (const auto& rail : rails_) {
    if (!rail) continue;
    const RegistrationCounters& of_rail = rail->registrations().counters();
    stats.registrations += of_rail.registrations;
    stats.cache_hits += of_rail.cache_hits;
    stats.evictions += of_rail.evictions;
    stats.refusals += of_rail.refusals;
    stats.path_resets += rail->num_resets;
    const bool is_up = rail->state == Rail::State::kUp;
    stats.paths.push_back(rail->port().name() + (is_up ? " up" : " down") +
                          (is_up || rail->last_error.empty() ? "" : ": " + rail->last_error));
  }
  stats.bytes_registered = place_.budget->held();
  stats.atomics = num_atomics_;
  stats.messages_again = num_again_;
  return stats;
}

}  // namespace pycomm::transport::rdma

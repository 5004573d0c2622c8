// RdmaLink, its rails: how they come up, and what happens when one breaks.
#include <algorithm>
#include <cstring>

#include "base/log.h"
#include "platform/system.h"
#include "transport/rdma/link.h"

namespace pycomm::transport::rdma {
namespace {

using base::TimeNs;
using Kind = ControlMessage::Kind;
using State = Rail::State;

constexpr TimeNs kSettleNs = 3'000'000'000;   // for the peer to answer for one rail
constexpr TimeNs kRetryFirstNs = 20'000'000;  // doubled with each failure
constexpr int kRetryDoublingsMax = 6;         // 1.3 s, well within kSettleNs
constexpr TimeNs kBlockedNs = 1'000'000;

}  // namespace

// ---------------------------------------------------------------- up

void RdmaLink::begin_rail(std::size_t r, TimeNs now) {
  Rail& rail = *rails_[r];
  if (Status status = rail.begin(rail.generation); !status.is_ok()) {
    rail.last_error = status.message();
    rail.end();
    ++rail.num_failures;
    rail.retry_at = now + (kRetryFirstNs << std::min(rail.num_failures, kRetryDoublingsMax));
    // This life is over before it began; the peer's word ends it.
    rail.state = State::kBroken;
    rail.sent_down = true;
    rail.heard_down = false;
    rail.settle_by = base::kNever;
    return say(Kind::kDown, r);
  }
  rail.state = State::kOffered;
  rail.settle_by = now + kSettleNs;
  say(Kind::kUp, r);
  if (rail.heard_up) connect_rail(r, now);
}

void RdmaLink::connect_rail(std::size_t r, TimeNs now) {
  Rail& rail = *rails_[r];
  // Of a group that is being created nobody else waits for this thread.
  const bool in_thread = establishment_ == Establishment::kDone;
  if (Status status = rail.connect(options_.rdma, in_thread); !status.is_ok()) {
    return break_rail(r, 0, status.message(), now);
  }
  rail.state = State::kConnecting;
  rail.settle_by = base::kNever;
}

void RdmaLink::end_connecting(std::size_t r, TimeNs now) {
  Rail& rail = *rails_[r];
  Status status;
  if (!rail.has_connected(&status)) return;
  if (!status.is_ok()) return break_rail(r, 0, status.message(), now);
  rail.state = State::kConnected;
  rail.settle_by = now + kSettleNs;
  say(Kind::kReady, r);
}

void RdmaLink::run_rails(TimeNs now) {
  const bool is_between = sent_verdict_ && establishment_ == Establishment::kUnderWay;
  for (std::size_t r = 0; r < rails_.size() && !is_between; ++r) {
    if (!rails_[r] || !failure().is_ok() || has_ended_) continue;
    rails_[r]->registrations().heed_others();
    run_rail(r, now);
  }
  if (!drain_failure_.is_ok()) fail(drain_failure_);
  if (!failure().is_ok() || has_ended_) return;
  if (establishment_ == Establishment::kUnderWay) {
    run_establishment(now);
  } else {
    watch_patience(now);
  }
}

void RdmaLink::run_rail(std::size_t r, TimeNs now) {
  Rail& rail = *rails_[r];
  const bool is_over = peer_departed() || stream_ended_at_ != 0;
  if (rail.must_break) break_rail(r, 0, rail.last_error, now);
  // A NIC may repeat for ever without a word: the kernel's rdma_rxe does so with atomics.
  if (rail.num_signalled() == 0) rail.moved_at = now;
  if (rail.state == State::kUp && now - rail.moved_at > stall_ns()) {
    break_rail(r, platform::verbs::kStatusRetryExceeded,
               "nothing was acknowledged for " + std::to_string(stall_ns() / 1'000'000'000) +
                   " s; broken off, it ends in " +
                   platform::verbs::describe_status(platform::verbs::kStatusFlushed),
               now);
  }
  switch (rail.state) {
    case State::kIdle:
      if (now >= rail.retry_at && !is_over) begin_rail(r, now);
      break;
    case State::kOffered: break;
    case State::kConnecting: end_connecting(r, now); break;
    case State::kConnected:
      if (rail.heard_ready) {
        CellHeader probe;
        probe.kind = static_cast<std::uint8_t>(CellHeader::Kind::kProbe);
        std::memcpy(rail.free_cell(), &probe, sizeof probe);
        const Status status = rail.send_cell(sizeof probe, true, false, true);
        rail.state = State::kProbing;
        if (!status.is_ok()) rail.break_for(status);
      }
      break;
    case State::kProbing:
      if (rail.heard_probe && rail.sent_probe_arrived) {
        rail.state = State::kUp;
        rail.num_failures = 0;
        rail.cause.clear();
        rail.settle_by = base::kNever;
        if (rail.generation > 1 && !rail.last_error.empty()) {
          base::log(base::LogLevel::kInfo, base::Subsystem::kNet,
                    "the RDMA path through " + rail.port().name() + " is there again");
        }
      }
      break;
    case State::kUp: break;
    case State::kBroken:
      // What had arrived before the break has been taken in by now.
      if (!rail.sent_down && !is_over && !rail.has_backlog()) {
        rail.sent_down = true;
        say(Kind::kDown, r);
        if (rail.heard_down) settle_rail(r, now);
      }
      break;
  }
  if (now > rail.settle_by) break_rail(r, 0, "the peer does not answer", now);
}

// Twice as long as the NIC takes by its own word to give up.
base::TimeNs RdmaLink::stall_ns() const {
  const TimeNs one = TimeNs{4096} << std::min<int>(options_.rdma.timeout_code, 24);
  return std::clamp<TimeNs>(2 * one * (options_.rdma.num_retries + 1), 2'000'000'000,
                            120'000'000'000);
}

void RdmaLink::run_establishment(TimeNs now) {
  const bool is_late = now > opened_at_ + options_.establish_ns;
  if (!has_offer_) return;  // it may still be about to create the group
  if (rails_.empty()) {
    establishment_ = Establishment::kRefused;
    return;
  }
  const auto is_settled = [&](const std::unique_ptr<Rail>& rail) {
    return !rail || rail->state == State::kUp || rail->num_failures > 0 || is_late;
  };
  if (!sent_verdict_ && std::all_of(rails_.begin(), rails_.end(), is_settled)) {
    sent_verdict_ = true;
    for (std::size_t r = 0; r < rails_.size(); ++r) {
      if (rails_[r] && rails_[r]->state == State::kUp) mine_up_ |= 1 << r;
    }
    say(Kind::kVerdict, 0);
  }
  if (!sent_verdict_ || theirs_up_ < 0) {
    if (now > opened_at_ + 2 * options_.establish_ns) {
      fail(Status::error(StatusCode::kTimeout, "the peer does not say which RDMA paths it has"));
    }
    return;
  }
  if ((mine_up_ & theirs_up_) != 0) {
    establishment_ = Establishment::kDone;
    for (const ControlMessage& message : std::exchange(deferred_, {})) take_control(message, now);
    return;
  }
  establishment_ = Establishment::kRefused;
  const std::string rails = describe_rails();
  refusal_ = "no message got through" + (rails.empty() ? "" : " (" + rails + ")");
  for (const auto& rail : rails_) {
    if (rail && !rail->break_off().is_ok()) rail->end();
  }
}

std::unique_ptr<platform::ByteStream> RdmaLink::take_stream(std::string* reason) {
  *reason = refusal_;
  write_control();
  rails_.clear();
  return std::move(stream_);
}

// ---------------------------------------------------------------- down

void RdmaLink::break_rail(std::size_t r, int status, const std::string& why, TimeNs now) {
  Rail& rail = *rails_[r];
  if (rail.state == State::kIdle || rail.state == State::kBroken) return;
  const bool was_up = rail.state == State::kUp;
  rail.must_break = false;
  rail.last_status = status;
  rail.last_error = why;
  if (was_up && !why.empty()) rail.cause = why;
  rail.settle_by = base::kNever;
  ++rail.num_resets;
  if (Status drained = rail.break_off(); !drained.is_ok()) {
    rail.end();
    drain_failure_ = drained;  // may be inside a call of the core's: told at the next turn
  }
  rail.state = State::kBroken;
  const bool is_revoking = why.empty();
  if (!is_revoking) ++rail.num_failures;
  // At once after a break on purpose, here or there; a rail that does not come up waits longer each
  // time.
  const bool is_on_purpose = is_revoking || (was_up && why == kPeerReset);
  rail.retry_at = is_on_purpose
                      ? now
                      : now + (kRetryFirstNs << std::min(rail.num_failures, kRetryDoublingsMax));
  // What was only flushed has its cause at the other end, which tells of it.
  if (was_up && status != 0 && status != platform::verbs::kStatusFlushed) {
    base::log(base::LogLevel::kWarn, base::Subsystem::kNet,
              "the RDMA path through " + rail.port().name() + " broke: " + why + "; " +
                  (num_up() > 0 ? "going on over " + std::to_string(num_up()) + " more"
                                : "no other is left, trying again"));
  }
}

// Both ends know what arrived: exactly the rest goes again.
void RdmaLink::settle_rail(std::size_t r, TimeNs now) {
  Rail& rail = *rails_[r];
  send_rest_again(r);
  rail.end();
  rail.state = State::kIdle;
  rail.heard_up = false;
  ++rail.generation;
  rail.retry_at = std::max(rail.retry_at, now);
}

void RdmaLink::send_rest_again(std::size_t r) {
  Rail& rail = *rails_[r];
  std::uint64_t number = rail.num_counted_before();
  std::deque<RegionJob> region_jobs;
  for (Rail::Posted& entry : rail.take_posted()) {
    const bool has_arrived = entry.is_counted && number++ < rail.peer_received;
    if (has_arrived) {
      on_sent(rail, entry);
      continue;
    }
    if (entry.cell >= 0 && !entry.job) {
      if (entry.is_probe) continue;
      const std::byte* cell = rail.landed(entry);
      again_.emplace_back(cell, cell + entry.bytes);
      continue;
    }
    if (!entry.job) continue;  // credits
    const std::shared_ptr<Job>& job = entry.job;
    job->bytes_under_way -= entry.bytes;
    if (job->transfer == nullptr) continue;
    if (job->is_unwanted) {
      end_piece(job, 0);
      continue;
    }
    if (job->kind == Job::Kind::kFetchAdd) {
      finish_job(job, Status::error(StatusCode::kSystem,
                                    "the path broke under a fetch_add, which may or may not have "
                                    "been carried out (" +
                                        rail.last_error + ")"));
      continue;
    }
    const bool was_waiting = job->has_piece();
    job->again.push_back({entry.offset, entry.bytes});
    ++num_again_;
    if (was_waiting) continue;
    if (job->kind == Job::Kind::kGranted) {
      writes_.push_back(job);
    } else {
      region_jobs.push_back({0, 0, job, true});
    }
  }
  // They were posted before those that still wait.
  region_jobs_.insert(region_jobs_.begin(), region_jobs.begin(), region_jobs.end());
}

void RdmaLink::watch_patience(TimeNs now) {
  if (num_up() > 0 || peer_departed() || stream_ended_at_ != 0) {
    without_rail_since_ = 0;
    return;
  }
  if (without_rail_since_ == 0) without_rail_since_ = now;
  if (now - without_rail_since_ < options_.patience_ns) return;
  fail(Status::error(StatusCode::kPeerLost,
                     "no RDMA path to it is left (" + describe_rails() + ")"));
}

std::size_t RdmaLink::num_up() const {
  return static_cast<std::size_t>(std::count_if(rails_.begin(), rails_.end(), [](const auto& rail) {
    return rail && rail->state == State::kUp;
  }));
}

std::size_t RdmaLink::index_of(const Rail& rail) const {
  const auto is_it = [&](const auto& candidate) { return candidate.get() == &rail; };
  return static_cast<std::size_t>(std::find_if(rails_.begin(), rails_.end(), is_it) -
                                  rails_.begin());
}

Rail* RdmaLink::choose_primary() {
  const auto is_good = [](const Rail* rail) {
    return rail != nullptr && rail->state == State::kUp && !rail->must_break;
  };
  if (is_good(primary_)) return primary_;
  primary_ = nullptr;
  for (const auto& rail : rails_) {
    if (primary_ == nullptr && is_good(rail.get())) primary_ = rail.get();
  }
  return primary_;
}

std::string RdmaLink::describe_rails() const {
  std::string text;
  for (const auto& rail : rails_) {
    if (!rail || rail->last_error.empty()) continue;
    text += (text.empty() ? "" : "; ") + rail->port().name() + ": " +
            (rail->cause.empty() ? rail->last_error : rail->cause);
  }
  return text;
}

base::TimeNs RdmaLink::next_deadline() const {
  if (has_ended()) return base::kNever;
  if (stream_ended_at_ != 0) return stream_ended_at_ + kAfterStreamNs;
  TimeNs at = base::kNever;
  const auto sooner = [&](TimeNs then) { at = std::min(at, then); };
  for (const auto& rail : rails_) {
    if (!rail) continue;
    if (rail->state == State::kIdle && !peer_departed()) sooner(rail->retry_at);
    sooner(rail->settle_by);
    if (rail->state == State::kUp && rail->num_signalled() > 0) {
      sooner(rail->moved_at + stall_ns());
    }
  }
  if (without_rail_since_ != 0) sooner(without_rail_since_ + options_.patience_ns);
  const bool is_connecting = std::any_of(rails_.begin(), rails_.end(), [](const auto& rail) {
    return rail && rail->state == State::kConnecting;
  });
  if (is_connecting) sooner(platform::real_clock().now_ns() + 10 * kBlockedNs);
  // Credits come by a write that completes nothing here; without an event all is looked at anew.
  const bool is_blocked = !again_.empty() || !core_.is_idle() || !writes_.empty() ||
                          !region_words_.empty() || has_region_work();
  if (is_blocked || !control_out_.empty() || !is_armed_) {
    sooner(platform::real_clock().now_ns() + kBlockedNs);
  }
  return at;
}

}  // namespace pycomm::transport::rdma

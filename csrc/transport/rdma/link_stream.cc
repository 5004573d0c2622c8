// RdmaLink, the stream beside its rails: what both ends say of them; its end is the peer's.
#include <algorithm>
#include <cstring>

#include "platform/system.h"
#include "transport/rdma/link.h"

namespace pycomm::transport::rdma {
namespace {

using base::TimeNs;
using Kind = ControlMessage::Kind;
using State = Rail::State;
using platform::IoOutcome;

}  // namespace

bool RdmaLink::read_control(TimeNs now) {
  if (stream_ended_at_ != 0) {
    if (peer_departed()) {
      stream_->end_writing();
      end_after_goodbye();
      return true;
    }
    if (now > stream_ended_at_ + kAfterStreamNs) {
      const std::string rails = describe_rails();
      fail(Status::error(StatusCode::kPeerLost,
                         stream_end_ + (rails.empty() ? "" : " (" + rails + ")")));
      return true;
    }
    return false;
  }
  bool moved = false;
  // Never more than a message at once: after a refusal the stream serves for something else.
  while (establishment_ != Establishment::kRefused && failure().is_ok()) {
    char buffer[sizeof(ControlMessage)];
    const auto result = stream_->read_some(buffer, sizeof buffer - control_in_.size());
    if (result.outcome == IoOutcome::kWouldBlock) {
      is_stream_ready_ = false;
      return moved;
    }
    moved = true;
    if (result.outcome != IoOutcome::kMoved) {
      lose_stream(result.outcome == IoOutcome::kClosed ? "its process ended without a goodbye"
                                                       : stream_->explain(result),
                  now);
      return true;
    }
    control_in_.append(buffer, result.bytes);
    if (control_in_.size() < sizeof(ControlMessage)) continue;
    ControlMessage message;
    std::memcpy(&message, control_in_.data(), sizeof message);
    control_in_.clear();
    if (!message.is_valid()) {
      fail(Status::error(StatusCode::kInternal, "the peer broke the protocol: a control message"));
    } else {
      take_control(message, now);
    }
    // It is decided: what follows may be of something else.
    const bool is_decided = has_offer_ && (rails_.empty() || (sent_verdict_ && theirs_up_ >= 0));
    if (is_decided && establishment_ == Establishment::kUnderWay) return true;
  }
  return moved;
}

void RdmaLink::lose_stream(const std::string& why, TimeNs now) {
  if (stream_ended_at_ != 0) return;
  stream_ended_at_ = now;
  stream_end_ = why;
}

void RdmaLink::write_control() {
  constexpr std::size_t kWaitingMax = 256 * 1024;
  if (control_out_.size() > kWaitingMax) {
    return fail(Status::error(StatusCode::kPeerLost, "it does not read what it is told"));
  }
  while (!control_out_.empty() && stream_ended_at_ == 0) {
    const iovec vector{control_out_.data(), control_out_.size()};
    const auto result = stream_->write_vectors(&vector, 1);
    if (result.outcome == IoOutcome::kWouldBlock) return;
    if (result.outcome != IoOutcome::kMoved) {
      return lose_stream(stream_->explain(result), platform::real_clock().now_ns());
    }
    control_out_.erase(0, result.bytes);
  }
  if (stream_ended_at_ != 0) control_out_.clear();
  static_cast<void>(stream_->flush());
}

void RdmaLink::say(Kind kind, std::size_t r) {
  ControlMessage message;
  message.kind = static_cast<std::uint8_t>(kind);
  message.rail = static_cast<std::uint8_t>(r);
  if (kind == Kind::kVerdict) {
    message.mask = static_cast<std::uint8_t>(mine_up_);
  } else if (const Rail* rail = rails_[r].get()) {
    message.generation = rail->generation;
    if (kind == Kind::kUp) {
      message.set_address(rail->address());
      message.credit_address = rail->credit_address();
      message.credit_key = rail->credit_key();
    } else if (kind == Kind::kDown) {
      message.received = rail->received;
      message.status = static_cast<std::uint8_t>(rail->last_status);
    }
  }
  control_out_.append(reinterpret_cast<const char*>(&message), sizeof message);
}

void RdmaLink::take_control(const ControlMessage& message, TimeNs now) {
  const auto kind = static_cast<Kind>(message.kind);
  if (kind == Kind::kOffer) return take_offer(message, now);
  if (kind == Kind::kVerdict) {
    theirs_up_ = message.mask;
    return;
  }
  if (kind == Kind::kGone) return forget_grant(message.token);
  // After the verdict nothing may be answered until it is clear what the stream serves for.
  if (sent_verdict_ && establishment_ == Establishment::kUnderWay) {
    constexpr std::size_t kDeferredMax = 256;
    if (deferred_.size() < kDeferredMax) deferred_.push_back(message);
    return;
  }
  if (message.rail >= rails_.size()) {
    return fail(Status::error(StatusCode::kInternal, "the peer broke the protocol: no such rail"));
  }
  const std::size_t r = message.rail;
  Rail* rail = rails_[r].get();
  if (rail == nullptr) {
    if (kind != Kind::kUp && kind != Kind::kDown) return;
    ControlMessage refusal;
    refusal.kind = static_cast<std::uint8_t>(Kind::kDown);
    refusal.rail = message.rail;
    refusal.generation = message.generation;
    control_out_.append(reinterpret_cast<const char*>(&refusal), sizeof refusal);
    return;
  }
  if (message.generation < rail->generation) return;  // of a life that is over
  if (message.generation > rail->generation) {
    return fail(Status::error(StatusCode::kInternal, "the peer broke the protocol: a rail's life"));
  }
  switch (kind) {
    case Kind::kUp:
      if (rail->state != State::kIdle && rail->state != State::kOffered) return;
      rail->heard_up = true;
      rail->theirs = message.address();
      rail->their_credit_address = message.credit_address;
      rail->their_credit_key = message.credit_key;
      if (rail->state == State::kIdle && now >= rail->retry_at) begin_rail(r, now);
      if (rail->state == State::kOffered) connect_rail(r, now);
      return;
    case Kind::kReady: rail->heard_ready = true; return;
    case Kind::kDown:
      if (rail->state == State::kIdle) {  // there was nothing here: on to the next life
        say(Kind::kDown, r);
        ++rail->generation;
        rail->heard_up = false;
        ++rail->num_failures;
        return;
      }
      rail->heard_down = true;
      rail->peer_received = message.received;
      break_rail(r, 0,
                 message.status != 0
                     ? "the peer's end: " + platform::verbs::describe_status(message.status)
                     : kPeerReset,
                 now);
      if (rail->state == State::kBroken && rail->sent_down) settle_rail(r, now);
      return;
    default: return;
  }
}

void RdmaLink::take_offer(const ControlMessage& message, TimeNs now) {
  if (std::exchange(has_offer_, true)) {
    return fail(Status::error(StatusCode::kInternal, "the peer broke the protocol: two offers"));
  }
  opened_at_ = now;
  const std::size_t mine = std::min(place_.ports.size(), kRailsMax);
  const std::size_t theirs = message.num_rails;
  has_atomics_ = message.mask != 0;
  if (mine == 0 || theirs == 0) {
    refusal_ = mine == 0 ? "no RDMA device here" : "no RDMA device there";
    return;
  }
  is_armed_ = false;
  Rail::Limits limits;
  limits.cell_bytes = kCellOverhead + kCellPayloadMax;
  for (std::size_t r = 0; r < std::max(mine, theirs); ++r) {
    auto rail = Rail::open(place_.ports[r % mine], place_.budget, place_.monitor, limits);
    if (rail.is_ok()) {
      const platform::verbs::Domain& domain = rail.value()->domain();
      has_atomics_ &= domain.port().has_atomics;
      if (domain.fd() >= 0) static_cast<void>(poller_.add(domain.fd(), r + 1));
      rail.value()->generation = 1;
      rails_.push_back(std::move(rail).value());
    } else {
      refusal_ = place_.ports[r % mine]->info().name() + ": " + rail.status().message();
      rails_.push_back(nullptr);
    }
  }
  run_rails(now);
}

}  // namespace pycomm::transport::rdma

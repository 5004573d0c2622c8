#include "collectives/local_run.h"

#include <algorithm>
#include <array>

#include "kernels/reduce.h"

namespace pycomm::collectives {
namespace {

constexpr std::uint64_t kWindowChunkBytesMax = 128 * 1024;
constexpr std::uint64_t kPulledChunkBytes = 256 * 1024;
constexpr std::uint64_t kMappedChunkBytes = 1024 * 1024;

}  // namespace

void cut_into_rounds(LocalPlan& plan, std::uint64_t longest, std::uint64_t element_bytes,
                     std::uint64_t window_bytes) {
  const auto n = static_cast<std::uint64_t>(plan.world_size);
  std::uint64_t bytes = 0;
  if (!plan.is_direct) {
    bytes = std::min(window_bytes / (kWindowRounds * n), kWindowChunkBytesMax);
  } else if (plan.folds() && !plan.pushes) {
    bytes = std::min(kPulledChunkBytes / std::max<std::uint64_t>(n - 1, 1),
                     window_bytes / kWindowRounds);
  } else {
    bytes = kMappedChunkBytes;
  }
  // Whole cache lines, so that cells and chunks are aligned like the tensors.
  const std::uint64_t line = std::max<std::uint64_t>(base::kCacheLineBytes / element_bytes, 1);
  plan.chunk = std::max<std::uint64_t>(bytes / element_bytes / line * line, line);
  plan.rounds = (longest + plan.chunk - 1) / plan.chunk;
}

LocalRun::LocalRun(LocalChannel& channel, const OpRequest& request, const LocalPlan& plan,
                   std::vector<LocalPeer> peers, ScratchPool& scratch)
    : channel_(channel),
      request_(request),
      plan_(plan),
      peers_(std::move(peers)),
      pool_(scratch),
      element_bytes_(dtype_bytes(request.dtype)),
      n_(plan.world_size),
      fold_lag_(plan.is_direct || plan.rounds == 1 ? 0 : 1),
      take_lag_(plan.rounds == 1 ? 0 : fold_lag_ + (plan.has_results() && !plan.pushes ? 1 : 0)),
      iterations_(plan.rounds == 0 ? 0 : plan.rounds + take_lag_) {
  if (iterations_ == 0) stage_ = Stage::kClose;
}

LocalRun::~LocalRun() {
  if (scratch_) pool_.give_back(std::move(scratch_), scratch_bytes_);
}

// ---------------------------------------------------------------- pacing

bool LocalRun::has_reached(Rank peer, std::uint64_t position) {
  const std::uint64_t now = word_of(peer)->load(std::memory_order_acquire);
  if (static_cast<std::int64_t>(now - (channel_.base + position)) >= 0) return true;
  waits_for_ = peer;
  seen_position_ = now;
  return false;
}

bool LocalRun::all_reached(std::uint64_t position, bool (LocalRun::*concerns)(Rank) const) {
  for (Rank p = 0; p < n_; ++p) {
    if (p != plan_.rank && (this->*concerns)(p) && !has_reached(p, position)) return false;
  }
  return true;
}

bool LocalRun::reads_me(Rank peer) const { return plan_.given(plan_.rank, peer).count > 0; }
bool LocalRun::i_read(Rank peer) const { return plan_.given(peer, plan_.rank).count > 0; }
bool LocalRun::touches_me(Rank peer) const {
  const bool writes = plan_.takes_results(plan_.rank) && plan_.folded(peer).count > 0;
  return writes || reads_me(peer);
}
bool LocalRun::takes_my_result(Rank peer) const { return plan_.takes_results(peer); }
bool LocalRun::i_take_result_of(Rank peer) const {
  return plan_.takes_results(plan_.rank) && plan_.folded(peer).count > 0;
}

// The cells of round c have been read by all that read them kWindowRounds ago.
bool LocalRun::may_give(std::uint64_t c) {
  if (plan_.is_direct || c < kWindowRounds) return true;
  const std::uint64_t before = c - kWindowRounds;
  return all_reached(plan_.folds() ? 3 * (before + fold_lag_) + 2 : 3 * (before + take_lag_) + 3,
                     &LocalRun::reads_me);
}

bool LocalRun::may_fold(std::uint64_t c) {
  if (!plan_.is_direct && !all_reached(3 * c + 1, &LocalRun::i_read)) return false;
  if (plan_.pushes || !plan_.has_results() || c < kWindowRounds) return true;
  return all_reached(3 * (c - kWindowRounds + take_lag_) + 3, &LocalRun::takes_my_result);
}

bool LocalRun::may_take(std::uint64_t c) {
  if (plan_.folds()) {
    if (plan_.pushes || !plan_.has_results()) return true;
    return all_reached(3 * (c + fold_lag_) + 2, &LocalRun::i_take_result_of);
  }
  return plan_.is_direct || all_reached(3 * c + 1, &LocalRun::i_read);
}

void LocalRun::publish(std::uint64_t position) {
  channel_.mine->position.store(channel_.base + position, std::memory_order_release);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  published_ = true;
}

bool LocalRun::advance() {
  if (!failure_.is_ok() || is_done()) return false;
  const std::uint64_t i = iteration_;
  const auto in_range = [&](std::uint64_t lag) { return i >= lag && i - lag < plan_.rounds; };
  switch (stage_) {
    case Stage::kGive:
      if (!plan_.is_direct && in_range(0)) {
        if (!may_give(i)) return false;
        give(i);
        publish(3 * i + 1);
      }
      stage_ = Stage::kFold;
      break;
    case Stage::kFold:
      if (plan_.folds() && in_range(fold_lag_)) {
        if (!may_fold(i - fold_lag_)) return false;
        fold(i - fold_lag_);
        if (plan_.has_results() && !plan_.pushes) publish(3 * i + 2);
      }
      stage_ = Stage::kTake;
      break;
    case Stage::kTake:
      if (in_range(take_lag_)) {
        if (!may_take(i - take_lag_)) return false;
        take(i - take_lag_);
      }
      // What took part in nothing has nothing to say before the end.
      publish(3 * i + 3);
      stage_ = ++iteration_ < iterations_ ? Stage::kGive : Stage::kClose;
      break;
    case Stage::kClose:
      if (!close()) return !failure_.is_ok();
      break;
    case Stage::kDone: return false;
  }
  waits_for_ = kNoRank;
  return failure_.is_ok();
}

// Whose memory others read, or write, stays until they are done; and what was read counts only if
// its owner had not given up by then.
bool LocalRun::close() {
  if (plan_.is_direct) {
    const auto concerns = plan_.pushes ? &LocalRun::touches_me : &LocalRun::reads_me;
    if (!all_reached(3 * iterations_, concerns)) return false;
    std::atomic_thread_fence(std::memory_order_acquire);
    for (Rank p = 0; p < n_; ++p) {
      const LocalMark& mark = *channel_.marks[static_cast<std::size_t>(p)];
      if (p == plan_.rank || mark.is_withdrawn.load(std::memory_order_relaxed) == 0) continue;
      failure_ = Status::error(StatusCode::kPeerLost,
                               "rank " + std::to_string(p) + " was lost: it gave up", p);
      return false;
    }
  }
  channel_.base += 3 * iterations_;
  stage_ = Stage::kDone;
  count();
  return true;
}

void LocalRun::count() {
  if (!channel_.counters) return;
  const Rank me = plan_.rank;
  const auto results = [&](Rank from, Rank to) {
    return plan_.has_results() && plan_.takes_results(to) ? bytes_of(plan_.folded(from).count) : 0;
  };
  for (Rank p = 0; p < n_; ++p) {
    if (p == me) continue;
    const std::uint64_t given = bytes_of(plan_.given(me, p).count + plan_.given(p, me).count);
    const std::uint64_t folded = results(me, p) + results(p, me);
    LocalCounters& counters = channel_.counters[static_cast<std::size_t>(p)];
    counters.sent += bytes_of(plan_.given(me, p).count) + results(me, p);
    counters.received += bytes_of(plan_.given(p, me).count) + results(p, me);
    (plan_.is_direct ? counters.direct : counters.staged) += given;
    (plan_.pushes ? counters.direct : counters.staged) += folded;
  }
}

// ---------------------------------------------------------------- moving

std::uint64_t LocalRun::cell_offset(std::uint64_t c, Rank cell) const {
  const std::uint64_t round = c % kWindowRounds;
  const std::uint64_t index =
      plan_.is_direct ? round
                      : round * static_cast<std::uint64_t>(n_) + static_cast<std::uint64_t>(cell);
  return index * bytes_of(plan_.chunk);
}

const std::byte* LocalRun::source(Rank peer, const Span& span, std::uint64_t c,
                                  std::byte* scratch) {
  const LocalPeer& from = peers_[static_cast<std::size_t>(peer)];
  if (!plan_.is_direct) {
    return from.window + cell_offset(c, plan_.is_common() ? peer : plan_.rank);
  }
  if (from.input != nullptr) return from.input + bytes_of(span.offset);
  Status status = channel_.puller->pull(peer, from.address + bytes_of(span.offset), scratch,
                                        bytes_of(span.count));
  if (status.is_ok()) return scratch;
  failure_ = std::move(status);
  return nullptr;
}

void LocalRun::give(std::uint64_t c) {
  const auto copy_to_cell = [&](const Span& whole, Rank cell) {
    const Span span = chunk_of(whole, plan_.chunk, c);
    if (span.count == 0) return;
    kernels::copy(channel_.window + cell_offset(c, cell), request_.input_at(span.offset),
                  bytes_of(span.count), window_stores());
  };
  const Rank me = plan_.rank;
  if (plan_.is_common()) {
    const bool anyone = plan_.kind != OpKind::kGather || me != plan_.root;
    if (anyone && plan_.is_giver(me)) copy_to_cell({0, plan_.count}, me);
    return;
  }
  for (int k = 1; k < n_; ++k) {
    const Rank peer = (me + k) % n_;
    copy_to_cell(plan_.given(me, peer), peer);
  }
}

void LocalRun::fold(std::uint64_t c) {
  const Rank me = plan_.rank;
  const Span whole = plan_.folded(me);
  const Span span = chunk_of(whole, plan_.chunk, c);
  if (span.count == 0) return;
  if (plan_.is_direct && !scratch_) {
    scratch_bytes_ = bytes_of(plan_.chunk) * static_cast<std::uint64_t>(n_ - 1);
    scratch_ = pool_.take(scratch_bytes_);
  }
  std::array<const std::byte*, kLocalWorldMax> inputs{};
  for (int k = 0; k < n_; ++k) {
    const Rank p = (me + k) % n_;
    const auto place = static_cast<std::uint64_t>(p < me ? p : p - 1);
    inputs[static_cast<std::size_t>(p)] =
        p == me ? request_.input_at(span.offset)
                : source(p, span, c, scratch_.get() + place * bytes_of(plan_.chunk));
    if (!failure_.is_ok()) return;
  }
  const std::uint64_t at =
      plan_.kind == OpKind::kReduceScatter ? span.offset - whole.offset : span.offset;
  std::array<std::byte*, kLocalWorldMax> outputs{};
  int num_outputs = 0;
  std::array<std::byte*, kLocalWorldMax> streamed{};
  int num_streamed = 0;
  if (plan_.pushes) {
    for (Rank p = 0; p < n_; ++p) {
      if (!plan_.takes_results(p)) continue;
      std::byte* to = p == me ? request_.output_at(at)
                              : peers_[static_cast<std::size_t>(p)].output + bytes_of(at);
      if (plan_.caches_windows) {
        outputs[static_cast<std::size_t>(num_outputs++)] = to;
      } else {
        streamed[static_cast<std::size_t>(num_streamed++)] = to;
      }
    }
  } else {
    const bool is_mine = !plan_.has_results() || plan_.takes_results(me);
    if (is_mine && plan_.is_streamed) {
      streamed[static_cast<std::size_t>(num_streamed++)] = request_.output_at(at);
    } else if (is_mine) {
      outputs[static_cast<std::size_t>(num_outputs++)] = request_.output_at(at);
    }
    if (plan_.has_results() && (plan_.kind == OpKind::kAllReduce || me != plan_.root)) {
      std::byte* cell = channel_.window + cell_offset(c, me);
      if (plan_.caches_windows) {
        outputs[static_cast<std::size_t>(num_outputs++)] = cell;
      } else {
        streamed[static_cast<std::size_t>(num_streamed++)] = cell;
      }
    }
  }
  kernels::fold({outputs.data(), num_outputs, streamed.data(), num_streamed}, inputs.data(), n_,
                span.count, request_.dtype, request_.op, request_.scale(n_));
}

void LocalRun::take_from(Rank peer, std::uint64_t c) {
  if (plan_.folds()) {
    if (plan_.pushes || !i_take_result_of(peer)) return;
    const Span span = chunk_of(plan_.folded(peer), plan_.chunk, c);
    if (span.count == 0) return;
    const std::byte* cell = peers_[static_cast<std::size_t>(peer)].window + cell_offset(c, peer);
    kernels::copy(request_.output_at(span.offset), cell, bytes_of(span.count), stores());
    return;
  }
  const Span whole = plan_.given(peer, plan_.rank);
  const Span span = chunk_of(whole, plan_.chunk, c);
  if (span.count == 0) return;
  std::byte* out = request_.output_at(plan_.taken_at(peer) + (span.offset - whole.offset));
  const std::byte* from = source(peer, span, c, out);
  if (from != nullptr && from != out) kernels::copy(out, from, bytes_of(span.count), stores());
}

void LocalRun::take(std::uint64_t c) {
  for (int k = 1; k < n_ && failure_.is_ok(); ++k) take_from((plan_.rank + k) % n_, c);
  if (plan_.folds() || !failure_.is_ok()) return;
  std::uint64_t at = 0;
  const Span whole = plan_.own(&at);
  const Span span = chunk_of(whole, plan_.chunk, c);
  if (span.count == 0) return;
  const std::byte* from = request_.input_at(span.offset);
  std::byte* out = request_.output_at(at + (span.offset - whole.offset));
  if (from != out) kernels::copy(out, from, bytes_of(span.count), stores());
}

}  // namespace pycomm::collectives

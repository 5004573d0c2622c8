#include "collectives/execution.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "base/check.h"
#include "collectives/local_agreement.h"
#include "collectives/schedule_run.h"

namespace pycomm::collectives {

Status timed_out(const std::vector<Rank>& late, std::int64_t timeout_ms) {
  std::string text = "waited for rank";
  if (late.size() > 1) text += "s";
  for (std::size_t i = 0; i < late.size(); ++i) {
    text += (i > 0 ? ", " : " ") + std::to_string(late[i]);
  }
  if (late.empty()) text = "went on";
  return Status::error(StatusCode::kTimeout,
                       text + " until the timeout of " + std::to_string(timeout_ms) + " ms",
                       late.empty() ? kNoRank : late.front());
}

Execution::Execution(GroupContext& group, const OpRequest& request, base::TimeNs now)
    : group_(group),
      request_(request),
      signature_(request.signature()),
      deadline_(base::deadline_after(now, request.timeout_ms)) {}

Execution::~Execution() = default;

bool Execution::advance(base::TimeNs now, With with) {
  bool moved = false;
  if (needs_links() && with == With::kMemoryOnly) return false;
  switch (stage_) {
    case Stage::kStart: moved = start(); break;
    case Stage::kFlat:
    case Stage::kAnnounced: moved = await_flat(); break;
    case Stage::kLocal: moved = advance_local(); break;
    case Stage::kPlanned:
      start_messages();
      moved = true;
      break;
    case Stage::kMessages:
      moved = run_->advance();
      if (!run_->failure().is_ok()) {
        abort(run_->failure());
      } else if (run_->is_done()) {
        finish(Status());
        moved = true;
      }
      break;
    case Stage::kFinished: return false;
  }
  if (!moved && now >= deadline_) {
    abort(timed_out(waits_for(), request_.timeout_ms));
    return true;
  }
  return moved;
}

bool Execution::start() {
  if (group_.flat == nullptr) {
    stage_ = Stage::kPlanned;
    return true;
  }
  if (is_flat(group_.shape, request_.kind, request_.bytes(), group_.world_size)) {
    publish_request(*group_.flat, request_, signature_);
    stage_ = Stage::kFlat;
  } else {
    announce();
    stage_ = Stage::kAnnounced;
  }
  if (group_.waker != nullptr) group_.waker->wake_peers();
  return true;
}

// Says what is coming, and where it lies.
void Execution::announce() {
  const Announcement mine =
      make_announcement(group_.local, group_.shape, request_, group_.rank, group_.world_size);
  std::vector<std::uint64_t> words(sizeof mine / sizeof(std::uint64_t));
  std::memcpy(words.data(), &mine, sizeof mine);
  if (request_.splits) {
    words.insert(words.end(), request_.splits->send.begin(), request_.splits->send.end());
    words.insert(words.end(), request_.splits->recv.begin(), request_.splits->recv.end());
  }
  group_.flat->publish(signature_, words.data(), words.size() * sizeof words[0]);
}

Rank Execution::missing_peer() {
  for (Rank p = 0; p < group_.world_size; ++p) {
    const std::atomic<std::uint64_t>* word = group_.flat->arrival_word(p);
    waiting_ = {word, word->load(std::memory_order_acquire)};
    if (waiting_.seen == group_.flat->sequence()) continue;
    if (!group_.has_departed(p) || group_.flat->has_arrived(p)) return p;
    is_lost(p);
    return p;
  }
  return kNoRank;
}

// Fails the operation if `peer` left the group; a death fails the group as a whole.
bool Execution::is_lost(Rank peer) {
  if (peer == kNoRank || !group_.has_departed(peer)) return false;
  if (stage_ == Stage::kLocal && local_->advance()) return true;  // its last word came before
  abort(Status::error(StatusCode::kPeerLost,
                      "rank " + std::to_string(peer) + " was lost: it left the group", peer));
  return true;
}

bool Execution::await_flat() {
  if (missing_peer() != kNoRank) return is_finished();
  if (stage_ == Stage::kFlat) {
    finish(collect_result(*group_.flat, request_, signature_, request_.op_number));
    return true;
  }
  if (Status status = after_announcement(); !status.is_ok()) {
    // After a difference of calls the group goes on; after anything else peers may be under way.
    if (status.code() == StatusCode::kInvalidUsage) {
      finish(std::move(status));
    } else {
      abort(status);
    }
  }
  return true;
}

Status Execution::after_announcement() {
  const int n = group_.world_size;
  PYCOMM_RETURN_IF_ERROR(compare_signatures(*group_.flat, signature_, request_.op_number));
  if (request_.splits) {
    read_splits();
    PYCOMM_RETURN_IF_ERROR(compare_splits());
  }
  std::vector<Announcement> announced(static_cast<std::size_t>(n));
  for (Rank p = 0; p < n; ++p) {
    std::memcpy(&announced[static_cast<std::size_t>(p)],
                group_.flat->payload(p, announcement_bytes()), sizeof(Announcement));
  }
  auto decision =
      decide(group_.local, group_.shape, request_, group_.rank, longest_split(), announced);
  if (!decision.is_ok()) return decision.status();
  if (!decision.value().plan) {
    stage_ = Stage::kPlanned;
    return Status();
  }
  local_.emplace(group_.local, request_, *decision.value().plan, std::move(decision.value().peers),
                 group_.scratch);
  stage_ = Stage::kLocal;
  if (group_.local.tuner && !decision.value().is_as_announced) {
    group_.local.tuner->refuse(what(decision.value().is_mapped),
                               static_cast<Way>(announced[0].way));
  }
  if (group_.local.tuner && decision.value().is_a_choice) {
    way_ = decision.value().way;
    is_mapped_ = decision.value().is_mapped;
    local_since_ = group_.local.clock->now_ns();
  }
  return Status();
}

bool Execution::advance_local() {
  const bool moved = local_->advance();
  if (local_->take_published() && group_.waker != nullptr) group_.waker->wake_peers();
  if (!local_->failure().is_ok()) {
    abort(local_->failure());
  } else if (local_->is_done()) {
    if (way_) note_time();
    finish(Status());
  } else if (!moved) {
    return is_lost(local_->waits_for());
  }
  return true;
}

Tuner::What Execution::what(bool is_mapped) const {
  const Sizes sizes = sizes_of(request_, group_.world_size);
  return {request_.kind, sizes.input + sizes.output, is_mapped};
}

void Execution::note_time() {
  group_.local.tuner->record(what(is_mapped_), *way_, group_.local.clock->now_ns() - local_since_);
}

std::uint64_t Execution::announcement_bytes() const {
  const auto n = static_cast<std::uint64_t>(group_.world_size);
  return sizeof(Announcement) + (request_.splits ? 2 * n * sizeof(std::uint64_t) : 0);
}

// Once: what is checked is what is used, whatever a peer does to its slot meanwhile.
void Execution::read_splits() {
  const auto n = static_cast<std::size_t>(group_.world_size);
  announced_splits_.resize(2 * n * n);
  for (std::size_t p = 0; p < n; ++p) {
    std::memcpy(
        &announced_splits_[2 * n * p],
        group_.flat->payload(static_cast<Rank>(p), announcement_bytes()) + sizeof(Announcement),
        2 * n * sizeof(std::uint64_t));
  }
}

// Elements that `from` announced for `to`, or `to` from `from`.
std::uint64_t Execution::announced_split(Rank from, Rank to, bool is_sent) const {
  const auto n = static_cast<std::size_t>(group_.world_size);
  const auto sender = static_cast<std::size_t>(from), taker = static_cast<std::size_t>(to);
  return announced_splits_[is_sent ? 2 * n * sender + taker : 2 * n * taker + n + sender];
}

std::uint64_t Execution::longest_split() const {
  std::uint64_t longest = 0;
  for (Rank from = 0; from < group_.world_size && request_.splits; ++from) {
    for (Rank to = 0; to < group_.world_size; ++to) {
      longest = std::max(longest, announced_split(from, to, true));
    }
  }
  return longest;
}

// What each rank sends must be what the other takes. All ranks look at all pairs, so that all come
// to the same end.
Status Execution::compare_splits() const {
  for (Rank from = 0; from < group_.world_size; ++from) {
    for (Rank to = 0; to < group_.world_size; ++to) {
      const std::uint64_t sent = announced_split(from, to, true);
      const std::uint64_t wanted = announced_split(from, to, false);
      if (sent == wanted && sent <= kCountMax) continue;
      return Status::error(StatusCode::kInvalidUsage,
                           "ranks disagree on operation " + std::to_string(request_.op_number) +
                               ", " + describe_signature(signature_) + ": rank " +
                               std::to_string(from) + " sends " + std::to_string(sent) +
                               " elements to rank " + std::to_string(to) + ", which expects " +
                               std::to_string(wanted),
                           from);
    }
  }
  return Status();
}

// What this rank gives itself, and what schedules expect in place (schedule.h).
void Execution::place_own_part() {
  const std::uint64_t part = request_.count;
  const std::uint64_t mine = static_cast<std::uint64_t>(group_.rank) * part;
  const bool is_root = request_.root == group_.rank;
  // In elements.
  const auto place = [&](std::uint64_t to, std::uint64_t from, std::uint64_t count) {
    if (count == 0 || request_.output_at(to) == request_.input_at(from)) return;
    std::memmove(request_.output_at(to), request_.input_at(from),
                 count * dtype_bytes(request_.dtype));
  };
  switch (request_.kind) {
    case OpKind::kAllReduce: place(0, 0, part); break;
    case OpKind::kBroadcast:
      if (is_root) place(0, 0, part);
      break;
    case OpKind::kAllGather: place(mine, 0, part); break;
    case OpKind::kGather:
      if (is_root) place(mine, 0, part);
      break;
    case OpKind::kScatter:
      if (is_root) place(0, mine, part);
      break;
    case OpKind::kAllToAll: place(mine, mine, part); break;
    case OpKind::kAllToAllUneven: {
      const auto before = [&](const std::vector<std::uint64_t>& counts) {
        return std::accumulate(counts.begin(), counts.begin() + group_.rank, std::uint64_t{0});
      };
      place(before(request_.splits->recv), before(request_.splits->send),
            request_.splits->send[static_cast<std::size_t>(group_.rank)]);
      break;
    }
    case OpKind::kReduce:
    case OpKind::kReduceScatter:
      if (group_.world_size == 1) place(0, 0, part);
      break;
    default: break;
  }
}

// Whether peers read nothing of what this rank gives itself: then they need not wait for the copy.
bool Execution::can_place_later() const {
  switch (request_.kind) {
    case OpKind::kGather:
    case OpKind::kScatter:
    case OpKind::kAllToAll:
    case OpKind::kAllToAllUneven: return true;
    case OpKind::kAllGather: return group_.shape.shares_memory;  // plan_direct_all_gather
    default: return false;
  }
}

void Execution::start_messages() {
  const bool places_later = can_place_later();
  if (!places_later) place_own_part();
  PlanRequest plan;
  plan.kind = request_.kind;
  plan.rank = group_.rank;
  plan.world_size = group_.world_size;
  plan.root = request_.root;
  plan.count = request_.kind == OpKind::kBarrier ? 0 : request_.count;
  plan.element_bytes = dtype_bytes(request_.dtype);
  plan.chunk_bytes = group_.chunk_bytes;
  plan.in_rank_order = folds_in_rank_order(group_.shape, request_.dtype);
  plan.splits = request_.splits.get();
  run_ = std::make_unique<ScheduleRun>(group_, request_, plan_over_messages(group_.shape, plan));
  stage_ = Stage::kMessages;
  if (!places_later) return;
  run_->advance();
  for (Link* link : group_.links) {
    if (link != nullptr) link->progress();  // what is announced leaves before the copy begins
  }
  place_own_part();
}

WaitingWord Execution::waiting_word() const {
  if (stage_ != Stage::kLocal) return waiting_;
  const Rank peer = local_->waits_for();
  if (peer == kNoRank) return {};
  return {local_->word_of(peer), local_->seen_position()};
}

std::vector<Rank> Execution::waits_for() const {
  if (stage_ == Stage::kMessages) return run_->waits_for();
  std::vector<Rank> ranks;
  if (stage_ == Stage::kLocal && local_->waits_for() != kNoRank) ranks = {local_->waits_for()};
  if (stage_ == Stage::kFlat || stage_ == Stage::kAnnounced) {
    for (Rank p = 0; p < group_.world_size; ++p) {
      if (!group_.flat->has_arrived(p)) ranks.push_back(p);
    }
  }
  return ranks;
}

void Execution::abort(const Status& status) {
  if (is_finished()) return;
  if (stage_ == Stage::kAnnounced || local_) {
    // What peers read here from now on is void; what they may write stays until their links are
    // gone.
    group_.local.mine->is_withdrawn.store(1, std::memory_order_seq_cst);
    if (!local_ || local_->is_exposed()) group_.quarantine.push_back(request_.keepalive);
  }
  finish(status);
}

void Execution::finish(Status status) {
  if (run_) run_->cancel();
  const bool used_links = run_ != nullptr;
  run_.reset();
  if (used_links) {
    for (Link* link : group_.links) {
      if (link != nullptr) link->retire(group_.group, request_.op_number + 1);
    }
  }
  status_ = std::move(status);
  stage_ = Stage::kFinished;
}

}  // namespace pycomm::collectives

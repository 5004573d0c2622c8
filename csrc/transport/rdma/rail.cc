#include "transport/rdma/rail.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "base/check.h"
#include "platform/system.h"

namespace pycomm::transport::rdma {
namespace {

using platform::verbs::Completion;
using platform::verbs::SendRequest;

constexpr std::uint64_t kSignalEvery = 16;
// Left free for the marker of a break and for credits.
constexpr std::uint32_t kReservedSends = 8;
constexpr base::TimeNs kDrainNs = 2'000'000'000;
constexpr std::uint64_t kPieceBytesMax = 4 * 1024 * 1024;

}  // namespace

Result<std::unique_ptr<Rail>> Rail::open(const std::shared_ptr<platform::verbs::Port>& port,
                                         const std::shared_ptr<RegistrationBudget>& budget,
                                         platform::MemoryMonitor* monitor, const Limits& limits) {
  std::unique_ptr<Rail> rail(new Rail(limits));
  PYCOMM_RETURN_IF_ERROR(rail->prepare(port, budget, monitor));
  return rail;
}

Status Rail::prepare(const std::shared_ptr<platform::verbs::Port>& port,
                     const std::shared_ptr<RegistrationBudget>& budget,
                     platform::MemoryMonitor* monitor) {
  // One receive more than there are credits: a break always finds one to flush.
  const std::uint32_t num_receives = limits_.num_cells + 1;
  // Twice what one pair can have under way: those of the pair before may not be polled yet.
  auto domain = port->create_domain(static_cast<int>(2 * (limits_.num_sends + num_receives)));
  if (!domain.is_ok()) return domain.status();
  domain_ = std::move(domain).value();
  registrations_ = std::make_unique<Registrations>(*domain_, budget, monitor);
  words_ = std::make_unique<Words>();
  const std::size_t cells = (num_receives + limits_.num_cells) * std::size_t{limits_.cell_bytes};
  block_.resize(cells + sizeof(std::uint64_t) * limits_.num_sends);
  receive_cells_ = block_.data();
  send_cells_ = receive_cells_ + num_receives * std::size_t{limits_.cell_bytes};
  budget_ = budget;
  if (!budget_->take(block_.size())) {
    budget_ = nullptr;
    return Status::error(StatusCode::kSystem, "too little memory may be locked (ulimit -l)");
  }
  using namespace platform::verbs;
  auto credit = domain_->register_memory(words_.get(), sizeof *words_, kLocalWrite | kRemoteWrite);
  if (!credit.is_ok()) return credit.status();
  credit_memory_ = std::move(credit).value();
  auto block = domain_->register_memory(block_.data(), block_.size(), kLocalWrite);
  if (!block.is_ok()) return block.status();
  block_memory_ = std::move(block).value();
  return Status();
}

// ---------------------------------------------------------------- generations

Status Rail::begin(std::uint32_t number) {
  auto pair = domain_->create_pair({limits_.num_sends, limits_.num_cells + 1});
  if (!pair.is_ok()) return pair.status();
  pair_ = std::move(pair).value();
  pair_number_ = pair_->address().number;
  generation = number;
  received = peer_received = 0;
  heard_ready = heard_probe = heard_down = sent_down = sent_probe_arrived = false;
  is_connected_ = must_break = false;
  bytes_under_way = 0;
  num_sent_counted_ = credits_told_ = 0;
  std::atomic_ref(words_->credits).store(0);
  posted_.clear();
  num_signalled_ = 0;
  backlog_.clear();
  free_cells_.clear();
  for (std::uint32_t i = 0; i < limits_.num_cells; ++i) free_cells_.push_back(static_cast<int>(i));
  for (std::uint32_t i = 0; i <= limits_.num_cells; ++i) {
    PYCOMM_RETURN_IF_ERROR(post_receive(i));
  }
  return Status();
}

Status Rail::connect(const RdmaOptions& options, bool in_thread) {
  attempt_ = std::make_shared<Attempt>();
  if (!in_thread || !pair_->may_block()) {
    attempt_->status = pair_->connect(theirs, options);
    attempt_->is_over = true;
    return Status();
  }
  // The pair goes before its domain, whichever of us lets go of them last.
  auto work = [attempt = attempt_, domain = domain_, pair = pair_, address = theirs,
               options]() mutable {
    platform::block_signals_in_this_thread();
    attempt->status = pair->connect(address, options);
    pair.reset();
    domain.reset();
    attempt->is_over = true;
  };
  return platform::run_detached(std::move(work));
}

bool Rail::has_connected(Status* status) {
  if (!attempt_ || !attempt_->is_over.load()) return false;
  *status = attempt_->status;
  is_connected_ = status->is_ok();
  attempt_.reset();
  return true;
}

Status Rail::break_off() {
  if (!std::exchange(is_connected_, false)) return Status();
  pair_->break_off();
  // Both queues end with something that comes back flushed; what is before that has happened.
  SendRequest marker;
  marker.id = next_id_++;
  marker.is_signalled = true;
  bool sends_drained = !pair_->post_send(marker).is_ok();
  bool receives_drained = false;
  const base::TimeNs deadline = platform::real_clock().now_ns() + kDrainNs;
  while (!sends_drained || !receives_drained) {
    Completion done[16];
    const int n = domain_->poll(done, 16);
    for (int i = 0; i < n; ++i) {
      if (!is_pair(done[i].pair)) continue;
      sends_drained |= done[i].id == marker.id;
      receives_drained |= done[i].status != 0 && (done[i].id & kReceiveBit) != 0;
      if (done[i].status != platform::verbs::kStatusFlushed) backlog_.push_back(done[i]);
    }
    if (n < 0) return Status::error(StatusCode::kSystem, "the completion queue is lost");
    if (n == 0 && platform::real_clock().now_ns() > deadline) {
      return Status::error(StatusCode::kSystem,
                           domain_->port().name() + " does not let go of what is posted on it");
    }
  }
  return Status();
}

std::uint64_t Rail::num_counted_before() const {
  const auto is_counted = [](const Posted& entry) { return entry.is_counted; };
  return num_sent_counted_ -
         static_cast<std::uint64_t>(std::count_if(posted_.begin(), posted_.end(), is_counted));
}

std::deque<Rail::Posted> Rail::take_posted() {
  num_signalled_ = 0;
  return std::exchange(posted_, {});
}

void Rail::end() {
  attempt_.reset();
  pair_.reset();
}

// ---------------------------------------------------------------- sending

bool Rail::can_send(bool is_counted) const {
  if (posted_.size() + kReservedSends > limits_.num_sends) return false;
  if (!is_counted) return true;
  const std::uint64_t given_back = std::atomic_ref(words_->credits).load(std::memory_order_acquire);
  return num_sent_counted_ - given_back < limits_.num_cells;
}

Status Rail::post(SendRequest& request, Posted entry) {
  entry.id = request.id = next_id_++;
  request.is_signalled |= entry.id % kSignalEvery == 0;
  entry.is_signalled = request.is_signalled;
  if (entry.is_counted) ++num_sent_counted_;
  if (entry.is_signalled) ++num_signalled_;
  Status status = pair_->post_send(request);
  // What could not be posted counts as under way all the same: the rail breaks, and it is sent
  // again.
  posted_.push_back(std::move(entry));
  return status;
}

Status Rail::send_cell(std::uint32_t bytes, bool is_signalled, bool is_goodbye, bool is_probe) {
  Posted entry;
  entry.is_counted = true;
  entry.cell = free_cells_.back();
  free_cells_.pop_back();
  entry.bytes = bytes;
  entry.is_goodbye = is_goodbye;
  entry.is_probe = is_probe;
  SendRequest request;
  request.kind = SendRequest::Kind::kSend;
  request.is_signalled = is_signalled;
  request.is_inline = bytes <= pair_->inline_bytes_max();
  request.data = cell(entry.cell);
  request.bytes = bytes;
  request.local_key = block_memory_->local_key();
  return post(request, std::move(entry));
}

Status Rail::send_piece(const std::shared_ptr<Job>& job, std::size_t rail, std::uint64_t piece_max,
                        LinkCounters* counters) {
  using Kind = Job::Kind;
  Transfer& transfer = *job->transfer;
  Job::Piece piece{job->next, std::min({transfer.bytes - job->next, piece_max, kPieceBytesMax})};
  if (!job->again.empty()) piece = job->again.front();
  bool is_staged = job->kind == Kind::kFetchAdd;
  if (!is_staged && !job->registered[rail] && transfer.bytes > 0) {
    const unsigned access = job->kind == Kind::kRead ? platform::verbs::kLocalWrite : 0u;
    auto memory = registrations_->acquire(transfer.data, transfer.bytes, access);
    if (memory.is_ok()) job->registered[rail] = std::move(memory).value();
  }
  is_staged |= !job->registered[rail];
  Posted entry;
  entry.is_counted = job->kind == Kind::kGranted;
  SendRequest request;
  request.kind = job->kind == Kind::kGranted ? SendRequest::Kind::kWriteWithImmediate
                 : job->kind == Kind::kWrite ? SendRequest::Kind::kWrite
                 : job->kind == Kind::kRead  ? SendRequest::Kind::kRead
                                             : SendRequest::Kind::kFetchAdd;
  request.data = transfer.data + piece.offset;
  if (is_staged) {
    PYCOMM_CHECK(!free_cells_.empty());
    piece.bytes = std::min<std::uint64_t>(piece.bytes, limits_.cell_bytes);
    entry.cell = free_cells_.back();
    free_cells_.pop_back();
    if (job->kind == Kind::kGranted || job->kind == Kind::kWrite) {
      if (piece.bytes > 0) std::memcpy(cell(entry.cell), transfer.data + piece.offset, piece.bytes);
      counters->bytes_staged += piece.bytes;
    }
    request.data = cell(entry.cell);
    request.local_key = block_memory_->local_key();
  } else {
    request.local_key = job->registered[rail]->local_key();
    counters->bytes_direct += piece.bytes;
  }
  if (job->again.empty()) {
    job->next += piece.bytes;
  } else if (piece.bytes == job->again.front().bytes) {
    job->again.pop_front();
  } else {
    job->again.front().offset += piece.bytes;
    job->again.front().bytes -= piece.bytes;
  }
  job->bytes_under_way += piece.bytes;
  entry.bytes = static_cast<std::uint32_t>(piece.bytes);
  entry.offset = piece.offset;
  entry.job = job;
  // Pieces of one job may be on several rails: each has to say that it is done.
  request.is_signalled = true;
  request.bytes = entry.bytes;
  request.immediate = job->grant.token;
  request.remote_address = job->grant.address + piece.offset;
  request.remote_key = job->grant.keys[rail];
  request.add = job->add;
  return post(request, std::move(entry));
}

// Told by a write: it takes no receive, so it can always be told.
void Rail::give_credits_back() {
  if (received - credits_told_ < limits_.num_cells / 4) return;
  if (posted_.size() + 2 > limits_.num_sends) return;
  credits_told_ = received;
  std::byte* source = send_cells_ + std::size_t{limits_.num_cells} * limits_.cell_bytes +
                      next_id_ % limits_.num_sends * sizeof(std::uint64_t);
  std::memcpy(source, &received, sizeof received);
  SendRequest request;
  request.kind = SendRequest::Kind::kWrite;
  request.is_inline = pair_->inline_bytes_max() >= sizeof received;
  request.data = source;
  request.bytes = sizeof received;
  request.local_key = block_memory_->local_key();
  request.remote_key = their_credit_key;
  request.remote_address = their_credit_address;
  if (const Status status = post(request, Posted{}); !status.is_ok()) break_for(status);
}

void Rail::release(const Posted& entry) {
  if (entry.cell >= 0) free_cells_.push_back(entry.cell);
}

// ---------------------------------------------------------------- completions

Status Rail::post_receive(std::uint32_t index) {
  return pair_->post_receive(kReceiveBit | index,
                             receive_cells_ + std::size_t{index} * limits_.cell_bytes,
                             limits_.cell_bytes, block_memory_->local_key());
}

int Rail::poll(Completion* out, int count) {
  int n = 0;
  while (n < count && !backlog_.empty()) {
    out[n++] = backlog_.front();
    backlog_.pop_front();
  }
  if (n > 0 || state == State::kBroken || !pair_) return n;
  const int polled = domain_->poll(out, count);
  if (polled < 0) return polled;
  // Of an earlier pair nothing counts any more.
  return static_cast<int>(
      std::remove_if(out, out + polled, [&](const Completion& c) { return !is_pair(c.pair); }) -
      out);
}

Status Rail::recycle(const Completion& completion) {
  if (state == State::kBroken) return Status();
  return post_receive(static_cast<std::uint32_t>(completion.id & ~kReceiveBit));
}

}  // namespace pycomm::transport::rdma

// One path of an RDMA link: a reliable connection between a port here and a port there, with the
// cells that its messages lie in, credits, and a record of everything that is under way.
//
// Two-sided messages (a cell, or a write with immediate data) take a receive there, so each needs a
// credit: the receiver tells by a small write how many receives it has given back in all. They
// are counted at both ends; since a connection keeps their order, the number that had arrived says
// of each, after a break, whether it did. That is what makes recovery exact.
//
// A rail lives for as long as the link; its queue pair only for one generation.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "platform/verbs.h"
#include "transport/message_core.h"
#include "transport/rdma/registrations.h"

namespace pycomm::transport::rdma {

inline constexpr std::size_t kRailsMax = kGrantKeysMax;
// In the number of a receive. Of a request that failed a completion says nothing but its number.
inline constexpr std::uint64_t kReceiveBit = std::uint64_t{1} << 63;

// Work on the peer's memory, in pieces.
struct Job {
  enum class Kind : std::uint8_t { kGranted, kWrite, kRead, kFetchAdd };
  struct Piece {
    std::uint64_t offset;
    std::uint64_t bytes;
  };
  Kind kind = Kind::kGranted;
  Transfer* transfer = nullptr;  // null once it was cancelled
  Grant grant;                   // address, keys by rail; the token of a kGranted
  std::uint64_t add = 0;
  std::uint64_t next = 0;   // not yet posted from here on
  std::deque<Piece> again;  // posted, but lost with its rail
  std::uint64_t bytes_under_way = 0;
  bool is_unwanted = false;  // the receiver has taken its grant back
  std::shared_ptr<Registered> registered[kRailsMax];

  bool has_piece() const {
    return transfer != nullptr && !is_unwanted && (!again.empty() || next < transfer->bytes);
  }
  bool is_complete() const { return transfer != nullptr && bytes_under_way == 0 && !has_piece(); }
};

class Rail {
 public:
  enum class State : std::uint8_t {
    kIdle,        // no pair; again at retry_at
    kOffered,     // the peer knows of this end
    kConnecting,  // another thread finds the way
    kConnected,   // takes packets; waits for the peer to say the same
    kProbing,     // a message has been sent each way
    kUp,
    kBroken,  // takes nothing more; waits to hear what arrived there
  };
  struct Posted {
    std::uint64_t id = 0;
    bool is_counted = false;
    bool is_signalled = false;
    int cell = -1;            // taken until it is done
    std::uint32_t bytes = 0;  // of the cell, or of the piece
    std::uint64_t offset = 0;
    std::shared_ptr<Job> job;
    bool is_goodbye = false;
    bool is_probe = false;
  };
  struct Limits {
    std::uint32_t cell_bytes = 4096 + 128;
    std::uint32_t num_cells = 64;   // to send from, and to receive into
    std::uint32_t num_sends = 128;  // work requests under way
  };

  // Errors: kSystem, naming the verbs call.
  static Result<std::unique_ptr<Rail>> open(const std::shared_ptr<platform::verbs::Port>& port,
                                            const std::shared_ptr<RegistrationBudget>& budget,
                                            platform::MemoryMonitor* monitor, const Limits& limits);

  ~Rail() {
    if (budget_) budget_->give_back(block_.size());
  }

  // --- one generation after the other
  // A fresh pair with its receives posted.
  Status begin(std::uint32_t generation);
  // `in_thread`: what may take seconds is done by another; has_connected() tells.
  Status connect(const RdmaOptions& options, bool in_thread);
  // Errors: what connecting says.
  bool has_connected(Status* status);
  // When it returns nothing arrives any more and nothing leaves; what had arrived, or failed, is
  // still to be polled. Errors: kSystem if the NIC does not let go of the memory.
  Status break_off();
  // After break_off() and polling: what was under way, in the order of posting.
  std::deque<Posted> take_posted();
  void end();  // without a pair

  platform::verbs::PairAddress address() const { return pair_->address(); }
  std::uint64_t credit_address() const { return reinterpret_cast<std::uint64_t>(&words_->credits); }
  std::uint32_t credit_key() const { return credit_memory_->remote_key(); }

  // --- sending
  bool can_send(bool is_counted) const;
  bool has_cell() const { return !free_cells_.empty(); }
  std::byte* free_cell() { return cell(free_cells_.back()); }
  // Sends the first `bytes` of free_cell().
  Status send_cell(std::uint32_t bytes, bool is_signalled, bool is_goodbye, bool is_probe);
  // The next piece of a job, straight from or into its memory, or, if that cannot be registered,
  // through a cell. `rail` is this rail's number.
  Status send_piece(const std::shared_ptr<Job>& job, std::size_t rail, std::uint64_t piece_max,
                    LinkCounters* counters);
  void give_credits_back();

  // --- completions
  // Those of before the break first.
  int poll(platform::verbs::Completion* out, int count);
  bool has_backlog() const { return !backlog_.empty(); }
  std::byte* received_cell(const platform::verbs::Completion& completion) {
    return receive_cells_ + (completion.id & ~kReceiveBit) * limits_.cell_bytes;
  }
  // The receive may be used again.
  Status recycle(const platform::verbs::Completion& completion);
  // The send `id` and all before it have succeeded.
  template <class Done>
  void complete_sends(std::uint64_t id, Done done) {
    while (!posted_.empty() && posted_.front().id <= id) {
      Posted entry = std::move(posted_.front());
      posted_.pop_front();
      num_signalled_ -= entry.is_signalled ? 1 : 0;
      release(entry);
      done(entry);
    }
  }
  // The value that a fetch_add or a staged read brought, while its entry is being completed.
  const std::byte* landed(const Posted& entry) { return cell(entry.cell); }

  const platform::verbs::PortInfo& port() const { return domain_->port(); }
  platform::verbs::Domain& domain() { return *domain_; }
  Registrations& registrations() { return *registrations_; }
  const Registrations& registrations() const { return *registrations_; }
  const std::deque<Posted>& posted() const { return posted_; }
  // Of what is under way, how much will say when it is done.
  std::size_t num_signalled() const { return num_signalled_; }
  // How many counted messages were sent before those in posted().
  std::uint64_t num_counted_before() const;
  bool is_pair(std::uint32_t number) const { return pair_ && pair_number_ == number; }

  // --- for the link
  State state = State::kIdle;
  std::uint32_t generation = 0;
  bool heard_up = false, heard_ready = false, heard_probe = false, heard_down = false;
  bool sent_down = false, sent_probe_arrived = false;
  std::uint64_t received = 0;       // counted messages, this generation
  std::uint64_t peer_received = 0;  // of a kDown
  platform::verbs::PairAddress theirs;
  std::uint64_t their_credit_address = 0;
  std::uint32_t their_credit_key = 0;
  base::TimeNs retry_at = 0;
  base::TimeNs settle_by = base::kNever;  // of a state that waits for the peer
  base::TimeNs moved_at = 0;              // the last completion, or when there was none to come
  int num_failures = 0;                   // in a row
  int last_status = 0;                    // verbs status that broke it last
  std::string last_error;
  std::string cause;  // what broke it when it was up
  std::uint64_t num_resets = 0;
  std::uint64_t bytes_under_way = 0;  // of jobs
  bool must_break = false;            // a call on it failed
  void break_for(const Status& status) {
    must_break = true;
    last_error = status.message();
  }

 private:
  struct Words {
    alignas(64) std::uint64_t credits;  // the peer writes how many it has given back
  };

  Rail(const Limits& limits) : limits_(limits) {}
  Status prepare(const std::shared_ptr<platform::verbs::Port>& port,
                 const std::shared_ptr<RegistrationBudget>& budget,
                 platform::MemoryMonitor* monitor);
  std::byte* cell(int index) {
    return send_cells_ + static_cast<std::size_t>(index) * limits_.cell_bytes;
  }
  Status post_receive(std::uint32_t index);
  Status post(platform::verbs::SendRequest& request, Posted entry);
  void release(const Posted& entry);

  const Limits limits_;
  // Of a thread that connects; it keeps the pair and its domain for as long as it needs them.
  struct Attempt {
    std::atomic<bool> is_over{false};
    Status status;
  };

  std::shared_ptr<platform::verbs::Domain> domain_;
  std::unique_ptr<Registrations> registrations_;
  std::unique_ptr<Words> words_;
  std::vector<std::byte> block_;  // receive cells, send cells, the credit that is sent
  std::byte* receive_cells_ = nullptr;
  std::byte* send_cells_ = nullptr;
  std::unique_ptr<platform::verbs::Memory> credit_memory_;
  std::unique_ptr<platform::verbs::Memory> block_memory_;
  std::shared_ptr<RegistrationBudget> budget_;
  std::shared_ptr<platform::verbs::Pair> pair_;
  std::uint32_t pair_number_ = 0;
  std::shared_ptr<Attempt> attempt_;
  std::vector<int> free_cells_;
  std::deque<Posted> posted_;
  std::size_t num_signalled_ = 0;
  bool is_connected_ = false;
  std::uint64_t next_id_ = 1;
  std::uint64_t num_sent_counted_ = 0;
  std::uint64_t credits_told_ = 0;
  std::deque<platform::verbs::Completion> backlog_;
};

}  // namespace pycomm::transport::rdma

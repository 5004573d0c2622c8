// The message layer of a link, without I/O or clock: frames in, frames out. Every transport drives
// one; what differs is how frames travel, and whether the receiver can pull (read the sender's
// memory itself).
//
// Protocol. A small message goes at once, as long as the receiver's window lasts; the receiver
// gives window back as it consumes. Above eager_bytes_max, or without window:
//   push: the receiver's post sends kClear, and the sender answers with kData.
//         Where the receiver can grant its memory (GrantPort), kClear carries the grant and the
//         driver writes there itself; what has arrived it reports as kData.
//   pull: the sender announces an address with kRequest; the receiver reads and says kPulled.
// A message that found no window announces itself by kRequest, so that a post knows to clear it:
// one group that runs ahead cannot starve another.
//
// Invariant: a transfer is in exactly one of posts_, sends_, writes_, fetches_ or the outgoing
// queue while pending; finish() removes it everywhere. Thread: the owner's; no lock inside.
#pragma once

#include <array>
#include <deque>
#include <functional>
#include <unordered_map>
#include <vector>

#include "base/hash.h"
#include "pycomm/transport.h"
#include "transport/frame.h"

namespace pycomm::transport {

struct CoreOptions {
  std::uint64_t eager_bytes_max = 8 * 1024;
  std::uint64_t eager_window_bytes = 512 * 1024;
  std::uint64_t fragment_bytes_max = std::uint64_t{1} << 30;  // of one kData payload
  bool pulls = false;       // this side can read the peer's memory
  bool peer_pulls = false;  // the peer can read this side's memory
};

// Reads the peer's memory, and announces memory that the peer may read, revocably.
class PullPort {
 public:
  virtual ~PullPort() = default;
  // A slot for one announcement, or false if none is free or the memory is better sent. revoke()
  // or a kPulled frees it.
  virtual bool announce(const std::byte* data, std::uint64_t bytes, std::uint32_t* slot) = 0;
  virtual void revoke(std::uint32_t slot) = 0;
  // Copies from the peer; fails if the announcement was revoked meanwhile.
  virtual Status pull(std::uint32_t slot, std::uint64_t address, std::byte* out,
                      std::uint64_t bytes) = 0;
};

// What the receiver of a message lets its sender write into: an address there, the receiver's own
// name for the grant, and a key for each path between the two.
inline constexpr std::size_t kGrantKeysMax = 4;
struct Grant {
  std::uint64_t address = 0;
  std::uint32_t token = 0;  // 0: no grant
  std::array<std::uint32_t, kGrantKeysMax> keys{};
};

// Lets the peer write this side's memory.
class GrantPort {
 public:
  virtual ~GrantPort() = default;
  // Lets the peer write the memory of a posted transfer. Returns a token, or 0 if it cannot be:
  // then the bytes come inside frames.
  virtual std::uint32_t grant(Transfer& transfer) = 0;
  // The transfer is over. If it is not complete, the peer can write no more when this returns.
  virtual void end_grant(std::uint32_t token, bool is_complete) = 0;
};

// A peer's word that a group it shares with us is over, and whose fault it was; with kOk, that it
// has left the group and nothing for it follows. It travels before a goodbye, so that nobody takes
// a survivor that leaves for the cause.
struct GroupNotice {
  std::uint64_t group = 0;
  StatusCode code = StatusCode::kAborted;
  Rank rank = kNoRank;
};

// Where a peer stands: told after it has waited for some time, or concluded from a message for an
// operation that ended here without it. So ranks that are in different operations find out.
struct Whereabouts {
  std::uint64_t group = 0;
  std::uint64_t op = 0;
  Signature signature = 0;
};

class MessageCore final : public RemoteMemory {
 public:
  // What one unexpected message costs beside its bytes, so that empty ones are bounded too.
  static constexpr std::uint64_t kOverheadBytes = 128;
  // Announcements and clearances that may wait for their other half: far above any schedule's need.
  static constexpr std::size_t kPendingMax = 1 << 17;
  // Groups that ended, remembered so that their late frames are dropped.
  static constexpr std::size_t kDeadGroupsMax = 1024;

  MessageCore(const CoreOptions& options, PullPort* pull_port, GrantPort* grant_port = nullptr);

  void post(Transfer& transfer);
  void send(Transfer& transfer);
  void cancel(Transfer& transfer);
  bool is_offered(const TransferId& id) const;
  void retire(std::uint64_t group, std::uint64_t op);

  // --- outgoing: take front(), put it on the wire in whole, then pop().
  struct OutFrame {
    FrameHeader header;
    const std::byte* payload = nullptr;
    Transfer* transfer = nullptr;  // advanced by pop()
    std::vector<std::byte> owned;  // payload's home if the transfer was cancelled meanwhile
    bool started = false;          // set by the driver once a byte of it has left
  };
  OutFrame* front() { return outgoing_.empty() ? nullptr : &outgoing_.front(); }
  OutFrame* at(std::size_t i) { return i < outgoing_.size() ? &outgoing_[i] : nullptr; }
  void pop();

  // --- outgoing by writes into what the peer has granted: take the next, and say how it ended.
  struct OutWrite {
    Transfer* transfer;
    Grant grant;
  };
  bool next_write(OutWrite* out);
  void finish_write(Transfer& transfer, Status status);
  // The receiver has taken a grant back: what waits to be written there counts as sent.
  void forget_grant(std::uint32_t token);
  bool has_write_due() const { return !due_writes_.empty(); }

  // --- incoming: begin() each header, put its payload where payload_target() says (asked anew
  // after each pause; null: throw it away), then end(). A status that is not ok breaks the link.
  // `grant` came with a kClear.
  Status begin(const FrameHeader& header, const Grant& grant = {});
  std::byte* payload_target() const { return incoming_.target; }
  Status end();

  // Fails everything pending, and all that is offered later.
  void fail(const Status& status);
  const Status& failure() const { return failure_; }
  void queue_goodbye();
  bool peer_departed() const { return departed_; }
  void send_notice(const GroupNotice& notice);
  std::vector<GroupNotice> take_notices() { return std::exchange(notices_, {}); }
  void send_whereabouts(const Whereabouts& mine);
  std::vector<Whereabouts> take_whereabouts() { return std::exchange(whereabouts_, {}); }
  bool is_idle() const { return outgoing_.empty() && due_writes_.empty(); }
  // Reads the next announced message that is wanted here, all of it; false if there is none. Not
  // done where it is noticed: what this side has to announce itself goes first.
  bool pull_next();

  LinkCounters& counters() { return counters_; }
  const LinkCounters& counters() const { return counters_; }

  // --- RemoteMemory, emulated by the receiving side's engine.
  bool can_write() const override { return true; }
  bool can_fetch_add() const override { return true; }
  Status expose(std::uint64_t region, std::byte* data, std::uint64_t bytes,
                RegionKind kind) override;
  void withdraw(std::uint64_t region) override;
  std::byte* map(std::uint64_t, std::uint64_t) override { return nullptr; }
  void read(Transfer& transfer, std::uint64_t region, std::uint64_t offset) override;
  void write(Transfer& transfer, std::uint64_t region, std::uint64_t offset) override;
  void fetch_add(Transfer& transfer, std::uint64_t region, std::uint64_t offset,
                 std::uint64_t delta) override;

 private:
  struct Unexpected {
    FrameHeader header;
    std::vector<std::byte> bytes;  // of an eager message
    bool complete = false;         // all bytes are here
    Transfer* claimed = nullptr;   // posted while the bytes were still coming
  };
  struct Incoming {
    FrameHeader header;
    std::byte* target = nullptr;
    Transfer* transfer = nullptr;
    bool to_unexpected = false;
  };
  struct Region {
    std::byte* data;
    std::uint64_t bytes;
  };
  using Map = std::unordered_map<TransferId, Transfer*, base::TransferIdHash>;

  void finish(Transfer& transfer, Status status);
  bool is_retired(const TransferId& id) const;
  void emit(FrameKind kind, const TransferId& id, std::uint64_t argument, std::uint32_t key = 0);
  void emit_clear(Transfer& transfer);
  void emit_payload(FrameKind kind, Transfer& transfer, std::uint64_t offset, std::uint64_t bytes);
  void emit_data(Transfer& transfer);
  void start_data(Transfer& transfer, const FrameHeader& clear, const Grant& grant);
  void give_window_back(std::uint64_t bytes);
  bool matches(Transfer& transfer, const FrameHeader& header);
  void accept_request(Transfer& transfer, const FrameHeader& header);
  void pull(Transfer& transfer, const FrameHeader& header);
  Status begin_eager(const FrameHeader& header);
  Status begin_data(const FrameHeader& header);
  Status begin_write(const FrameHeader& header);
  Status on_request(const FrameHeader& header);
  Status on_clear(const FrameHeader& header, const Grant& grant);
  void on_pulled(const FrameHeader& header);
  void on_fetch_add(const FrameHeader& header);
  void on_fetch_reply(const FrameHeader& header);
  void on_goodbye();
  void on_group_failed(const FrameHeader& header);
  void note_whereabouts(const FrameHeader& header);
  void end_eager();
  Region* region_at(std::uint64_t region, std::uint64_t offset, std::uint64_t bytes);

  const CoreOptions options_;
  PullPort* const pull_port_;
  GrantPort* const grant_port_;
  std::uint64_t window_;            // eager bytes that the peer still takes
  std::uint64_t window_owed_ = 0;   // consumed here, not yet given back
  std::uint64_t window_taken_ = 0;  // of ours, by the peer's eager messages so far

  std::deque<OutFrame> outgoing_;
  Incoming incoming_;
  Map posts_;
  Map sends_;    // announced, or waiting for kClear
  Map writes_;   // the driver writes them into the peer's memory
  Map fetches_;  // waiting for kFetchReply
  std::unordered_map<TransferId, Unexpected, base::TransferIdHash> unexpected_;
  struct EarlyClear {
    FrameHeader header;
    Grant grant;
  };
  std::unordered_map<TransferId, EarlyClear, base::TransferIdHash> early_clears_;
  std::unordered_map<std::uint64_t, std::uint64_t> retired_below_;  // by group
  std::deque<std::uint64_t> dead_groups_;                           // bounds retired_below_
  std::unordered_map<std::uint64_t, Region> regions_;

  Status failure_;
  bool departed_ = false;
  bool said_goodbye_ = false;
  std::deque<FrameHeader> due_;  // of posts that can be pulled
  std::deque<std::pair<TransferId, Grant>> due_writes_;
  std::vector<GroupNotice> notices_;
  std::vector<Whereabouts> whereabouts_;
  LinkCounters counters_;
};

// What the peer's header says against what this side posted; for error texts.
std::string describe_mismatch(const Transfer& mine, Signature theirs, std::uint64_t their_bytes);

}  // namespace pycomm::transport

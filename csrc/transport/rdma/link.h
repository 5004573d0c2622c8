// A link over rails. Small messages and announcements travel in cells over one rail, in order; what
// a receiver has granted is written by the NIC over all of them. When a rail breaks, the two ends
// tell each other over the stream beside it how much had arrived, and exactly the rest is sent
// again. Taking a grant back uses the same way: the pairs are broken, which is the one thing that
// certainly ends a peer's access, and begun anew.
//
// link.cc sends, link_receive.cc receives, link_rails.cc brings rails up and down, link_stream.cc
// hears and says what both ends know of them, link_memory.cc has grants and regions.
#pragma once

#include <map>
#include <unordered_map>

#include "platform/poller.h"
#include "transport/rdma/control.h"
#include "transport/rdma/factory.h"
#include "transport/rdma/rail.h"

namespace pycomm::transport::rdma {

// In front of every message in a cell.
struct CellHeader {
  enum class Kind : std::uint8_t { kFrame = 1, kProbe, kRegion, kRegionGone };
  std::uint8_t kind = 0;
  std::uint8_t reserved[3] = {};
  std::uint32_t token = 0;    // of a kClear with a grant
  std::uint64_t address = 0;  // of the grant, or of the region
  std::uint32_t keys[kRailsMax] = {};
};
static_assert(sizeof(CellHeader) == 32);
inline constexpr std::uint32_t kCellOverhead = sizeof(CellHeader) + sizeof(FrameHeader);
inline constexpr std::uint64_t kCellPayloadMax = 4096;
// For what was sent before the stream's end.
inline constexpr base::TimeNs kAfterStreamNs = 20'000'000;
// Why a rail broke that the other end has reset on purpose, or for a reason it keeps to itself.
inline constexpr const char* kPeerReset = "the peer's end was reset";

class RdmaLink final : public CoreLink, private GrantPort, private RemoteMemory {
 public:
  RdmaLink(std::unique_ptr<platform::ByteStream> stream, const Place& place,
           const LinkOptions& options, platform::Poller poller, base::TimeNs now);
  ~RdmaLink() override;

  const char* transport() const override { return "rdma"; }
  int fd() const override { return poller_.fd(); }
  std::vector<int> fds() const override;
  void on_ready() override;
  void arm() override;
  base::TimeNs next_deadline() const override;
  bool progress() override;
  void cancel(Transfer& transfer) override;
  void fail(const Status& status) override;
  RemoteMemory* remote_memory() override { return this; }
  bool is_flushed() const override;
  void end_writing() override { stream_->end_writing(); }
  bool awaits_peers_end() const override { return true; }

  Establishment establishment() const { return establishment_; }
  std::unique_ptr<platform::ByteStream> take_stream(std::string* reason);
  RdmaStats stats() const;

 private:
  struct Granted {
    Transfer* transfer;
    std::shared_ptr<Registered> registered[kRailsMax];
  };
  struct Exposed {
    std::byte* data;
    std::uint64_t bytes;
    std::shared_ptr<Registered> registered[kRailsMax];
  };
  struct PeerRegion {
    std::uint64_t bytes = 0;
    Grant grant;
  };
  struct RegionJob {
    std::uint64_t region;
    std::uint64_t offset;
    std::shared_ptr<Job> job;
    bool is_resolved = false;  // the region is known
  };

  // --- link.cc
  bool poll_rail(std::size_t r);
  Status take_message(Rail& rail, const platform::verbs::Completion& completion);
  Status take_cell(const std::byte* cell, std::uint32_t bytes);
  void take_written(std::uint32_t token, std::uint32_t bytes);
  void take_goodbye();
  void end_jobs(const Status& status);
  void on_sent(Rail& rail, const Rail::Posted& entry);
  bool transmit();
  bool transmit_again(Rail& rail);
  bool transmit_frames(Rail& rail);
  bool transmit_regions();
  bool transmit_writes();
  Status put_frame(Rail& rail, const MessageCore::OutFrame& frame);
  Status put_region_word(Rail& rail, std::uint64_t region);
  void finish_job(const std::shared_ptr<Job>& job, Status status);
  void end_piece(const std::shared_ptr<Job>& job, std::uint64_t bytes);
  bool may_send_frames() const;

  // --- link_stream.cc
  bool read_control(base::TimeNs now);
  void write_control();
  void say(ControlMessage::Kind kind, std::size_t r);
  void take_control(const ControlMessage& message, base::TimeNs now);
  void take_offer(const ControlMessage& message, base::TimeNs now);
  void lose_stream(const std::string& why, base::TimeNs now);

  // --- link_rails.cc
  void run_rails(base::TimeNs now);
  void run_rail(std::size_t r, base::TimeNs now);
  void begin_rail(std::size_t r, base::TimeNs now);
  void connect_rail(std::size_t r, base::TimeNs now);
  void end_connecting(std::size_t r, base::TimeNs now);
  void break_rail(std::size_t r, int status, const std::string& why, base::TimeNs now);
  void settle_rail(std::size_t r, base::TimeNs now);
  void send_rest_again(std::size_t r);
  void run_establishment(base::TimeNs now);
  void watch_patience(base::TimeNs now);
  base::TimeNs stall_ns() const;
  std::size_t num_up() const;
  std::size_t index_of(const Rail& rail) const;
  // The rail that carries cells; it stays the same as long as it is up. Null if none is.
  Rail* choose_primary();
  std::string describe_rails() const;

  // --- link_memory.cc
  std::uint32_t grant(Transfer& transfer) override;
  void end_grant(std::uint32_t token, bool is_complete) override;
  void revoke();
  void forget_grant(std::uint32_t token);
  bool is_gone(std::uint32_t token) const;
  void scrub_clear(std::vector<std::byte>* cell) const;
  bool can_read() const override { return true; }
  bool can_write() const override { return true; }
  bool can_fetch_add() const override { return has_atomics_; }
  Status expose(std::uint64_t region, std::byte* data, std::uint64_t bytes,
                RegionKind kind) override;
  void withdraw(std::uint64_t region) override;
  std::byte* map(std::uint64_t, std::uint64_t) override { return nullptr; }
  void read(Transfer& transfer, std::uint64_t region, std::uint64_t offset) override;
  void write(Transfer& transfer, std::uint64_t region, std::uint64_t offset) override;
  void fetch_add(Transfer& transfer, std::uint64_t region, std::uint64_t offset,
                 std::uint64_t delta) override;
  void start_region_job(Job::Kind kind, Transfer& transfer, std::uint64_t region,
                        std::uint64_t offset, std::uint64_t add);
  bool resolve(RegionJob& waiting);
  void forget_region(std::uint64_t region);
  bool has_region_work() const;

  std::unique_ptr<platform::ByteStream> stream_;
  const Place place_;
  const LinkOptions options_;
  const platform::Poller poller_;
  base::TimeNs opened_at_;  // when the peer's offer came
  Establishment establishment_ = Establishment::kUnderWay;
  std::string refusal_;
  bool has_offer_ = false, sent_verdict_ = false;
  int mine_up_ = 0, theirs_up_ = -1;

  std::vector<std::unique_ptr<Rail>> rails_;  // null: this side cannot open it
  Rail* primary_ = nullptr;
  base::TimeNs without_rail_since_ = 0;  // 0: there is one
  base::TimeNs stream_ended_at_ = 0;
  std::string stream_end_;
  bool is_armed_ = false;
  bool is_stream_ready_ = true;
  std::uint64_t turns_ = 0;

  std::string control_in_, control_out_;
  std::vector<ControlMessage> deferred_;
  Status drain_failure_;
  std::deque<std::vector<std::byte>> again_;                  // cells of a broken rail, in order
  std::unordered_map<Transfer*, std::shared_ptr<Job>> jobs_;  // all that are not over
  std::deque<std::shared_ptr<Job>> writes_;  // of granted memory, with pieces to post
  std::deque<RegionJob> region_jobs_;        // in order, with pieces to post
  bool is_goodbye_under_way_ = false;
  std::optional<FrameHeader> goodbye_;  // the peer's, until everything else is in

  std::uint32_t next_token_ = 1;
  std::unordered_map<std::uint32_t, Granted> grants_;
  std::deque<std::uint32_t> gone_;  // the peer's, taken back lately
  std::map<std::uint64_t, Exposed> exposed_;
  std::deque<std::uint64_t> region_words_;            // regions whose state the peer is to be told
  std::map<std::uint64_t, PeerRegion> peer_regions_;  // of no bytes: withdrawn lately
  std::deque<std::uint64_t> gone_regions_;
  bool has_atomics_ = true;
  std::uint64_t num_atomics_ = 0, num_again_ = 0;
};

}  // namespace pycomm::transport::rdma

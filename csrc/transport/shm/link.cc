// A shared-memory link: rings of frames in each side's own segment, payload in blocks, large
// messages read straight from the sender's memory where the kernel allows it.
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/check.h"
#include "base/log.h"
#include "kernels/reduce.h"
#include "platform/sockets.h"
#include "platform/system.h"
#include "transport/shm/factory.h"

namespace pycomm::transport::shm {
namespace {

// What the peer let us map.
struct Peer {
  platform::Mapping segment;  // read-only
  platform::Mapping arena;    // read and write
  platform::Doorbell doorbell;
  const SegmentHeader* header = nullptr;
  const Outbox* outbox = nullptr;  // its frames for us
  int pid = 0;
  bool can_be_read = false;
};

class ShmLink final : public CoreLink, private PullPort, private RemoteMemory {
 public:
  ShmLink(Host& host, platform::UniqueFd socket, Outbox* outbox, Peer peer,
          const CoreOptions& options)
      : CoreLink(options, this),
        host_(host),
        socket_(std::move(socket)),
        outbox_(outbox),
        peer_(std::move(peer)) {}

  // While the peer lives it may still read what was written for it: the pages then go with the
  // segment, when the host ends and the peer unmaps it.
  ~ShmLink() override {
    if (has_ended()) host_.free_segment(reinterpret_cast<std::byte*>(outbox_));
  }

  const char* transport() const override { return "shm"; }
  int fd() const override { return socket_.get(); }
  RemoteMemory* remote_memory() override { return this; }

  bool has_incoming() const override {
    return peer_.outbox->head.load(std::memory_order_acquire) != tail_;
  }

  bool progress() override {
    if (!failure().is_ok()) return false;
    // First what peers can work on while this side takes in theirs.
    bool moved = publish_frames();
    if (failure().is_ok()) moved |= take_frames();
    if (failure().is_ok() && core_.pull_next()) moved = true;
    if (failure().is_ok()) moved |= publish_frames();
    return moved;
  }

  void flush() override {
    if (failure().is_ok()) publish_frames();
  }

  // The socket carries nothing after the handshake; its end is the peer's.
  void on_ready() override {
    char byte;
    const platform::IoResult result = platform::read_some(socket_.get(), &byte, 1);
    if (result.outcome == platform::IoOutcome::kWouldBlock) return;
    take_frames();  // what it wrote before the end is still ours
    if (peer_departed()) return end_after_goodbye();
    fail(Status::error(StatusCode::kPeerLost, "its process ended without a goodbye"));
  }

  const Peer& peer() const { return peer_; }

 private:
  // --- frames
  bool take_frames() {
    bool moved = false;
    // Again until it is empty: what a dying peer wrote last may explain what failed before it.
    for (int rounds = 0; rounds < kRoundsMax; ++rounds) {
      const std::uint64_t head = peer_.outbox->head.load(std::memory_order_acquire);
      if (head == tail_ || !failure().is_ok()) return moved;
      moved = true;
      if (head - tail_ > kNumFrames) {
        fail(Status::error(StatusCode::kInternal, "the peer's ring is inconsistent"));
        return true;
      }
      take_frames_below(head);
    }
    return moved;
  }

  void take_frames_below(std::uint64_t head) {
    const bool may_be_full = head - tail_ >= kNumBlocks / 2;
    while (tail_ != head) {
      FrameHeader frame;
      std::memcpy(&frame, &peer_.outbox->frames[tail_ % kNumFrames], sizeof frame);
      Status status = take(frame);
      if (!status.is_ok()) {
        fail(status);
        return;
      }
      ++tail_;
      outbox_->block_tail.store(block_tail_, std::memory_order_relaxed);
      outbox_->tail.store(tail_, std::memory_order_release);
    }
    // The peer may sleep with frames that found no room.
    if (may_be_full) ring_peer();
  }

  // After something was written for the peer.
  void ring_peer() {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (peer_.header->bell_armed.load(std::memory_order_relaxed) != kBellOff) {
      peer_.doorbell.ring();
    }
  }

  Status take(const FrameHeader& frame) {
    if (frame.payload_bytes > kBlockBytes) {
      return Status::error(StatusCode::kInternal, "the peer's frame exceeds a block");
    }
    PYCOMM_RETURN_IF_ERROR(core_.begin(frame));
    if (frame.payload_bytes > 0) {
      if (std::byte* target = core_.payload_target()) {
        kernels::copy(target, peer_.outbox->blocks[block_tail_ % kNumBlocks], frame.payload_bytes,
                      frame.message_bytes >= kStreamedMessageBytesMin ? kernels::Stores::kStreamed
                                                                      : kernels::Stores::kCached);
        core_.counters().bytes_staged += frame.payload_bytes;
      }
      ++block_tail_;
    }
    return core_.end();
  }

  bool publish_frames() {
    if (core_.front() == nullptr) return false;
    if (has_ended_) {
      end_after_goodbye();
      return true;
    }
    const std::uint64_t tail = peer_.outbox->tail.load(std::memory_order_acquire);
    const std::uint64_t block_tail = peer_.outbox->block_tail.load(std::memory_order_relaxed);
    if (head_ - tail > kNumFrames || block_head_ - block_tail > kNumBlocks) {
      fail(Status::error(StatusCode::kInternal, "the peer's ring is inconsistent"));
      return true;
    }
    const std::uint64_t first = head_;
    std::uint64_t unpublished_bytes = 0;
    bool is_urgent = false;
    while (MessageCore::OutFrame* frame = core_.front()) {
      const std::uint64_t bytes = frame->header.payload_bytes;
      if (head_ - tail == kNumFrames || (bytes > 0 && block_head_ - block_tail == kNumBlocks)) {
        break;
      }
      if (bytes > 0) {
        kernels::copy(
            outbox_->blocks[block_head_ % kNumBlocks], frame->payload, bytes,
            bytes >= kStreamedBytesMin ? kernels::Stores::kStreamed : kernels::Stores::kCached);
        core_.counters().bytes_staged += bytes;
        unpublished_bytes += bytes;
        ++block_head_;
      }
      std::memcpy(&outbox_->frames[head_ % kNumFrames], &frame->header, sizeof(FrameHeader));
      is_urgent |= frame->header.kind == static_cast<std::uint8_t>(FrameKind::kGroupFailed);
      ++head_;
      core_.pop();
      if (unpublished_bytes >= kPublishBytes) {  // the peer copies out while this side copies in
        outbox_->head.store(head_, std::memory_order_release);
        unpublished_bytes = 0;
        ring_peer();
      }
    }
    if (head_ == first) return false;
    outbox_->head.store(head_, std::memory_order_release);
    // A failure is news also to who waits for nothing.
    if (is_urgent) {
      peer_.doorbell.ring();
    } else {
      ring_peer();
    }
    return true;
  }

  // --- PullPort: the key is the slot in the low byte and its generation above.
  bool announce(const std::byte* data, std::uint64_t bytes, std::uint32_t* key) override {
    if (bytes >= kSmallPagesBytesMax && !platform::has_huge_pages(data, bytes)) return false;
    for (std::uint32_t i = 0; i < kNumAnnouncements; ++i) {
      const std::uint32_t slot = (next_slot_ + i) % kNumAnnouncements;
      const std::uint64_t generation = outbox_->announcements[slot].load();
      if (generation % 2 == 1) continue;
      outbox_->announcements[slot].store(generation + 1, std::memory_order_release);
      next_slot_ = slot + 1;
      *key = make_key(slot, generation + 1);
      return true;
    }
    return false;
  }

  void revoke(std::uint32_t key) override {
    const std::uint32_t slot = key % kNumAnnouncements;
    const std::uint64_t generation = outbox_->announcements[slot].load();
    if (generation % 2 == 1 && make_key(slot, generation) == key) {
      outbox_->announcements[slot].store(generation + 1, std::memory_order_seq_cst);
    }
  }

  Status pull(std::uint32_t key, std::uint64_t address, std::byte* out,
              std::uint64_t bytes) override {
    const bool was_read = platform::read_process_memory(peer_.pid, address, out, bytes);
    const int error = errno;
    std::atomic_thread_fence(std::memory_order_seq_cst);
    const std::uint32_t slot = key % kNumAnnouncements;
    const std::uint64_t generation = peer_.outbox->announcements[slot].load();
    if (make_key(slot, generation) != key) {
      return Status::error(StatusCode::kAborted, "the peer withdrew the message");
    }
    if (!was_read) {
      errno = error;
      if (errno == ESRCH || errno == EFAULT) {
        return Status::error(StatusCode::kPeerLost, "its memory is gone");
      }
      return platform::system_error("process_vm_readv");
    }
    return Status();
  }

  static std::uint32_t make_key(std::uint32_t slot, std::uint64_t generation) {
    return slot | static_cast<std::uint32_t>(generation << 8);
  }

  // --- RemoteMemory on mapped pages: no frame travels.
  bool can_map() const override { return true; }
  bool can_read() const override { return true; }
  bool can_write() const override { return true; }
  bool can_fetch_add() const override { return true; }

  Status expose(std::uint64_t region, std::byte* data, std::uint64_t bytes,
                RegionKind kind) override {
    const bool in_arena = host_.arena().mapping().contains(data, bytes);
    if (kind == RegionKind::kDevice ||
        (!in_arena && !host_.segment().mapping().contains(data, bytes))) {
      return Status::error(StatusCode::kInvalidUsage,
                           "only shared memory of this process can be exposed over shm");
    }
    for (RegionEntry& entry : outbox_->regions) {
      if (entry.region_plus_one.load() == region + 1) {
        return Status::error(StatusCode::kInvalidUsage, "the region is exposed already");
      }
    }
    for (RegionEntry& entry : outbox_->regions) {
      if (entry.region_plus_one.load() != 0) continue;
      const std::byte* base = in_arena ? host_.arena().data() : host_.segment().data();
      entry.in_arena = in_arena;
      entry.offset = static_cast<std::uint64_t>(data - base);
      entry.bytes = bytes;
      entry.region_plus_one.store(region + 1, std::memory_order_release);
      return Status();
    }
    return Status::error(StatusCode::kSystem, "too many regions are exposed to this peer");
  }

  void withdraw(std::uint64_t region) override {
    for (RegionEntry& entry : outbox_->regions) {
      if (entry.region_plus_one.load() == region + 1) entry.region_plus_one.store(0);
    }
  }

  struct Window {
    std::byte* data = nullptr;
    std::uint64_t bytes = 0;
    bool writable = false;
  };

  Window window_of(std::uint64_t region) const {
    for (const RegionEntry& entry : peer_.outbox->regions) {
      if (entry.region_plus_one.load(std::memory_order_acquire) != region + 1) continue;
      const bool in_arena = entry.in_arena != 0;
      const std::uint64_t offset = entry.offset;
      const std::uint64_t bytes = entry.bytes;
      const platform::Mapping& home = in_arena ? peer_.arena : peer_.segment;
      if (offset > home.bytes() || bytes > home.bytes() - offset) return {};
      return {home.data() + offset, bytes, in_arena};
    }
    return {};
  }

  std::byte* map(std::uint64_t region, std::uint64_t bytes) override {
    const Window window = window_of(region);
    return window.bytes >= bytes ? window.data : nullptr;
  }

  // Where a one-sided transfer lands, or null after failing it.
  std::byte* reach(Transfer& transfer, std::uint64_t region, std::uint64_t offset, bool writes) {
    const Window window = window_of(region);
    const bool fits =
        window.data != nullptr && offset <= window.bytes && transfer.bytes <= window.bytes - offset;
    if (failure().is_ok() && fits && (window.writable || !writes)) return window.data + offset;
    transfer.state = TransferState::kFailed;
    transfer.status =
        !failure().is_ok()
            ? failure()
            : Status::error(StatusCode::kInvalidUsage, "the peer exposes no such region or offset");
    return nullptr;
  }

  void read(Transfer& transfer, std::uint64_t region, std::uint64_t offset) override {
    if (const std::byte* from = reach(transfer, region, offset, false)) {
      std::memcpy(transfer.data, from, transfer.bytes);
      transfer.state = TransferState::kDone;
    }
  }

  void write(Transfer& transfer, std::uint64_t region, std::uint64_t offset) override {
    if (std::byte* to = reach(transfer, region, offset, true)) {
      std::memcpy(to, transfer.data, transfer.bytes);
      std::atomic_thread_fence(std::memory_order_release);
      transfer.state = TransferState::kDone;
    }
  }

  void fetch_add(Transfer& transfer, std::uint64_t region, std::uint64_t offset,
                 std::uint64_t delta) override {
    PYCOMM_CHECK(transfer.bytes == sizeof(std::uint64_t));
    if (std::byte* at = reach(transfer, region, offset, true)) {
      if (reinterpret_cast<std::uintptr_t>(at) % sizeof(std::uint64_t) != 0) {
        transfer.state = TransferState::kFailed;
        transfer.status = Status::error(StatusCode::kInvalidUsage, "a counter must be aligned");
        return;
      }
      const std::uint64_t old =
          std::atomic_ref(*reinterpret_cast<std::uint64_t*>(at)).fetch_add(delta);
      std::memcpy(transfer.data, &old, sizeof old);
      transfer.state = TransferState::kDone;
    }
  }

  // Blocks go past the cache: a store to a line that the peer's cache holds waits for that cache.
  static constexpr std::uint64_t kStreamedBytesMin = 16 * 1024;
  static constexpr std::uint64_t kStreamedMessageBytesMin = 8 * 1024 * 1024;
  // The kernel reads small pages one by one: from here on two copies are faster than its one.
  static constexpr std::uint64_t kSmallPagesBytesMax = 8 * 1024 * 1024;
  static constexpr std::uint64_t kPublishBytes = 128 * 1024;
  static constexpr int kRoundsMax = 8;  // then other links get their turn

  Host& host_;
  platform::UniqueFd socket_;
  Outbox* const outbox_;
  const Peer peer_;
  std::uint64_t head_ = 0;        // frames published
  std::uint64_t block_head_ = 0;  // blocks filled
  std::uint64_t tail_ = 0;        // of the peer's frames, consumed
  std::uint64_t block_tail_ = 0;
  std::uint32_t next_slot_ = 0;
};

struct HandshakeFields {
  std::uint64_t magic = kSegmentMagic;
  std::uint64_t version = kProtocolVersion;
  std::uint64_t outbox_offset = 0;
  std::uint64_t nonce_address = 0;
  std::uint64_t nonce = 0;
};

std::string pack(const HandshakeFields& fields) {
  return std::string(reinterpret_cast<const char*>(&fields), sizeof fields);
}

// Whether this process can read the peer's memory; tried, not guessed.
bool probe_pull(int pid, const HandshakeFields& theirs) {
  std::uint64_t seen = 0;
  return pid > 0 &&
         platform::read_process_memory(pid, theirs.nonce_address,
                                       reinterpret_cast<std::byte*>(&seen), sizeof seen) &&
         seen == theirs.nonce;
}

}  // namespace

Result<std::unique_ptr<CoreLink>> establish(Host& host, platform::UniqueFd socket,
                                            const LinkOptions& options, base::TimeNs deadline) {
  auto credentials = platform::peer_credentials(socket.get());
  if (!credentials.is_ok()) return credentials.status();
  if (credentials.value().uid != platform::effective_uid()) {
    return Status::error(StatusCode::kInvalidUsage, "a process of another user knocked");
  }
  auto memory = host.allocate_segment(sizeof(Outbox));
  if (!memory.is_ok()) return memory.status();
  auto* outbox = reinterpret_cast<Outbox*>(memory.value());
  // Until the link owns it.
  struct Guard {
    Host& host;
    std::byte* data;
    ~Guard() {
      if (data != nullptr) host.free_segment(data);
    }
  } guard{host, memory.value()};

  if (options.allow_pull) platform::allow_memory_reads();
  const auto nonce = std::make_unique<std::uint64_t>(platform::random_u64());
  HandshakeFields mine;
  mine.outbox_offset = static_cast<std::uint64_t>(memory.value() - host.segment().data());
  mine.nonce_address = reinterpret_cast<std::uint64_t>(nonce.get());
  mine.nonce = *nonce;
  PYCOMM_RETURN_IF_ERROR(platform::send_with_fds(
      socket.get(), pack(mine), {host.segment().fd(), host.arena().fd(), host.doorbell().fd()},
      deadline));

  std::vector<platform::UniqueFd> fds;
  auto message = platform::receive_with_fds(socket.get(), 3, &fds, deadline);
  if (!message.is_ok()) return message.status();
  HandshakeFields theirs;
  if (message.value().size() != sizeof theirs) {
    return Status::error(StatusCode::kInternal, "the local peer does not speak this protocol");
  }
  std::memcpy(&theirs, message.value().data(), sizeof theirs);
  if (theirs.magic != kSegmentMagic || theirs.version != kProtocolVersion ||
      theirs.outbox_offset % kPageBytes != 0 ||
      theirs.outbox_offset > kSegmentBytes - sizeof(Outbox)) {
    return Status::error(StatusCode::kInternal, "the local peer does not speak this protocol");
  }

  Peer peer;
  auto segment = platform::map_sealed(fds[0].get(), kSegmentBytes, platform::Access::kReadOnly);
  if (!segment.is_ok()) return segment.status();
  peer.segment = std::move(segment).value();
  if (peer.segment.bytes() != kSegmentBytes) {
    return Status::error(StatusCode::kInternal, "the local peer's segment has the wrong size");
  }
  auto arena =
      platform::map_sealed(fds[1].get(), host.arena().bytes(), platform::Access::kReadWrite);
  if (!arena.is_ok()) return arena.status();
  peer.arena = std::move(arena).value();
  peer.doorbell = platform::Doorbell::adopt(std::move(fds[2]));
  peer.pid = credentials.value().pid;
  peer.header = reinterpret_cast<const SegmentHeader*>(peer.segment.data());
  peer.outbox = reinterpret_cast<const Outbox*>(peer.segment.data() + theirs.outbox_offset);

  // Second round: who can read whose memory.
  const bool pulls = options.allow_pull && probe_pull(peer.pid, theirs);
  peer.can_be_read = pulls;
  PYCOMM_RETURN_IF_ERROR(
      platform::send_with_fds(socket.get(), pulls ? "pull" : "stage", {}, deadline));
  fds.clear();
  auto answer = platform::receive_with_fds(socket.get(), 0, &fds, deadline);
  if (!answer.is_ok()) return answer.status();
  if (!pulls && options.allow_pull) {
    base::log(base::LogLevel::kInfo, base::Subsystem::kShm,
              "process_vm_readv is refused here (container policy or Yama); large messages take "
              "two copies through shared memory instead of one");
  }

  CoreOptions core;
  core.eager_bytes_max =
      options.eager_bytes_max < kBlockBytes ? options.eager_bytes_max : kBlockBytes;
  core.fragment_bytes_max = kBlockBytes;
  core.pulls = pulls;
  core.peer_pulls = answer.value() == "pull";
  guard.data = nullptr;
  return std::unique_ptr<CoreLink>(
      new ShmLink(host, std::move(socket), outbox, std::move(peer), core));
}

PeerFlags peer_flags(CoreLink& link) {
  const Peer& peer = static_cast<ShmLink&>(link).peer();
  return {&peer.header->bell_armed, &peer.header->flat_sleepers, &peer.doorbell, peer.pid,
          peer.can_be_read};
}

}  // namespace pycomm::transport::shm

// The transport contract. Shared memory, TCP, RDMA, QUIC and the simulator speak it; everything
// above is written once. Two layers:
//
//   messages       The receiver posts a destination under a name, the sender sends under the same
//                  name; the name finds the memory, so no handle travels per operation.
//   remote memory  Optional: read, write, fetch_add and map on memory that a peer has exposed.
//
// What holds on every transport (tests/cpp/transport_conformance_test.cc):
//   - Identity. A transfer is (group, epoch, op, step, chunk). A receiver places it once; what
//     arrives again, or for a retired operation, is dropped.
//   - Order. None between transfers. A completion is visible after its bytes; assume nothing else.
//   - Done means mine. A transfer that is done no longer needs its span; a failed one is revoked
//     before it is reported, except where a peer may write memory directly (the owner of such
//     memory quarantines it until the link is gone).
//   - Failure. A link that failed fails every transfer, now and later, with the reason. A peer
//     that said goodbye fails only what it can no longer deliver.
//   - Bounds. Unexpected bytes are credited (eager_bytes_max each, eager_window_bytes in all);
//     above that the receiver's post is the clear-to-send.
//
// Thread: an Engine serialises all calls on a link; a link never calls back into its user.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "pycomm/types.h"

namespace pycomm {

struct TransferId {
  std::uint64_t group = 0;
  std::uint64_t op = 0;
  std::uint32_t epoch = 0;
  std::uint32_t step = 0;
  std::uint32_t chunk = 0;

  bool operator==(const TransferId&) const = default;
};

enum class TransferState : std::uint8_t { kIdle, kPending, kDone, kFailed };

// One span on its way. The caller owns it and keeps it, and the memory, in place until it is
// done, failed, or withdrawn by cancel().
struct Transfer {
  TransferId id;
  Signature signature = 0;
  std::byte* data = nullptr;  // the destination of a post, the source of a send (never written)
  std::uint64_t bytes = 0;
  // Both sides set it where the receiver looks with is_offered() before it posts: then even a large
  // message that waits for its post is announced.
  bool is_announced = false;
  TransferState state = TransferState::kIdle;
  Status status;

  // The link's own.
  std::uint64_t bytes_done = 0;
  std::uint64_t slot = 0;

  bool is_finished() const {
    return state == TransferState::kDone || state == TransferState::kFailed;
  }
};

// Whether something can be used, and if not, why not, in words for a person.
struct Viability {
  bool viable = true;
  std::string reason;
};

// What a link did so far; counters of proof for "no copy" claims.
struct LinkCounters {
  std::uint64_t bytes_sent = 0;
  std::uint64_t bytes_received = 0;
  std::uint64_t bytes_staged = 0;  // copied through an intermediate buffer on this side
  std::uint64_t bytes_direct = 0;  // moved between the two users' memories with no such copy
  std::uint64_t messages_sent = 0;
  std::uint64_t messages_received = 0;
};

// Where memory lives. Only kHost moves today; the kind is in the contract so that a transport can
// refuse or stage the others rather than fault on them.
enum class RegionKind : std::uint8_t { kHost, kPinned, kDevice };

// Memory of a peer, by region number and offset. Grants belong to the link and die with it.
// Region numbers are agreed by the users of the link.
class RemoteMemory {
 public:
  virtual ~RemoteMemory() = default;

  virtual bool can_map() const { return false; }
  virtual bool can_read() const { return false; }
  virtual bool can_write() const { return false; }
  virtual bool can_fetch_add() const { return false; }

  // Lets the peer reach [data, data + bytes) under `region`. Errors: kInvalidUsage if taken.
  virtual Status expose(std::uint64_t region, std::byte* data, std::uint64_t bytes,
                        RegionKind kind) = 0;
  // After it returns the peer can no longer reach the region over this link.
  virtual void withdraw(std::uint64_t region) = 0;

  // The peer's region as an address here, or null if it is not exposed, or shorter than `bytes`.
  // Valid as long as the link object.
  virtual std::byte* map(std::uint64_t region, std::uint64_t bytes) = 0;

  // One-sided transfers at `offset` bytes into the peer's region. A write that is done is visible
  // to a later fetch_add on the same link. fetch_add leaves the old value in *transfer.data
  // (8 bytes); offset must be a multiple of 8.
  virtual void read(Transfer& transfer, std::uint64_t region, std::uint64_t offset) = 0;
  virtual void write(Transfer& transfer, std::uint64_t region, std::uint64_t offset) = 0;
  virtual void fetch_add(Transfer& transfer, std::uint64_t region, std::uint64_t offset,
                         std::uint64_t delta) = 0;
};

// A connection to one peer process.
class Link {
 public:
  virtual ~Link() = default;

  virtual const char* transport() const = 0;  // "shm", "tcp", "rdma", "quic", "sim"

  // Offers a destination, or a source. Both return at once; watch transfer.state.
  virtual void post(Transfer& transfer) = 0;
  virtual void send(Transfer& transfer) = 0;
  // Forgets a pending transfer: afterwards the link touches neither it nor its span.
  virtual void cancel(Transfer& transfer) = 0;
  // Whether the peer has sent, or announced, a transfer of this name that nobody posted yet.
  virtual bool is_offered(const TransferId& id) const = 0;
  // Operations of `group` below `op` are over here: what is buffered for them or still comes is
  // dropped.
  virtual void retire(std::uint64_t group, std::uint64_t op) = 0;

  // Moves whatever can move without blocking; true if anything did.
  virtual bool progress() = 0;

  virtual Viability is_viable() const = 0;
  virtual RemoteMemory* remote_memory() { return nullptr; }
  virtual LinkCounters counters() const = 0;

  // Says goodbye, so that the peer does not take the end for a death. Idempotent.
  virtual void close() = 0;
};

}  // namespace pycomm

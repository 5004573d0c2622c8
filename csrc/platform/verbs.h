// RDMA verbs as this library uses them: ports, protection domains, registrations, and reliable
// connections. An interface, so that the same link runs on a NIC (libibverbs, loaded at run time),
// on a simulated one in the tests, and behind wrappers that let any call fail.
//
// Lifetime: a Domain outlives the memories and pairs made from it; a Port may go before its
// domains. Thread: a domain and all that is made from it belong to one caller at a time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "pycomm/options.h"
#include "pycomm/transport.h"

namespace pycomm::platform::verbs {

using Gid = std::array<std::uint8_t, 16>;

// One port of one device, as it can be used.
struct PortInfo {
  std::string device;  // "mlx5_0"
  std::uint8_t number = 1;
  Viability use;  // if it cannot be used, why not: port down, no GID, permission
  bool is_ethernet = false;
  std::uint16_t lid = 0;
  std::uint8_t mtu_code = 3;  // 1: 256 bytes ... 5: 4096
  int gid_index = 0;
  Gid gid{};
  std::uint16_t pkey_index = 0;
  int max_reads = 1;  // reads and atomics that may be under way
  bool has_atomics = false;

  std::string name() const { return device + ":" + std::to_string(number); }
};

// Who may do what with registered memory beside this side's own reading.
enum Access : unsigned { kLocalWrite = 1, kRemoteWrite = 2, kRemoteRead = 4, kRemoteAtomic = 8 };

class Memory {
 public:
  virtual ~Memory() = default;  // the peer can no longer reach it
  virtual std::uint32_t local_key() const = 0;
  virtual std::uint32_t remote_key() const = 0;
};

struct SendRequest {
  enum class Kind : std::uint8_t { kSend, kWrite, kWriteWithImmediate, kRead, kFetchAdd };
  Kind kind = Kind::kSend;
  bool is_signalled = false;
  bool is_inline = false;  // copied by the call; at most Pair::inline_bytes_max()
  std::uint32_t immediate = 0;
  std::uint64_t id = 0;
  const void* data = nullptr;
  std::uint32_t bytes = 0;
  std::uint32_t local_key = 0;
  std::uint32_t remote_key = 0;
  std::uint64_t remote_address = 0;
  std::uint64_t add = 0;
};

struct Completion {
  std::uint64_t id = 0;
  std::uint32_t pair = 0;   // its number
  int status = 0;           // 0: success; else as ibv_wc_status
  bool is_receive = false;  // meaningful for successes
  bool has_immediate = false;
  std::uint32_t immediate = 0;
  std::uint32_t bytes = 0;
};
inline constexpr int kStatusFlushed = 5;
inline constexpr int kStatusRemoteAccess = 10;
inline constexpr int kStatusRetryExceeded = 12;
// "IBV_WC_RETRY_EXC_ERR (transport retry counter exceeded)"
std::string describe_status(int status);

// What one end of a connection tells the other.
struct PairAddress {
  Gid gid{};
  std::uint32_t number = 0;
  std::uint32_t first_psn = 0;
  std::uint16_t lid = 0;
  std::uint8_t mtu_code = 0;
  std::uint8_t max_reads = 0;
  bool is_ethernet = false;
};

struct PairLimits {
  std::uint32_t num_sends = 128;
  std::uint32_t num_receives = 128;
};

class Pair {
 public:
  virtual ~Pair() = default;
  virtual PairAddress address() const = 0;
  virtual std::uint32_t inline_bytes_max() const = 0;
  // Receives may be posted from the start, sends once connected. It may take seconds where the way
  // to the other end is unknown (may_block()); any thread may call it, while no other uses the
  // pair.
  virtual Status connect(const PairAddress& theirs, const RdmaOptions& options) = 0;
  // To the error state: nothing more arrives or leaves, and what is posted comes back flushed.
  virtual bool may_block() const { return false; }
  virtual void break_off() = 0;
  virtual Status post_receive(std::uint64_t id, void* data, std::uint32_t bytes,
                              std::uint32_t local_key) = 0;
  virtual Status post_send(const SendRequest& request) = 0;
};

// A protection domain and the completion queue of everything made from it.
class Domain {
 public:
  virtual ~Domain() = default;
  virtual const PortInfo& port() const = 0;
  virtual Result<std::unique_ptr<Memory>> register_memory(const void* data, std::uint64_t bytes,
                                                          unsigned access) = 0;
  // Of a GPU: by dma-buf, or, where a kernel module teaches the NIC device addresses
  // (nvidia_peermem), as it is. Errors: kSystem, with what both ways said.
  virtual Result<std::unique_ptr<Memory>> register_device_memory(const void* data,
                                                                 std::uint64_t bytes,
                                                                 unsigned access) {
    return register_memory(data, bytes, access);
  }
  virtual Result<std::unique_ptr<Pair>> create_pair(const PairLimits& limits) = 0;
  // At most `count` completions; negative if the queue is lost.
  virtual int poll(Completion* out, int count) = 0;
  // Readable after arm() once something has completed; -1 if there is nothing to sleep on.
  virtual int fd() const = 0;
  virtual Status arm() = 0;
  virtual void clear_events() = 0;
};

class Port {
 public:
  virtual ~Port() = default;
  virtual const PortInfo& info() const = 0;
  virtual Result<std::unique_ptr<Domain>> create_domain(int num_completions) = 0;
  // Descriptors that a forked child must not use.
  virtual std::vector<int> fds() const = 0;
};

class Library {
 public:
  virtual ~Library() = default;
  // All ports of the machine with what can be said of each; empty with a reason in *refusal.
  virtual std::vector<PortInfo> ports(const RdmaOptions& options, std::string* refusal) = 0;
  virtual Result<std::shared_ptr<Port>> open(const PortInfo& info) = 0;
};

// libibverbs, loaded at the first call. Null, with a reason, where it is not there.
Library* ibverbs(std::string* refusal);

}  // namespace pycomm::platform::verbs

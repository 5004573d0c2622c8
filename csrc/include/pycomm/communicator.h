// START HERE: collectives on a group of ranks.
//
//   auto communicator = Communicator::create(store, rank, world_size, options);
//   communicator.value()->run(request);      // blocks
//   communicator.value()->start(request);    // returns an Operation
//
// Every rank calls the same operations in the same order. Results are bit for bit the same on
// every rank. A rank that dies turns into kPeerLost, naming it, on every other; the group is then
// over and every later call says so.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "pycomm/operation.h"
#include "pycomm/options.h"
#include "pycomm/shard_barrier.h"
#include "pycomm/transport.h"

namespace pycomm {

// A key-value store that all ranks of a group reach while it is created: torch's, or a folder.
class Store {
 public:
  virtual ~Store() = default;
  virtual Status set(const std::string& key, const std::string& value) = 0;
  // Waits for the key. Errors: kTimeout, kSystem.
  virtual Result<std::string> get(const std::string& key, std::int64_t timeout_ms) = 0;
  // Whether the key is there now.
  virtual Result<bool> has(const std::string& key) = 0;
};

// Keys as files of a folder that all ranks see; for tests, benchmarks and single hosts.
std::unique_ptr<Store> make_file_store(const std::string& folder);

// One line of the flight recorder.
struct FlightRecord {
  std::uint64_t op_number = 0;
  Signature signature = 0;
  bool is_finished = false;
  StatusCode code = StatusCode::kOk;
};

// How a peer is reached, and what moved.
// What QUIC knows of the path to a peer.
struct PathStats {
  std::string peer;                  // address and port
  double rtt_s = 0;                  // smoothed
  double bandwidth_bytes_per_s = 0;  // as congestion control sees it
  std::uint64_t bytes_sent = 0;      // of UDP payload
  std::uint64_t packets_sent = 0, packets_lost = 0;
  std::uint64_t bytes_resent = 0;
  std::uint64_t window_bytes = 0;  // that may be in flight
  std::uint64_t mtu = 0;           // bytes of UDP payload
};

// What RDMA did for a link to a peer.
struct RdmaStats {
  std::uint64_t registrations = 0;  // of memory, with the NIC
  std::uint64_t cache_hits = 0;     // that an earlier registration served
  std::uint64_t evictions = 0;
  std::uint64_t refusals = 0;          // not registered: the bytes were copied instead
  std::uint64_t bytes_registered = 0;  // of the whole process, now
  std::uint64_t atomics = 0;           // fetch_adds that the NIC did
  std::uint64_t messages_again = 0;    // sent again after a path broke
  std::uint64_t path_resets = 0;
  std::vector<std::string> paths;  // "mlx5_0:1 up"
};

struct PeerStats {
  Rank rank = kNoRank;
  std::string transport;
  LinkCounters counters;
  std::vector<PathStats> paths;  // over QUIC, the quickest first
  std::optional<RdmaStats> rdma;
};

class Communicator {
 public:
  // Collective. Errors: kInvalidUsage if ranks differ in version, build or options, naming both
  // sides; kTimeout naming the missing ranks.
  static Result<std::unique_ptr<Communicator>> create(Store& store, Rank rank, int world_size,
                                                      const Options& options);
  // Leaves: peers that still need this rank fail, those that do not go on.
  virtual ~Communicator() = default;

  virtual Rank rank() const = 0;
  virtual int world_size() const = 0;

  // Thread: any; operations run in the order of the calls.
  // Cost: up to 4 KiB among ranks of one host, one exchange of cache lines in the caller.
  virtual Status run(const OpRequest& request) = 0;
  // start() waits while another thread is inside a call on this group.
  virtual std::shared_ptr<Operation> start(const OpRequest& request) = 0;
  // Starts all, in order, then waits for all; the first failure. What has not ended then (after a
  // signal) is in `left`.
  virtual Status run_all(const std::vector<OpRequest>& requests,
                         std::vector<std::shared_ptr<Operation>>* left) = 0;

  // Ends every pending and later operation with kAborted.
  virtual void abort(const std::string& reason) = 0;
  virtual void set_timeout_ms(std::int64_t timeout_ms) = 0;
  // Polled every ~50 ms while a caller waits; true makes the wait end with kAborted.
  virtual void set_interrupt_check(std::function<bool()> is_interrupted) = 0;

  // allocate_shared_memory(), or kSystem where this group's process shares none.
  virtual Result<std::shared_ptr<std::byte>> allocate_shared(std::uint64_t bytes) = 0;

  // Collective. Errors: kInvalidUsage (fewer than one shard), kSystem (memory).
  virtual Result<std::unique_ptr<ShardBarrier>> create_shard_barrier(int num_shards) = 0;

  // Ok while the group can be used, then the failure that ended it.
  virtual Status health() const = 0;

  virtual std::vector<FlightRecord> flight_records() const = 0;
  // Writes the last operations of all groups of this process in torch's flight recorder format.
  // Returns the file's path. A timeout does it by itself, where Options name a folder.
  virtual Result<std::string> dump_flight_records(const std::string& folder) const = 0;
  virtual std::vector<PeerStats> peer_stats() const = 0;
};

// One port of one RDMA device, as this library sees it.
struct RdmaPort {
  std::string device;
  int number = 1;
  Viability use;      // whether groups can use it, and if not, why not
  int gid_index = 0;  // that they would use
  bool has_atomics = false;
};
// All ports of the machine; none with the reason in *refusal.
std::vector<RdmaPort> rdma_ports(const RdmaOptions& options, std::string* refusal);

// Bytes that this process may lock for a NIC; UINT64_MAX: no limit.
std::uint64_t lockable_bytes();

// Says goodbye on all links of this process; later operations fail. For interpreters that end
// without destroying their groups.
void shutdown_process();

const char* version();

// Memory that the host's other ranks reach as soon as they are in a group with this process:
// collectives on it copy nothing. It may be made before any group, and outlive all. Whole pages.
// Errors: kSystem if shared memory is short or cannot be had.
enum class SharedZeros { kYes, kNo };
Result<std::shared_ptr<std::byte>> allocate_shared_memory(std::uint64_t bytes,
                                                          SharedZeros zeros = SharedZeros::kYes);

// Whose shared memory an address lies in.
enum class MemoryOwner { kNobody, kThisProcess, kAncestor };
MemoryOwner shared_memory_owner(const void* data);

// What this machine allows, for `pycomm doctor`.
std::vector<std::string> kernel_sets();  // of reductions, the one in use first
Viability crypto_viability();
// The library that seals QUIC packets here, or why none does.
std::string packet_crypto();                                            // TCP needs it
std::vector<std::pair<std::string, std::string>> network_interfaces();  // name, IPv4 address

}  // namespace pycomm

// Options of a communicator: resolved once, from explicit values over the environment over a file
// over defaults. Everything here that steers a plan is agreed by the group at creation
// (plan_fingerprint); a difference is an error that names both sides.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace pycomm {

enum class TransportChoice : std::uint8_t { kAuto, kShm, kTcp, kQuic, kRdma };

// Ports that may be listened on; {0, 0}: any.
struct PortRange {
  std::uint16_t first = 0;
  std::uint16_t last = 0;
};

// Who this process is to others and whom it trusts: PEM files, as `pycomm certs` makes them.
struct TlsOptions {
  std::string ca_file;           // who vouches for everyone
  std::string certificate_file;  // this process's, and the chain up to the CA
  std::string key_file;          // 0600
  std::string peer_name;         // of rank r's certificate; "{rank}" in it stands for r
  std::string denied_file;       // SHA-256 fingerprints that are refused all the same; may be empty

  bool is_set() const { return !ca_file.empty() || !certificate_file.empty() || !key_file.empty(); }
  std::string name_of(int rank) const;
};

// How RDMA is used; by the names that NCCL gave its own settings.
struct RdmaOptions {
  bool is_disabled = false;
  std::string devices;             // "mlx5_0:1,mlx5_2" in this order; ^ excludes; empty: all
  int gid_index = -1;              // -1: the best RoCE v2 one
  std::uint16_t pkey = 0;          // partition; 0: the first
  std::uint8_t timeout_code = 16;  // of an acknowledgement: 4.096 us * 2^code
  std::uint8_t num_retries = 7;
  std::uint8_t traffic_class = 0;
  std::uint8_t service_level = 0;
  std::uint64_t registered_bytes_max = UINT64_MAX;  // at most what RLIMIT_MEMLOCK lets through
};

struct Options {
  TransportChoice transport = TransportChoice::kAuto;
  std::int64_t timeout_ms = 1'800'000;       // per operation, and for creating the group
  std::int64_t connect_timeout_ms = 10'000;  // of one connection
  std::uint64_t chunk_bytes = 256 * 1024;    // unit of the pipeline in rings and trees
  std::uint64_t eager_bytes_max = 8 * 1024;  // above it the receiver's post is the clear-to-send
  bool deterministic = false;                // bits depend on nothing but the inputs
  bool shm_disabled = false;
  bool shm_tensors = false;                  // put CPU tensors into shared memory
  std::uint64_t shm_bytes_max = UINT64_MAX;  // shared memory of this process
  bool tunes = true;                         // finds the best way among ranks of a host by timing
  std::string tuning_file;                   // what was learnt; empty: in the user's cache
  std::string secret;                        // per-job secret; empty: one host only
  TlsOptions tls;                            // encryption between hosts; not set: none
  std::string interfaces;                    // PYCOMM_SOCKET_IFNAME
  bool interfaces_are_borrowed = false;      // from a variable of gloo or NCCL: a wish, no order
  std::string bind_address;                  // of listeners; empty: chosen
  std::string advertise_address;             // what peers are told; empty: what is bound
  PortRange ports;                           // TCP and UDP
  // A UDP socket for each: the address it is bound to and what peers are told, both empty for the
  // general ones.
  std::vector<std::pair<std::string, std::string>> quic_paths = {{}};
  bool quic_uses_cubic = false;       // instead of BBR
  std::uint64_t quic_mtu_max = 1472;  // largest UDP payload that is tried
  enum class QuicCrypto : std::uint8_t { kAny, kOpenssl, kIpsecMb };
  QuicCrypto quic_crypto = QuicCrypto::kAny;
  std::string quic_keylog;       // file for the keys of all connections; empty: none
  std::string quic_qlog_folder;  // for a trace of each connection; empty: none
  RdmaOptions rdma;
  bool allow_public_plaintext = false;  // plain TCP between public addresses
  std::string flight_recorder_folder;   // where a failure dumps to; empty: nowhere

  std::string complaint;  // what did not parse; a group with one is not made

  // Not from the environment.
  std::string group_name = "default";
  std::string framework = "none";  // for example "torch 2.13.0"; agreed by the group
  std::vector<int> global_ranks;   // of the group's ranks in the job; empty: the same

  std::function<bool()> is_interrupted;  // asked now and then while ranks wait for each other

  std::string plan_fingerprint() const;
};

// One setting as it was resolved, for `pycomm doctor`.
struct Setting {
  std::string name;    // "PYCOMM_TIMEOUT_SEC"
  std::string value;   // a secret is not shown
  std::string source;  // "argument", "environment", "PATH" of a file, or "default"
  std::string help;
};

struct Resolution {
  Options options;
  std::vector<Setting> settings;
  std::string complaint;              // values that do not parse: refuse to go on
  std::vector<std::string> warnings;  // names that mean nothing, each with the nearest that does
};

// `arguments` are by the names of the environment. The file is PYCOMM_CONFIG_FILE, or
// ~/.config/pycomm/pycomm.conf, then /etc/pycomm.conf: lines NAME=VALUE, # for comments. Sets the
// log's level, subsystems and file, and logs warnings once per process.
Resolution resolve_options(const std::map<std::string, std::string>& arguments = {});

}  // namespace pycomm

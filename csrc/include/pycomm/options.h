// Options of a communicator. Everything here that steers a plan is agreed by the group at
// creation (plan_fingerprint); a difference is an error that names both sides.
#pragma once

#include <cstdint>
#include <string>

namespace pycomm {

enum class TransportChoice : std::uint8_t { kAuto, kShm, kTcp };

struct Options {
  TransportChoice transport = TransportChoice::kAuto;
  std::int64_t timeout_ms = 1'800'000;       // per operation, and for creating the group
  std::uint64_t chunk_bytes = 256 * 1024;    // unit of the pipeline in rings and trees
  std::uint64_t eager_bytes_max = 8 * 1024;  // above it the receiver's post is the clear-to-send
  std::string secret;                        // per-job secret; empty: one host only
  std::string group_name = "default";
  std::string framework = "none";       // for example "torch 2.13.0"; agreed by the group
  std::string bind_address;             // TCP listener; empty: chosen from the route to peers
  bool allow_public_plaintext = false;  // plain TCP between public addresses

  // PYCOMM_TRANSPORT, PYCOMM_TIMEOUT_SEC, PYCOMM_CHUNK_BYTES, PYCOMM_SECRET_FILE, PYCOMM_SECRET,
  // PYCOMM_SOCKET_ADDR, PYCOMM_ALLOW_PUBLIC_PLAINTEXT over the defaults. A value that does not
  // parse is kept in `complaint` for the caller to report.
  static Options from_environment(std::string* complaint);
  std::string plan_fingerprint() const;
};

}  // namespace pycomm

// How a group comes together: every rank publishes who it is and how it can be reached, reads
// everyone's, checks that all agree, and connects.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "communicator/engine.h"
#include "pycomm/handshaker.h"

namespace pycomm::communicator {

// What a rank tells about itself. Text lines "key=value", parsed strictly: the store is not trusted
// with anything but its availability.
struct Hello {
  std::uint32_t protocol = 0;
  std::string build;        // version of this library
  std::string framework;    // for example torch and its version
  std::string fingerprint;  // options that steer plans
  int world_size = 0;
  std::string process_id;
  std::string host;        // one running kernel
  std::string shm_domain;  // who can share memory; empty: this process cannot
  std::string shm_refusal;
  std::string local_name;
  std::string tcp_address;
  std::string tcp_local_address;  // for ranks on the same host
  std::uint16_t tcp_port = 0;
  // Where a UDP socket listens; an empty host stands for tcp_address, or tcp_local_address. None:
  // no QUIC.
  std::vector<UdpAddress> quic_paths;
  std::string quic_refusal;
  int num_rdma_ports = 0;
  std::string rdma_refusal;
  std::string proof;        // how it proves membership: "none", "secret", "certificate" or both
  std::string cpus;         // processors that this rank may run on, platform::allowed_cpus()
  std::uint64_t nonce = 0;  // rank 0's becomes the group's id
};

// "none", "secret", "certificate", or "certificate and secret".
std::string proof_of(const Options& options);
std::string encode(const Hello& hello);
// Errors: kInternal for anything that encode() cannot have written.
Result<Hello> decode(const std::string& text);

// The first difference that matters, naming both ranks and both values.
Status compare(const std::vector<Hello>& hellos);

// Processors that any of them may run on.
int num_cpus(const std::vector<Hello>& hellos);

// Which transport two processes use; decided alike on both sides.
enum class Path { kShm, kTcp, kQuic, kRdma };
// Among hosts RDMA where both have it and nobody asked for encryption, then QUIC; on one host,
// without shared memory, TCP.
Path choose_path(const Hello& a, const Hello& b, TransportChoice choice);

// A group's creation as its ranks see it in the store: who has said hello, and whether one of them
// gave up, which ends it for all.
class Meeting {
 public:
  Meeting(Store& store, const Options& options, Rank rank)
      : store_(store),
        prefix_("pycomm/" + options.group_name + "/"),
        rank_(rank),
        is_interrupted_(options.is_interrupted) {}

  // Publishes mine and collects all. Errors: kTimeout naming the first missing rank; what ended it.
  Result<std::vector<Hello>> exchange(const Hello& mine, base::TimeNs deadline);
  // Tells the others that this rank cannot join, and why.
  void give_up(const Status& why);
  // What another rank gave up for, kAborted for a signal here, or ok. Costs a question to the
  // store: ask now and then, at most kAskEveryNs apart.
  static constexpr base::TimeNs kAskEveryNs = 200'000'000;
  Status check();
  // check() if it is time.
  Status check_now_and_then();

 private:
  Store& store_;
  const std::string prefix_;
  const Rank rank_;
  const std::function<bool()> is_interrupted_;
  base::TimeNs ask_at_ = 0;
  bool is_over_ = false;  // another rank gave up, and has told the others
};

// What those who connect a group have in common; lives as long as its creation.
struct Gathering {
  Engine& engine;
  Meeting& meeting;
  const std::vector<Hello>& hellos;
  Rank rank;
  const Options& options;
  base::TimeNs deadline;

  const Hello& mine() const { return hellos[static_cast<std::size_t>(rank)]; }
  // kNoRank for a process that no hello tells of.
  Rank rank_of(const std::string& process_id) const;
  // That the certificate of a rank of this group must carry: names count ranks of the job.
  std::string name_of(Rank peer) const;
};

// A link to every other rank; links that the engine has already are used again.
// Errors: kTimeout naming the rank, kInvalidUsage (no secret between hosts), what connecting says.
Result<std::vector<std::shared_ptr<transport::CoreLink>>> connect_all(const Gathering& gathering);

}  // namespace pycomm::communicator

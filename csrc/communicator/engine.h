// The one engine of a process: its shared memory, its links, its listeners, its progress thread.
// It lives as long as any communicator and says goodbye on its links when it ends.
//
// Locks, in this order: a group's ownership flag, then mutex_ (links, groups, poller). Whoever
// holds mutex_ only tries for ownership, since a caller may keep it for as long as a peer is slow.
// The progress thread runs when nobody waits inside wait(); a waiting caller runs the engine
// itself.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <thread>

#include "communicator/addresses.h"
#include "communicator/crowding.h"
#include "communicator/group.h"
#include "platform/byte_stream.h"
#include "platform/poller.h"
#include "platform/sockets.h"
#include "transport/core_link.h"
#include "transport/quic/endpoint.h"
#include "transport/rdma/factory.h"
#include "transport/shm/host.h"

namespace pycomm::communicator {

// Region numbers on shared-memory links. A group's flat area is its group id, which has bit 63
// clear.
inline constexpr std::uint64_t kArenaRegion = (std::uint64_t{1} << 63) + 1;
inline constexpr std::uint64_t kSegmentRegion = (std::uint64_t{1} << 63) + 2;

// What the poller's tokens below kFirstLinkToken mean.
inline constexpr std::uint64_t kDoorbellToken = 1;
inline constexpr std::uint64_t kKickToken = 2;
inline constexpr std::uint64_t kUdpToken = 3;
inline constexpr std::uint64_t kFirstLinkToken = 16;

// Something on links that needs a hand now and then. With the engine's lock.
class Tended {
 public:
  virtual void tend() = 0;

 protected:
  ~Tended() = default;
};

// A connection that proved whose it is before anyone here waited for it.
struct Stashed {
  std::string process_id;
  platform::UniqueFd local;                      // a local socket, or
  std::unique_ptr<platform::ByteStream> stream;  // a stream on which membership is done
};

class Engine : public std::enable_shared_from_this<Engine> {
 public:
  // The process's engine, started if there is none.
  // Each acquire() is answered by one release_user(); the last one stops the engine.
  static Result<std::shared_ptr<Engine>> acquire(const Options& options);
  void release_user();
  // Ends it now; groups that are left fail.
  static void shutdown_process();
  ~Engine();

  const std::string& process_id() const { return process_id_; }
  // Null if shared memory cannot be had; shm_refusal() says why.
  const std::shared_ptr<transport::shm::Host>& host() { return host_; }
  const std::string& shm_refusal() const { return shm_refusal_; }
  const std::string& local_name() const { return local_name_; }
  int local_listener() const { return local_listener_.get(); }
  const Addresses& addresses() const { return addresses_; }
  const platform::TcpListener& tcp_listener() const { return tcp_listener_; }
  const std::string& local_secret() const { return local_secret_; }
  // One endpoint for each of Options::quic_paths; none where there is no QUIC.
  const std::vector<std::shared_ptr<transport::quic::Endpoint>>& quic() const { return quic_; }
  // What peers are told for each; empty: the general address.
  const std::vector<std::string>& quic_told() const { return quic_told_; }
  // Why there is none, or fewer.
  const std::string& quic_refusal() const { return quic_refusal_; }
  // RDMA ports that may be used; none, and why.
  const transport::rdma::Place& rdma() const { return rdma_; }
  const std::string& rdma_refusal() const { return rdma_refusal_; }
  // Endpoints, links and what they are given are used under this lock.
  template <class F>
  auto with_lock(F f) {
    std::lock_guard lock(mutex_);
    return f();
  }
  // One turn of the engine, unless another thread is at it; whether anything moved.
  bool move() {
    std::unique_lock lock(mutex_, std::try_to_lock);
    return lock.owns_lock() && progress();
  }
  // At every turn from now on; until then. With the lock.
  void add_tended(Tended* tended) { tended_.push_back(tended); }
  void remove_tended(Tended* tended) { std::erase(tended_, tended); }
  std::mutex& creation_mutex() { return creation_mutex_; }
  Crowding& crowding() { return crowding_; }

  // --- links, by the peer's process id
  std::shared_ptr<transport::CoreLink> find_link(const std::string& process_id);
  Status add_link(const std::string& process_id, std::shared_ptr<transport::CoreLink> link);

  // What a peer exposed, and exposing to it.
  Status expose(transport::CoreLink& link, std::uint64_t region, std::byte* data,
                std::uint64_t bytes);
  std::byte* map(transport::CoreLink& link, std::uint64_t region, std::uint64_t bytes);
  // Connections of members of groups that are created later here than there.
  void stash(Stashed early);
  std::optional<Stashed> take_stashed(const std::string& process_id);

  // --- groups
  void add_group(const std::shared_ptr<Group>& group,
                 const std::vector<std::string>& process_ids_by_rank);
  void remove_group(const std::shared_ptr<Group>& group);
  // Of a group that did not come together: tells the others, takes its memory back.
  void discard_group(Group& group, const Status& why);
  Viability viability_of(transport::CoreLink& link);
  bool knows_group(std::uint64_t group_id);

  // --- operations
  // `caller_waits`: wait() follows at once, so the progress thread need not be woken.
  void submit(Group& group, std::shared_ptr<QueuedOperation> operation, bool caller_waits);
  void submit_point_to_point(Group& group, std::shared_ptr<QueuedOperation> operation,
                             bool caller_waits);
  // A caller drove an operation at the front of its group's queue so far, and lets go of it.
  void take_over();
  // Runs the engine in the calling thread, later parks. Ok when done, or kTimeout.
  Status wait(QueuedOperation& operation, std::int64_t timeout_ms);
  void abort_group(Group& group, const Status& status, Group::Tell tell = Group::Tell::kPeers);
  // Something outside the engine's sight changed: look now.
  void kick();
  // While a caller waits long outside the engine: what peers say of a failure must not wait too.
  void begin_watching();
  void end_watching();
  // Runs on a completion thread. A callback may wait for another operation's callback: whoever
  // waits inside one holds up no other.
  void run_later(std::function<void()> callback);
  // Lets go of a user's memory where no lock is held: that may run the user's code, or wait for a
  // lock of the user's that is held by someone who waits for us.
  void dispose(std::shared_ptr<void> memory);

  std::vector<PeerStats> peer_stats(const Group& group);
  // Writes what all groups of this process did last, as rank `about` has it in the job. Returns
  // the file's path. Errors: kSystem, kInvalidUsage (flight_dump.h, write_private_file).
  Result<std::string> dump_flight(const Group& about, const std::string& folder);

 private:
  struct PeerLink {
    std::shared_ptr<transport::CoreLink> link;
    std::uint64_t token = 0;
    bool told_lost = false;
    bool told_departed = false;
    bool wants_write = false;
  };
  struct Member {
    std::shared_ptr<Group> group;
    std::vector<std::string> process_ids;  // by rank
  };
  // The shared memory of a group that ended here, kept until no peer can read it.
  struct Grave {
    std::uint64_t region = 0;
    std::byte* area = nullptr;
    std::byte* window = nullptr;
    std::vector<std::shared_ptr<transport::CoreLink>> links;
    std::vector<std::shared_ptr<void>> quarantine;
  };

  Engine() = default;
  Status start(const Options& options);
  Status start_quic(const Options& options);
  Status start_rdma(const Options& options);
  void forget_rdma();
  void stop();
  bool progress();  // needs mutex_
  void watch_links();
  void forget(PeerLink& peer);
  void take_notices(const std::string& process_id, transport::CoreLink& link);
  bool take_notice(const std::string& process_id, const transport::GroupNotice& notice);
  void tell_failures();
  void send_failure(const Group& group);
  void tell_cause(const Group& group);
  Result<std::string> write_flight(const Group& about, const std::string& folder);  // needs mutex_
  void dump_timeouts();
  void leave(collectives::GroupContext& context, const transport::GroupNotice& notice);
  void bury(Group& group);
  void sweep_graves();
  void keep_quarantines_for_good();
  bool is_active() const { return num_active_.load() > 0; }
  void progress_loop();
  void sleep_until_event();
  void completion_loop();
  void flush_disposals();
  void dispatch(const std::vector<platform::Poller::Event>& events);
  void arm_bell();
  void begin_running();
  void end_running();
  bool look_once_more();

  std::string process_id_;
  std::string local_name_;
  std::string local_secret_;
  std::string shm_refusal_;
  std::shared_ptr<transport::shm::Host> host_;  // as long as anyone has memory of it
  platform::UniqueFd local_listener_;
  Addresses addresses_;
  platform::TcpListener tcp_listener_;
  std::vector<std::shared_ptr<transport::quic::Endpoint>> quic_;
  std::vector<std::string> quic_told_;
  std::string quic_refusal_;
  transport::rdma::Place rdma_;
  std::string rdma_refusal_;
  std::mutex creation_mutex_;
  Crowding crowding_;

  std::mutex mutex_;
  platform::Poller poller_;
  platform::Doorbell kick_bell_;
  std::map<std::string, PeerLink> links_;
  std::vector<Member> members_;
  std::vector<Grave> graves_;
  std::vector<Tended*> tended_;
  std::deque<Stashed> stashed_;
  std::deque<std::pair<std::string, transport::GroupNotice>> early_notices_;  // by process id
  std::uint64_t next_token_ = kFirstLinkToken;
  std::vector<platform::Poller::Event> events_;

  std::atomic<int> num_active_{0};       // queued operations of all groups
  std::atomic<bool> has_unsent_{false};  // a link holds frames that found no room
  std::atomic<int> num_watchers_{0};
  std::atomic<int> num_runners_{0};     // callers inside wait()
  std::atomic<bool> is_asleep_{false};  // the progress thread is in, or about to enter, epoll
  std::atomic<bool> is_stopping_{false};
  bool is_stopped_ = false;
  std::thread progress_thread_;

  std::mutex completion_mutex_;
  std::condition_variable completion_changed_;
  std::deque<std::function<void()>> completions_;
  std::vector<std::shared_ptr<void>> disposals_;
  std::vector<std::thread> completion_threads_;
  std::size_t num_idle_completers_ = 0;
};

}  // namespace pycomm::communicator

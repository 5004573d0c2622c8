// A link that drives a MessageCore, and what an engine needs of it beyond the contract: a
// descriptor to sleep on, and a look whether something waits. Shared by shm and tcp.
#pragma once

#include <atomic>
#include <memory>

#include "base/clock.h"
#include "transport/message_core.h"

namespace pycomm::transport {

class CoreLink : public Link, public std::enable_shared_from_this<CoreLink> {
 public:
  CoreLink(const CoreOptions& options, PullPort* pull_port, GrantPort* grant_port = nullptr)
      : core_(options, pull_port, grant_port) {}

  void post(Transfer& transfer) override { core_.post(transfer); }
  void send(Transfer& transfer) override { core_.send(transfer); }
  void cancel(Transfer& transfer) override { core_.cancel(transfer); }
  bool is_offered(const TransferId& id) const override { return core_.is_offered(id); }
  void retire(std::uint64_t group, std::uint64_t op) override { core_.retire(group, op); }
  RemoteMemory* remote_memory() override { return &core_; }
  LinkCounters counters() const override { return core_.counters(); }
  void close() override { core_.queue_goodbye(); }

  Viability is_viable() const override {
    if (!core_.failure().is_ok()) return {false, core_.failure().message()};
    if (core_.peer_departed()) return {false, "the peer has left"};
    return {};
  }

  // Readable when the peer moved or died; -1 if the transport has one descriptor for all links.
  virtual int fd() const = 0;
  // All that a forked child must not keep.
  virtual std::vector<int> fds() const { return {fd()}; }
  // When progress() has to be called even if nothing comes.
  virtual base::TimeNs next_deadline() const { return base::kNever; }
  virtual bool wants_write() const { return false; }
  // Called when fd() is ready; progress() follows.
  virtual void on_ready() {}
  // About to sleep: from now on fd() tells what comes. progress() follows.
  virtual void arm() {}
  // Whether something arrived that progress() would take; no system call.
  virtual bool has_incoming() const { return false; }

  // After the goodbye has left: lets the peer see the end, and whether this side still has to wait
  // until the peer has taken everything.
  virtual void end_writing() {}
  virtual bool awaits_peers_end() const { return false; }

  // Lets what is queued here leave, and takes nothing in.
  virtual void flush() { progress(); }

  virtual void fail(const Status& status) { core_.fail(status); }
  const Status& failure() const { return core_.failure(); }
  bool peer_departed() const { return core_.peer_departed(); }
  void send_notice(const GroupNotice& notice) { core_.send_notice(notice); }
  void send_whereabouts(const Whereabouts& mine) { core_.send_whereabouts(mine); }
  std::vector<Whereabouts> take_whereabouts() { return core_.take_whereabouts(); }
  std::vector<GroupNotice> take_notices() { return core_.take_notices(); }
  // Everything queued here, a goodbye included, has left.
  virtual bool is_flushed() const { return core_.is_idle(); }
  // fd() has nothing more to say: the link failed, or the peer said goodbye and closed.
  bool has_ended() const { return has_ended_ || !core_.failure().is_ok(); }

 protected:
  // The peer said goodbye and closed: what is still queued for it counts as delivered.
  void end_after_goodbye() {
    has_ended_ = true;
    while (core_.front() != nullptr) core_.pop();
  }

  MessageCore core_;
  bool has_ended_ = false;
};

}  // namespace pycomm::transport

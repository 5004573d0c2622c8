// Sleeping on descriptors: an epoll set, and a doorbell that any thread or peer can ring.
#pragma once

#include <cstdint>
#include <vector>

#include "base/clock.h"
#include "platform/fd.h"
#include "pycomm/status.h"

namespace pycomm::platform {

// An eventfd. ring() never blocks; clear() takes all rings at once.
class Doorbell {
 public:
  static Result<Doorbell> create();
  static Doorbell adopt(UniqueFd fd);

  void ring() const;
  void clear() const;
  // Waits for a ring without clearing it; false after `timeout_ns`.
  bool wait(std::int64_t timeout_ns) const;
  int fd() const { return fd_.get(); }

 private:
  UniqueFd fd_;
};

// Level-triggered epoll; readiness to read, and to write where asked, by a caller's number.
class Poller {
 public:
  struct Event {
    std::uint64_t token;
    bool readable;  // also set on hang-up and error: a read will tell
    bool writable;
  };

  static Result<Poller> create();
  Status add(int fd, std::uint64_t token) const;
  void set_wants_write(int fd, std::uint64_t token, bool wants);
  void remove(int fd);
  // The set itself; readable while anything in it is.
  int fd() const { return fd_.get(); }
  // Waits up to `timeout_ns` (negative: for ever) and appends what is ready.
  void wait(std::int64_t timeout_ns, std::vector<Event>* events) const;

 private:
  UniqueFd fd_;
};

}  // namespace pycomm::platform

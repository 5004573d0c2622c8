#include "platform/tun.h"

#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>

#include <algorithm>
#include <cstring>

#include "platform/system.h"

namespace pycomm::platform {
namespace {

// Restores the thread's namespace when it ends.
class NamespaceVisit {
 public:
  Status enter(const std::string& path) {
    home_.reset(::open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC));
    const UniqueFd there(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (!home_ || !there) return system_error("opening the network namespace " + path);
    if (setns(there.get(), CLONE_NEWNET) != 0) return system_error("entering " + path);
    return Status();
  }
  ~NamespaceVisit() {
    if (home_) static_cast<void>(setns(home_.get(), CLONE_NEWNET));
  }

 private:
  UniqueFd home_;
};

}  // namespace

Result<UniqueFd> open_tun(const std::string& namespace_path, const std::string& name) {
  NamespaceVisit visit;
  PYCOMM_RETURN_IF_ERROR(visit.enter(namespace_path));
  UniqueFd fd(::open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC));
  if (!fd) return system_error("opening /dev/net/tun");
  ifreq request{};
  std::strncpy(request.ifr_name, name.c_str(), IFNAMSIZ - 1);
  request.ifr_flags = IFF_TUN | IFF_NO_PI;
  if (ioctl(fd.get(), TUNSETIFF, &request) != 0) return system_error("making the device " + name);
  return fd;
}

std::size_t read_packet(int fd, std::uint8_t* out, std::size_t bytes_max) {
  const ssize_t got = ::read(fd, out, bytes_max);
  return got > 0 ? static_cast<std::size_t>(got) : 0;
}

std::size_t write_packet(int fd, const std::uint8_t* packet, std::size_t bytes) {
  const ssize_t sent = ::write(fd, packet, bytes);
  return sent > 0 ? static_cast<std::size_t>(sent) : 0;
}

void await_any_readable(const std::vector<int>& fds, base::TimeNs deadline) {
  std::vector<pollfd> polled;
  for (const int fd : fds) polled.push_back({fd, POLLIN, 0});
  const base::TimeNs left = deadline - real_clock().now_ns();
  if (left <= 0) return;
  const timespec timeout{left / 1'000'000'000, left % 1'000'000'000};
  static_cast<void>(ppoll(polled.data(), polled.size(), &timeout, nullptr));
}

}  // namespace pycomm::platform

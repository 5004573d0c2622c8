#include "platform/memory_monitor.h"

#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <thread>

#include "platform/system.h"

namespace pycomm::platform {
namespace {

// linux/userfaultfd.h of before 5.11 does not have it.
constexpr int kUserModeOnly = 1;

UniqueFd open_userfaultfd(std::string* refusal) {
  // Faults are never served here, so that user mode is all that is needed of it.
  int fd = -1;
  for (const int mode : {kUserModeOnly, 0}) {
    fd = static_cast<int>(syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | mode));
    if (fd >= 0) break;
  }
  if (fd < 0) {
    *refusal = std::string("userfaultfd: ") + std::strerror(errno);
    return UniqueFd();
  }
  UniqueFd owned(fd);
  uffdio_api api{};
  api.api = UFFD_API;
  api.features = UFFD_FEATURE_EVENT_UNMAP | UFFD_FEATURE_EVENT_REMAP | UFFD_FEATURE_EVENT_REMOVE |
                 UFFD_FEATURE_PAGEFAULT_FLAG_WP;
  if (ioctl(fd, UFFDIO_API, &api) != 0) {
    *refusal = std::string("userfaultfd's events: ") + std::strerror(errno);
    return UniqueFd();
  }
  return owned;
}

}  // namespace

MemoryMonitor* MemoryMonitor::of_process(std::string* refusal) {
  // Never destroyed: threads may free memory after static destructors ran. A forked child has its
  // own, since neither the thread nor the watch is inherited.
  static std::mutex mutex;
  static MemoryMonitor* monitor = nullptr;
  static int owner = 0;
  static std::string why;
  std::lock_guard lock(mutex);
  if (owner != process_id()) {
    owner = process_id();
    monitor = nullptr;
    why.clear();
    UniqueFd fd = open_userfaultfd(&why);
    if (fd) {
      monitor = new MemoryMonitor(std::move(fd));
      std::thread([m = monitor] { m->run(); }).detach();
    }
  }
  if (monitor == nullptr) *refusal = why;
  return monitor;
}

bool MemoryMonitor::watch(const void* data, std::uint64_t bytes) {
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const std::uintptr_t begin = reinterpret_cast<std::uintptr_t>(data) & ~(page - 1);
  const std::uintptr_t end =
      (reinterpret_cast<std::uintptr_t>(data) + bytes + page - 1) & ~(page - 1);
  uffdio_register range{};
  range.range.start = begin;
  range.range.len = end - begin;
  // Write-protect mode in which nothing is ever protected: events without faults.
  range.mode = UFFDIO_REGISTER_MODE_WP;
  return ioctl(fd_.get(), UFFDIO_REGISTER, &range) == 0;
}

void MemoryMonitor::take_events() {
  uffd_msg message;
  while (read(fd_.get(), &message, sizeof message) == static_cast<ssize_t>(sizeof message)) {
    Freed freed{};
    switch (message.event) {
      case UFFD_EVENT_UNMAP:
      case UFFD_EVENT_REMOVE:
        freed = {static_cast<std::uintptr_t>(message.arg.remove.start),
                 static_cast<std::uintptr_t>(message.arg.remove.end)};
        break;
      case UFFD_EVENT_REMAP:
        freed = {static_cast<std::uintptr_t>(message.arg.remap.from),
                 static_cast<std::uintptr_t>(message.arg.remap.from + message.arg.remap.len)};
        break;
      default: continue;
    }
    const std::uint64_t n = num_events_.load(std::memory_order_relaxed);
    events_[n % kEventsMax] = freed;
    num_events_.store(n + 1, std::memory_order_release);
  }
}

int MemoryMonitor::freed_since(std::uint64_t* cursor, Freed* out, int count, bool* all) {
  std::lock_guard lock(mutex_);
  take_events();
  const std::uint64_t end = num_events_.load(std::memory_order_relaxed);
  *all = end - *cursor > kEventsMax;
  if (*all) {
    *cursor = end;
    return 0;
  }
  int n = 0;
  while (n < count && *cursor < end) out[n++] = events_[(*cursor)++ % kEventsMax];
  return n;
}

void MemoryMonitor::run() {
  block_signals_in_this_thread();
  for (;;) {
    pollfd waiting{fd_.get(), POLLIN, 0};
    if (poll(&waiting, 1, -1) < 0 && errno != EINTR) return;
    std::lock_guard lock(mutex_);
    take_events();
  }
}

}  // namespace pycomm::platform

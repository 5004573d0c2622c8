#include "communicator/fork_guard.h"

#include <array>
#include <atomic>

#include "communicator/shared_memory.h"
#include "platform/fd.h"
#include "platform/system.h"

namespace pycomm::communicator {

std::atomic<std::uint64_t> fork_generation_count{0};

namespace {

// Lock-free: the handler runs in a child whose other threads are gone, whatever they held.
constexpr int kFdsMax = 4096;
std::array<std::atomic<int>, kFdsMax> g_fds_plus_one{};

void on_fork() {
  keep_inherited_memory_private();
  fork_generation_count.fetch_add(1);
  for (auto& slot : g_fds_plus_one) {
    const int fd = slot.exchange(0) - 1;
    if (fd >= 0) platform::close_raw_fd(fd);
  }
}

}  // namespace

void watch_forks() {
  static const bool installed = [] {
    platform::on_fork_child(on_fork);
    return true;
  }();
  static_cast<void>(installed);
}

void forget_after_fork(int fd) {
  for (auto& slot : g_fds_plus_one) {
    int empty = 0;
    if (slot.compare_exchange_strong(empty, fd + 1)) return;
  }
}

void forget_no_more(int fd) {
  for (auto& slot : g_fds_plus_one) {
    int expected = fd + 1;
    if (slot.compare_exchange_strong(expected, 0)) return;
  }
}

}  // namespace pycomm::communicator

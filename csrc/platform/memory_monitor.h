// Sees which memory the process gives back: munmap, mremap, madvise(MADV_DONTNEED), free() that
// ends in one of these. A registration that is kept beyond its use needs that, since the next
// mapping at the same address is other memory. By userfaultfd(2), whose events hold the caller of
// munmap until they are read; no fault is ever handled, no function is patched.
//
// Thread: any. Never allocates under its lock, since allocating may give memory back.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>

#include "platform/fd.h"

namespace pycomm::platform {

class MemoryMonitor {
 public:
  struct Freed {
    std::uintptr_t begin;
    std::uintptr_t end;
  };

  // The process's, started by the first call; null with a reason where the kernel lets it not be
  // (userfaultfd needs CAP_SYS_PTRACE, vm.unprivileged_userfaultfd=1 or its user-mode-only form).
  static MemoryMonitor* of_process(std::string* refusal);

  // From now on the pages of [data, data + bytes) are watched. False if they cannot be (memory of
  // a file, for example): then nothing may be kept for them.
  bool watch(const void* data, std::uint64_t bytes);

  // What was freed since *cursor, at most `count` intervals; moves *cursor on. *all: more than can
  // be told, so everything counts as freed.
  int freed_since(std::uint64_t* cursor, Freed* out, int count, bool* all);

 private:
  static constexpr std::size_t kEventsMax = 1024;

  explicit MemoryMonitor(UniqueFd fd) : fd_(std::move(fd)) {}
  void take_events();  // under mutex_
  void run();

  const UniqueFd fd_;
  std::mutex mutex_;
  std::array<Freed, kEventsMax> events_{};  // number n lies at n % kEventsMax
  std::atomic<std::uint64_t> num_events_{0};
};

}  // namespace pycomm::platform

// What a forked child inherits: dead handles. Its copies of the sockets are closed at once, so
// that peers notice the parent's death even while a child lives on. The child may start anew.
#pragma once

#include <atomic>
#include <cstdint>

namespace pycomm::communicator {

// Installs the handler, once.
void watch_forks();
// Changes in every forked child: what was made under another generation is the parent's.
extern std::atomic<std::uint64_t> fork_generation_count;
inline std::uint64_t fork_generation() {
  return fork_generation_count.load(std::memory_order_relaxed);
}
// One T a fork generation, never destroyed: threads, tensors and exit handlers may outlive static
// destructors, and a child must not touch a lock that its parent held.
template <class T>
T& of_this_process() {
  static std::atomic<T*> current{new T};
  static std::atomic<std::uint64_t> generation{fork_generation()};
  std::uint64_t seen = generation.load();
  if (seen != fork_generation() && generation.compare_exchange_strong(seen, fork_generation())) {
    current.store(new T);
  }
  return *current.load();
}

// Close `fd` in every child forked from now on; no more.
void forget_after_fork(int fd);
void forget_no_more(int fd);

}  // namespace pycomm::communicator

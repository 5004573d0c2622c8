// Sleeping on a word of shared memory that another process will change.
#pragma once

#include <atomic>
#include <cstdint>

namespace pycomm::platform {

// Sleeps while the low half of *word still is that of `seen`, at most `timeout_ns`. May return
// early. The word may be mapped read-only.
void futex_wait(const std::atomic<std::uint64_t>* word, std::uint64_t seen,
                std::int64_t timeout_ns);
void futex_wake_all(const std::atomic<std::uint64_t>* word);

// The slow half of an asymmetric fence (membarrier(2), global expedited). Publishers do a store and
// then a load with no fence between; a sleeper stores its flag, calls process_barrier(), and looks
// once more: then one of the two has seen the other. Publishers must have registered.
// Both return false where the kernel refuses; the sleeper then has to look again soon by itself.
bool register_for_process_barriers();
bool process_barrier();

}  // namespace pycomm::platform

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

}  // namespace pycomm::platform

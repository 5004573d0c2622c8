// The process and its host: clock, environment, identity, random bytes, threads.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "pycomm/status.h"

namespace pycomm::platform {

// CLOCK_MONOTONIC.
class RealClock final : public base::Clock {
 public:
  base::TimeNs now_ns() const override;
};
const RealClock& real_clock();

void sleep_ns(std::int64_t ns);
void yield_thread();

std::optional<std::string> environment(const char* name);
std::vector<std::pair<std::string, std::string>> environment_with_prefix(const std::string& prefix);
// Contents of a small text file; nothing if it cannot be read.
std::optional<std::string> read_file(const std::string& path);
std::string host_name();
// The model as the kernel names it; empty if it does not.
std::string processor_name();
// TMPDIR or /tmp.
std::string temporary_folder();
// The user's cache folder for this library, made if need be; empty if there is none.
std::string user_cache_folder();
// A folder that only this user can write, made if need be.
// Errors: kSystem; kInvalidUsage if it is there and is another user's, or open to others.
Status make_private_folder(const std::string& path);
// Writes a file of mode 0600; follows no link.
Status write_private_file(const std::string& path, const std::string& contents);

// The contents of a file that only its owner may read, without trailing white space.
// Errors: kSystem (not readable), kInvalidUsage (others may read it).
Result<std::string> read_private_file(const std::string& path);

// "text: strerror(errno)" as a kSystem status.
Status system_error(const std::string& text);

// 16 bytes from the kernel's generator, as 32 hexadecimal digits.
std::string random_hex128();
std::uint64_t random_u64();

// Equal for two processes that can share memory over a local socket: same boot of the kernel,
// same network namespace, same user.
std::string shared_memory_domain();
// Equal for two processes that reach each other over loopback: one kernel, one network namespace.
std::string host_identity();

// Whether the kernel knows any RDMA device.
bool has_rdma_devices();
// Bytes that this process may lock: RLIMIT_MEMLOCK, or no limit with the right to ignore it.
std::uint64_t lockable_bytes();

int process_id();
// The processors that this process may run on, four a hexadecimal digit, the first in the lowest
// bit of the first digit.
std::string allowed_cpus();
// Restricts the calling thread to the index-th allowed processor; false if there is none.
bool pin_thread_to_allowed_cpu(int index);

// Runs it in a thread of its own, which nobody waits for. Errors: kSystem.
Status run_detached(std::function<void()> work);

// Signals go to other threads from now on.
void block_signals_in_this_thread();

// `what()` runs in the child after every fork of this process, before fork returns there.
void on_fork_child(void (*what)());
// `what()` runs when the process ends by exit() or by returning from main.
void on_process_exit(void (*what)());

}  // namespace pycomm::platform

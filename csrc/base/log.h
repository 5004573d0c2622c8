// Log lines "pycomm[host:pid] WARN text" to stderr or a file, one write each. Warnings and errors
// are always told; INFO and TRACE by subsystem, as NCCL users know it.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace pycomm::base {

enum class LogLevel : int { kError = 0, kWarn = 1, kInfo = 2, kTrace = 3 };
enum class Subsystem : std::uint32_t {
  kInit = 1,  // groups that come and go
  kColl = 2,  // collectives
  kP2p = 4,   // sends and receives
  kNet = 8,   // sockets
  kShm = 16,  // shared memory
  kEnv = 32,  // settings
  kAll = 63,
};

// Each returns false, and changes nothing, for what it does not know.
bool set_log_level_named(const std::string& level);  // VERSION, WARN, INFO, TRACE
bool set_log_subsystems(const std::string& list);    // "INIT,NET", "^SHM", "ALL"
// %h and %p have been replaced by set_log_identity()'s; given before that, the file opens then.
bool set_log_file(const std::string& path);
void set_log_identity(const std::string& host, int pid);

extern std::atomic<int> log_level;
// Without a call, for paths that are counted in nanoseconds.
inline bool is_tracing() {
  return log_level.load(std::memory_order_relaxed) >= static_cast<int>(LogLevel::kTrace);
}
bool log_enabled(LogLevel level, Subsystem subsystem);
void log(LogLevel level, Subsystem subsystem, const std::string& text);
// Whatever the level: for who asked for VERSION or more.
void tell_version(const std::string& version);

}  // namespace pycomm::base

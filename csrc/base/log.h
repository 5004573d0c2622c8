// Log lines to stderr: "pycomm[pid] level: text", one write each. The level is set once at start.
#pragma once

#include <string>

namespace pycomm::base {

enum class LogLevel : int { kError = 0, kWarn = 1, kInfo = 2 };

void set_log_level(LogLevel level);
// What every line starts with; set before other threads log.
void set_log_prefix(const std::string& prefix);
bool log_enabled(LogLevel level);
void log(LogLevel level, const std::string& text);

}  // namespace pycomm::base

#include "base/log.h"

#include <cstdio>
#include <mutex>

namespace pycomm::base {

std::atomic<int> log_level{static_cast<int>(LogLevel::kWarn)};

namespace {

struct Named {
  const char* name;
  std::uint32_t value;
};
constexpr Named kSubsystems[] = {{"INIT", 1}, {"COLL", 2}, {"P2P", 4}, {"NET", 8},
                                 {"SHM", 16}, {"ENV", 32}, {"ALL", 63}};
// VERSION is errors and the version, which the settings tell (tell_version).
constexpr Named kLevels[] = {{"VERSION", 0}, {"WARN", 1}, {"INFO", 2}, {"TRACE", 3}};

std::atomic<std::uint32_t> g_subsystems{static_cast<std::uint32_t>(Subsystem::kAll)};

// Never destroyed: threads may log while the process ends.
struct Sink {
  std::mutex mutex;
  std::string pattern;
  std::string host = "?";
  int pid = 0;
  std::FILE* file = nullptr;
};
Sink& sink() {
  static auto* sink = new Sink;
  return *sink;
}

const Named* find(const Named* first, const Named* last, const std::string& name) {
  for (; first != last; ++first) {
    if (name == first->name) return first;
  }
  return nullptr;
}

std::string expand(const Sink& s) {
  std::string path;
  for (std::size_t i = 0; i < s.pattern.size(); ++i) {
    const char next = i + 1 < s.pattern.size() ? s.pattern[i + 1] : 0;
    if (s.pattern[i] == '%' && (next == 'h' || next == 'p')) {
      path += next == 'h' ? s.host : std::to_string(s.pid);
      ++i;
    } else {
      path += s.pattern[i];
    }
  }
  return path;
}

bool reopen(Sink& s) {
  std::FILE* file = std::fopen(expand(s).c_str(), "ae");
  if (file == nullptr) return false;
  std::setvbuf(file, nullptr, _IONBF, 0);
  if (s.file != nullptr) std::fclose(s.file);
  s.file = file;
  return true;
}

}  // namespace

bool set_log_level_named(const std::string& level) {
  const Named* found = find(std::begin(kLevels), std::end(kLevels), level);
  if (found != nullptr) log_level.store(static_cast<int>(found->value));
  return found != nullptr;
}

bool set_log_subsystems(const std::string& list) {
  const bool excludes = !list.empty() && list[0] == '^';
  std::uint32_t named = 0;
  for (std::size_t at = excludes ? 1 : 0; at <= list.size();) {
    const std::size_t end = std::min(list.find(',', at), list.size());
    const Named* found =
        find(std::begin(kSubsystems), std::end(kSubsystems), list.substr(at, end - at));
    if (found == nullptr) return false;
    named |= found->value;
    at = end + 1;
  }
  g_subsystems.store(excludes ? static_cast<std::uint32_t>(Subsystem::kAll) & ~named : named);
  return true;
}

bool set_log_file(const std::string& path) {
  Sink& s = sink();
  std::lock_guard lock(s.mutex);
  s.pattern = path;
  return reopen(s);
}

void set_log_identity(const std::string& host, int pid) {
  Sink& s = sink();
  std::lock_guard lock(s.mutex);
  const bool is_other = s.pid != pid;
  s.host = host;
  s.pid = pid;
  if (is_other && s.pattern.find("%p") != std::string::npos) reopen(s);
}

bool log_enabled(LogLevel level, Subsystem subsystem) {
  if (static_cast<int>(level) > log_level.load(std::memory_order_relaxed)) return false;
  if (level <= LogLevel::kWarn) return true;
  return (g_subsystems.load(std::memory_order_relaxed) & static_cast<std::uint32_t>(subsystem)) !=
         0;
}

namespace {
void write_line(const char* label, const std::string& text) {
  Sink& s = sink();
  std::lock_guard lock(s.mutex);
  const std::string line =
      "pycomm[" + s.host + ":" + std::to_string(s.pid) + "] " + label + " " + text + "\n";
  std::fwrite(line.data(), 1, line.size(), s.file != nullptr ? s.file : stderr);  // one write
}
}  // namespace

void log(LogLevel level, Subsystem subsystem, const std::string& text) {
  static const char* const names[] = {"ERROR", "WARN", "INFO", "TRACE"};
  if (log_enabled(level, subsystem)) write_line(names[static_cast<int>(level)], text);
}

void tell_version(const std::string& version) { write_line("VERSION", version); }

}  // namespace pycomm::base

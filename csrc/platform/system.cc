#include "platform/system.h"

#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <system_error>
#include <thread>

#include "base/check.h"
#include "platform/fd.h"

namespace pycomm::platform {

base::TimeNs RealClock::now_ns() const {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return base::TimeNs{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

const RealClock& real_clock() {
  static const RealClock clock;
  return clock;
}

void sleep_ns(std::int64_t ns) {
  timespec duration{static_cast<time_t>(ns / 1'000'000'000), static_cast<long>(ns % 1'000'000'000)};
  nanosleep(&duration, nullptr);
}

bool has_rdma_devices() {
  // Any entry beside "." and "..".
  DIR* folder = opendir("/sys/class/infiniband");
  if (folder == nullptr) return false;
  bool found = false;
  while (const dirent* entry = readdir(folder)) found |= entry->d_name[0] != '.';
  closedir(folder);
  return found;
}

std::uint64_t lockable_bytes() {
  // CAP_IPC_LOCK in the effective set: the kernel does not count then.
  constexpr int kIpcLock = 14;
  if (const auto status = read_file("/proc/self/status")) {
    const std::size_t at = status->find("CapEff:");
    if (at != std::string::npos &&
        (std::strtoull(status->c_str() + at + 7, nullptr, 16) >> kIpcLock & 1) != 0) {
      return UINT64_MAX;
    }
  }
  rlimit limit{};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return UINT64_MAX;
  return limit.rlim_cur;
}

Status run_detached(std::function<void()> work) {
  try {
    std::thread(std::move(work)).detach();
    return Status();
  } catch (const std::system_error& error) {
    return Status::error(StatusCode::kSystem, std::string("starting a thread: ") + error.what());
  }
}

void yield_thread() { sched_yield(); }

std::optional<std::string> environment(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr) return std::nullopt;
  return std::string(value);
}

std::vector<std::pair<std::string, std::string>> environment_with_prefix(
    const std::string& prefix) {
  std::vector<std::pair<std::string, std::string>> found;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string text = *entry;
    const std::size_t equals = text.find('=');
    if (equals == std::string::npos || text.compare(0, prefix.size(), prefix) != 0) continue;
    found.emplace_back(text.substr(0, equals), text.substr(equals + 1));
  }
  return found;
}

std::optional<std::string> read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::nullopt;
  std::stringstream contents;
  contents << file.rdbuf();
  return contents.str();
}

std::string host_name() {
  char name[HOST_NAME_MAX + 1] = {};
  return gethostname(name, sizeof name - 1) == 0 ? name : "unknown-host";
}

std::string temporary_folder() {
  const char* folder = std::getenv("TMPDIR");
  return folder != nullptr && *folder != 0 ? folder : "/tmp";
}

Status make_private_folder(const std::string& path) {
  mkdir(path.c_str(), 0700);
  struct stat info;
  if (lstat(path.c_str(), &info) != 0) return system_error("'" + path + "'");
  if (!S_ISDIR(info.st_mode) || info.st_uid != geteuid() || (info.st_mode & 022) != 0) {
    return Status::error(StatusCode::kInvalidUsage,
                         "'" + path + "' is no folder that only this user can write");
  }
  return Status();
}

Status write_private_file(const std::string& path, const std::string& contents) {
  UniqueFd fd(open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!fd) return system_error("'" + path + "'");
  for (std::size_t at = 0; at < contents.size();) {
    const ssize_t wrote = write(fd.get(), contents.data() + at, contents.size() - at);
    if (wrote <= 0) return system_error("'" + path + "'");
    at += static_cast<std::size_t>(wrote);
  }
  return Status();
}

Result<std::string> read_private_file(const std::string& path) {
  struct stat info;
  if (stat(path.c_str(), &info) != 0) return system_error("'" + path + "'");
  if (!S_ISREG(info.st_mode)) {
    return Status::error(StatusCode::kInvalidUsage, "'" + path + "' is not a file");
  }
  if ((info.st_mode & 077) != 0) {
    return Status::error(StatusCode::kInvalidUsage,
                         "'" + path + "' can be read by other users; chmod 600 it");
  }
  std::ifstream file(path, std::ios::binary);
  std::stringstream contents;
  contents << file.rdbuf();
  if (!file) return Status::error(StatusCode::kSystem, "'" + path + "' cannot be read");
  std::string text = contents.str();
  while (!text.empty() && std::strchr(" \r\n\t", text.back()) != nullptr) text.pop_back();
  return text;
}

Status system_error(const std::string& text) {
  return Status::error(StatusCode::kSystem, text + ": " + std::strerror(errno));
}

namespace {

void fill_random(void* data, std::size_t bytes) {
  auto* at = static_cast<unsigned char*>(data);
  while (bytes > 0) {
    const ssize_t n = getrandom(at, bytes, 0);
    if (n < 0 && errno == EINTR) continue;
    PYCOMM_CHECK(n > 0);
    at += n;
    bytes -= static_cast<std::size_t>(n);
  }
}

std::string boot_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  file >> id;
  return id.empty() ? "no-boot-id-" + random_hex128() : id;
}

}  // namespace

std::string random_hex128() {
  unsigned char bytes[16];
  fill_random(bytes, sizeof bytes);
  static const char digits[] = "0123456789abcdef";
  std::string text;
  for (unsigned char b : bytes) {
    text += digits[b >> 4];
    text += digits[b & 15];
  }
  return text;
}

std::uint64_t random_u64() {
  std::uint64_t value;
  fill_random(&value, sizeof value);
  return value;
}

std::string host_identity() {
  static const std::string id = [] {
    struct stat info;
    const std::string network =
        stat("/proc/self/ns/net", &info) == 0 ? std::to_string(info.st_ino) : random_hex128();
    return boot_id() + "/net" + network;
  }();
  return id;
}

std::string shared_memory_domain() { return host_identity() + "/uid" + std::to_string(geteuid()); }

int process_id() { return getpid(); }

std::string user_cache_folder() {
  std::string folder = environment("XDG_CACHE_HOME").value_or("");
  if (folder.empty()) {
    const auto home = environment("HOME");
    if (!home || home->empty()) return "";
    folder = *home + "/.cache";
  }
  if (!make_private_folder(folder).is_ok()) return "";
  folder += "/pycomm";
  return make_private_folder(folder).is_ok() ? folder : "";
}

std::string processor_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 1);
  }
  return "";
}

std::string allowed_cpus() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  sched_getaffinity(0, sizeof allowed, &allowed);
  std::string digits;
  for (int first = 0; first + 4 <= CPU_SETSIZE; first += 4) {
    int four = 0;
    for (int k = 0; k < 4; ++k) four |= CPU_ISSET(first + k, &allowed) ? 1 << k : 0;
    digits += "0123456789abcdef"[four];
  }
  digits.erase(digits.find_last_not_of('0') + 1);
  return digits;
}

bool pin_thread_to_allowed_cpu(int index) {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return false;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &allowed) || index-- > 0) continue;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    return sched_setaffinity(0, sizeof one, &one) == 0;
  }
  return false;
}

void block_signals_in_this_thread() {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
}

void on_fork_child(void (*what)()) { pthread_atfork(nullptr, nullptr, what); }

void on_process_exit(void (*what)()) { std::atexit(what); }

}  // namespace pycomm::platform

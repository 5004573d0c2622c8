#include "two_processes.h"

#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace pycomm::bench {

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

void pin(int index) {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  sched_getaffinity(0, sizeof allowed, &allowed);
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &allowed) || index-- > 0) continue;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    sched_setaffinity(0, sizeof one, &one);
    return;
  }
}

void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

Shared::Shared(std::uint64_t size) : bytes(size) {
  data = static_cast<char*>(
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  std::memset(data, 1, bytes);
}

Shared::~Shared() { munmap(data, bytes); }

double in_two(const std::function<double(int, Flags&)>& body) {
  Shared memory(sizeof(Flags));
  std::memset(memory.data, 0, sizeof(Flags));
  auto& flags = *reinterpret_cast<Flags*>(memory.data);
  cpu_set_t before;
  sched_getaffinity(0, sizeof before, &before);
  const pid_t child = fork();
  if (child == 0) {
    pin(1);
    flags.result[1] = body(1, flags);
    _exit(0);
  }
  pin(0);
  flags.result[0] = body(0, flags);
  waitpid(child, nullptr, 0);
  sched_setaffinity(0, sizeof before, &before);
  return std::max(flags.result[0], flags.result[1]);
}

}  // namespace pycomm::bench

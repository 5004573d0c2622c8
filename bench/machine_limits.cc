#include "machine_limits.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <functional>
#include <vector>

#include "two_processes.h"
#include "udp_pipe.h"

namespace pycomm::bench {
namespace {

using Best = std::function<double(const std::function<double()>&, bool lower_wins)>;

int rounds_for(std::uint64_t bytes) {
  return static_cast<int>(std::clamp<std::uint64_t>((std::uint64_t{1} << 28) / bytes, 5, 2000));
}

float* touched_floats(std::uint64_t bytes) {
  auto* data = static_cast<float*>(aligned_alloc(4096, bytes));
  for (std::uint64_t i = 0; i < bytes / sizeof(float); ++i) data[i] = 1.0f;
  return data;
}

__attribute__((target_clones("avx512f", "avx2", "default"))) void add_into(
    float* __restrict a, const float* __restrict b, std::uint64_t count) {
  for (std::uint64_t i = 0; i < count; ++i) a[i] += b[i];
}

__attribute__((target_clones("avx512f", "avx2", "default"))) void add_both(float* __restrict a,
                                                                           float* __restrict b,
                                                                           std::uint64_t count) {
  for (std::uint64_t i = 0; i < count; ++i) {
    const float sum = a[i] + b[i];
    a[i] = sum;
    b[i] = sum;
  }
}

__attribute__((target_clones("avx512f", "avx2", "default"))) std::uint64_t sum_of(
    const std::uint64_t* data, std::uint64_t count) {
  std::uint64_t sum = 0;
  for (std::uint64_t i = 0; i < count; ++i) sum += data[i];
  return sum;
}

// Many independent sums, so that the loop waits for memory and not for its own adds.
__attribute__((target_clones("avx512f", "avx2", "default"))) float sum_of_both(
    const float* __restrict a, const float* __restrict b, std::uint64_t count) {
  constexpr int kSums = 64;
  float sums[kSums] = {};
  for (std::uint64_t i = 0; i + kSums <= count; i += kSums) {
    for (int k = 0; k < kSums; ++k) {
      sums[k] += a[i + static_cast<std::uint64_t>(k)] + b[i + static_cast<std::uint64_t>(k)];
    }
  }
  float sum = 0;
  for (float s : sums) sum += s;
  return sum;
}

// Median seconds of `work` over rounds, both processes starting each round together.
double timed_rounds(Flags& flags, int me, int num_rounds, bool together,
                    const std::function<void(int)>& work) {
  std::vector<double> times;
  for (int round = 1; round <= num_rounds; ++round) {
    if (together) flags.exchange(me, static_cast<std::uint64_t>(round));
    const auto start = Clock::now();
    work(round);
    times.push_back(seconds_since(start));
  }
  return median(times);
}

double paired(std::uint64_t bytes, int num_processes,
              const std::function<void(float*, float*)>& work) {
  const double seconds = in_two([&](int me, Flags& flags) {
    if (me >= num_processes) return 0.0;
    float* a = touched_floats(bytes);
    float* b = touched_floats(bytes);
    const double s =
        timed_rounds(flags, me, rounds_for(bytes), num_processes == 2, [&](int) { work(a, b); });
    free(a);
    free(b);
    return s;
  });
  return static_cast<double>(bytes) / seconds;
}

}  // namespace

double flag_exchange_ns(int num_rounds) {
  return in_two([num_rounds](int me, Flags& flags) {
           std::vector<double> batches;
           constexpr int kBatch = 100;
           std::uint64_t round = 0;
           for (int done = 0; done < num_rounds; done += kBatch) {
             const auto start = Clock::now();
             for (int i = 0; i < kBatch; ++i) flags.exchange(me, ++round);
             batches.push_back(seconds_since(start) / kBatch);
           }
           return median(batches);
         }) *
         1e9;
}

double copy_bytes_per_s(std::uint64_t bytes, int num_processes) {
  return paired(bytes, num_processes, [bytes](float* a, float* b) { std::memcpy(a, b, bytes); });
}

double add_bytes_per_s(std::uint64_t bytes, int num_processes) {
  return paired(bytes, num_processes,
                [bytes](float* a, float* b) { add_into(a, b, bytes / sizeof(float)); });
}

double cross_read_bytes_per_s(std::uint64_t bytes) {
  Shared memory(2 * bytes);
  const double seconds = in_two([&](int me, Flags& flags) {
    auto* mine = memory.data + static_cast<std::uint64_t>(me) * bytes;
    const auto* theirs = memory.data + static_cast<std::uint64_t>(1 - me) * bytes;
    std::vector<double> times;
    std::uint64_t round = 0;
    volatile std::uint64_t sink = 0;
    for (int i = 0; i < std::min(rounds_for(bytes), 500); ++i) {
      std::memset(mine, i, bytes);  // dirty it
      flags.exchange(me, ++round);
      const auto start = Clock::now();
      sink = sink + sum_of(reinterpret_cast<const std::uint64_t*>(theirs), bytes / 8);
      times.push_back(seconds_since(start));
      flags.exchange(me, ++round);
    }
    return median(times);
  });
  return static_cast<double>(bytes) / seconds;
}

double process_vm_readv_bytes_per_s(std::uint64_t bytes) {
  const double seconds = in_two([&](int me, Flags& flags) {
    float* mine = touched_floats(bytes);
    float* into = touched_floats(bytes);
    flags.pids[me] = getpid();
    flags.address[me] = reinterpret_cast<std::uintptr_t>(mine);
    flags.exchange(me, 1);
    std::vector<double> times;
    std::uint64_t round = 1;
    bool works = true;
    for (int i = 0; i < std::min(rounds_for(bytes), 500); ++i) {
      flags.exchange(me, ++round);
      const auto start = Clock::now();
      iovec local{into, bytes};
      iovec remote{reinterpret_cast<void*>(flags.address[1 - me]), bytes};
      works &= process_vm_readv(flags.pids[1 - me], &local, 1, &remote, 1, 0) ==
               static_cast<ssize_t>(bytes);
      times.push_back(seconds_since(start));
    }
    flags.exchange(me, ++round);
    free(mine);
    free(into);
    return works ? median(times) : 1e30;  // refused: a rate of zero
  });
  return static_cast<double>(bytes) / seconds;
}

double shared_all_reduce_s(std::uint64_t bytes, SharedPass pass) {
  Shared memory(2 * bytes);
  return in_two([&](int me, Flags& flags) {
    auto* a = reinterpret_cast<float*>(memory.data);
    auto* b = reinterpret_cast<float*>(memory.data + bytes);
    const std::uint64_t half = bytes / 2 / sizeof(float);
    const std::uint64_t first = static_cast<std::uint64_t>(me) * half;
    std::vector<double> times;
    std::uint64_t round = 0;
    volatile float sink = 0;
    for (int i = 0; i < std::min(rounds_for(bytes), 200); ++i) {
      std::fill(me == 0 ? a : b, (me == 0 ? a : b) + bytes / sizeof(float), 1.0f);
      flags.exchange(me, ++round);
      const auto start = Clock::now();
      flags.exchange(me, ++round);
      if (pass == SharedPass::kReadOnly) {
        sink = sink + sum_of_both(a + first, b + first, half);
      } else {
        add_both(a + first, b + first, half);
      }
      flags.exchange(me, ++round);
      times.push_back(seconds_since(start));
    }
    return median(times);
  });
}

namespace {

// A connected pair over loopback TCP; the child gets the accepted end.
double over_tcp(const std::function<double(int fd, int me, Flags&)>& body) {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  if (bind(listener, reinterpret_cast<sockaddr*>(&address), size) != 0 ||
      listen(listener, 1) != 0) {
    close(listener);
    return 1e30;
  }
  getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size);
  const double result = in_two([&](int me, Flags& flags) {
    const int fd = me == 1 ? accept(listener, nullptr, nullptr) : socket(AF_INET, SOCK_STREAM, 0);
    if (me == 0 && connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
      return 1e30;
    }
    const int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    const double value = body(fd, me, flags);
    close(fd);
    return value;
  });
  close(listener);
  return result;
}

bool read_fully(int fd, char* data, std::uint64_t bytes) {
  while (bytes > 0) {
    const ssize_t n = read(fd, data, bytes);
    if (n <= 0) return false;
    data += n;
    bytes -= static_cast<std::uint64_t>(n);
  }
  return true;
}

bool write_fully(int fd, const char* data, std::uint64_t bytes) {
  while (bytes > 0) {
    const ssize_t n = write(fd, data, bytes);
    if (n <= 0) return false;
    data += n;
    bytes -= static_cast<std::uint64_t>(n);
  }
  return true;
}

}  // namespace

double tcp_stream_bytes_per_s(std::uint64_t bytes) {
  const double seconds = over_tcp([&](int fd, int me, Flags&) {
    std::vector<char> buffer(bytes, 1);
    std::vector<double> times;
    char byte = 0;
    for (int i = 0; i < 15; ++i) {
      const auto start = Clock::now();
      bool works;
      if (me == 0) {
        works = write_fully(fd, buffer.data(), bytes) && read_fully(fd, &byte, 1);
      } else {
        works = read_fully(fd, buffer.data(), bytes) && write_fully(fd, &byte, 1);
      }
      if (!works) return 1e30;
      times.push_back(seconds_since(start));
    }
    return median(times);
  });
  return static_cast<double>(bytes) / seconds;
}

double tcp_round_trip_ns(Waiting waiting) {
  const int flags = waiting == Waiting::kBusy ? MSG_DONTWAIT : 0;
  return over_tcp([flags](int fd, int me, Flags&) {
           std::vector<double> times;
           char word[8] = {};
           const auto receive = [&] {
             ssize_t n;
             do {
               n = recv(fd, word, sizeof word, flags);
             } while (n < 0 && errno == EAGAIN);
             return n == sizeof word;
           };
           for (int i = 0; i < 5000; ++i) {
             const auto start = Clock::now();
             const bool works = me == 0 ? write_fully(fd, word, 8) && receive()
                                        : receive() && write_fully(fd, word, 8);
             if (!works) return 1e30;
             times.push_back(seconds_since(start));
           }
           return median(times);
         }) *
         1e9;
}

namespace {

void measure_pipes(const Best& best, const std::function<void(const Limit&)>& report) {
  constexpr std::uint64_t kPayload = 1452, kSource = 4 << 20;
  const std::pair<const char*, PipeCipher> pipes[] = {
      {"UDP pipe", PipeCipher::kNone},
      {"UDP pipe, AES by OpenSSL", PipeCipher::kOpenssl},
      {"UDP pipe, AES by ipsec-mb", PipeCipher::kIpsecMb}};
  for (const auto& [name, cipher] : pipes) {
    const double rate =
        best([&] { return udp_pipe_bytes_per_s(kPayload, kSource, cipher); }, false);
    if (rate > 0) report({name, kPayload, 2, rate / 1e9, "GB/s"});
  }
}

}  // namespace

void measure_limits(const std::function<void(const Limit&)>& report) {
  const Best best = [](const std::function<double()>& measure, bool lower_wins) {
    double value = measure();
    for (int i = 0; i < 2; ++i) {
      const double again = measure();
      value = lower_wins ? std::min(value, again) : std::max(value, again);
    }
    return value;
  };
  report({"flag exchange", 0, 2, best([] { return flag_exchange_ns(200'000); }, true), "ns"});
  for (const std::uint64_t bytes : {8, 1024}) {
    const auto nanoseconds = [bytes] {
      return static_cast<double>(bytes) / process_vm_readv_bytes_per_s(bytes) * 1e9;
    };
    report({"process_vm_readv", bytes, 2, best(nanoseconds, true), "ns"});
  }
  for (const std::uint64_t kib : {64, 256, 1024, 16 * 1024, 256 * 1024}) {
    const std::uint64_t bytes = kib << 10;
    for (const int n : {1, 2}) {
      report({"copy", bytes, n, best([&] { return copy_bytes_per_s(bytes, n); }, false) / 1e9,
              "GB/s"});
      report(
          {"add", bytes, n, best([&] { return add_bytes_per_s(bytes, n); }, false) / 1e9, "GB/s"});
    }
    report({"cross-core read", bytes, 2,
            best([&] { return cross_read_bytes_per_s(bytes); }, false) / 1e9, "GB/s"});
    report({"process_vm_readv", bytes, 2,
            best([&] { return process_vm_readv_bytes_per_s(bytes); }, false) / 1e9, "GB/s"});
    report({"shared tensors, read only", bytes, 2,
            best([&] { return shared_all_reduce_s(bytes, SharedPass::kReadOnly); }, true) * 1e6,
            "us"});
    report({"shared tensors, bare loop", bytes, 2,
            best([&] { return shared_all_reduce_s(bytes, SharedPass::kWhole); }, true) * 1e6,
            "us"});
  }
  report({"TCP loopback stream", std::uint64_t{16} << 20, 2,
          best([] { return tcp_stream_bytes_per_s(std::uint64_t{16} << 20); }, false) / 1e9,
          "GB/s"});
  measure_pipes(best, report);
  for (const Waiting waiting : {Waiting::kAsleep, Waiting::kBusy}) {
    const char* name =
        waiting == Waiting::kBusy ? "TCP round trip, busy" : "TCP round trip, asleep";
    report({name, 8, 2, best([waiting] { return tcp_round_trip_ns(waiting); }, true), "ns"});
  }
}

}  // namespace pycomm::bench

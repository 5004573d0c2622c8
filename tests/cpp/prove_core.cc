// The probes that need only the core: latency, shared tensors, killed ranks. Each prints one line
// and exits 0 if its claim holds, 1 if not. `make prove` runs them beside the other two.
//
//   prove_core latency   8 bytes through the executor against the bare flag exchange
//   prove_core shared    16 MiB of shared tensors against the bare cross-core read
//   prove_core kill [N]  N times SIGKILL of one of three ranks at a random moment
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <fstream>
#include <thread>

#include "base/rng.h"
#include "forked_ranks.h"
#include "machine_limits.h"

namespace pycomm {
namespace {

using test::all_reduce;
using SteadyClock = std::chrono::steady_clock;

double seconds_since(SteadyClock::time_point start) {
  return std::chrono::duration<double>(SteadyClock::now() - start).count();
}

double quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  return values[std::min(values.size() - 1,
                         static_cast<std::size_t>(q * static_cast<double>(values.size())))];
}

// A page that forked ranks report through.
template <class T>
T* shared_page() {
  void* data = mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  return new (data) T();
}

Options shm_options() {
  Options options;
  options.transport = TransportChoice::kShm;
  options.timeout_ms = 20'000;
  return options;
}

int prove_latency() {
  struct Report {
    double p50, p99;
    bool right;
  };
  auto* report = shared_page<Report>();
  std::vector<double> flags, p50s, p99s, ratios;
  bool right = true;
  for (int round = 0; round < 9; ++round) {
    flags.push_back(bench::flag_exchange_ns(200'000));
    const auto results = test::run_group(2, shm_options(), [&](Communicator& comm) {
      platform::pin_thread_to_allowed_cpu(comm.rank());
      constexpr int kBatch = 100;
      std::vector<double> batches;
      float data[2] = {1.0f, 2.0f};
      bool sums_right = true;
      for (int batch = 0; batch < 2200; ++batch) {
        const auto start = SteadyClock::now();
        for (int i = 0; i < kBatch; ++i) {
          data[0] = 1.0f;
          if (!comm.run(all_reduce(data, 2)).is_ok()) return 1;
          sums_right &= data[0] == 2.0f;
        }
        if (batch >= 200) batches.push_back(seconds_since(start) / kBatch * 1e9);
      }
      if (comm.rank() == 0) *report = {quantile(batches, 0.5), quantile(batches, 0.99), sums_right};
      return 0;
    });
    if (results != std::vector<int>{0, 0}) return 1;
    p50s.push_back(report->p50);
    ratios.push_back(report->p50 / flags.back());  // of one moment: the host moves its processors
    p99s.push_back(report->p99);
    right &= report->right;
  }
  const double ratio = quantile(ratios, 0.5);
  const bool holds = right && ratio <= 2.5;
  std::printf(
      "1 latency    %s  8 B all_reduce p50 %.0f ns (p99 of batches %.0f) = %.2fx the flag "
      "exchange of %.0f ns, medians of 9 rounds; claim <= 2.5x\n",
      holds ? "holds" : "FAILS", quantile(p50s, 0.5), quantile(p99s, 0.5), ratio,
      quantile(flags, 0.5));
  return holds ? 0 : 1;
}

int prove_shared() {
  constexpr std::uint64_t kBytes = std::uint64_t{16} << 20;
  struct Report {
    double seconds;
    std::uint64_t staged;
  };
  auto* report = shared_page<Report>();
  std::vector<double> formulas, bounds, bare, times, ratios;
  std::uint64_t staged = 0;
  for (int round = 0; round < 9; ++round) {
    const double flag_s = bench::flag_exchange_ns(50'000) * 1e-9;
    formulas.push_back(2 * flag_s +
                       static_cast<double>(kBytes) / 2 / bench::cross_read_bytes_per_s(kBytes));
    bare.push_back(bench::shared_all_reduce_s(kBytes, bench::SharedPass::kWhole));
    // What the bare loop did in less time bounds nothing.
    bounds.push_back(
        std::min(bare.back(), bench::shared_all_reduce_s(kBytes, bench::SharedPass::kReadOnly)));
    const auto results = test::run_group(2, shm_options(), [&](Communicator& comm) {
      platform::pin_thread_to_allowed_cpu(comm.rank());
      auto memory = comm.allocate_shared(kBytes);
      if (!memory.is_ok()) return 1;
      auto* data = reinterpret_cast<float*>(memory.value().get());
      const std::uint64_t count = kBytes / sizeof(float);
      std::vector<double> laps;
      for (int i = 0; i < 25; ++i) {
        std::fill(data, data + count, static_cast<float>(comm.rank() + 1));
        if (!comm.run(OpRequest{}).is_ok()) return 2;
        const auto start = SteadyClock::now();
        if (!comm.run(all_reduce(data, count)).is_ok()) return 3;
        if (i >= 5) laps.push_back(seconds_since(start));
        for (std::uint64_t k = 0; k < count; ++k) {
          if (data[k] != 3.0f) return 4;
        }
      }
      if (comm.rank() == 0) {
        const LinkCounters counters = comm.peer_stats()[0].counters;
        *report = {quantile(laps, 0.5), counters.bytes_staged};
      }
      return 0;
    });
    if (results != std::vector<int>{0, 0}) return 1;
    times.push_back(report->seconds);
    ratios.push_back(times.back() / bounds.back());  // of one moment: the host moves its processors
    staged += report->staged;
  }
  const double ratio = quantile(ratios, 0.5);
  const bool holds = staged == 0 && ratio <= 1.5;
  std::printf(
      "2 shared     %s  16 MiB all_reduce of shared tensors %.0f us = %.2fx the bound of reading "
      "both halves, %.0f us (bare loop %.0f us; 2f + S/2/Bx, which leaves out reading one's own "
      "half, %.0f us), medians of 9 rounds; %llu bytes staged; claim <= 1.5x, 0\n",
      holds ? "holds" : "FAILS", quantile(times, 0.5) * 1e6, ratio, quantile(bounds, 0.5) * 1e6,
      quantile(bare, 0.5) * 1e6, quantile(formulas, 0.5) * 1e6,
      static_cast<unsigned long long>(staged));
  return holds ? 0 : 1;
}

int count_entries(const char* folder) {
  int n = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder)) ++n;
  return n;
}

// Bytes of memfds and other shared memory in use on this host.
std::int64_t shared_memory_kib() {
  std::ifstream file("/proc/meminfo");
  std::string key;
  std::int64_t value = 0;
  while (file >> key >> value) {
    if (key == "Shmem:") return value;
    file.ignore(100, '\n');
  }
  return -1;
}

// One round: three ranks stream all_reduces of mixed sizes, rank `victim` is killed.
// Returns the survivors' slowest reaction in seconds, or a negative number.
double kill_round(base::Rng& rng) {
  struct Report {
    std::atomic<double> killed_at{0};
    std::atomic<int> ready{0};
  };
  auto* report = shared_page<Report>();
  auto* reacted = shared_page<std::array<double, 3>>();
  const auto victim = static_cast<Rank>(rng.below(3));
  const auto delay_us = static_cast<std::int64_t>(rng.below(20'000));
  const std::uint64_t seed = rng.next();
  const auto epoch = SteadyClock::now();
  const std::string folder = test::make_folder();
  const auto body = [&](Rank rank) {
    auto store = make_file_store(folder);
    auto comm = Communicator::create(*store, rank, 3, shm_options());
    if (!comm.is_ok()) return 10;
    base::Rng sizes(seed);
    std::vector<float> data(300'000, 1.0f);
    std::vector<std::shared_ptr<Operation>> operations;
    report->ready.fetch_add(1);
    for (;;) {
      static constexpr std::uint64_t kCounts[] = {2, 200, 5'000, 300'000};
      const std::uint64_t count = kCounts[sizes.below(4)];
      const bool async = sizes.below(3) == 0;
      OpRequest request = all_reduce(data.data(), count);
      const Status status =
          async ? comm.value()->start(request)->wait() : comm.value()->run(request);
      if (status.is_ok()) continue;
      (*reacted)[static_cast<std::size_t>(rank)] = seconds_since(epoch);
      const bool named =
          status.code() == StatusCode::kPeerLost && status.rank() == victim &&
          status.message().find("rank " + std::to_string(victim)) != std::string::npos;
      if (!named) std::fprintf(stderr, "rank %d: %s\n", rank, status.to_string().c_str());
      return named ? 0 : 11;
    }
  };
  const auto results = test::run_ranks(3, body, [&](const std::vector<pid_t>& children) {
    while (report->ready.load() < 3) std::this_thread::yield();
    platform::sleep_ns(delay_us * 1000);
    report->killed_at = seconds_since(epoch);
    kill(children[static_cast<std::size_t>(victim)], SIGKILL);
  });
  std::filesystem::remove_all(folder);
  double slowest = 0;
  for (Rank r = 0; r < 3; ++r) {
    const double reaction = (*reacted)[static_cast<std::size_t>(r)] - report->killed_at.load();
    if (r == victim) continue;
    if (results[static_cast<std::size_t>(r)] != 0) return -1;
    slowest = std::max(slowest, reaction);
  }
  munmap(report, sizeof(Report));
  munmap(reacted, sizeof *reacted);
  return slowest;
}

int prove_kill(int num_rounds) {
  base::Rng rng(0x5eed);
  const int fds_before = count_entries("/proc/self/fd");
  const int shm_before = count_entries("/dev/shm");
  const std::int64_t memory_before = shared_memory_kib();
  std::vector<double> reactions;
  int failures = 0;
  for (int i = 0; i < num_rounds; ++i) {
    const double seconds = kill_round(rng);
    if (seconds < 0 || seconds > 1.0) {
      ++failures;
      std::fprintf(stderr, "round %d: %s\n", i, seconds < 0 ? "a survivor failed" : "too slow");
    }
    reactions.push_back(std::max(seconds, 0.0));
  }
  platform::sleep_ns(50'000'000);
  const int left =
      count_entries("/proc/self/fd") - fds_before + count_entries("/dev/shm") - shm_before;
  const std::int64_t grown_kib = shared_memory_kib() - memory_before;
  const bool holds = failures == 0 && left == 0 && grown_kib < 1024;
  std::printf(
      "3 kill       %s  %d of %d rounds: both survivors name the killed rank, p50 %.1f ms, "
      "slowest %.1f ms; left behind: %d descriptors or files, %lld KiB; claim <= 1 s, 0\n",
      holds ? "holds" : "FAILS", num_rounds - failures, num_rounds, quantile(reactions, 0.5) * 1e3,
      quantile(reactions, 1.0) * 1e3, left, static_cast<long long>(grown_kib));
  return holds ? 0 : 1;
}

}  // namespace
}  // namespace pycomm

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  if (mode == "latency") return pycomm::prove_latency();
  if (mode == "shared") return pycomm::prove_shared();
  if (mode == "kill") return pycomm::prove_kill(argc > 2 ? std::atoi(argv[2]) : 100);
  std::fprintf(stderr, "usage: prove_core latency | shared | kill [rounds]\n");
  return 2;
}

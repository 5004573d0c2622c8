#include "core_latency.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <memory>

#include "pycomm/communicator.h"
#include "two_processes.h"

namespace pycomm::bench {
namespace {

double quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  const auto at = static_cast<std::size_t>(q * static_cast<double>(values.size()));
  return values[std::min(at, values.size() - 1)];
}

Latency measure(Communicator& comm, std::uint64_t bytes) {
  std::vector<float> data(std::max<std::uint64_t>(bytes / sizeof(float), 1), 1.0f);
  OpRequest request;
  request.kind = OpKind::kAllReduce;
  request.dtype = DType::kFloat32;
  request.count = data.size();
  request.input = request.output = reinterpret_cast<std::byte*>(data.data());
  constexpr int kBatch = 100, kBatches = 300, kWarm = 30, kSingles = 20'000;
  std::vector<double> means, singles;
  for (int batch = 0; batch < kBatches; ++batch) {
    const auto start = Clock::now();
    for (int i = 0; i < kBatch; ++i) {
      data[0] = 1.0f;
      if (!comm.run(request).is_ok() || data[0] != 2.0f) return {};
    }
    if (batch >= kWarm) means.push_back(seconds_since(start) / kBatch);
  }
  for (int i = 0; i < kSingles; ++i) {
    const auto start = Clock::now();
    if (!comm.run(request).is_ok()) return {};
    singles.push_back(seconds_since(start));
  }
  return {quantile(means, 0.5), quantile(singles, 0.99)};
}

}  // namespace

Latency core_all_reduce_latency(std::uint64_t bytes) {
  Shared memory(sizeof(Latency));
  auto* result = reinterpret_cast<Latency*>(memory.data);
  *result = {};
  std::string folder = (std::filesystem::temp_directory_path() / "pycomm-latency-").string();
  folder.append(6, 'X');  // mkdtemp's to fill in
  if (mkdtemp(folder.data()) == nullptr) return {};
  pid_t ranks[2];
  for (int rank : {0, 1}) {
    ranks[rank] = fork();
    if (ranks[rank] != 0) continue;
    pin(rank);
    Options options;
    options.transport = TransportChoice::kShm;
    options.timeout_ms = 20'000;
    auto store = make_file_store(folder);
    auto comm = Communicator::create(*store, rank, 2, options);
    if (comm.is_ok()) {
      const Latency mine = measure(*comm.value(), bytes);
      if (rank == 0) *result = mine;
      comm.value().reset();
    }
    _exit(0);
  }
  for (const pid_t rank : ranks) waitpid(rank, nullptr, 0);
  std::filesystem::remove_all(folder);
  return *result;
}

}  // namespace pycomm::bench

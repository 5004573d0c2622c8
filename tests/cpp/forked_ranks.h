// Runs a function in n forked ranks, each with a communicator over a store in a temporary folder.
#pragma once

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "platform/system.h"
#include "pycomm/communicator.h"

namespace pycomm::test {

inline std::string make_folder() {
  std::string pattern =
      std::filesystem::temp_directory_path().string() + "/pycomm-" + std::string(6, 'X');
  return mkdtemp(pattern.data());
}

// Each child's exit status; negative: the signal that ended it. The parent must have no threads.
inline std::vector<int> run_ranks(
    int world_size, const std::function<int(Rank)>& body,
    const std::function<void(const std::vector<pid_t>&)>& meanwhile = {}) {
  std::vector<pid_t> children;
  for (Rank r = 0; r < world_size; ++r) {
    const pid_t pid = fork();
    if (pid == 0) {
      alarm(100);
      const int status = body(r);
      std::fflush(nullptr);
      _exit(status);
    }
    children.push_back(pid);
  }
  if (meanwhile) meanwhile(children);
  std::vector<int> results;
  for (const pid_t pid : children) {
    int status = 0;
    waitpid(pid, &status, 0);
    results.push_back(WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status));
  }
  return results;
}

// The usual body: create, run, destroy. A failed creation is status 70 with the reason on stderr.
inline std::vector<int> run_group(int world_size, const Options& options,
                                  const std::function<int(Communicator&)>& body) {
  const std::string folder = make_folder();
  auto results = run_ranks(world_size, [&](Rank rank) {
    auto store = make_file_store(folder);
    auto communicator = Communicator::create(*store, rank, world_size, options);
    if (!communicator.is_ok()) {
      std::fprintf(stderr, "rank %d: %s\n", rank, communicator.status().to_string().c_str());
      return 70;
    }
    const int status = body(*communicator.value());
    return status;
  });
  std::filesystem::remove_all(folder);
  return results;
}

inline OpRequest all_reduce(float* data, std::uint64_t count) {
  OpRequest request;
  request.kind = OpKind::kAllReduce;
  request.dtype = DType::kFloat32;
  request.input = reinterpret_cast<std::byte*>(data);
  request.output = reinterpret_cast<std::byte*>(data);
  request.count = count;
  return request;
}

}  // namespace pycomm::test

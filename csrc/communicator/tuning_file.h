// Where what ranks of one host learnt about its ways is kept between jobs: a file of mode 0600, one
// for each kind of host, number of ranks and version of this library. Without one nothing is kept.
#pragma once

#include <string>

#include "pycomm/options.h"

namespace pycomm::communicator {

class TuningFile {
 public:
  TuningFile() = default;
  explicit TuningFile(std::string path) : path_(std::move(path)) {}

  // What was kept; empty if there is nothing, or others could have written it.
  std::string load() const;
  // Replaces it, as a whole. A file that cannot be written is no failure.
  void save(const std::string& text) const;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

TuningFile open_tuning(const Options& options, int num_ranks);

}  // namespace pycomm::communicator

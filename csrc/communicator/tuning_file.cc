#include "communicator/tuning_file.h"

#include <cstdio>

#include "base/hash.h"
#include "base/log.h"
#include "platform/system.h"
#include "pycomm/communicator.h"

namespace pycomm::communicator {
namespace {

constexpr std::size_t kFileBytesMax = 1 << 20;

}  // namespace

std::string TuningFile::load() const {
  if (path_.empty()) return "";
  auto text = platform::read_private_file(path_);
  return text.is_ok() && text.value().size() <= kFileBytesMax ? text.value() + "\n" : "";
}

void TuningFile::save(const std::string& text) const {
  if (path_.empty() || text.empty()) return;
  // Never a file, or a link, that someone else has put there.
  const std::string fresh = path_ + "." + std::to_string(platform::process_id());
  std::remove(fresh.c_str());
  Status status = platform::write_private_file(fresh, text);
  if (status.is_ok() && std::rename(fresh.c_str(), path_.c_str()) != 0) {
    status = platform::system_error("'" + path_ + "'");
  }
  if (status.is_ok()) return;
  std::remove(fresh.c_str());
  base::log(base::LogLevel::kInfo, base::Subsystem::kShm,
            "what was learnt about this host is not kept: " + status.message());
}

TuningFile open_tuning(const Options& options, int num_ranks) {
  if (!options.tunes || options.tuning_file == "off") return TuningFile();
  if (!options.tuning_file.empty()) return TuningFile(options.tuning_file);
  const std::string folder = platform::user_cache_folder();
  if (folder.empty()) return TuningFile();
  char name[80];
  std::snprintf(name, sizeof name, "/tuning-%016llx-%d.txt",
                static_cast<unsigned long long>(base::fnv1a(std::string(version()) + "\n" +
                                                            platform::processor_name() + "\n" +
                                                            platform::host_name())),
                num_ranks);
  return TuningFile(folder + name);
}

}  // namespace pycomm::communicator

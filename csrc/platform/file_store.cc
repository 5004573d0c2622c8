// A store of one file a key: written aside and renamed, so that readers see whole values.
#include <filesystem>
#include <fstream>
#include <sstream>

#include "platform/system.h"
#include "pycomm/communicator.h"

namespace pycomm {
namespace {

class FileStore final : public Store {
 public:
  explicit FileStore(std::string folder) : folder_(std::move(folder)) {}

  Status set(const std::string& key, const std::string& value) override {
    const std::string aside = path_of(key) + "." + platform::random_hex128();
    {
      std::ofstream file(aside, std::ios::binary);
      file << value;
      if (!file.flush()) return platform::system_error("writing '" + aside + "'");
    }
    std::error_code error;
    std::filesystem::rename(aside, path_of(key), error);
    if (error) return Status::error(StatusCode::kSystem, "rename: " + error.message());
    return Status();
  }

  Result<std::string> get(const std::string& key, std::int64_t timeout_ms) override {
    const auto deadline = base::deadline_after(platform::real_clock().now_ns(), timeout_ms);
    for (;;) {
      std::ifstream file(path_of(key), std::ios::binary);
      if (file) {
        std::stringstream contents;
        contents << file.rdbuf();
        return contents.str();
      }
      if (platform::real_clock().now_ns() > deadline) {
        return Status::error(StatusCode::kTimeout, "key '" + key + "' did not appear");
      }
      platform::sleep_ns(500'000);
    }
  }

  Result<bool> has(const std::string& key) override {
    std::error_code error;
    return std::filesystem::exists(path_of(key), error);
  }

 private:
  std::string path_of(const std::string& key) const {
    std::string name;
    for (const char c : key) name += c == '/' ? "%2F" : c == '%' ? "%25" : std::string(1, c);
    return folder_ + "/" + name;
  }

  const std::string folder_;
};

}  // namespace

std::unique_ptr<Store> make_file_store(const std::string& folder) {
  return std::make_unique<FileStore>(folder);
}

}  // namespace pycomm

// Options from the environment, and the part of them that ranks must agree on.
#include "pycomm/options.h"

#include <algorithm>
#include <charconv>
#include <string_view>

#include "base/log.h"
#include "platform/system.h"

namespace pycomm {
namespace {

bool parse_u64(const std::string& text, std::uint64_t* out) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *out);
  return error == std::errc() && end == text.data() + text.size();
}

constexpr std::string_view kTransportNames[] = {"auto", "shm", "tcp"};  // by TransportChoice
constexpr std::size_t kSecretBytesMin = 16;

void read_secret(Options& options, std::string* complaint) {
  if (const auto path = platform::environment("PYCOMM_SECRET_FILE")) {
    auto secret = platform::read_private_file(*path);
    if (!secret.is_ok()) {
      *complaint += "PYCOMM_SECRET_FILE: " + secret.status().message() +
                    " (make one with: head -c 32 /dev/urandom | base64 > FILE; chmod 600 FILE). ";
      return;
    }
    options.secret = std::move(secret).value();
    if (options.secret.size() < kSecretBytesMin) {
      *complaint += "PYCOMM_SECRET_FILE '" + *path +
                    "' holds fewer than 16 bytes (head -c 32 /dev/urandom | base64 makes 44). ";
    }
  } else if (const auto secret = platform::environment("PYCOMM_SECRET")) {
    options.secret = *secret;
    if (secret->size() < kSecretBytesMin) *complaint += "PYCOMM_SECRET is shorter than 16 bytes. ";
  }
}

void read_log_level(std::string* complaint) {
  const auto level = platform::environment("PYCOMM_DEBUG");
  if (!level) return;
  if (*level == "INFO") {
    base::set_log_level(base::LogLevel::kInfo);
  } else if (*level != "WARN") {
    *complaint += "PYCOMM_DEBUG '" + *level + "' is none of WARN, INFO. ";
  }
}

}  // namespace

Options Options::from_environment(std::string* complaint) {
  Options options;
  read_log_level(complaint);
  if (const auto choice = platform::environment("PYCOMM_TRANSPORT")) {
    const auto* const found =
        std::find(std::begin(kTransportNames), std::end(kTransportNames), *choice);
    if (found == std::end(kTransportNames)) {
      *complaint += "PYCOMM_TRANSPORT '" + *choice + "' is none of auto, shm, tcp. ";
    } else {
      options.transport = static_cast<TransportChoice>(found - std::begin(kTransportNames));
    }
  }
  const auto number = [&](const char* name, std::uint64_t min, std::uint64_t max,
                          std::uint64_t* out) {
    const auto text = platform::environment(name);
    if (!text) return false;
    std::uint64_t value = 0;
    if (!parse_u64(*text, &value) || value < min || value > max) {
      *complaint += std::string(name) + " '" + *text + "' is not a number from " +
                    std::to_string(min) + " to " + std::to_string(max) + ". ";
      return false;
    }
    *out = value;
    return true;
  };
  std::uint64_t seconds = 0;
  if (number("PYCOMM_TIMEOUT_SEC", 1, 31'536'000, &seconds)) {
    options.timeout_ms = static_cast<std::int64_t>(seconds) * 1000;
  }
  number("PYCOMM_CHUNK_BYTES", 4096, std::uint64_t{1} << 30, &options.chunk_bytes);
  if (const auto address = platform::environment("PYCOMM_SOCKET_ADDR")) {
    options.bind_address = *address;
  }
  options.allow_public_plaintext =
      platform::environment("PYCOMM_ALLOW_PUBLIC_PLAINTEXT") == std::string("1");
  read_secret(options, complaint);
  if (!complaint->empty()) complaint->pop_back();
  return options;
}

std::string Options::plan_fingerprint() const {
  return "PYCOMM_TRANSPORT=" + std::string(kTransportNames[static_cast<int>(transport)]) +
         " PYCOMM_CHUNK_BYTES=" + std::to_string(chunk_bytes) +
         " eager_bytes_max=" + std::to_string(eager_bytes_max);
}

}  // namespace pycomm

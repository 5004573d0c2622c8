#include "communicator/rdma_ports.h"

#include <algorithm>

#include "platform/system.h"
#include "pycomm/communicator.h"

namespace pycomm {
namespace communicator {
namespace {

// "mlx5_0:1,mlx5_2" (prefixes of names, a port or all), "=mlx5_0" (exact), "^mlx5_1" (not).
bool names_port(std::string item, const platform::verbs::PortInfo& port, bool is_exact) {
  const std::size_t colon = item.find(':');
  if (colon != std::string::npos) {
    if (item.substr(colon + 1) != std::to_string(port.number)) return false;
    item.resize(colon);
  }
  return is_exact ? port.device == item : port.device.starts_with(item);
}

}  // namespace

std::vector<platform::verbs::PortInfo> usable_ports(
    const std::vector<platform::verbs::PortInfo>& ports, const RdmaOptions& options,
    std::string* refusal) {
  std::string spec = options.devices;
  const bool excludes = spec.starts_with("^");
  if (excludes) spec.erase(0, 1);
  const bool is_exact = spec.starts_with("=");
  if (is_exact) spec.erase(0, 1);
  std::vector<std::string> items;
  for (std::size_t at = 0; !spec.empty() && at <= spec.size();) {
    const std::size_t end = std::min(spec.find(',', at), spec.size());
    items.push_back(spec.substr(at, end - at));
    at = end + 1;
  }
  std::vector<platform::verbs::PortInfo> chosen;
  const auto take = [&](const platform::verbs::PortInfo& port) {
    if (port.use.viable) {
      chosen.push_back(port);
    } else {
      *refusal += (refusal->empty() ? "" : "; ") + port.name() + ": " + port.use.reason;
    }
  };
  if (excludes || items.empty()) {
    for (const auto& port : ports) {
      const bool is_named = std::any_of(items.begin(), items.end(), [&](const std::string& item) {
        return names_port(item, port, is_exact);
      });
      if (!is_named) take(port);
    }
  } else {
    for (const std::string& item : items) {
      for (const auto& port : ports) {
        if (names_port(item, port, is_exact)) take(port);
      }
    }
  }
  if (chosen.empty() && refusal->empty()) {
    *refusal = "PYCOMM_IB_HCA=" + options.devices + " leaves no device";
  }
  return chosen;
}

}  // namespace communicator

std::vector<RdmaPort> rdma_ports(const RdmaOptions& options, std::string* refusal) {
  std::vector<RdmaPort> result;
  if (!platform::has_rdma_devices()) {
    *refusal = "there is no RDMA device";
    return result;
  }
  platform::verbs::Library* library = platform::verbs::ibverbs(refusal);
  if (library == nullptr) return result;
  for (const platform::verbs::PortInfo& port : library->ports(options, refusal)) {
    result.push_back({port.device, port.number, port.use, port.gid_index, port.has_atomics});
  }
  return result;
}

std::uint64_t lockable_bytes() { return platform::lockable_bytes(); }

}  // namespace pycomm

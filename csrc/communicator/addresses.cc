#include "communicator/addresses.h"

#include <algorithm>
#include <string_view>

#include "base/log.h"

namespace pycomm::communicator {
namespace {

struct InterfaceFilter {
  bool excludes = false;
  bool is_exact = false;
  std::vector<std::string> names;

  static InterfaceFilter parse(std::string_view spec) {
    InterfaceFilter filter;
    filter.excludes = spec.starts_with('^');
    if (filter.excludes) spec.remove_prefix(1);
    filter.is_exact = spec.starts_with('=');
    if (filter.is_exact) spec.remove_prefix(1);
    while (!spec.empty()) {
      const std::size_t comma = std::min(spec.find(','), spec.size());
      if (comma > 0) filter.names.emplace_back(spec.substr(0, comma));
      spec.remove_prefix(std::min(comma + 1, spec.size()));
    }
    return filter;
  }

  bool allows(const std::string& name) const {
    const bool is_named = std::any_of(names.begin(), names.end(), [&](const std::string& n) {
      return is_exact ? name == n : name.starts_with(n);
    });
    return is_named != excludes;
  }
};

constexpr const char* kAny = "0.0.0.0";

bool is_last_resort(const platform::Interface& interface) {
  return interface.is_loopback || interface.name.starts_with("docker");
}

}  // namespace

Result<platform::Interface> choose_interface(const std::string& spec,
                                             const std::vector<platform::Interface>& interfaces) {
  const InterfaceFilter filter = InterfaceFilter::parse(spec);
  const platform::Interface* fallback = nullptr;
  std::string there_are;
  for (const platform::Interface& interface : interfaces) {
    there_are += (there_are.empty() ? "" : ", ") + interface.name + " (" + interface.address + ")";
    if (!spec.empty() && !filter.allows(interface.name)) continue;
    // Who names an interface means it; who excludes some still prefers a real one.
    if ((spec.empty() || filter.excludes) && is_last_resort(interface)) {
      if (fallback == nullptr) fallback = &interface;
      continue;
    }
    return interface;
  }
  if (fallback != nullptr) return *fallback;
  return Status::error(StatusCode::kInvalidUsage,
                       "no interface with an IPv4 address fits PYCOMM_SOCKET_IFNAME '" + spec +
                           "'; there are: " + (there_are.empty() ? "none" : there_are));
}

Result<Addresses> choose_addresses(const Options& options) {
  Addresses result;
  result.advertise = platform::outgoing_address();
  // Without a route to everywhere there may still be a network: a switch between a few machines.
  if (platform::is_loopback_address(result.advertise)) {
    if (auto any = choose_interface("", platform::list_interfaces()); any.is_ok()) {
      result.advertise = any.value().address;
    }
  }
  if (!options.bind_address.empty() && options.bind_address != kAny) {
    result.listen = result.advertise = options.bind_address;
  } else if (!options.interfaces.empty()) {
    auto chosen = choose_interface(options.interfaces, platform::list_interfaces());
    if (chosen.is_ok()) {
      result.listen = result.advertise = chosen.value().address;
    } else if (!options.interfaces_are_borrowed) {
      return chosen.status();
    } else {
      base::log(base::LogLevel::kWarn, base::Subsystem::kNet,
                "GLOO_ or NCCL_SOCKET_IFNAME is left aside: " + chosen.status().message());
    }
  } else if (options.secret.empty() && !options.tls.is_set() && options.bind_address != kAny) {
    result.listen = "127.0.0.1";
  }
  if (!options.advertise_address.empty()) result.advertise = options.advertise_address;
  return result;
}

Viability is_reachable_from_elsewhere(const std::string& address) {
  if (platform::is_loopback_address(address) || address == kAny) {
    return {false, "it advertises " + address +
                       ", a loopback address that no other host reaches; set "
                       "PYCOMM_SOCKET_IFNAME or PYCOMM_ADVERTISE_ADDR there"};
  }
  return {};
}

}  // namespace pycomm::communicator

// Which ports there are, with which address each would be used, and what is in the way.
#include "platform/ibverbs_symbols.h"

#if PYCOMM_HAVE_VERBS_HEADERS

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "platform/system.h"

namespace pycomm::platform::verbs {
namespace {

bool is_zero(const Gid& gid) {
  return std::all_of(gid.begin(), gid.end(), [](std::uint8_t b) { return b == 0; });
}

// RoCE v2 on an IPv4 address is what every fabric routes; then v2 on a global IPv6 address, then on
// a link-local one. -1: none.
int best_roce_gid(ibv_context* context, const PortInfo& port, int num_gids) {
  int best = -1, best_score = 0;
  for (int i = 0; i < num_gids; ++i) {
    ibv_gid raw{};
    if (ib().query_gid(context, port.number, i, &raw) != 0) continue;
    Gid gid;
    std::memcpy(gid.data(), raw.raw, gid.size());
    if (is_zero(gid)) continue;
    const auto type =
        read_file("/sys/class/infiniband/" + port.device + "/ports/" + std::to_string(port.number) +
                  "/gid_attrs/types/" + std::to_string(i));
    if (!type || type->find("RoCE v2") == std::string::npos) continue;
    static constexpr std::uint8_t kIpv4Prefix[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
    const bool is_ipv4 = std::memcmp(gid.data(), kIpv4Prefix, sizeof kIpv4Prefix) == 0;
    const bool is_link_local = gid[0] == 0xfe && (gid[1] & 0xc0) == 0x80;
    const int score = is_ipv4 ? 3 : is_link_local ? 1 : 2;
    if (score > best_score) {
      best = i;
      best_score = score;
    }
  }
  return best;
}

void choose_pkey(ibv_context* context, const RdmaOptions& options, int table_length,
                 PortInfo* port) {
  if (options.pkey == 0) return;
  for (int i = 0; i < table_length; ++i) {
    __be16 key = 0;
    if (ib().query_pkey(context, port->number, i, &key) != 0) continue;
    // The top bit says full or limited membership.
    if ((be16toh(key) & 0x7fff) == (options.pkey & 0x7fff)) {
      port->pkey_index = static_cast<std::uint16_t>(i);
      return;
    }
  }
  port->use = {false, "the port is not a member of the partition in PYCOMM_IB_PKEY"};
}

void describe_port(ibv_context* context, const RdmaOptions& options, PortInfo* port) {
  ibv_port_attr attr{};
  if (ib().query_port(context, port->number, &attr) != 0) {
    port->use = {false, refused("ibv_query_port", 0).message()};
    return;
  }
  port->is_ethernet = attr.link_layer == IBV_LINK_LAYER_ETHERNET;
  port->lid = attr.lid;
  port->mtu_code = static_cast<std::uint8_t>(attr.active_mtu);
  if (attr.state != IBV_PORT_ACTIVE) {
    static constexpr const char* kStates[] = {"NOP", "DOWN", "INIT", "ARMED", "ACTIVE", "DEFER"};
    const bool is_known = static_cast<unsigned>(attr.state) < std::size(kStates);
    port->use = {false, std::string("its port is ") + (is_known ? kStates[attr.state] : "odd") +
                            " (link down, or no subnet manager)"};
    return;
  }
  port->gid_index = options.gid_index >= 0 ? options.gid_index
                    : port->is_ethernet    ? best_roce_gid(context, *port, attr.gid_tbl_len)
                                           : 0;
  ibv_gid gid{};
  if (port->gid_index >= 0 && ib().query_gid(context, port->number, port->gid_index, &gid) == 0) {
    std::memcpy(port->gid.data(), gid.raw, port->gid.size());
  }
  if (port->is_ethernet && (port->gid_index < 0 || is_zero(port->gid))) {
    port->use = {false, options.gid_index >= 0
                            ? "it has no GID at PYCOMM_IB_GID_INDEX"
                            : "it has no RoCE v2 GID (no address on its network interface?)"};
    return;
  }
  choose_pkey(context, options, attr.pkey_tbl_len, port);
}

std::string why_not_opened(const ibv_device* device) {
  // The library tries several ways, and errno is the last one's.
  const int error = errno;
  const std::string node = std::string("/dev/infiniband/") + device->dev_name;
  if (access(node.c_str(), F_OK) == 0 && access(node.c_str(), R_OK | W_OK) != 0) {
    return "this user may not open " + node + " (Permission denied)";
  }
  return "it cannot be opened: " + std::string(std::strerror(error));
}

}  // namespace

std::vector<PortInfo> find_ports(const RdmaOptions& options, std::string* refusal) {
  std::vector<PortInfo> found;
  int count = 0;
  ibv_device** devices = ib().get_device_list(&count);
  if (devices == nullptr || count == 0) {
    *refusal = devices == nullptr ? refused("ibv_get_device_list", 0).message()
                                  : "there is no RDMA device";
  }
  for (int i = 0; i < count; ++i) {
    const std::string name = ib().get_device_name(devices[i]);
    OpenDevice device;
    device.context = ib().open_device(devices[i]);
    ibv_device_attr attr{};
    if (device.context == nullptr || ib().query_device(device.context, &attr) != 0) {
      PortInfo port;
      port.device = name;
      port.use = {false, why_not_opened(devices[i])};
      found.push_back(port);
      continue;
    }
    for (std::uint8_t number = 1; number <= attr.phys_port_cnt; ++number) {
      PortInfo port;
      port.device = name;
      port.number = number;
      port.max_reads = std::min(attr.max_qp_rd_atom, attr.max_qp_init_rd_atom);
      port.has_atomics = attr.atomic_cap != IBV_ATOMIC_NONE;
      describe_port(device.context, options, &port);
      found.push_back(port);
    }
  }
  if (devices != nullptr) ib().free_device_list(devices);
  return found;
}

std::shared_ptr<OpenDevice> open_device(const std::string& name) {
  int count = 0;
  ibv_device** devices = ib().get_device_list(&count);
  auto device = std::make_shared<OpenDevice>();
  for (int i = 0; i < count; ++i) {
    if (name == ib().get_device_name(devices[i])) device->context = ib().open_device(devices[i]);
  }
  const int error = errno;
  if (devices != nullptr) ib().free_device_list(devices);
  errno = error;
  return device->context != nullptr ? device : nullptr;
}

}  // namespace pycomm::platform::verbs

#endif  // PYCOMM_HAVE_VERBS_HEADERS

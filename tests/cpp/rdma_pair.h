// Two ends of an RDMA link in one process, over a simulated NIC or real devices.
#pragma once

#include "fake_verbs.h"
#include "link_pairs.h"
#include "transport/rdma/factory.h"

namespace pycomm::test {

struct RdmaPair : LinkPair {
  std::shared_ptr<Fabric> fabric;  // null over real devices
};

struct RdmaSetup {
  std::vector<std::string> devices[2];
  std::uint64_t seed = 1;
  transport::rdma::LinkOptions options;
  std::uint64_t bytes_registered_max = UINT64_MAX;
  bool is_watched = true;  // freed memory is seen
};

// The two ends, not yet established.
inline RdmaPair begin_rdma_pair(const RdmaSetup& setup,
                                std::vector<std::shared_ptr<platform::verbs::Port>> ports[2]) {
  auto [client, server] = connected_sockets();
  platform::UniqueFd* sockets[2] = {&client, &server};
  RdmaPair pair;
  std::shared_ptr<transport::CoreLink>* ends[2] = {&pair.a, &pair.b};
  std::string refusal;
  platform::MemoryMonitor* monitor =
      setup.is_watched ? platform::MemoryMonitor::of_process(&refusal) : nullptr;
  for (int side : {0, 1}) {
    transport::rdma::Place place;
    place.ports = ports[side];
    place.budget =
        std::make_shared<transport::rdma::RegistrationBudget>(setup.bytes_registered_max);
    place.monitor = monitor;
    *ends[side] = transport::rdma::make_link(platform::make_plain_stream(std::move(*sockets[side])),
                                             place, setup.options, platform::real_clock().now_ns())
                      .value();
  }
  pair.pump = [a = pair.a, b = pair.b] {
    a->progress();
    b->progress();
  };
  return pair;
}

inline bool establish(RdmaPair& pair) {
  using transport::rdma::Establishment;
  const auto is_open = [&](transport::CoreLink& link) {
    return transport::rdma::establishment(link) == Establishment::kUnderWay &&
           link.failure().is_ok();
  };
  while (is_open(*pair.a) || is_open(*pair.b)) pair.pump();
  return transport::rdma::establishment(*pair.a) == Establishment::kDone &&
         transport::rdma::establishment(*pair.b) == Establishment::kDone;
}

inline RdmaPair begin_fake_rdma_pair(const RdmaSetup& setup) {
  auto fabric = std::make_shared<Fabric>(setup.seed);
  std::vector<std::shared_ptr<platform::verbs::Port>> ports[2];
  for (int side : {0, 1}) {
    for (const std::string& device : setup.devices[side]) {
      ports[side].push_back(std::make_shared<FakePort>(fabric, device));
    }
  }
  RdmaPair pair = begin_rdma_pair(setup, ports);
  pair.fabric = fabric;
  return pair;
}

inline RdmaPair make_fake_rdma_pair(const RdmaSetup& setup) {
  RdmaPair pair = begin_fake_rdma_pair(setup);
  if (!establish(pair)) std::abort();
  return pair;
}

// Over devices of this machine. Aborts, saying why, if they cannot be used.
inline RdmaPair make_real_rdma_pair(const RdmaSetup& setup) {
  std::string refusal;
  platform::verbs::Library* library = platform::verbs::ibverbs(&refusal);
  if (library == nullptr) {
    std::fprintf(stderr, "no verbs: %s\n", refusal.c_str());
    std::abort();
  }
  std::vector<std::shared_ptr<platform::verbs::Port>> ports[2];
  for (int side : {0, 1}) {
    for (const std::string& device : setup.devices[side]) {
      for (const platform::verbs::PortInfo& info : library->ports(setup.options.rdma, &refusal)) {
        if (info.device != device) continue;
        if (!info.use.viable)
          std::fprintf(stderr, "%s: %s\n", device.c_str(), info.use.reason.c_str());
        ports[side].push_back(library->open(info).value());
      }
    }
  }
  RdmaPair pair = begin_rdma_pair(setup, ports);
  if (!establish(pair)) {
    std::fprintf(stderr, "not established: %s\n", pair.a->failure().to_string().c_str());
    std::abort();
  }
  return pair;
}

}  // namespace pycomm::test

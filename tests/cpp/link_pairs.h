// Two ends of a link of any transport in one process, and the pump that moves them.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "platform/sockets.h"
#include "platform/system.h"
#include "quic_pair.h"
#include "transport/core_link.h"
#include "transport/quic/factory.h"
#include "transport/shm/factory.h"
#include "transport/sim/network.h"
#include "transport/tcp/factory.h"

namespace pycomm::test {

struct LinkPair {
  std::shared_ptr<void> keepalive;  // what the links stand on; destroyed after them
  std::shared_ptr<transport::CoreLink> a, b;
  std::function<void()> pump;                                       // moves what can move
  std::function<std::byte*(int side, std::uint64_t bytes)> memory;  // that `side` may expose
};

inline LinkPair make_shm_pair(bool allow_pull) {
  struct Keep {
    std::shared_ptr<transport::shm::Arena> arenas[2];
    std::unique_ptr<transport::shm::Host> hosts[2];
  };
  auto keep = std::make_shared<Keep>();
  for (int side : {0, 1}) {
    auto budget = std::make_shared<transport::shm::Budget>(UINT64_MAX);
    keep->arenas[side] = transport::shm::Arena::create(budget).value();
    keep->hosts[side] = transport::shm::Host::create(budget, keep->arenas[side]).value();
  }
  const std::string name = "pycomm-test-" + platform::random_hex128();
  auto listener = platform::listen_local(name).value();
  auto client = platform::connect_local(name, base::kNever).value();
  platform::UniqueFd server;
  while (!(server = platform::accept_one(listener.get()))) platform::yield_thread();
  transport::shm::LinkOptions options;
  options.allow_pull = allow_pull;
  const auto deadline = platform::real_clock().now_ns() + base::ms_to_ns(10'000);
  LinkPair pair;
  std::thread other([&] {
    pair.b =
        transport::shm::establish(*keep->hosts[1], std::move(server), options, deadline).value();
  });
  pair.a = transport::shm::establish(*keep->hosts[0], std::move(client), options, deadline).value();
  other.join();
  pair.pump = [a = pair.a, b = pair.b] {
    a->progress();
    b->progress();
  };
  pair.memory = [keep](int side, std::uint64_t bytes) {
    return keep->arenas[side]->allocate(bytes, transport::shm::Arena::Contents::kZeros).value();
  };
  pair.keepalive = keep;
  return pair;
}

inline std::pair<platform::UniqueFd, platform::UniqueFd> connected_sockets() {
  auto listener = platform::listen_tcp("127.0.0.1", 0, 0).value();
  const auto deadline = platform::real_clock().now_ns() + base::ms_to_ns(10'000);
  auto client = platform::connect_tcp("127.0.0.1", listener.port, deadline).value();
  platform::UniqueFd server;
  while (!(server = platform::accept_one(listener.fd.get()))) platform::yield_thread();
  if (!platform::configure_stream(server.get()).is_ok()) std::abort();
  return {std::move(client), std::move(server)};
}

inline LinkPair make_tcp_pair() {
  auto [client, server] = connected_sockets();
  LinkPair pair;
  pair.a = transport::tcp::make_link(platform::make_plain_stream(std::move(client)), {});
  pair.b = transport::tcp::make_link(platform::make_plain_stream(std::move(server)), {});
  pair.pump = [a = pair.a, b = pair.b] {
    a->progress();
    b->progress();
  };
  return pair;
}

// Over `num_paths` connections, each between two sockets of its own.
inline LinkPair make_quic_pair(int num_paths = 1) {
  using transport::quic::Endpoint;
  auto endpoints = std::make_shared<std::vector<std::shared_ptr<Endpoint>>>();
  LinkPair pair;
  std::shared_ptr<transport::CoreLink>* links[2] = {&pair.a, &pair.b};
  for (int path = 0; path < num_paths; ++path) {
    auto [client, server] = make_handed_over();
    HandedOver* states[2] = {&client, &server};
    std::shared_ptr<Endpoint> ends[2];
    for (int i = 0; i < 2; ++i) {
      ends[i] = Endpoint::open("127.0.0.1", 0, 0, "a key").value();
      states[1 - i]->peer = {"127.0.0.1", ends[i]->port()};
      endpoints->push_back(ends[i]);
    }
    for (int i = 0; i < 2; ++i) {
      const base::TimeNs now = platform::real_clock().now_ns();
      if (path == 0) {
        *links[i] = transport::quic::make_link(ends[i], *states[i], {}, now).value();
      } else if (!transport::quic::add_path(**links[i], ends[i], *states[i], {}, now).is_ok()) {
        std::abort();
      }
    }
  }
  pair.pump = [endpoints, a = pair.a, b = pair.b] {
    for (const auto& endpoint : *endpoints) endpoint->progress(platform::real_clock().now_ns());
    a->progress();
    b->progress();
  };
  return pair;
}

inline LinkPair make_sim_pair(std::uint64_t seed) {
  transport::sim::NetworkOptions options;
  options.seed = seed;
  options.loss_per_million = 50'000;
  options.eager_bytes_max = 8 * 1024;
  options.eager_window_bytes = 512 * 1024;
  auto network = std::make_shared<transport::sim::Network>(2, options);
  LinkPair pair;
  pair.a = std::shared_ptr<transport::CoreLink>(network, network->link(0, 1));
  pair.b = std::shared_ptr<transport::CoreLink>(network, network->link(1, 0));
  pair.pump = [network] { network->step(); };
  pair.keepalive = network;
  return pair;
}

}  // namespace pycomm::test

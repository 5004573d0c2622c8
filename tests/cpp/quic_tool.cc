// One end of a QUIC connection for tests with software we did not write: takes a connection over
// from a handshake (key=value lines on standard input), sends and expects a pattern on its stream,
// and says how it went.
//   quic_tool FD BYTES_OUT BYTES_IN [update]
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <map>
#include <sstream>

#include "platform/system.h"
#include "quic_pair.h"

namespace {

using namespace pycomm;

std::string unhex(const std::string& hex) {
  std::string bytes;
  for (std::size_t i = 0; i + 1 < hex.size(); i += 2) {
    bytes += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
  }
  return bytes;
}

// sequence:cid:token,...
std::vector<ConnectionId> read_ids(const std::string& text) {
  std::vector<ConnectionId> ids;
  std::istringstream items(text);
  for (std::string item; std::getline(items, item, ',');) {
    const std::size_t first = item.find(':'), second = item.find(':', first + 1);
    ids.push_back({std::stoull(item), unhex(item.substr(first + 1, second - first - 1)),
                   unhex(item.substr(second + 1))});
  }
  return ids;
}

HandedOver read_state() {
  std::map<std::string, std::string> fields;
  for (std::string line; std::getline(std::cin, line);) {
    const std::size_t equals = line.find('=');
    fields[line.substr(0, equals)] = line.substr(equals + 1);
  }
  const auto number = [&](const char* name) { return std::stoull(fields.at(name)); };
  HandedOver s;
  s.is_client = number("is_client") != 0;
  s.is_chacha20 = number("is_chacha20") != 0;
  s.sending_secret = unhex(fields.at("sending_secret"));
  s.receiving_secret = unhex(fields.at("receiving_secret"));
  s.own_ids = read_ids(fields.at("own_ids"));
  s.peer_ids = read_ids(fields.at("peer_ids"));
  s.next_packet_number = number("next_packet_number");
  std::istringstream ranges(fields.at("received"));
  for (std::string range; std::getline(ranges, range, ',');) {
    s.received.emplace_back(std::stoull(range), std::stoull(range.substr(range.find('-') + 1)));
  }
  s.stream_id = number("stream_id");
  s.receive_max = number("receive_max");
  s.received_bytes = number("received_bytes");
  s.stream_receive_max = number("stream_receive_max");
  s.send_max = number("send_max");
  s.sent_bytes = number("sent_bytes");
  s.stream_send_max = number("stream_send_max");
  s.datagram_bytes_max = number("datagram_bytes_max");
  s.ack_delay_exponent = number("ack_delay_exponent");
  s.ack_delay_max_ms = number("ack_delay_max_ms");
  s.rtt_us = number("rtt_us");
  s.peer = {"127.0.0.1", static_cast<std::uint16_t>(number("peer_port"))};
  return s;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) return 64;
  const int fd = std::atoi(argv[1]);
  const std::uint64_t bytes_in = std::strtoull(argv[3], nullptr, 10);
  const bool updates = argc > 4;
  fcntl(fd, F_SETFL, O_NONBLOCK);
  const HandedOver state = read_state();
  test::Bulk bulk(std::strtoull(argv[2], nullptr, 10));
  transport::quic::SessionOptions options;
  options.peer_is_stock = true;
  const auto now = [] { return platform::real_clock().now_ns(); };
  transport::quic::Stream stream(bulk, bulk, options.receive_window_max);
  auto made = transport::quic::Session::create(state, options, stream, now());
  if (!made.is_ok()) return 65;
  transport::quic::Session& session = *made.value();
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  to.sin_port = htons(state.peer.port);
  std::vector<std::uint8_t> batch(65'000), in(65'536);
  const auto until = now() + base::ms_to_ns(60'000);
  auto next_update = now() + base::ms_to_ns(50);
  while (now() < until && session.failure().is_ok() &&
         !(bulk.is_done_sending() && bulk.has_received(bytes_in))) {
    session.on_timer(now());
    if (updates && now() > next_update) {
      session.request_key_update();
      next_update = now() + base::ms_to_ns(100);
    }
    std::size_t segment = 0;
    while (const std::size_t bytes = session.send(batch, &segment, now())) {
      for (std::size_t at = 0; at < bytes; at += segment) {
        [[maybe_unused]] const auto sent =
            sendto(fd, batch.data() + at, std::min(segment, bytes - at), 0,
                   reinterpret_cast<sockaddr*>(&to), sizeof to);
      }
    }
    pollfd polled{fd, POLLIN, 0};
    const auto wait_ms =
        std::clamp<std::int64_t>((session.next_deadline() - now()) / 1'000'000, 0, 20);
    poll(&polled, 1, static_cast<int>(wait_ms));
    for (;;) {
      const ssize_t got = recv(fd, in.data(), in.size(), 0);
      if (got <= 0) break;
      session.receive({in.data(), static_cast<std::size_t>(got)}, state.peer, test::Ecn::kNone,
                      now());
    }
  }
  const auto counters = session.counters();
  std::printf("failure=%s\nsent=%d\nreceived=%d\nupdates=%llu\nforged=%llu\nlost=%llu\n",
              session.failure().message().c_str(), bulk.is_done_sending(),
              bulk.has_received(bytes_in),
              static_cast<unsigned long long>(counters.num_key_updates),
              static_cast<unsigned long long>(counters.num_forged),
              static_cast<unsigned long long>(counters.packets_lost));
  return bulk.is_done_sending() && bulk.has_received(bytes_in) ? 0 : 1;
}

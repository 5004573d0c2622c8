// One end of a QUIC v2 connection by picoquic: a peer for our engine that we did not write, and one
// to measure it by. All numbers are said as one line of JSON.
//   peer server PORT BYTES_OUT BYTES_IN CERTIFICATE KEY [OPTION...]
//   peer client PORT BYTES_OUT BYTES_IN [OPTION...]
//   peer sink PORT CERTIFICATE KEY [OPTION...]      takes what a source sends
//   peer source PORT SECONDS [OPTION...]            sends for so long
// Servers say "port N" first; PORT 0 is any. Servers and clients stay until standard input ends, a
// sink and its source until they are done. Rates are of bytes of the stream, the larger
// direction's.
//   update             change keys every 100 ms
//   hello=LINE         what to say on stream 0: a client first, a server when it is spoken to
//   ca=FILE            trust these, and ask a client for its certificate; else trust everyone
//   certificate=FILE, key=FILE, name=NAME            of a client; the name is the server's
//   congestion=NAME, batch=PACKETS, buffer=BYTES, mtu=BYTES, window=BYTES, nogso
#include <arpa/inet.h>
#include <picoquic.h>
#include <picoquic_packet_loop.h>
#include <poll.h>
#include <sys/resource.h>
#include <unistd.h>

// Only for the count of key updates.
#include <picoquic_internal.h>
#include <picotls.h>

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

namespace {

constexpr char kAlpn[] = "pycomm/1";
constexpr std::uint64_t kHelloStream = 0, kBulkStream = 4;
constexpr std::uint64_t kUpdateUs = 100'000, kPollUs = 10'000;
// A server may still be handing the connection over when it has answered our hello.
constexpr std::uint64_t kSettleUs = 100'000;

// The pattern of test::Bulk, which repeats.
class Pattern {
 public:
  Pattern() : bytes_(2 * kPeriod) {
    for (std::uint64_t i = 0; i < bytes_.size(); ++i) {
      bytes_[i] = static_cast<std::uint8_t>((i * 2654435761u) >> 11);
    }
  }
  const std::uint8_t* at(std::uint64_t offset) const { return &bytes_[offset % kPeriod]; }

 private:
  static constexpr std::uint64_t kPeriod = 1 << 19;  // and no packet is longer
  std::vector<std::uint8_t> bytes_;
};

struct Peer {
  bool is_client = false, is_bench = false, updates = false;
  std::uint64_t bytes_out = 0, bytes_in = 0, source_us = 0;
  std::string hello;
  Pattern pattern;

  picoquic_cnx_t* connection = nullptr;
  std::string heard;  // on the stream of hellos
  std::uint64_t sent = 0, received = 0, num_asked = 0;
  bool is_right = true, is_sending = false, has_fin = false;
  bool is_gone = false, is_over = false;  // the connection; this program
  std::uint64_t began_us = 0, ended_us = 0, send_at_us = 0, next_update_us = 0;
  picoquic_path_quality_t quality{};
  std::uint64_t num_updates = 0, payload_bytes = 0;
  std::string failure;
};

void look(Peer& peer) {
  if (peer.connection == nullptr) return;
  picoquic_get_default_path_quality(peer.connection, &peer.quality);
  peer.num_updates = peer.connection->nb_crypto_key_rotations;
  peer.payload_bytes = peer.connection->path[0]->send_mtu;
}

void begin(Peer& peer) {
  if (peer.began_us == 0) peer.began_us = picoquic_current_time();
}

void begin_sending(Peer& peer) {
  if (peer.is_sending) return;
  peer.is_sending = true;
  begin(peer);
  picoquic_mark_active_stream(peer.connection, kBulkStream, 1, nullptr);
}

void say_hello(Peer& peer) {
  const std::string line = peer.hello + "\n";
  picoquic_add_to_stream(peer.connection, kHelloStream,
                         reinterpret_cast<const std::uint8_t*>(line.data()), line.size(), 0);
}

void on_hello(Peer& peer, const std::uint8_t* bytes, std::size_t count) {
  const bool was_whole = peer.heard.find('\n') != std::string::npos;
  peer.heard.append(reinterpret_cast<const char*>(bytes), count);
  if (was_whole || peer.heard.find('\n') == std::string::npos) return;
  if (peer.is_client) {
    peer.send_at_us = picoquic_current_time() + kSettleUs;
  } else {
    say_hello(peer);
  }
}

void on_bulk(Peer& peer, const std::uint8_t* bytes, std::size_t count) {
  begin(peer);
  if (!peer.is_bench) {
    peer.is_right &= std::memcmp(bytes, peer.pattern.at(peer.received), count) == 0;
  }
  peer.received += count;
  peer.ended_us = picoquic_current_time();
  if (!peer.is_bench) begin_sending(peer);
}

int provide(Peer& peer, void* context, std::size_t room) {
  const bool is_last = peer.is_bench && picoquic_current_time() > peer.began_us + peer.source_us;
  const std::uint64_t count = std::min<std::uint64_t>(room, peer.bytes_out - peer.sent);
  const bool goes_on = !is_last && peer.sent + count < peer.bytes_out;
  std::uint8_t* to = picoquic_provide_stream_data_buffer(context, count, is_last, goes_on);
  if (to == nullptr) return -1;
  std::memcpy(to, peer.pattern.at(peer.sent), count);
  peer.sent += count;
  return 0;
}

int on_event(picoquic_cnx_t* connection, std::uint64_t stream, std::uint8_t* bytes,
             std::size_t count, picoquic_call_back_event_t event, void* context, void*) {
  Peer& peer = *static_cast<Peer*>(context);
  if (peer.connection == nullptr) {
    if (peer.is_gone) return 0;
    peer.connection = connection;
    picoquic_set_callback(connection, on_event, context);
  }
  if (peer.connection != connection) return -1;  // one only
  switch (event) {
    case picoquic_callback_ready:
      if (!peer.is_client) break;
      // Ours from here on: the server may be the first to send on it.
      picoquic_set_app_stream_ctx(connection, kBulkStream, nullptr);
      if (peer.hello.empty()) {
        begin_sending(peer);
      } else {
        say_hello(peer);
      }
      break;
    case picoquic_callback_stream_data:
    case picoquic_callback_stream_fin:
      if (stream == kHelloStream) on_hello(peer, bytes, count);
      if (stream == kBulkStream) on_bulk(peer, bytes, count);
      if (event == picoquic_callback_stream_fin && stream == kBulkStream && peer.is_bench) {
        peer.has_fin = true;
        look(peer);
        if (peer.is_client) {
          picoquic_close(connection, 0);
          peer.is_over = true;
        } else {
          picoquic_add_to_stream(connection, kBulkStream, nullptr, 0, 1);
        }
      }
      break;
    case picoquic_callback_prepare_to_send: return provide(peer, bytes, count);
    case picoquic_callback_stateless_reset:
    case picoquic_callback_close:
    case picoquic_callback_application_close: {
      if (!peer.is_bench) look(peer);
      std::uint64_t reasons[4]{};
      picoquic_get_close_reasons(connection, &reasons[0], &reasons[1], &reasons[2], &reasons[3]);
      for (const std::uint64_t reason : reasons) {
        if (reason != 0) peer.failure += std::to_string(reason) + " ";
      }
      peer.connection = nullptr;
      peer.is_gone = true;
      if (peer.is_bench) peer.is_over = true;
      break;
    }
    default: break;
  }
  return 0;
}

// What no packet brings about.
void on_turn(Peer& peer, packet_loop_time_check_arg_t& turn) {
  const std::uint64_t now = turn.current_time;
  if (!peer.is_bench) {
    pollfd input{STDIN_FILENO, POLLIN, 0};
    char byte = 0;
    if (poll(&input, 1, 0) == 1 && read(STDIN_FILENO, &byte, 1) <= 0) peer.is_over = true;
  }
  if (peer.connection != nullptr) {
    if (peer.send_at_us != 0 && now >= peer.send_at_us) {
      peer.send_at_us = 0;
      begin_sending(peer);
    }
    if (peer.updates && peer.received + peer.sent > 0 && now >= peer.next_update_us) {
      peer.num_asked += picoquic_start_key_rotation(peer.connection) == 0 ? 1 : 0;
      peer.next_update_us = now + kUpdateUs;
    }
  }
  turn.delta_t = std::min<std::int64_t>(turn.delta_t, kPollUs);
}

int on_loop(picoquic_quic_t*, picoquic_packet_loop_cb_enum event, void* context, void* argument) {
  Peer& peer = *static_cast<Peer*>(context);
  switch (event) {
    case picoquic_packet_loop_ready:
      static_cast<picoquic_packet_loop_options_t*>(argument)->do_time_check = 1;
      return 0;
    case picoquic_packet_loop_port_update:
      if (!peer.is_client) {
        std::printf("port %d\n", static_cast<sockaddr_in*>(argument)->sin_port);
        std::fflush(stdout);
      }
      return 0;
    case picoquic_packet_loop_time_check:
      on_turn(peer, *static_cast<packet_loop_time_check_arg_t*>(argument));
      return 0;
    case picoquic_packet_loop_after_send:
      return peer.is_over ? PICOQUIC_NO_ERROR_TERMINATE_PACKET_LOOP : 0;
    default: return 0;
  }
}

bool is_done(const Peer& peer) {
  if (peer.is_bench) return peer.has_fin;
  return peer.is_right && peer.sent == peer.bytes_out && peer.received == peer.bytes_in;
}

void report(const Peer& peer) {
  const double seconds =
      peer.ended_us > peer.began_us ? 1e-6 * static_cast<double>(peer.ended_us - peer.began_us) : 0;
  const double bytes = static_cast<double>(std::max(peer.sent, peer.received));
  rusage used{};
  getrusage(RUSAGE_SELF, &used);
  const auto in_seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
  };
  std::printf("{\"is_done\": %s, \"is_right\": %s, \"received\": %" PRIu64 ", \"sent\": %" PRIu64,
              is_done(peer) ? "true" : "false", peer.is_right ? "true" : "false", peer.received,
              peer.sent);
  std::printf(", \"seconds\": %.6f, \"gbit_per_s\": %.3f, \"cpu_s\": %.3f, \"rtt_us\": %" PRIu64,
              seconds, seconds > 0 ? 8e-9 * bytes / seconds : 0,
              in_seconds(used.ru_utime) + in_seconds(used.ru_stime), peer.quality.rtt);
  std::printf(", \"packets_sent\": %" PRIu64 ", \"packets_lost\": %" PRIu64
              ", \"packets_spuriously_lost\": %" PRIu64 ", \"payload_bytes\": %" PRIu64,
              peer.quality.sent, peer.quality.lost, peer.quality.spurious_losses,
              peer.payload_bytes);
  std::printf(", \"updates\": %" PRIu64 ", \"updates_asked\": %" PRIu64 ", \"failure\": \"%s\"}\n",
              peer.num_updates, peer.num_asked, peer.failure.c_str());
}

int run(Peer& peer, int port, std::map<std::string, std::string>& options) {
  const auto file = [&](const char* name) {
    return options[name].empty() ? nullptr : options[name].c_str();
  };
  const auto number = [&](const char* name, int otherwise) {
    return options[name].empty() ? otherwise : std::atoi(options[name].c_str());
  };
  picoquic_register_all_congestion_control_algorithms();
  picoquic_quic_t* quic = picoquic_create(8, file("certificate"), file("key"), file("ca"), kAlpn,
                                          on_event, &peer, nullptr, nullptr, nullptr,
                                          picoquic_current_time(), nullptr, nullptr, nullptr, 0);
  if (quic == nullptr) return 65;
  if (file("ca") == nullptr) {
    picoquic_set_null_verifier(quic);
  } else if (!peer.is_client) {
    picoquic_set_client_authentication(quic, 1);
  }
  picoquic_set_default_connection_id_length(quic, 8);
  picoquic_set_cipher_suite(quic, PICOQUIC_AES_128_GCM_SHA256);
  picoquic_set_default_idle_timeout(quic, 20'000);
  picoquic_set_mtu_max(quic, static_cast<std::uint32_t>(number("mtu", 1480)));
  picoquic_set_default_congestion_algorithm_by_name(
      quic, options["congestion"].empty() ? "cubic" : options["congestion"].c_str());
  if (const int window = number("window", 16 << 20); window > 0) {
    const auto bytes = static_cast<std::uint64_t>(window);
    picoquic_set_default_tp_value(quic, picoquic_tp_initial_max_data, bytes);
    picoquic_set_default_tp_value(quic, picoquic_tp_initial_max_stream_data_bidi_local, bytes);
    picoquic_set_default_tp_value(quic, picoquic_tp_initial_max_stream_data_bidi_remote, bytes);
  }

  if (peer.is_client) {
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    to.sin_port = htons(static_cast<std::uint16_t>(port));
    const std::string name = options["name"].empty() ? "localhost" : options["name"];
    const std::uint64_t now = picoquic_current_time();
    peer.connection = picoquic_create_cnx(
        quic, picoquic_null_connection_id, picoquic_null_connection_id,
        reinterpret_cast<sockaddr*>(&to), now, PICOQUIC_V2_VERSION, name.c_str(), kAlpn, 1);
    if (peer.connection == nullptr) return 65;
    picoquic_set_callback(peer.connection, on_event, &peer);
    if (picoquic_start_client_cnx(peer.connection) != 0) return 65;
  }

  picoquic_packet_loop_param_t loop{};
  loop.local_af = AF_INET;
  loop.local_port = static_cast<std::uint16_t>(peer.is_client ? 0 : port);
  loop.socket_buffer_size = number("buffer", 4 << 20);
  loop.send_batch_max = static_cast<std::size_t>(number("batch", 0));
  loop.do_not_use_gso = options.contains("nogso") ? 1 : 0;
  const int ended = picoquic_packet_loop_v2(quic, &loop, on_loop, &peer);
  if (!peer.is_bench) look(peer);
  report(peer);
  picoquic_free(quic);
  if (ended != 0) return 66;
  return is_done(peer) ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) return 64;
  const std::string role = argv[1];
  Peer peer;
  peer.is_client = role == "client" || role == "source";
  peer.is_bench = role == "sink" || role == "source";
  std::map<std::string, std::string> options;
  int next = 3;
  if (peer.is_bench && peer.is_client) {
    peer.source_us = static_cast<std::uint64_t>(1e6 * std::atof(argv[next++]));
    peer.bytes_out = UINT64_MAX;
  } else if (!peer.is_bench) {
    if (argc < 5) return 64;
    peer.bytes_out = std::strtoull(argv[next++], nullptr, 10);
    peer.bytes_in = std::strtoull(argv[next++], nullptr, 10);
  }
  if (!peer.is_client) {
    if (argc < next + 2) return 64;
    options["certificate"] = argv[next++];
    options["key"] = argv[next++];
  }
  for (; next < argc; ++next) {
    const std::string option = argv[next];
    const std::size_t equals = option.find('=');
    options[option.substr(0, equals)] =
        equals == std::string::npos ? "" : option.substr(equals + 1);
  }
  peer.updates = options.contains("update");
  peer.hello = options["hello"];
  return run(peer, std::atoi(argv[2]), options);
}

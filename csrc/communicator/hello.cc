// Encoding, decoding and comparing hellos.
#include <algorithm>
#include <bit>
#include <charconv>
#include <map>

#include "communicator/bootstrap.h"
#include "platform/udp.h"

namespace pycomm::communicator {
namespace {

constexpr std::size_t kHelloBytesMax = 4096;

bool is_plain(const std::string& text) {
  for (char c : text) {
    if (c < ' ' || c > '~') return false;
  }
  return text.size() < 512;
}

std::string plain(std::string text) {
  for (char& c : text) {
    if (c < ' ' || c > '~') c = '?';
  }
  return text.substr(0, 500);
}

template <class T>
bool parse(const std::string& text, T* out) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *out);
  return error == std::errc() && end == text.data() + text.size();
}

bool is_hexadecimal(const std::string& text) {
  return text.find_first_not_of("0123456789abcdef") == std::string::npos;
}

constexpr std::size_t kPathsMax = 8;

std::string encode_paths(const std::vector<UdpAddress>& paths) {
  std::string text;
  for (const UdpAddress& path : paths) {
    text += (text.empty() ? "" : ",") + path.host + ":" + std::to_string(path.port);
  }
  return text;
}

bool parse_paths(const std::string& text, std::vector<UdpAddress>* out) {
  for (std::size_t at = 0; !text.empty() && at <= text.size();) {
    const std::size_t end = std::min(text.find(',', at), text.size());
    const std::string item = text.substr(at, end - at);
    const std::size_t colon = item.find(':');
    UdpAddress path;
    if (colon == std::string::npos || !parse(item.substr(colon + 1), &path.port)) return false;
    path.host = item.substr(0, colon);
    const bool is_address = path.host.empty() || platform::UdpPeer::parse(path.host, 0).is_ok();
    if (!is_address || path.port == 0 || out->size() >= kPathsMax) return false;
    out->push_back(std::move(path));
    at = end + 1;
  }
  return true;
}

bool is_process_id(const std::string& text) { return text.size() == 32 && is_hexadecimal(text); }

}  // namespace

std::string proof_of(const Options& options) {
  if (!options.tls.is_set()) return options.secret.empty() ? "none" : "secret";
  return options.secret.empty() ? "certificate" : "certificate and secret";
}

std::string encode(const Hello& h) {
  const auto line = [](const char* key, const std::string& value) {
    return std::string(key) + "=" + plain(value) + "\n";
  };
  return line("protocol", std::to_string(h.protocol)) + line("build", h.build) +
         line("framework", h.framework) + line("fingerprint", h.fingerprint) +
         line("world_size", std::to_string(h.world_size)) + line("process_id", h.process_id) +
         line("host", h.host) + line("shm_domain", h.shm_domain) +
         line("shm_refusal", h.shm_refusal) + line("local_name", h.local_name) +
         line("tcp_address", h.tcp_address) + line("tcp_local_address", h.tcp_local_address) +
         line("tcp_port", std::to_string(h.tcp_port)) +
         line("quic_paths", encode_paths(h.quic_paths)) + line("quic_refusal", h.quic_refusal) +
         line("num_rdma_ports", std::to_string(h.num_rdma_ports)) +
         line("rdma_refusal", h.rdma_refusal) + line("proof", h.proof) + line("cpus", h.cpus) +
         line("nonce", std::to_string(h.nonce));
}

Result<Hello> decode(const std::string& text) {
  const Status malformed =
      Status::error(StatusCode::kInternal, "a rank published something that is no pycomm hello");
  if (text.size() > kHelloBytesMax) return malformed;
  std::map<std::string, std::string> fields;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = text.find('\n', at);
    if (end == std::string::npos) return malformed;
    const std::string line = text.substr(at, end - at);
    const std::size_t equals = line.find('=');
    if (equals == std::string::npos || !is_plain(line)) return malformed;
    if (!fields.emplace(line.substr(0, equals), line.substr(equals + 1)).second) return malformed;
    at = end + 1;
  }
  Hello h;
  // A hello of another version may have other fields; only the version is read then.
  if (!parse(fields["protocol"], &h.protocol)) return malformed;
  h.build = fields["build"];
  if (h.protocol != transport::kProtocolVersion) return h;
  h.framework = fields["framework"];
  h.fingerprint = fields["fingerprint"];
  h.process_id = fields["process_id"];
  h.host = fields["host"];
  h.shm_domain = fields["shm_domain"];
  h.shm_refusal = fields["shm_refusal"];
  h.local_name = fields["local_name"];
  h.tcp_address = fields["tcp_address"];
  h.tcp_local_address = fields["tcp_local_address"];
  h.proof = fields["proof"];
  h.quic_refusal = fields["quic_refusal"];
  h.rdma_refusal = fields["rdma_refusal"];
  h.cpus = fields["cpus"];
  const bool is_valid =
      parse(fields["world_size"], &h.world_size) && parse(fields["tcp_port"], &h.tcp_port) &&
      parse_paths(fields["quic_paths"], &h.quic_paths) &&
      parse(fields["num_rdma_ports"], &h.num_rdma_ports) && h.num_rdma_ports >= 0 &&
      parse(fields["nonce"], &h.nonce) && h.nonce >> 63 == 0 && is_process_id(h.process_id) &&
      h.local_name.size() <= 100 && is_hexadecimal(h.cpus);
  if (!is_valid) return malformed;
  return h;
}

Status compare(const std::vector<Hello>& hellos) {
  const Hello& first = hellos[0];
  for (std::size_t r = 1; r < hellos.size(); ++r) {
    const Hello& h = hellos[r];
    const auto differ = [&](const char* what, const std::string& zero, const std::string& mine) {
      return Status::error(StatusCode::kInvalidUsage,
                           std::string("ranks do not agree on ") + what + ": rank 0 has '" + zero +
                               "', rank " + std::to_string(r) + " has '" + mine +
                               "'; make them the same on every rank",
                           static_cast<Rank>(r));
    };
    if (h.protocol != first.protocol) {
      return differ("the protocol version",
                    std::to_string(first.protocol) + " (pycomm " + first.build + ")",
                    std::to_string(h.protocol) + " (pycomm " + h.build + ")");
    }
    if (h.build != first.build) return differ("pycomm's build", first.build, h.build);
    if (h.framework != first.framework) {
      return differ("the framework", first.framework, h.framework);
    }
    if (h.fingerprint != first.fingerprint) {
      return differ("the options that steer plans", first.fingerprint, h.fingerprint);
    }
    if (h.world_size != first.world_size) {
      return differ("the world size", std::to_string(first.world_size),
                    std::to_string(h.world_size));
    }
    for (std::size_t q = 0; q < r; ++q) {
      if (hellos[q].process_id == h.process_id) {
        return Status::error(StatusCode::kInvalidUsage,
                             "ranks " + std::to_string(q) + " and " + std::to_string(r) +
                                 " are the same process; every rank needs its own");
      }
    }
  }
  return Status();
}

int num_cpus(const std::vector<Hello>& hellos) {
  std::vector<int> together;
  for (const Hello& hello : hellos) {
    together.resize(std::max(together.size(), hello.cpus.size()));
    for (std::size_t i = 0; i < hello.cpus.size(); ++i) {
      const char digit = hello.cpus[i];
      together[i] |= digit <= '9' ? digit - '0' : digit - 'a' + 10;
    }
  }
  int count = 0;
  for (const int four : together) count += std::popcount(static_cast<unsigned>(four));
  return count;
}

Path choose_path(const Hello& a, const Hello& b, TransportChoice choice) {
  if (!a.shm_domain.empty() && a.shm_domain == b.shm_domain) return Path::kShm;
  // RDMA bears no encryption: where certificates ask for it, only who names it gets it.
  const bool is_open = a.proof.find("certificate") == std::string::npos &&
                       b.proof.find("certificate") == std::string::npos;
  if (a.num_rdma_ports > 0 && b.num_rdma_ports > 0 &&
      (choice == TransportChoice::kRdma || (a.host != b.host && is_open))) {
    return Path::kRdma;
  }
  const bool both = !a.quic_paths.empty() && !b.quic_paths.empty();
  return both && (choice == TransportChoice::kQuic || a.host != b.host) ? Path::kQuic : Path::kTcp;
}

}  // namespace pycomm::communicator

// Options from arguments, environment and file, and the part of them that ranks must agree on.
#include "pycomm/options.h"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <functional>
#include <optional>
#include <string_view>

#include "base/log.h"
#include "platform/sockets.h"
#include "platform/system.h"
#include "platform/udp.h"
#include "pycomm/communicator.h"

namespace pycomm {
namespace {

constexpr std::string_view kTransportNames[] = {"auto", "shm", "tcp", "quic",
                                                "rdma"};  // by TransportChoice
constexpr std::size_t kSecretBytesMin = 16;
constexpr const char* kMakeASecret = "head -c 32 /dev/urandom | base64 > FILE; chmod 600 FILE";

// Takes a value; what is wrong with it, or "".
using Take = std::function<std::string(const std::string&, Options&)>;

bool parse_u64(std::string_view text, std::uint64_t* out) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *out);
  return error == std::errc() && end == text.data() + text.size();
}

template <class T>
Take number(T Options::* member, std::uint64_t min, std::uint64_t max, std::uint64_t unit = 1) {
  return [=](const std::string& text, Options& options) -> std::string {
    std::uint64_t value = 0;
    if (!parse_u64(text, &value) || value < min || value > max) {
      return "is not a number from " + std::to_string(min) + " to " + std::to_string(max);
    }
    options.*member = static_cast<T>(value * unit);
    return "";
  };
}

template <class T>
Take rdma_number(T RdmaOptions::* member, std::uint64_t min, std::uint64_t max) {
  return [=](const std::string& text, Options& options) -> std::string {
    std::uint64_t value = 0;
    if (!parse_u64(text, &value) || value < min || value > max) {
      return "is not a number from " + std::to_string(min) + " to " + std::to_string(max);
    }
    options.rdma.*member = static_cast<T>(value);
    return "";
  };
}

std::string take_pkey(const std::string& value, Options& options) {
  const bool is_hex = value.starts_with("0x") || value.starts_with("0X");
  const char* first = value.data() + (is_hex ? 2 : 0);
  const char* last = value.data() + value.size();
  const auto [end, error] = std::from_chars(first, last, options.rdma.pkey, is_hex ? 16 : 10);
  return error == std::errc() && end == last ? "" : "is no partition key such as 0x8001";
}

Take text(std::string Options::* member) {
  return [=](const std::string& value, Options& options) {
    options.*member = value;
    return std::string();
  };
}

Take tls_text(std::string TlsOptions::* member) {
  return [=](const std::string& value, Options& options) {
    options.tls.*member = value;
    return std::string();
  };
}

// Of a folder that `pycomm certs issue` made; single settings come after and count for more.
std::string take_certs(const std::string& folder, Options& options) {
  options.tls.ca_file = folder + "/ca.pem";
  options.tls.certificate_file = folder + "/certificate.pem";
  options.tls.key_file = folder + "/key.pem";
  if (const auto peers = platform::read_file(folder + "/peers")) {
    options.tls.peer_name = peers->substr(0, peers->find_first_of("\r\n"));
  }
  if (platform::read_file(folder + "/denied")) options.tls.denied_file = folder + "/denied";
  return platform::read_file(options.tls.certificate_file)
             ? ""
             : "is no folder with ca.pem, certificate.pem and key.pem (pycomm certs issue)";
}

Take flag(bool Options::* member) {
  return [=](const std::string& value, Options& options) -> std::string {
    if (value != "0" && value != "1") return "is neither 0 nor 1";
    options.*member = value == "1";
    return "";
  };
}

std::string take_transport(const std::string& value, Options& options) {
  const auto* const found =
      std::find(std::begin(kTransportNames), std::end(kTransportNames), value);
  if (found == std::end(kTransportNames)) return "is none of auto, shm, tcp, quic, rdma";
  options.transport = static_cast<TransportChoice>(found - std::begin(kTransportNames));
  return "";
}

std::string take_ports(const std::string& value, Options& options) {
  const std::size_t dash = value.find_first_of("-:");
  std::uint64_t first = 0, last = 0;
  const bool is_range =
      parse_u64(value.substr(0, dash), &first) &&
      parse_u64(dash == std::string::npos ? value : value.substr(dash + 1), &last);
  if (!is_range || first < 1 || last < first || last > 65535) {
    return "is not a range of ports such as 20000-20100";
  }
  options.ports = {static_cast<std::uint16_t>(first), static_cast<std::uint16_t>(last)};
  return "";
}

std::string take_secret_file(const std::string& path, Options& options) {
  auto secret = platform::read_private_file(path);
  if (!secret.is_ok()) {
    return "cannot be used: " + secret.status().message() + " (make one with: " + kMakeASecret +
           ")";
  }
  options.secret = std::move(secret).value();
  if (options.secret.size() < kSecretBytesMin) {
    return std::string("holds fewer than 16 bytes (make one with: ") + kMakeASecret + ")";
  }
  return "";
}

std::string take_secret(const std::string& value, Options& options) {
  if (value.size() < kSecretBytesMin) return "is shorter than 16 bytes";
  if (options.secret.empty()) options.secret = value;  // the file counts for more
  return "";
}

std::string take_log_level(const std::string& value, Options&) {
  return base::set_log_level_named(value) ? "" : "is none of VERSION, WARN, INFO, TRACE";
}

std::string take_log_subsystems(const std::string& value, Options&) {
  return base::set_log_subsystems(value) ? ""
                                         : "is no list of INIT, COLL, P2P, NET, SHM, ENV, ALL "
                                           "(^INIT,NET for all but those)";
}

std::string take_log_file(const std::string& value, Options&) {
  return base::set_log_file(value) ? "" : "cannot be opened";
}

// "2", or addresses, each maybe with the one that peers are told: "10.0.0.5,10.1.0.5=203.0.113.9".
std::string take_quic_paths(const std::string& value, Options& options) {
  constexpr std::uint64_t kMax = 8;
  std::uint64_t count = 0;
  if (parse_u64(value, &count)) {
    if (count < 1 || count > kMax) return "is not a number from 1 to 8";
    options.quic_paths.assign(count, {});
    return "";
  }
  options.quic_paths.clear();
  for (std::size_t at = 0; at <= value.size();) {
    const std::size_t end = std::min(value.find(',', at), value.size());
    const std::string item = value.substr(at, end - at);
    const std::size_t equals = item.find('=');
    const std::string bound = item.substr(0, equals);
    const std::string told = equals == std::string::npos ? bound : item.substr(equals + 1);
    if (!platform::UdpPeer::parse(bound, 0).is_ok() || !platform::UdpPeer::parse(told, 0).is_ok()) {
      return "is neither a number nor a list of IPv4 addresses such as 10.0.0.5,10.1.0.5";
    }
    options.quic_paths.emplace_back(bound, told == "0.0.0.0" ? "" : told);
    at = end + 1;
  }
  return options.quic_paths.size() <= kMax ? "" : "names more than 8 addresses";
}

std::string take_flight_recorder(const std::string& value, Options& options) {
  options.flight_recorder_folder = value == "off" ? "" : value;
  return "";
}

struct Known {
  const char* name;
  const char* by_default;
  const char* help;
  Take take;
  const char* also[2] = {nullptr, nullptr};  // other names of the environment, in this order
};

// The file counts for more than the plain secret, so it comes first.
const std::vector<Known>& known_settings() {
  static const auto* known = new std::vector<Known>{
      {"PYCOMM_DEBUG", "WARN", "log level: VERSION, WARN, INFO or TRACE", take_log_level},
      {"PYCOMM_DEBUG_SUBSYS", "ALL",
       "what INFO and TRACE tell of: INIT,COLL,P2P,NET,SHM,ENV; ^ excludes", take_log_subsystems},
      {"PYCOMM_DEBUG_FILE", "", "log file instead of stderr; %h is the host, %p the process",
       take_log_file},
      {"PYCOMM_TRANSPORT", "auto", "auto, or shm, tcp, quic, rdma alone (refuse anything else)",
       take_transport},
      {"PYCOMM_TIMEOUT_SEC", "1800", "of an operation, and of creating a group",
       number(&Options::timeout_ms, 1, 31'536'000, 1000)},
      {"PYCOMM_CONNECT_TIMEOUT_SEC", "10", "of one connection to a peer that does not answer",
       number(&Options::connect_timeout_ms, 1, 86'400, 1000)},
      {"PYCOMM_CHUNK_BYTES", "262144",
       "unit of the pipeline in rings and trees; 1 MiB over RDMA, 4 MiB over QUIC",
       number(&Options::chunk_bytes, 4096, std::uint64_t{1} << 30)},
      {"PYCOMM_DETERMINISTIC", "0", "1: bits depend on nothing but the inputs",
       flag(&Options::deterministic)},
      {"PYCOMM_SHM_DISABLE", "0", "1: no shared memory", flag(&Options::shm_disabled)},
      {"PYCOMM_TUNE", "1",
       "0: ranks of one host do not time which way is best, but keep to a guess",
       flag(&Options::tunes)},
      {"PYCOMM_TUNE_FILE", "", "where what was learnt is kept; off: nowhere; default: user's cache",
       text(&Options::tuning_file)},
      {"PYCOMM_SHM_TENSORS", "0",
       "1: torch's CPU tensors lie in shared memory from the first group on",
       flag(&Options::shm_tensors)},
      {"PYCOMM_SHM_BYTES_MAX", "", "most shared memory that this process takes",
       number(&Options::shm_bytes_max, std::uint64_t{1} << 20, UINT64_MAX)},
      {"PYCOMM_SOCKET_IFNAME",
       "",
       "interfaces: eth,ib (prefixes), =eth0 (exact), ^docker,lo (not)",
       text(&Options::interfaces),
       {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}},
      {"PYCOMM_SOCKET_ADDR", "", "address to listen on, instead of an interface's",
       text(&Options::bind_address)},
      {"PYCOMM_ADVERTISE_ADDR", "", "address that peers are told, where it differs (NAT)",
       text(&Options::advertise_address)},
      {"PYCOMM_PORT_RANGE", "", "TCP and UDP ports to listen on, such as 20000-20100", take_ports},
      {"PYCOMM_SECRET_FILE", "", "file of mode 0600 with the job's secret; needed between hosts",
       take_secret_file},
      {"PYCOMM_SECRET", "", "the secret itself; prefer the file", take_secret},
      {"PYCOMM_CERTS", "", "folder of `pycomm certs issue`: encrypts between hosts", take_certs},
      {"PYCOMM_QUIC_PATHS", "1",
       "QUIC connections between two processes, or addresses to have one each over: "
       "10.0.0.5,10.1.0.5 (=TOLD where peers need another: NAT)",
       take_quic_paths},
      {"PYCOMM_QUIC_CONGESTION", "bbr", "how QUIC finds its rate: bbr or cubic",
       [](const std::string& value, Options& options) -> std::string {
         options.quic_uses_cubic = value == "cubic";
         return value == "cubic" || value == "bbr" ? "" : "is neither bbr nor cubic";
       }},
      {"PYCOMM_QUIC_MTU_MAX", "1472", "largest UDP payload that QUIC tries; 8972 on jumbo frames",
       number(&Options::quic_mtu_max, 1200, 65'000)},
      {"PYCOMM_QUIC_CRYPTO", "auto",
       "library of QUIC's cipher: auto (the fastest), ipsec-mb, openssl",
       [](const std::string& value, Options& options) -> std::string {
         using Crypto = Options::QuicCrypto;
         options.quic_crypto = value == "openssl"    ? Crypto::kOpenssl
                               : value == "ipsec-mb" ? Crypto::kIpsecMb
                                                     : Crypto::kAny;
         const bool is_known = value == "auto" || options.quic_crypto != Crypto::kAny;
         return is_known ? "" : "is none of auto, ipsec-mb, openssl";
       }},
      {"PYCOMM_QUIC_KEYLOG", "",
       "file for the keys of all QUIC connections, for Wireshark: ends their secrecy",
       text(&Options::quic_keylog)},
      {"PYCOMM_QUIC_QLOG", "", "folder for a trace (qlog) of each QUIC connection",
       text(&Options::quic_qlog_folder)},
      {"PYCOMM_IB_DISABLE", "0", "1: no RDMA",
       [](const std::string& value, Options& options) -> std::string {
         options.rdma.is_disabled = value == "1";
         return value == "0" || value == "1" ? "" : "is neither 0 nor 1";
       }},
      {"PYCOMM_IB_HCA", "",
       "RDMA devices, in the order of their paths: mlx5_0:1,mlx5_2 (prefixes, =exact, ^not)",
       [](const std::string& value, Options& options) {
         options.rdma.devices = value;
         return std::string();
       }},
      {"PYCOMM_IB_GID_INDEX", "", "of the RoCE address; default: the best RoCE v2 one",
       rdma_number(&RdmaOptions::gid_index, 0, 255)},
      {"PYCOMM_IB_TIMEOUT", "16", "of an acknowledgement: 4.096 us times 2 to the power of this",
       rdma_number(&RdmaOptions::timeout_code, 1, 31)},
      {"PYCOMM_IB_RETRY_CNT", "7", "how often the NIC repeats before a path counts as broken",
       rdma_number(&RdmaOptions::num_retries, 0, 7)},
      {"PYCOMM_IB_TC", "0", "traffic class of RoCE packets (DSCP times 4)",
       rdma_number(&RdmaOptions::traffic_class, 0, 255)},
      {"PYCOMM_IB_SL", "0", "InfiniBand service level",
       rdma_number(&RdmaOptions::service_level, 0, 15)},
      {"PYCOMM_IB_PKEY", "", "InfiniBand partition, 0x8001 or 32769; default: the first",
       take_pkey},
      {"PYCOMM_IB_REGISTERED_BYTES_MAX", "",
       "most memory that is registered; default: what may be locked (ulimit -l)",
       rdma_number(&RdmaOptions::registered_bytes_max, 0, UINT64_MAX)},
      {"PYCOMM_TLS_CA", "", "certificate of the CA that all ranks trust (PEM)",
       tls_text(&TlsOptions::ca_file)},
      {"PYCOMM_TLS_CERT", "", "this process's certificate and its chain (PEM)",
       tls_text(&TlsOptions::certificate_file)},
      {"PYCOMM_TLS_KEY", "", "its key (PEM, mode 0600)", tls_text(&TlsOptions::key_file)},
      {"PYCOMM_TLS_PEERS", "", "name in rank r's certificate, such as rank-{rank}.job.example.com",
       tls_text(&TlsOptions::peer_name)},
      {"PYCOMM_TLS_DENIED", "", "file of SHA-256 fingerprints that are refused, one a line",
       tls_text(&TlsOptions::denied_file)},
      {"PYCOMM_ALLOW_PUBLIC_PLAINTEXT", "0", "1: plain TCP even between public addresses",
       flag(&Options::allow_public_plaintext)},
      {"PYCOMM_FLIGHT_RECORDER", "",
       "folder for each rank's last operations after a timeout, or off", take_flight_recorder},
      {"PYCOMM_RENDEZVOUS", "",
       "where pycomm.Communicator's ranks meet: tcp://HOST:PORT, file:///FOLDER",
       [](const std::string&, Options&) { return std::string(); }},
      {"PYCOMM_CONFIG_FILE", "", "file of settings, NAME=VALUE a line",
       [](const std::string&, Options&) { return std::string(); }},
  };
  return *known;
}

std::string complaint_about(const TlsOptions& tls) {
  if (!tls.is_set()) return "";
  std::string missing;
  const auto need = [&](const std::string& value, const char* name) {
    if (value.empty()) missing += (missing.empty() ? "" : ", ") + std::string(name);
  };
  need(tls.ca_file, "PYCOMM_TLS_CA");
  need(tls.certificate_file, "PYCOMM_TLS_CERT");
  need(tls.key_file, "PYCOMM_TLS_KEY");
  need(tls.peer_name, "PYCOMM_TLS_PEERS");
  if (missing.empty()) return "";
  return "Encryption between hosts needs " + missing +
         " too, or PYCOMM_CERTS with all of them (pycomm certs issue). ";
}

using Values = std::map<std::string, std::pair<std::string, std::string>>;  // name: value, source

void read_config_file(const std::string& path, bool must_exist, Values& values,
                      std::string* complaint) {
  const auto contents = platform::read_file(path);
  if (!contents) {
    if (must_exist) *complaint += "PYCOMM_CONFIG_FILE '" + path + "' cannot be read. ";
    return;
  }
  std::size_t line_number = 0;
  for (std::size_t at = 0; at < contents->size();) {
    const std::size_t end = std::min(contents->find('\n', at), contents->size());
    std::string line = contents->substr(at, end - at);
    at = end + 1;
    ++line_number;
    line = line.substr(0, line.find('#'));
    const std::size_t first = line.find_first_not_of(" \t\r");
    if (first == std::string::npos) continue;
    const std::size_t equals = line.find('=');
    if (equals == std::string::npos) {
      *complaint += path + ":" + std::to_string(line_number) + " is not NAME=VALUE. ";
      continue;
    }
    const auto trimmed = [](std::string part) {
      const std::size_t from = part.find_first_not_of(" \t\r");
      const std::size_t to = part.find_last_not_of(" \t\r");
      return from == std::string::npos ? std::string() : part.substr(from, to - from + 1);
    };
    values.try_emplace(trimmed(line.substr(0, equals)),
                       std::make_pair(trimmed(line.substr(equals + 1)), path));
  }
}

// Levenshtein's, for "did you mean".
std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, replaced});
    }
  }
  return row.back();
}

std::string nearest_name(std::string_view name) {
  const auto& known = known_settings();
  return std::min_element(known.begin(), known.end(),
                          [&](const Known& a, const Known& b) {
                            return edit_distance(a.name, name) < edit_distance(b.name, name);
                          })
      ->name;
}

bool is_known(const std::string& name) {
  const auto& known = known_settings();
  return std::any_of(known.begin(), known.end(), [&](const Known& k) { return name == k.name; });
}

// The first source that has the setting counts.
Values collect(const std::map<std::string, std::string>& arguments, std::string* complaint) {
  Values values;
  for (const auto& [name, value] : arguments) values[name] = {value, "argument"};
  for (const auto& [name, value] : platform::environment_with_prefix("PYCOMM_")) {
    values.try_emplace(name, std::make_pair(value, "environment"));
  }
  for (const Known& known : known_settings()) {
    for (const char* other : known.also) {
      if (other == nullptr || values.contains(known.name)) continue;
      if (const auto value = platform::environment(other)) {
        values[known.name] = {*value, std::string("environment, ") + other};
      }
    }
  }
  const auto chosen = values.find("PYCOMM_CONFIG_FILE");
  if (chosen != values.end()) {
    read_config_file(chosen->second.first, true, values, complaint);
  } else {
    if (const auto home = platform::environment("HOME")) {
      read_config_file(*home + "/.config/pycomm/pycomm.conf", false, values, complaint);
    }
    read_config_file("/etc/pycomm.conf", false, values, complaint);
  }
  return values;
}

}  // namespace

Resolution resolve_options(const std::map<std::string, std::string>& arguments) {
  base::set_log_identity(platform::host_name(), platform::process_id());
  Resolution result;
  result.options.flight_recorder_folder = platform::temporary_folder() +
                                          "/pycomm-flight-recorder-" +
                                          std::to_string(platform::effective_uid());
  Values values = collect(arguments, &result.complaint);
  for (const Known& known : known_settings()) {
    Setting setting{known.name, known.by_default, "default", known.help};
    if (const auto found = values.find(known.name); found != values.end()) {
      const auto& [value, source] = found->second;
      const bool is_secret = setting.name == "PYCOMM_SECRET";
      if (const std::string fault = known.take(value, result.options); !fault.empty()) {
        result.complaint += setting.name + (is_secret ? " " : " '" + value + "' ") + fault + ". ";
      }
      setting.value = is_secret ? "(set)" : value;
      setting.source = source;
      if (setting.name == "PYCOMM_SOCKET_IFNAME" && source.starts_with("environment, ")) {
        result.options.interfaces_are_borrowed = true;
      }
    }
    result.settings.push_back(std::move(setting));
  }
  for (const auto& [name, value] : values) {
    if (is_known(name)) continue;
    result.warnings.push_back(name + " (" + value.second +
                              ") means nothing to pycomm; did you mean " + nearest_name(name) +
                              "?");
  }
  result.complaint += complaint_about(result.options.tls);
  if (!result.complaint.empty()) result.complaint.pop_back();
  result.options.complaint = result.complaint;
  static std::atomic<bool> told{false};
  if (!result.warnings.empty() && !told.exchange(true)) {
    for (const std::string& warning : result.warnings) {
      base::log(base::LogLevel::kWarn, base::Subsystem::kEnv, warning);
    }
  }
  static std::atomic<bool> version_told{false};
  for (const Setting& setting : result.settings) {
    if (setting.source == "default") continue;
    const bool asks = setting.name == "PYCOMM_DEBUG" && setting.value != "WARN";
    if (asks && !version_told.exchange(true))
      base::tell_version(std::string("pycomm ") + version());
    base::log(base::LogLevel::kInfo, base::Subsystem::kEnv,
              setting.name + "=" + setting.value + " (" + setting.source + ")");
  }
  return result;
}

std::string TlsOptions::name_of(int rank) const {
  constexpr std::string_view kPlace = "{rank}";
  std::string name = peer_name;
  if (const std::size_t at = name.find(kPlace); at != std::string::npos) {
    name.replace(at, kPlace.size(), std::to_string(rank));
  }
  return name;
}

std::string Options::plan_fingerprint() const {
  return "PYCOMM_TRANSPORT=" + std::string(kTransportNames[static_cast<int>(transport)]) +
         " PYCOMM_CHUNK_BYTES=" + std::to_string(chunk_bytes) +
         " PYCOMM_DETERMINISTIC=" + (deterministic ? "1" : "0") +
         " eager_bytes_max=" + std::to_string(eager_bytes_max);
}

}  // namespace pycomm

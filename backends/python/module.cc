// Python's view of the core without torch: the module pycomm._core.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bare_loops.h"
#include "communicator.h"
#include "core_latency.h"
#include "handshaker.h"
#include "machine_limits.h"
#include "pycomm/communicator.h"
#include "relay.h"
#include "shard_barrier.h"
#include "udp_pipe.h"

namespace py = pybind11;

namespace {

// Forks two pinned processes for each figure; they touch no Python.
void measure_limits(const py::function& report) {
  pycomm::bench::measure_limits([&](const pycomm::bench::Limit& limit) {
    report(limit.name, limit.bytes, limit.num_threads, limit.value, limit.unit);
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  });
}

py::dict resolve_settings(const std::map<std::string, std::string>& arguments) {
  const pycomm::Resolution resolution = pycomm::resolve_options(arguments);
  py::list settings;
  for (const pycomm::Setting& setting : resolution.settings) {
    py::dict row;
    row["name"] = setting.name;
    row["value"] = setting.value;
    row["source"] = setting.source;
    row["help"] = setting.help;
    settings.append(row);
  }
  py::dict result;
  result["settings"] = settings;
  result["complaint"] = resolution.complaint;
  result["warnings"] = resolution.warnings;
  return result;
}

py::dict rdma_ports() {
  std::string refusal;
  py::list ports;
  for (const pycomm::RdmaPort& port :
       pycomm::rdma_ports(pycomm::resolve_options().options.rdma, &refusal)) {
    py::dict row;
    row["device"] = port.device;
    row["port"] = port.number;
    row["usable"] = port.use.viable;
    row["reason"] = port.use.reason;
    row["gid_index"] = port.gid_index;
    row["atomics"] = port.has_atomics;
    ports.append(row);
  }
  py::dict result;
  result["ports"] = ports;
  result["refusal"] = refusal;
  return result;
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  m.def("version", &pycomm::version);
  m.def("kernel_sets", &pycomm::kernel_sets);
  m.def("crypto_refusal", [] { return pycomm::crypto_viability().reason; });
  m.def("packet_crypto", &pycomm::packet_crypto);
  m.def("rdma_ports", &rdma_ports);
  m.def("lockable_bytes", &pycomm::lockable_bytes);
  m.def("interfaces", &pycomm::network_interfaces);
  m.def("shutdown_process", &pycomm::shutdown_process, py::call_guard<py::gil_scoped_release>());
  m.def("measure_limits", &measure_limits, py::arg("report"),
        "Measures this machine's bounds; report(name, bytes, processes, value, unit) for each.");
  m.def(
      "udp_pipe_bytes_per_s",
      [](std::uint64_t payload_bytes, std::uint64_t source_bytes, const std::string& library) {
        using pycomm::bench::PipeCipher;
        const PipeCipher cipher = library == "openssl"    ? PipeCipher::kOpenssl
                                  : library == "ipsec-mb" ? PipeCipher::kIpsecMb
                                                          : PipeCipher::kNone;
        return pycomm::bench::udp_pipe_bytes_per_s(payload_bytes, source_bytes, cipher);
      },
      py::arg("payload_bytes"), py::arg("source_bytes"), py::arg("library"));
  m.def(
      "bare_seconds",
      [](const std::string& operation, std::uint64_t bytes, bool has_huge_pages) {
        using pycomm::bench::Pages;
        return pycomm::bench::bare_seconds(operation, bytes,
                                           has_huge_pages ? Pages::kHuge : Pages::kSmall);
      },
      py::arg("operation"), py::arg("bytes"), py::arg("has_huge_pages"));
  m.def(
      "core_latency",
      [](std::uint64_t bytes) {
        const pycomm::bench::Latency latency = pycomm::bench::core_all_reduce_latency(bytes);
        return std::make_pair(latency.p50_s, latency.p99_s);
      },
      py::arg("bytes"));
  m.def("flag_exchange_ns", &pycomm::bench::flag_exchange_ns, py::arg("rounds"));
  m.def("bare_shared_seconds", &pycomm::bench::bare_shared_seconds, py::arg("bytes"));
  m.def("resolve_settings", &resolve_settings,
        py::arg("arguments") = std::map<std::string, std::string>(),
        "Every setting with its value, source and help; what does not parse; unknown names.");
  pycomm::python::bind_shard_barrier(m);
  pycomm::python::bind_communicator(m);
  pycomm::python::bind_relay(m);
  pycomm::python::install_handshaker();
}

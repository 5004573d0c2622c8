#include "relay.h"

#include <pybind11/stl.h>

#include "pycomm/relay.h"

namespace py = pybind11;

namespace pycomm::python {
namespace {

using lab::LinkReport;
using lab::LinkShape;
using lab::Relay;

std::unique_ptr<Relay> create(
    const std::vector<std::tuple<std::string, std::string, std::uint32_t>>& sites,
    std::uint64_t seed) {
  std::vector<lab::Site> made;
  for (const auto& [path, device, subnet] : sites) made.push_back({path, device, subnet});
  auto relay = Relay::create(made, seed);
  if (!relay.is_ok()) throw std::runtime_error(relay.status().message());
  return std::move(relay).value();
}

// The fields of LinkShape by name; what is not named has its default.
LinkShape shape_of(const py::kwargs& fields) {
  LinkShape shape;
  const auto set = [&](const char* name, auto* out) {
    if (fields.contains(name)) *out = fields[name].cast<std::remove_pointer_t<decltype(out)>>();
  };
  set("delay_ns", &shape.delay_ns);
  set("jitter_ns", &shape.jitter_ns);
  set("reorders", &shape.reorders);
  set("loss", &shape.loss);
  set("burst_begins", &shape.burst_begins);
  set("burst_ends", &shape.burst_ends);
  set("burst_loss", &shape.burst_loss);
  set("duplicates", &shape.duplicates);
  set("rate_bits_per_s", &shape.rate_bits_per_s);
  set("queue_ns", &shape.queue_ns);
  set("marks_ecn", &shape.marks_ecn);
  set("mtu_bytes", &shape.mtu_bytes);
  return shape;
}

py::dict report_of(const Relay& relay, int from, int to) {
  const LinkReport report = relay.report(from, to);
  py::dict result;
  result["num_in"] = report.num_in;
  result["num_out"] = report.num_out;
  result["bytes_out"] = report.bytes_out;
  result["num_lost"] = report.num_lost;
  result["num_overflow"] = report.num_overflow;
  result["num_too_long"] = report.num_too_long;
  result["queue_ns_max"] = report.queue_ns_max;
  result["late_ns_max"] = report.late_ns_max;
  return result;
}

}  // namespace

void bind_relay(py::module_& m) {
  py::class_<Relay>(m, "Relay", "Packets among sites, delayed and lost as a network would.")
      .def(py::init(&create), py::arg("sites"), py::arg("seed"))
      .def("set_link", [](Relay& relay, int from, int to,
                          const py::kwargs& fields) { relay.set_link(from, to, shape_of(fields)); })
      .def("report", &report_of)
      .def("rebind", &Relay::rebind)
      .def("run", &Relay::run, py::call_guard<py::gil_scoped_release>())
      .def("stop", &Relay::stop);
}

}  // namespace pycomm::python

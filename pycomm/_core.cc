// Python's view of the core without torch: the module pycomm._core.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "machine_limits.h"
#include "pycomm/communicator.h"

namespace py = pybind11;

PYBIND11_MODULE(_core, m) {
  m.def("version", &pycomm::version);
  m.def(
      "measure_limits",
      [] {
        // Forks two pinned processes; they touch no Python.
        py::list result;
        for (const pycomm::bench::Limit& limit : pycomm::bench::measure_limits()) {
          result.append(
              py::make_tuple(limit.name, limit.bytes, limit.num_threads, limit.value, limit.unit));
        }
        return result;
      },
      "Measures this machine's bounds: (name, bytes, processes, value, unit) each.");
  m.def("flag_exchange_ns", &pycomm::bench::flag_exchange_ns, py::arg("num_rounds") = 200'000);
}

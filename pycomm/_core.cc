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
      [](const py::function& report) {
        // Forks two pinned processes for each figure; they touch no Python.
        pycomm::bench::measure_limits([&](const pycomm::bench::Limit& limit) {
          report(limit.name, limit.bytes, limit.num_threads, limit.value, limit.unit);
          if (PyErr_CheckSignals() != 0) throw py::error_already_set();
        });
      },
      py::arg("report"),
      "Measures this machine's bounds; report(name, bytes, processes, value, unit) for each.");
}

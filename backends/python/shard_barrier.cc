#include "shard_barrier.h"

#include "raise.h"

namespace py = pybind11;

namespace pycomm::python {

std::shared_ptr<ShardBarrier> create_shard_barrier(Communicator& communicator, int num_shards) {
  py::gil_scoped_release no_gil;
  auto barrier = communicator.create_shard_barrier(num_shards);
  check(barrier.status());
  return std::move(barrier).value();
}

void bind_shard_barrier(py::module_& m) {
  py::class_<ShardBarrier, std::shared_ptr<ShardBarrier>>(m, "ShardBarrier")
      .def_property_readonly("num_shards", &ShardBarrier::num_shards)
      .def(
          "arrive", [](ShardBarrier& self, int shard) { check(self.arrive(shard)); },
          py::arg("shard"), py::call_guard<py::gil_scoped_release>())
      .def("is_complete", &ShardBarrier::is_complete, py::arg("shard"))
      .def(
          "wait",
          [](ShardBarrier& self, int shard, std::int64_t timeout_ms) {
            check(self.wait(shard, timeout_ms));
          },
          py::arg("shard"), py::arg("timeout_ms") = -1, py::call_guard<py::gil_scoped_release>());
}

}  // namespace pycomm::python

// Python's view of the torch backend: the module pycomm._torch.
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include "allocator.h"
#include "process_group.h"
#include "python/handshaker.h"
#include "python/rows.h"

namespace py = pybind11;
using pycomm::torch_backend::ProcessGroup;

namespace {

// What the group's communicator says, asked without the GIL.
template <class Ask>
auto ask(ProcessGroup& group, Ask&& question) {
  py::gil_scoped_release no_gil;
  return question(*group.communicator());
}

py::list peer_stats(ProcessGroup& group) {
  return pycomm::python::peer_stats_rows(ask(group, [](auto& c) { return c.peer_stats(); }));
}

py::list flight_records(ProcessGroup& group) {
  return pycomm::python::flight_record_rows(ask(group, [](auto& c) { return c.flight_records(); }));
}

std::string dump_flight_records(ProcessGroup& group, const std::string& folder) {
  const auto path = ask(group, [&](auto& c) { return c.dump_flight_records(folder); });
  if (!path.is_ok()) std::rethrow_exception(pycomm::torch_backend::to_exception(path.status()));
  return path.value();
}

}  // namespace

PYBIND11_MODULE(_torch, m) {
  pycomm::python::install_handshaker();
  m.attr("torch_version") = PYCOMM_TORCH_VERSION;
  py::class_<ProcessGroup, c10d::Backend, c10::intrusive_ptr<ProcessGroup>>(m, "ProcessGroupPycomm")
      .def_property_readonly("options", &ProcessGroup::getBackendOptions)
      .def("peer_stats", &peer_stats)
      .def("flight_records", &flight_records)
      .def("dump_flight_records", &dump_flight_records, py::arg("folder"));
  m.def("create_process_group", &pycomm::torch_backend::create_process_group, py::arg("store"),
        py::arg("rank"), py::arg("size"), py::arg("timeout"), py::arg("group_name"),
        py::arg("global_ranks"), py::call_guard<py::gil_scoped_release>());
  m.def("share_all_tensors", &pycomm::torch_backend::share_all_tensors);
  m.def("begin_sharing_tensors", &pycomm::torch_backend::begin_sharing_tensors);
  m.def("end_sharing_tensors", &pycomm::torch_backend::end_sharing_tensors);
  m.def("is_shared", [](const at::Tensor& tensor) {
    return pycomm::torch_backend::is_shared(tensor.const_data_ptr());
  });
  m.def("allocator_stats", [] {
    const auto stats = pycomm::torch_backend::allocator_stats();
    py::dict result;
    result["shared_bytes"] = stats.shared_bytes;
    result["num_shared"] = stats.num_shared;
    result["num_refused"] = stats.num_refused;
    return result;
  });
  m.def("communication_time", [] {
    auto& time = pycomm::torch_backend::communication_time();
    return py::make_tuple(static_cast<double>(time.operations_ns) * 1e-9,
                          static_cast<double>(time.waited_ns) * 1e-9);
  });
  m.def("leave_out_this_thread", [] { pycomm::torch_backend::counts_communication = false; });
  m.def("shutdown_process", &pycomm::shutdown_process, py::call_guard<py::gil_scoped_release>());
}

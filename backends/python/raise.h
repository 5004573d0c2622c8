// A failure of the core as an exception of pycomm.errors.
#pragma once

#include <pybind11/pybind11.h>

#include "pycomm/status.h"

namespace pycomm::python {

[[noreturn]] inline void raise(const Status& status) {
  pybind11::gil_scoped_acquire gil;
  const pybind11::object error =
      pybind11::module_::import("pycomm.errors")
          .attr("make_error")(static_cast<int>(status.code()), to_string(status.code()),
                              status.message(), status.rank());
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw pybind11::error_already_set();
}

inline void check(const Status& status) {
  if (!status.is_ok()) raise(status);
}

}  // namespace pycomm::python

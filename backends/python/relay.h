// The lab's relay in Python: pycomm._core.Relay.
#pragma once

#include <pybind11/pybind11.h>

namespace pycomm::python {

void bind_relay(pybind11::module_& m);

}  // namespace pycomm::python

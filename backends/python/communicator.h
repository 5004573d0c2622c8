// The binding behind pycomm.Communicator.
#pragma once

#include <pybind11/pybind11.h>

namespace pycomm::python {

void bind_communicator(pybind11::module_& m);

}  // namespace pycomm::python

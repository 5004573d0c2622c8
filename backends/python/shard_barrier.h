// ShardBarrier for Python.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "pycomm/communicator.h"

namespace pycomm::python {

// Collective.
std::shared_ptr<ShardBarrier> create_shard_barrier(Communicator& communicator, int num_shards);
void bind_shard_barrier(pybind11::module_& m);

}  // namespace pycomm::python

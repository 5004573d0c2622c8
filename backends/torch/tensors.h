// Tensors as the core sees them: dtype, flat memory, and what to do with those that are neither.
#pragma once

#include <ATen/ATen.h>

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "pycomm/operation.h"

namespace pycomm::torch_backend {

// Errors (as c10::Error): a device, layout or dtype that cannot be moved or reduced, with a remedy.
void check_movable(const at::Tensor& tensor, const char* operation);
DType reducible_dtype(at::ScalarType type);
ReduceOp reduce_op(const c10d::ReduceOp& op);

std::byte* data_of(const at::Tensor& tensor);

// A request that moves the tensor's elements as they are; dtypes without arithmetic go as bytes.
OpRequest moving_request(OpKind kind, const at::Tensor& tensor);

// Keeps a tensor's storage as long as a peer may touch it.
std::shared_ptr<void> keep(std::vector<at::Tensor> tensors);

}  // namespace pycomm::torch_backend

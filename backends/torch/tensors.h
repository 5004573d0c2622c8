// Tensors as the core sees them: dtype, flat memory, and what to do with those that are neither.
#pragma once

#include <ATen/ATen.h>

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "pycomm/operation.h"

namespace pycomm::torch_backend {

using Tensors = std::vector<at::Tensor>;

// Errors (as c10::Error): a device, layout or dtype that cannot be moved or reduced, with a remedy.
void check_movable(const at::Tensor& tensor, const char* operation);
// That all can be moved, and are of the dtype and number of elements of `like`.
void check_alike(const Tensors& tensors, const at::Tensor& like, const char* operation);

// One request in the making. Tensors that do not lie flat in memory go through flat copies; what an
// operation wrote to a copy is copied out by finish().
class Staged {
 public:
  Staged(OpKind kind, const char* name) : name_(name) { request.kind = kind; }

  // Sets dtype and count from one rank's part. dtypes without arithmetic move as bytes.
  void part(const at::Tensor& tensor);
  // Errors: a reduction that is not defined on the dtype. A pre-multiplied sum scales its input.
  void reduction(const c10d::ReduceOp& op);

  void input(const at::Tensor& tensor);
  void input(const Tensors& parts);
  void output(const at::Tensor& tensor);
  void output(const Tensors& parts);
  void in_place(const at::Tensor& tensor);

  // Elements of the request's dtype in one tensor, or in `rows` of it.
  static std::uint64_t units(const at::Tensor& tensor);

  // Gives inputs that share memory with an output of another rank's part memory of their own.
  void part_ways(int rank);

  bool needs_finish() const { return !copies_.empty(); }
  void finish() const;
  // Keeps all memory as long as a peer may touch it.
  std::shared_ptr<void> keepalive() const { return std::make_shared<Tensors>(kept_); }

  OpRequest request;

 private:
  at::Tensor flat(const at::Tensor& tensor);
  std::byte* target_of(const at::Tensor& tensor);
  at::Tensor premultiplied(const at::Tensor& tensor) const;

  const char* name_;
  Tensors inputs_;   // of a list, or one
  Tensors outputs_;  // likewise
  std::optional<at::Tensor> factor_;
  Tensors kept_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;  // (to, from)
};

}  // namespace pycomm::torch_backend

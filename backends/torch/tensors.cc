#include "tensors.h"

#include <optional>

namespace pycomm::torch_backend {
namespace {

std::optional<DType> dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kDouble: return DType::kFloat64;
    case at::kFloat: return DType::kFloat32;
    case at::kHalf: return DType::kFloat16;
    case at::kBFloat16: return DType::kBFloat16;
    case at::kChar: return DType::kInt8;
    case at::kShort: return DType::kInt16;
    case at::kInt: return DType::kInt32;
    case at::kLong: return DType::kInt64;
    case at::kByte: return DType::kUInt8;
    case at::kBool: return DType::kBool;
    case at::kComplexFloat: return DType::kComplex64;
    case at::kComplexDouble: return DType::kComplex128;
    default: return std::nullopt;
  }
}

ReduceOp reduce_op(c10d::ReduceOp::RedOpType op) {
  switch (op) {
    case c10d::ReduceOp::SUM:
    case c10d::ReduceOp::PREMUL_SUM: return ReduceOp::kSum;
    case c10d::ReduceOp::AVG: return ReduceOp::kAvg;
    case c10d::ReduceOp::PRODUCT: return ReduceOp::kProduct;
    case c10d::ReduceOp::MIN: return ReduceOp::kMin;
    case c10d::ReduceOp::MAX: return ReduceOp::kMax;
    case c10d::ReduceOp::BAND: return ReduceOp::kBitAnd;
    case c10d::ReduceOp::BOR: return ReduceOp::kBitOr;
    case c10d::ReduceOp::BXOR: return ReduceOp::kBitXor;
    default: break;
  }
  TORCH_CHECK(false,
              "pycomm: this reduction is not supported; use SUM, AVG, PRODUCT, MIN, MAX, "
              "BAND, BOR, BXOR or PREMUL_SUM");
}

bool is_flat(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

std::byte* data_of(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.numel() == 0 ? nullptr : tensor.data_ptr());
}

}  // namespace

void check_movable(const at::Tensor& tensor, const char* operation) {
  TORCH_CHECK(tensor.device().is_cpu(), "pycomm: ", operation, " got a tensor on ", tensor.device(),
              ", but this group moves CPU tensors; create it with "
              "init_process_group('cpu:pycomm,cuda:nccl'), or pass tensor.cpu()");
  TORCH_CHECK(tensor.layout() == at::kStrided, "pycomm: ", operation,
              " takes dense tensors only; call .to_dense() first");
}

void check_alike(const Tensors& tensors, const at::Tensor& like, const char* operation) {
  for (const at::Tensor& tensor : tensors) {
    check_movable(tensor, operation);
    TORCH_CHECK(tensor.scalar_type() == like.scalar_type() && tensor.numel() == like.numel(),
                "pycomm: ", operation, " needs tensors alike on every rank: ", like.numel(), " ",
                like.scalar_type(), " and ", tensor.numel(), " ", tensor.scalar_type(),
                " (for uneven sizes, pad, or use all_to_all_single with split sizes)");
  }
}

std::uint64_t Staged::units(const at::Tensor& tensor) {
  const bool has_dtype = dtype_of(tensor.scalar_type()).has_value();
  return static_cast<std::uint64_t>(tensor.numel()) *
         static_cast<std::uint64_t>(has_dtype ? 1 : tensor.element_size());
}

void Staged::part(const at::Tensor& tensor) {
  request.dtype = dtype_of(tensor.scalar_type()).value_or(DType::kUInt8);
  request.count = units(tensor);
}

void Staged::reduction(const c10d::ReduceOp& op) {
  request.op = reduce_op(op.op_);
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) return;
  const auto* supplement = static_cast<c10d::PreMulSumSupplement*>(op.supplement_.get());
  factor_ = supplement->tensor_factor.defined() ? supplement->tensor_factor
                                                : at::scalar_tensor(supplement->double_factor);
}

at::Tensor Staged::premultiplied(const at::Tensor& tensor) const {
  return tensor.mul(factor_->to(tensor.scalar_type()));
}

at::Tensor Staged::flat(const at::Tensor& tensor) {
  check_movable(tensor, name_);
  TORCH_CHECK(!reduces(request.kind) || dtype_of(tensor.scalar_type()),
              "pycomm: no reduction is defined on ", c10::toString(tensor.scalar_type()),
              "; convert the tensor to float32, float16 or bfloat16 first");
  const at::Tensor result =
      is_flat(tensor) ? tensor : tensor.resolve_conj().resolve_neg().contiguous();
  kept_.push_back(result);
  return result;
}

void Staged::input(const at::Tensor& tensor) {
  inputs_ = {flat(factor_ ? premultiplied(tensor) : tensor)};
  request.input = data_of(inputs_[0]);
}

void Staged::input(const Tensors& parts) {
  Parts list;
  for (const at::Tensor& part : parts) {
    inputs_.push_back(flat(factor_ ? premultiplied(part) : part));
    list.push_back(data_of(inputs_.back()));
  }
  request.input_parts = std::make_shared<Parts>(std::move(list));
}

std::byte* Staged::target_of(const at::Tensor& tensor) {
  check_movable(tensor, name_);
  at::Tensor target = tensor;
  if (!is_flat(tensor)) {
    target =
        at::empty(tensor.sizes(), tensor.options().memory_format(at::MemoryFormat::Contiguous));
    copies_.emplace_back(tensor, target);
  }
  kept_.push_back(target);
  outputs_.push_back(target);
  return data_of(target);
}

void Staged::part_ways(int rank) {
  if (inputs_.empty() || (!request.input_parts && !request.output_parts)) return;
  const auto overlap = [](const at::Tensor& a, const at::Tensor& b) {
    const auto* first = static_cast<const std::byte*>(data_of(a));
    const auto* second = static_cast<const std::byte*>(data_of(b));
    return first < second + b.nbytes() && second < first + a.nbytes();
  };
  for (std::size_t i = 0; i < inputs_.size(); ++i) {
    for (std::size_t o = 0; o < outputs_.size(); ++o) {
      // In place: what a rank gives itself.
      const bool is_own = (inputs_.size() == 1 || i == static_cast<std::size_t>(rank)) &&
                          (outputs_.size() == 1 || o == static_cast<std::size_t>(rank));
      const bool is_same = data_of(inputs_[i]) == data_of(outputs_[o]);
      if (!overlap(inputs_[i], outputs_[o]) || (is_own && is_same)) continue;
      kept_.push_back(inputs_[i] = inputs_[i].clone());
    }
  }
  if (!request.input_parts) {
    request.input = data_of(inputs_[0]);
    return;
  }
  Parts list;
  for (const at::Tensor& input : inputs_) list.push_back(data_of(input));
  request.input_parts = std::make_shared<Parts>(std::move(list));
}

void Staged::output(const at::Tensor& tensor) { request.output = target_of(tensor); }

void Staged::output(const Tensors& parts) {
  Parts list;
  for (const at::Tensor& part : parts) list.push_back(target_of(part));
  request.output_parts = std::make_shared<Parts>(std::move(list));
}

void Staged::in_place(const at::Tensor& tensor) {
  input(tensor);
  request.output = const_cast<std::byte*>(request.input);
  const at::Tensor& used = kept_.back();
  if (!used.is_same(tensor)) copies_.emplace_back(tensor, used);
}

void Staged::finish() const {
  for (const auto& [to, from] : copies_) to.copy_(from);
}

}  // namespace pycomm::torch_backend

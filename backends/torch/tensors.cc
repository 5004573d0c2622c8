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

}  // namespace

void check_movable(const at::Tensor& tensor, const char* operation) {
  TORCH_CHECK(tensor.device().is_cpu(), "pycomm: ", operation, " got a tensor on ", tensor.device(),
              ", but this group moves CPU tensors; create it with "
              "init_process_group('cpu:pycomm,cuda:nccl'), or pass tensor.cpu()");
  TORCH_CHECK(tensor.layout() == at::kStrided, "pycomm: ", operation,
              " takes dense tensors only; call .to_dense() first");
}

DType reducible_dtype(at::ScalarType type) {
  const auto dtype = dtype_of(type);
  TORCH_CHECK(dtype.has_value(), "pycomm: no reduction is defined on ", c10::toString(type),
              "; convert the tensor to float32, float16 or bfloat16 first");
  return *dtype;
}

ReduceOp reduce_op(const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM: return ReduceOp::kSum;
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
              "BAND, BOR or BXOR");
}

std::byte* data_of(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.numel() == 0 ? nullptr : tensor.data_ptr());
}

OpRequest moving_request(OpKind kind, const at::Tensor& tensor) {
  OpRequest request;
  request.kind = kind;
  const auto dtype = dtype_of(tensor.scalar_type());
  request.dtype = dtype.value_or(DType::kUInt8);
  request.count = static_cast<std::uint64_t>(tensor.numel()) * (dtype ? 1 : tensor.element_size());
  request.input = data_of(tensor);
  request.output = data_of(tensor);
  return request;
}

std::shared_ptr<void> keep(std::vector<at::Tensor> tensors) {
  return std::make_shared<std::vector<at::Tensor>>(std::move(tensors));
}

}  // namespace pycomm::torch_backend

// From (dtype, reduction) at run time to types at compile time; shared by reduce_cpu.inc and
// reduce_cuda.cu so that both know the same pairs.
#pragma once

#include "kernels/functors.h"
#include "pycomm/types.h"

namespace pycomm::kernels {

// Calls visit(T{}) with the element type of `dtype`.
template <class Visitor>
decltype(auto) with_element_type(DType dtype, Visitor&& visit) {
  switch (dtype) {
    case DType::kFloat64: return visit(double{});
    case DType::kFloat32: return visit(float{});
    case DType::kFloat16: return visit(Half{});
    case DType::kBFloat16: return visit(BFloat16{});
    case DType::kInt8: return visit(std::int8_t{});
    case DType::kInt16: return visit(std::int16_t{});
    case DType::kInt32: return visit(std::int32_t{});
    case DType::kInt64: return visit(std::int64_t{});
    case DType::kUInt8: return visit(std::uint8_t{});
    case DType::kBool: return visit(Bool{});
    case DType::kComplex64: return visit(Complex<float>{});
    case DType::kComplex128: break;
  }
  return visit(Complex<double>{});
}

template <class T>
inline constexpr bool is_complex_v = false;
template <class T>
inline constexpr bool is_complex_v<Complex<T>> = true;
template <class T>
inline constexpr bool is_float_v =
    std::is_floating_point_v<T> || std::is_same_v<T, Half> || std::is_same_v<T, BFloat16>;

// Calls visit(Op{}) for a reduction that is_reducible(); an average adds here and is scaled later.
// For a pair that is not reducible it calls visit(SumOp{}): callers check first.
template <class T, class Visitor>
decltype(auto) with_reduce_op(ReduceOp op, Visitor&& visit) {
  switch (op) {
    case ReduceOp::kProduct: return visit(ProductOp{});
    case ReduceOp::kMin:
      if constexpr (!is_complex_v<T>) return visit(MinOp{});
      break;
    case ReduceOp::kMax:
      if constexpr (!is_complex_v<T>) return visit(MaxOp{});
      break;
    case ReduceOp::kBitAnd:
      if constexpr (!is_complex_v<T> && !is_float_v<T>) return visit(BitAndOp{});
      break;
    case ReduceOp::kBitOr:
      if constexpr (!is_complex_v<T> && !is_float_v<T>) return visit(BitOrOp{});
      break;
    case ReduceOp::kBitXor:
      if constexpr (!is_complex_v<T> && !is_float_v<T>) return visit(BitXorOp{});
      break;
    default: break;
  }
  return visit(SumOp{});
}

}  // namespace pycomm::kernels

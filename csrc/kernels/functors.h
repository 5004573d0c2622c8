// The arithmetic of every reduction, once, for the CPU loops and for the CUDA kernels.
//
// A reduction works in an accumulator type: 16-bit floats add in float32 and round once per call.
// Min and max hand a NaN through from either side. Bool sums are logical or, products logical and.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__CUDACC__)
#define PYCOMM_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define PYCOMM_HOST_DEVICE inline __attribute__((always_inline))
#endif

namespace pycomm::kernels {

PYCOMM_HOST_DEVICE float bits_to_float(std::uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

PYCOMM_HOST_DEVICE std::uint32_t float_to_bits(float value) {
  std::uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

// IEEE 754 binary16, converted by integer arithmetic that vectorises: no table, no branch per bit.
struct Half {
  std::uint16_t bits;

  PYCOMM_HOST_DEVICE float to_accumulator() const {
    const std::uint32_t sign = std::uint32_t(bits & 0x8000u) << 16;
    const std::uint32_t magnitude = bits & 0x7fffu;
    // Shift exponent and mantissa into place, then rescale by 2^112 so that subnormals come out.
    const float scaled = bits_to_float(magnitude << 13) * bits_to_float(0x77800000u);
    const std::uint32_t finite = float_to_bits(scaled);
    const std::uint32_t special = 0x7f800000u | (magnitude << 13);
    return bits_to_float(sign | (magnitude >= 0x7c00u ? special : finite));
  }

  PYCOMM_HOST_DEVICE static Half from_accumulator(float value) {
    const std::uint32_t in = float_to_bits(value);
    const std::uint32_t sign = (in >> 16) & 0x8000u;
    const std::uint32_t magnitude = in & 0x7fffffffu;
    // Normal results: rebias by 112 and round to nearest, ties to even.
    const std::uint32_t odd = (magnitude >> 13) & 1u;
    const std::uint32_t normal = (magnitude - 0x38000000u + 0xfffu + odd) >> 13;
    // Subnormal results: adding 0.5 lets the float adder align and round them.
    const std::uint32_t tiny =
        float_to_bits(bits_to_float(magnitude) + bits_to_float(0x3f000000u)) - 0x3f000000u;
    const std::uint32_t nan = 0x7e00u;
    std::uint32_t out = magnitude < 0x38800000u ? tiny : normal;
    out = magnitude >= 0x47800000u ? 0x7c00u : out;  // overflow and infinity
    out = out > 0x7c00u ? 0x7c00u : out;             // rounding may carry into infinity
    out = magnitude > 0x7f800000u ? nan : out;
    return Half{static_cast<std::uint16_t>(sign | out)};
  }
};

// bfloat16: the upper half of a binary32, rounded to nearest, ties to even.
struct BFloat16 {
  std::uint16_t bits;

  PYCOMM_HOST_DEVICE float to_accumulator() const {
    return bits_to_float(std::uint32_t(bits) << 16);
  }

  PYCOMM_HOST_DEVICE static BFloat16 from_accumulator(float value) {
    const std::uint32_t in = float_to_bits(value);
    const std::uint32_t rounded = (in + 0x7fffu + ((in >> 16) & 1u)) >> 16;
    const std::uint32_t quiet_nan = (in >> 16) | 0x40u;
    const bool is_nan = (in & 0x7fffffffu) > 0x7f800000u;
    return BFloat16{static_cast<std::uint16_t>(is_nan ? quiet_nan : rounded)};
  }
};

struct Bool {
  std::uint8_t bits;
};

template <class T>
struct Complex {
  T re, im;
};

// How an element is read into, and written from, its accumulator.
template <class T>
struct Accumulator {
  using type = T;
  PYCOMM_HOST_DEVICE static T load(T value) { return value; }
  PYCOMM_HOST_DEVICE static T store(T value) { return value; }
};
template <>
struct Accumulator<Half> {
  using type = float;
  PYCOMM_HOST_DEVICE static float load(Half value) { return value.to_accumulator(); }
  PYCOMM_HOST_DEVICE static Half store(float value) { return Half::from_accumulator(value); }
};
template <>
struct Accumulator<BFloat16> {
  using type = float;
  PYCOMM_HOST_DEVICE static float load(BFloat16 value) { return value.to_accumulator(); }
  PYCOMM_HOST_DEVICE static BFloat16 store(float value) {
    return BFloat16::from_accumulator(value);
  }
};

// Integers wrap: sums and products are taken unsigned, where overflow is defined.
template <class T>
PYCOMM_HOST_DEVICE T wrap_add(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    using U = std::make_unsigned_t<T>;
    return static_cast<T>(static_cast<U>(static_cast<U>(a) + static_cast<U>(b)));
  } else {
    return a + b;
  }
}

template <class T>
PYCOMM_HOST_DEVICE T wrap_multiply(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    // Widened to 64 bits: two promoted uint16 would overflow a signed int.
    return static_cast<T>(static_cast<std::uint64_t>(a) * static_cast<std::uint64_t>(b));
  } else {
    return a * b;
  }
}

struct SumOp {
  template <class T>
  PYCOMM_HOST_DEVICE T operator()(T a, T b) const {
    return wrap_add(a, b);
  }
  PYCOMM_HOST_DEVICE Bool operator()(Bool a, Bool b) const {
    return Bool{static_cast<std::uint8_t>((a.bits | b.bits) != 0)};
  }
  template <class T>
  PYCOMM_HOST_DEVICE Complex<T> operator()(Complex<T> a, Complex<T> b) const {
    return {a.re + b.re, a.im + b.im};
  }
};

struct ProductOp {
  template <class T>
  PYCOMM_HOST_DEVICE T operator()(T a, T b) const {
    return wrap_multiply(a, b);
  }
  PYCOMM_HOST_DEVICE Bool operator()(Bool a, Bool b) const {
    return Bool{static_cast<std::uint8_t>(a.bits != 0 && b.bits != 0)};
  }
  template <class T>
  PYCOMM_HOST_DEVICE Complex<T> operator()(Complex<T> a, Complex<T> b) const {
    return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
  }
};

struct MinOp {
  template <class T>
  PYCOMM_HOST_DEVICE T operator()(T a, T b) const {
    if constexpr (std::is_floating_point_v<T>)
      return a != a ? a : (b < a || b != b ? b : a);
    else
      return b < a ? b : a;
  }
  PYCOMM_HOST_DEVICE Bool operator()(Bool a, Bool b) const { return ProductOp()(a, b); }
};

struct MaxOp {
  template <class T>
  PYCOMM_HOST_DEVICE T operator()(T a, T b) const {
    if constexpr (std::is_floating_point_v<T>)
      return a != a ? a : (b > a || b != b ? b : a);
    else
      return b > a ? b : a;
  }
  PYCOMM_HOST_DEVICE Bool operator()(Bool a, Bool b) const { return SumOp()(a, b); }
};

struct BitAndOp {
  template <class T>
  PYCOMM_HOST_DEVICE T operator()(T a, T b) const {
    return static_cast<T>(a & b);
  }
  PYCOMM_HOST_DEVICE Bool operator()(Bool a, Bool b) const { return ProductOp()(a, b); }
};

struct BitOrOp {
  template <class T>
  PYCOMM_HOST_DEVICE T operator()(T a, T b) const {
    return static_cast<T>(a | b);
  }
  PYCOMM_HOST_DEVICE Bool operator()(Bool a, Bool b) const { return SumOp()(a, b); }
};

struct BitXorOp {
  template <class T>
  PYCOMM_HOST_DEVICE T operator()(T a, T b) const {
    return static_cast<T>(a ^ b);
  }
  PYCOMM_HOST_DEVICE Bool operator()(Bool a, Bool b) const {
    return Bool{static_cast<std::uint8_t>((a.bits != 0) != (b.bits != 0))};
  }
};

// One element of out = op(a, b).
template <class T, class Op>
PYCOMM_HOST_DEVICE T combine(T a, T b, Op op) {
  using A = Accumulator<T>;
  return A::store(op(A::load(a), A::load(b)));
}

// One element of x * factor, for averages.
template <class T>
PYCOMM_HOST_DEVICE T scale_element(T x, double factor) {
  using A = Accumulator<T>;
  return A::store(
      static_cast<typename A::type>(A::load(x) * static_cast<typename A::type>(factor)));
}
template <class T>
PYCOMM_HOST_DEVICE Complex<T> scale_element(Complex<T> x, double factor) {
  return {static_cast<T>(x.re * factor), static_cast<T>(x.im * factor)};
}

}  // namespace pycomm::kernels

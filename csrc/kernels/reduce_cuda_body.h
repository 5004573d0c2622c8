// The bodies of the CUDA kernels as functions of (thread, number of threads), so that the CPU twin
// test runs the very same index arithmetic without a device.
#pragma once

#include "kernels/dispatch.h"

namespace pycomm::kernels {

template <class T, class Op>
PYCOMM_HOST_DEVICE void combine_strided(T* out, const T* a, const T* b, std::uint64_t count, Op op,
                                        std::uint64_t thread, std::uint64_t num_threads) {
  for (std::uint64_t i = thread; i < count; i += num_threads) out[i] = combine(a[i], b[i], op);
}

// Several inputs in one pass, left to right, rounded once, then scaled (reduce.h: fold_block).
inline constexpr int kCudaInputsMax = 16;
template <class T>
struct FoldInputs {
  const T* data[kCudaInputsMax];
  int count;
};

template <class T, class Op>
PYCOMM_HOST_DEVICE void fold_strided(T* out, const FoldInputs<T>& inputs, std::uint64_t count,
                                     Op op, double scale, std::uint64_t thread,
                                     std::uint64_t num_threads) {
  using A = Accumulator<T>;
  for (std::uint64_t i = thread; i < count; i += num_threads) {
    typename A::type value = A::load(inputs.data[0][i]);
    for (int k = 1; k < inputs.count; ++k) value = op(value, A::load(inputs.data[k][i]));
    if constexpr (is_float_v<T> || is_complex_v<T>) {
      if (scale != 1.0) value = scale_element(value, scale);
    }
    out[i] = A::store(value);
  }
}

template <class T>
PYCOMM_HOST_DEVICE void scale_strided(T* data, std::uint64_t count, double factor,
                                      std::uint64_t thread, std::uint64_t num_threads) {
  for (std::uint64_t i = thread; i < count; i += num_threads) {
    data[i] = scale_element(data[i], factor);
  }
}

}  // namespace pycomm::kernels

// The bodies of the CUDA kernels as functions of (thread, number of threads), so that the CPU twin
// test runs the very same index arithmetic without a device.
#pragma once

#include "kernels/functors.h"

namespace pycomm::kernels {

template <class T, class Op>
PYCOMM_HOST_DEVICE void combine_strided(T* out, const T* a, const T* b, std::uint64_t count, Op op,
                                        std::uint64_t thread, std::uint64_t num_threads) {
  for (std::uint64_t i = thread; i < count; i += num_threads) out[i] = combine(a[i], b[i], op);
}

template <class T>
PYCOMM_HOST_DEVICE void scale_strided(T* data, std::uint64_t count, double factor,
                                      std::uint64_t thread, std::uint64_t num_threads) {
  for (std::uint64_t i = thread; i < count; i += num_threads) {
    data[i] = scale_element(data[i], factor);
  }
}

}  // namespace pycomm::kernels

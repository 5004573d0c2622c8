// Reductions over device memory: the CUDA twin of reduce.h, from the same functors.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "pycomm/types.h"

namespace pycomm::kernels {

// out[i] = a[i] op b[i] on `stream`; device pointers, aligned to the element.
// Errors: kInvalidUsage for a pair that is not reducible, kSystem with CUDA's own words.
Status combine_cuda(std::byte* out, const std::byte* a, const std::byte* b, std::uint64_t count,
                    DType dtype, ReduceOp op, cudaStream_t stream);
Status scale_cuda(std::byte* data, std::uint64_t count, DType dtype, double factor,
                  cudaStream_t stream);

}  // namespace pycomm::kernels

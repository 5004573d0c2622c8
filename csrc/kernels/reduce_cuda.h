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
// out[i] = inputs[0][i] op inputs[1][i] op ..., then times `scale`; out may be an input.
// Errors: as combine_cuda; kInvalidUsage for no input, or more than 16.
Status fold_cuda(std::byte* out, const std::byte* const* inputs, int num_inputs,
                 std::uint64_t count, DType dtype, ReduceOp op, double scale, cudaStream_t stream);
Status scale_cuda(std::byte* data, std::uint64_t count, DType dtype, double factor,
                  cudaStream_t stream);

}  // namespace pycomm::kernels

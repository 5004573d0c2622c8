// CUDA kernels over the functors of functors.h; grid-stride loops, one launch a call.
#include "kernels/dispatch.h"
#include "kernels/reduce_cuda.h"
#include "kernels/reduce_cuda_body.h"

namespace pycomm::kernels {
namespace {

constexpr int kThreadsPerBlock = 256;
constexpr std::uint64_t kBlocksMax = 4096;

template <class T, class Op>
__global__ void combine_kernel(T* out, const T* a, const T* b, std::uint64_t count, Op op) {
  const std::uint64_t thread = std::uint64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  combine_strided(out, a, b, count, op, thread, std::uint64_t(gridDim.x) * blockDim.x);
}

template <class T, class Op>
__global__ void fold_kernel(T* out, FoldInputs<T> inputs, std::uint64_t count, Op op,
                            double scale) {
  const std::uint64_t thread = std::uint64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  fold_strided(out, inputs, count, op, scale, thread, std::uint64_t(gridDim.x) * blockDim.x);
}

template <class T>
__global__ void scale_kernel(T* data, std::uint64_t count, double factor) {
  const std::uint64_t thread = std::uint64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  scale_strided(data, count, factor, thread, std::uint64_t(gridDim.x) * blockDim.x);
}

unsigned num_blocks(std::uint64_t count) {
  const std::uint64_t wanted = (count + kThreadsPerBlock - 1) / kThreadsPerBlock;
  return static_cast<unsigned>(wanted < kBlocksMax ? wanted : kBlocksMax);
}

Status launch_status() {
  const cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) return Status();
  return Status::error(StatusCode::kSystem,
                       std::string("CUDA kernel launch: ") + cudaGetErrorString(error));
}

}  // namespace

Status combine_cuda(std::byte* out, const std::byte* a, const std::byte* b, std::uint64_t count,
                    DType dtype, ReduceOp op, cudaStream_t stream) {
  if (!is_reducible(dtype, op)) {
    return Status::error(StatusCode::kInvalidUsage,
                         std::string(to_string(op)) + " is not defined on " + to_string(dtype));
  }
  if (count == 0) return Status();
  with_element_type(dtype, [&](auto element) {
    using T = decltype(element);
    with_reduce_op<T>(op, [&](auto functor) {
      combine_kernel<T><<<num_blocks(count), kThreadsPerBlock, 0, stream>>>(
          reinterpret_cast<T*>(out), reinterpret_cast<const T*>(a), reinterpret_cast<const T*>(b),
          count, functor);
    });
  });
  return launch_status();
}

Status fold_cuda(std::byte* out, const std::byte* const* inputs, int num_inputs,
                 std::uint64_t count, DType dtype, ReduceOp op, double scale, cudaStream_t stream) {
  if (!is_reducible(dtype, op)) {
    return Status::error(StatusCode::kInvalidUsage,
                         std::string(to_string(op)) + " is not defined on " + to_string(dtype));
  }
  if (num_inputs < 1 || num_inputs > kCudaInputsMax) {
    return Status::error(StatusCode::kInvalidUsage,
                         std::to_string(num_inputs) + " inputs cannot be folded in one pass");
  }
  if (count == 0) return Status();
  with_element_type(dtype, [&](auto element) {
    using T = decltype(element);
    FoldInputs<T> typed{};
    typed.count = num_inputs;
    for (int k = 0; k < num_inputs; ++k) typed.data[k] = reinterpret_cast<const T*>(inputs[k]);
    with_reduce_op<T>(op, [&](auto functor) {
      fold_kernel<T><<<num_blocks(count), kThreadsPerBlock, 0, stream>>>(
          reinterpret_cast<T*>(out), typed, count, functor, scale);
    });
  });
  return launch_status();
}

Status scale_cuda(std::byte* data, std::uint64_t count, DType dtype, double factor,
                  cudaStream_t stream) {
  if (!is_reducible(dtype, ReduceOp::kAvg)) {
    return Status::error(StatusCode::kInvalidUsage,
                         std::string("scaling is not defined on ") + to_string(dtype));
  }
  if (count == 0) return Status();
  with_element_type(dtype, [&](auto element) {
    using T = decltype(element);
    if constexpr (is_float_v<T> || is_complex_v<T>) {
      scale_kernel<T><<<num_blocks(count), kThreadsPerBlock, 0, stream>>>(
          reinterpret_cast<T*>(data), count, factor);
    }
  });
  return launch_status();
}

}  // namespace pycomm::kernels

// Choice of an instruction set, once per process, and the block loop around fold_block.
#include <cstring>
#include <vector>

#include "kernels/reduce.h"

namespace pycomm::kernels {

namespace set_portable {
extern const ReduceKernels kKernels;
}
#if defined(PYCOMM_HAVE_X86_KERNELS)
namespace set_avx2 {
extern const ReduceKernels kKernels;
}
namespace set_avx512 {
extern const ReduceKernels kKernels;
}
#endif

const ReduceKernels* reduce_kernels_named(const char* name) {
  if (std::strcmp(name, "portable") == 0) return &set_portable::kKernels;
#if defined(PYCOMM_HAVE_X86_KERNELS)
  __builtin_cpu_init();
  if (std::strcmp(name, "avx2") == 0 && __builtin_cpu_supports("avx2") &&
      __builtin_cpu_supports("fma")) {
    return &set_avx2::kKernels;
  }
  if (std::strcmp(name, "avx512") == 0 && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    return &set_avx512::kKernels;
  }
#endif
  return nullptr;
}

const ReduceKernels& reduce_kernels() {
  static const ReduceKernels& best = []() -> const ReduceKernels& {
    for (const char* name : {"avx512", "avx2"}) {
      if (const ReduceKernels* kernels = reduce_kernels_named(name)) return *kernels;
    }
    return *reduce_kernels_named("portable");
  }();
  return best;
}

void copy(std::byte* out, const std::byte* in, std::uint64_t bytes, Stores stores) {
  if (stores == Stores::kStreamed) return reduce_kernels().stream(out, in, bytes);
  std::memcpy(out, in, bytes);
}

void fold(const FoldOutputs& outputs, const std::byte* const* inputs, int num_inputs,
          std::uint64_t count, DType dtype, ReduceOp op, double scale) {
  const ReduceKernels& kernels = reduce_kernels();
  const std::uint64_t element_bytes = dtype_bytes(dtype);
  const std::uint64_t block = kFoldBlockBytes / element_bytes;
  // Two inputs need no accumulator block: one pass over everything.
  const bool is_one_pass = num_inputs == 2 && outputs.num_cached <= 2 && outputs.num_streamed == 0;
  if (outputs.num_streamed == 0 && (count <= block || is_one_pass)) {
    kernels.fold_block(outputs.cached, outputs.num_cached, inputs, num_inputs, count, dtype, op,
                       scale);
    return;
  }
  // What is streamed is folded into the first-level cache first.
  alignas(64) std::byte result[kFoldBlockBytes];
  const bool has_cached = outputs.num_cached > 0;
  std::vector<std::byte*> outs(static_cast<std::size_t>(has_cached ? outputs.num_cached : 1));
  std::vector<const std::byte*> ins(static_cast<std::size_t>(num_inputs));
  for (std::uint64_t first = 0; first < count; first += block) {
    const std::uint64_t offset = first * element_bytes;
    const std::uint64_t n = count - first < block ? count - first : block;
    outs[0] = result;
    for (int k = 0; k < outputs.num_cached; ++k) {
      outs[static_cast<std::size_t>(k)] = outputs.cached[k] + offset;
    }
    for (int k = 0; k < num_inputs; ++k) ins[static_cast<std::size_t>(k)] = inputs[k] + offset;
    kernels.fold_block(outs.data(), static_cast<int>(outs.size()), ins.data(), num_inputs, n, dtype,
                       op, scale);
    for (int k = 0; k < outputs.num_streamed; ++k) {
      kernels.stream(outputs.streamed[k] + offset, outs[0], n * element_bytes);
    }
  }
}

}  // namespace pycomm::kernels

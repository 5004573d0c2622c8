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

void fold(std::byte* const* outputs, int num_outputs, const std::byte* const* inputs,
          int num_inputs, std::uint64_t count, DType dtype, ReduceOp op, double scale) {
  const ReduceKernels& kernels = reduce_kernels();
  const std::uint64_t element_bytes = dtype_bytes(dtype);
  const std::uint64_t block = kFoldBlockBytes / element_bytes;
  // Two inputs need no accumulator block: one pass over everything.
  const bool is_one_pass = num_inputs == 2 && num_outputs <= 2 && scale == 1.0;
  if (count <= block || is_one_pass) {
    kernels.fold_block(outputs, num_outputs, inputs, num_inputs, count, dtype, op, scale);
    return;
  }
  std::vector<std::byte*> outs(static_cast<std::size_t>(num_outputs));
  std::vector<const std::byte*> ins(static_cast<std::size_t>(num_inputs));
  for (std::uint64_t first = 0; first < count; first += block) {
    const std::uint64_t offset = first * element_bytes;
    for (int k = 0; k < num_outputs; ++k) outs[static_cast<std::size_t>(k)] = outputs[k] + offset;
    for (int k = 0; k < num_inputs; ++k) ins[static_cast<std::size_t>(k)] = inputs[k] + offset;
    const std::uint64_t n = count - first < block ? count - first : block;
    kernels.fold_block(outs.data(), num_outputs, ins.data(), num_inputs, n, dtype, op, scale);
  }
}

}  // namespace pycomm::kernels

// Reductions over arrays on the CPU, dispatched once per process to the widest instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pycomm/types.h"

namespace pycomm::kernels {

// Whether what is written will be read soon, or goes past the cache.
enum class Stores : std::uint8_t { kCached, kStreamed };

// Pointers need no alignment. Every function is a pure loop: no allocation, no lock.
struct ReduceKernels {
  const char* name;  // "portable", "avx2", "avx512"

  // out[i] = a[i] op b[i], i < count elements. out may be a or b, not overlap them otherwise.
  void (*combine)(std::byte* out, const std::byte* a, const std::byte* b, std::uint64_t count,
                  DType dtype, ReduceOp op);
  // For one block of up to kFoldBlockBytes bytes (any size for two inputs and at most two
  // outputs): every outputs[k][i] = inputs[0][i] op
  // inputs[1][i] op ... in that order. 16-bit floats round once, after the last input, then are
  // scaled when scale != 1. outputs may alias inputs.
  void (*fold_block)(std::byte* const* outputs, int num_outputs, const std::byte* const* inputs,
                     int num_inputs, std::uint64_t count, DType dtype, ReduceOp op, double scale);
  // Copies past the cache. Ordered before a later release store.
  void (*stream)(std::byte* out, const std::byte* in, std::uint64_t bytes);
  // data[i] *= factor; floats and complex numbers only.
  void (*scale)(std::byte* data, std::uint64_t count, DType dtype, double factor);
};

inline constexpr std::uint64_t kFoldBlockBytes = 8 * 1024;

// The best set for this processor.
const ReduceKernels& reduce_kernels();
// A set by name ("portable", "avx2", "avx512"), or null if this processor or build lacks it.
const ReduceKernels* reduce_kernels_named(const char* name);

// Copies between places that do not overlap.
void copy(std::byte* out, const std::byte* in, std::uint64_t bytes, Stores stores);

// fold_block over any count. Outputs that are streamed go past the cache, and may not be inputs
// elsewhere than at the same element.
struct FoldOutputs {
  std::byte* const* cached = nullptr;
  int num_cached = 0;
  std::byte* const* streamed = nullptr;
  int num_streamed = 0;
};
void fold(const FoldOutputs& outputs, const std::byte* const* inputs, int num_inputs,
          std::uint64_t count, DType dtype, ReduceOp op, double scale);

}  // namespace pycomm::kernels

// The reduction loops for avx512; CMakeLists.txt sets the flags of this file.
#define PYCOMM_KERNEL_SET set_avx512
#define PYCOMM_KERNEL_NAME "avx512"
#include "kernels/reduce_cpu.inc"

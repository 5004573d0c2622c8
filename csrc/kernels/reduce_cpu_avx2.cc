// The reduction loops for avx2; CMakeLists.txt sets the flags of this file.
#define PYCOMM_KERNEL_SET set_avx2
#define PYCOMM_KERNEL_NAME "avx2"
#include "kernels/reduce_cpu.inc"

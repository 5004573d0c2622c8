// The reduction loops for portable; CMakeLists.txt sets the flags of this file.
#define PYCOMM_KERNEL_SET set_portable
#define PYCOMM_KERNEL_NAME "portable"
#include "kernels/reduce_cpu.inc"

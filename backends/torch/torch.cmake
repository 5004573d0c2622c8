# The _torch module, against the torch of one interpreter. find_package(Torch) is avoided: on CUDA
# wheels it demands a CUDA toolkit. pybind11 must be the one inside torch, or base classes of c10d
# are unknown at import.
if(NOT PYCOMM_TORCH_PYTHON)
  find_package(Python REQUIRED COMPONENTS Interpreter)
  set(PYCOMM_TORCH_PYTHON ${Python_EXECUTABLE})
endif()
find_package(Python REQUIRED COMPONENTS Interpreter Development.Module)
# -I ignores the environment of an isolated build, so that the user's own torch is found.
execute_process(
  COMMAND ${PYCOMM_TORCH_PYTHON} -I -c
    "import os; os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '0'; import torch; print(os.path.dirname(torch.__file__), torch.__version__, int(torch._C._GLIBCXX_USE_CXX11_ABI), sep=';')"
  OUTPUT_VARIABLE PYCOMM_TORCH_FACTS RESULT_VARIABLE PYCOMM_TORCH_RESULT
  ERROR_VARIABLE PYCOMM_TORCH_ERROR OUTPUT_STRIP_TRAILING_WHITESPACE)
if(NOT PYCOMM_TORCH_RESULT EQUAL 0)
  message(FATAL_ERROR "pycomm needs torch in the environment it is installed into, and "
    "${PYCOMM_TORCH_PYTHON} has none. Install torch (>= 2.13) first:  pip install torch==2.13.0\n"
    "${PYCOMM_TORCH_ERROR}")
endif()
list(GET PYCOMM_TORCH_FACTS 0 PYCOMM_TORCH_DIR)
list(GET PYCOMM_TORCH_FACTS 1 PYCOMM_TORCH_VERSION)
list(GET PYCOMM_TORCH_FACTS 2 PYCOMM_TORCH_ABI)
message(STATUS "torch ${PYCOMM_TORCH_VERSION} in ${PYCOMM_TORCH_DIR}")

file(GLOB PYCOMM_TORCH_SOURCES CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/*.cc)
list(APPEND PYCOMM_TORCH_SOURCES ${CMAKE_SOURCE_DIR}/backends/python/handshaker.cc)
Python_add_library(_torch MODULE WITH_SOABI ${PYCOMM_TORCH_SOURCES})
target_include_directories(_torch SYSTEM PRIVATE ${PYCOMM_TORCH_DIR}/include
  ${PYCOMM_TORCH_DIR}/include/torch/csrc/api/include)
target_include_directories(_torch PRIVATE ${CMAKE_SOURCE_DIR}/csrc/include
  ${CMAKE_SOURCE_DIR}/backends/torch ${CMAKE_SOURCE_DIR}/backends)
target_compile_definitions(_torch PRIVATE TORCH_EXTENSION_NAME=_torch TORCH_API_INCLUDE_EXTENSION_H
  _GLIBCXX_USE_CXX11_ABI=${PYCOMM_TORCH_ABI} PYCOMM_TORCH_VERSION="${PYCOMM_TORCH_VERSION}")
target_compile_options(_torch PRIVATE -Wall -Wextra -Wno-missing-field-initializers -g0)
target_link_libraries(_torch PRIVATE pycomm_core
  ${PYCOMM_TORCH_DIR}/lib/libc10.so ${PYCOMM_TORCH_DIR}/lib/libtorch_cpu.so
  ${PYCOMM_TORCH_DIR}/lib/libtorch.so ${PYCOMM_TORCH_DIR}/lib/libtorch_python.so)
install(TARGETS _torch LIBRARY DESTINATION pycomm)

#include "platform/device_memory.h"

#include <dlfcn.h>
#include <unistd.h>

#include <string>

namespace pycomm::platform {
namespace {

// As in cuda.h of CUDA 11.7 and later; part of the driver's stable interface.
using DevicePointer = unsigned long long;
constexpr int kHandleIsDmaBuf = 1;  // CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
using GetHandle = int (*)(void* handle, DevicePointer data, std::size_t bytes, int type,
                          unsigned long long flags);

GetHandle get_handle() {
  static const GetHandle function = [] {
    void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    return driver == nullptr
               ? nullptr
               : reinterpret_cast<GetHandle>(dlsym(driver, "cuMemGetHandleForAddressRange"));
  }();
  return function;
}

}  // namespace

Result<DmaBuf> export_dma_buf(const void* data, std::uint64_t bytes) {
  const GetHandle function = get_handle();
  if (function == nullptr) {
    return Status::error(StatusCode::kSystem, "no CUDA driver that exports dma-bufs (11.7)");
  }
  // The range has to be of whole pages of the host.
  const auto page = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  const auto address = reinterpret_cast<std::uint64_t>(data);
  const std::uint64_t begin = address & ~(page - 1);
  const std::uint64_t end = (address + bytes + page - 1) & ~(page - 1);
  int fd = -1;
  if (const int error = function(&fd, begin, end - begin, kHandleIsDmaBuf, 0); error != 0) {
    return Status::error(StatusCode::kSystem,
                         "cuMemGetHandleForAddressRange: CUDA error " + std::to_string(error));
  }
  DmaBuf exported;
  exported.fd = UniqueFd(fd);
  exported.offset = address - begin;
  return exported;
}

}  // namespace pycomm::platform

// Memory of a GPU as something that a NIC can be given: a dma-buf. CUDA's driver is loaded at run
// time; nothing here has run on hardware yet.
#pragma once

#include <cstdint>

#include "platform/fd.h"
#include "pycomm/status.h"

namespace pycomm::platform {

// A dma-buf of the pages that hold [data, data + bytes), and where in it `data` lies.
struct DmaBuf {
  UniqueFd fd;
  std::uint64_t offset = 0;
};

// Errors: kSystem (no CUDA driver, a driver or kernel without dma-buf, no such memory).
Result<DmaBuf> export_dma_buf(const void* data, std::uint64_t bytes);

}  // namespace pycomm::platform

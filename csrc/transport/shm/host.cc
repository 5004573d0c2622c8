#include "transport/shm/host.h"

namespace pycomm::transport::shm {

Result<std::unique_ptr<Host>> Host::create(std::shared_ptr<Budget> budget,
                                           std::shared_ptr<Arena> arena) {
  std::unique_ptr<Host> host(new Host());
  host->arena_ = std::move(arena);
  auto segment = platform::SealedMemory::create("pycomm-segment", kSegmentBytes);
  if (!segment.is_ok()) return segment.status();
  // The first page is the header's.
  PYCOMM_RETURN_IF_ERROR(segment.value().commit(0, kPageBytes));
  host->segment_ = PagePool(std::move(segment).value(), kPageBytes, std::move(budget));
  auto bell = platform::Doorbell::create();
  if (!bell.is_ok()) return bell.status();
  host->doorbell_ = std::move(bell).value();
  host->header().magic = kSegmentMagic;
  return host;
}

Result<std::byte*> Host::allocate_segment(std::uint64_t bytes) {
  std::lock_guard lock(mutex_);
  return segment_.allocate(bytes);
}

void Host::free_segment(std::byte* data) {
  std::lock_guard lock(mutex_);
  segment_.free(data);
}

}  // namespace pycomm::transport::shm

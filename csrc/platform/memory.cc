#include "platform/memory.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <iterator>

#include "platform/system.h"

namespace pycomm::platform {

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  if (this != &other) {
    if (data_ != nullptr) munmap(data_, bytes_);
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
  }
  return *this;
}

Mapping::~Mapping() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

bool Mapping::contains(const void* pointer, std::uint64_t bytes) const {
  const auto* at = static_cast<const std::byte*>(pointer);
  return data_ != nullptr && at >= data_ && at <= data_ + bytes_ &&
         bytes <= static_cast<std::uint64_t>(data_ + bytes_ - at);
}

Result<SealedMemory> SealedMemory::create(const char* label, std::uint64_t bytes,
                                          InForks in_forks) {
  SealedMemory memory;
  memory.fd_.reset(memfd_create(label, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memory.fd_) return system_error("memfd_create");
  if (ftruncate(memory.fd(), static_cast<off_t>(bytes)) != 0) return system_error("ftruncate");
  if (fcntl(memory.fd(), F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL) != 0) {
    return system_error("sealing a memfd");
  }
  void* data =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, memory.fd(), 0);
  if (data == MAP_FAILED) return system_error("mmap of shared memory");
  if (in_forks == InForks::kUnmapped) madvise(data, bytes, MADV_DONTFORK);
  madvise(data, bytes, MADV_HUGEPAGE);  // where shared memory may have them
  memory.mapping_ = Mapping(static_cast<std::byte*>(data), bytes);
  return memory;
}

Status SealedMemory::commit(std::uint64_t offset, std::uint64_t bytes) {
  while (fallocate(fd_.get(), 0, static_cast<off_t>(offset), static_cast<off_t>(bytes)) != 0) {
    if (errno == EINTR) continue;
    return system_error("no shared memory for " + std::to_string(bytes) + " bytes");
  }
  return Status();
}

void SealedMemory::release(std::uint64_t offset, std::uint64_t bytes) {
  fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
            static_cast<off_t>(bytes));
}

bool map_privately(int fd, std::byte* data, std::uint64_t bytes) {
  return mmap(data, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, fd,
              0) != MAP_FAILED;
}

Result<Mapping> map_sealed(int fd, std::uint64_t bytes_max, Access access) {
  const int seals = fcntl(fd, F_GET_SEALS);
  constexpr int kNeeded = F_SEAL_GROW | F_SEAL_SHRINK;
  struct stat info;
  if (seals < 0 || (seals & kNeeded) != kNeeded || fstat(fd, &info) != 0 || info.st_size <= 0 ||
      static_cast<std::uint64_t>(info.st_size) > bytes_max) {
    return Status::error(StatusCode::kInternal, "a peer offered memory that is not a sealed memfd");
  }
  const auto bytes = static_cast<std::uint64_t>(info.st_size);
  const int protection = access == Access::kReadOnly ? PROT_READ : PROT_READ | PROT_WRITE;
  void* data = mmap(nullptr, bytes, protection, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (data == MAP_FAILED) return system_error("mmap of a peer's shared memory");
  madvise(data, bytes, MADV_DONTFORK);
  return Mapping(static_cast<std::byte*>(data), bytes);
}

bool read_process_memory(int pid, std::uint64_t address, std::byte* out, std::uint64_t bytes) {
  while (bytes > 0) {
    // The kernel moves at most about 2 GiB a call.
    const std::uint64_t part = std::min<std::uint64_t>(bytes, std::uint64_t{1} << 30);
    iovec local{out, part};
    iovec remote{reinterpret_cast<void*>(address), part};
    const ssize_t n = process_vm_readv(pid, &local, 1, &remote, 1, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    out += n;
    address += static_cast<std::uint64_t>(n);
    bytes -= static_cast<std::uint64_t>(n);
  }
  return true;
}

namespace {

// Of <linux/fs.h> since 6.7, by their documented layout: older headers lack them.
struct PageRegion {
  std::uint64_t start;
  std::uint64_t end;
  std::uint64_t categories;
};
struct PageScan {
  std::uint64_t size;
  std::uint64_t flags;
  std::uint64_t start;
  std::uint64_t end;
  std::uint64_t walk_end;
  std::uint64_t vec;
  std::uint64_t vec_len;
  std::uint64_t max_pages;
  std::uint64_t category_inverted;
  std::uint64_t category_mask;
  std::uint64_t category_anyof_mask;
  std::uint64_t return_mask;
};
constexpr std::uint64_t kPageIsHuge = 1 << 6;
constexpr unsigned long kPageScan = _IOWR('f', 16, PageScan);

}  // namespace

bool has_huge_pages(const std::byte* data, std::uint64_t bytes) {
  constexpr std::uint64_t kPage = 4096, kSampleBytes = 8 << 20;
  // Opened anew: a forked child's descriptor would still show its parent.
  const UniqueFd pages(open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC));
  if (!pages) return false;
  PageRegion region[4] = {};
  PageScan scan{};
  scan.size = sizeof scan;
  scan.start = reinterpret_cast<std::uint64_t>(data) / kPage * kPage;
  scan.end = scan.start + std::min(bytes, kSampleBytes) / kPage * kPage;
  scan.vec = reinterpret_cast<std::uint64_t>(region);
  scan.vec_len = std::size(region);
  scan.category_mask = scan.return_mask = kPageIsHuge;
  const int num_regions = ioctl(pages.get(), kPageScan, &scan);
  std::uint64_t huge = 0;
  for (int i = 0; i < num_regions; ++i) huge += region[i].end - region[i].start;
  return 2 * huge > scan.end - scan.start;
}

void allow_memory_reads() {
  // Yama remembers one allowed reader; only "any" serves several ranks. Other users' processes
  // are still refused by the ordinary ptrace rules.
#if defined(PR_SET_PTRACER) && defined(PR_SET_PTRACER_ANY)
  prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
#endif
}

}  // namespace pycomm::platform

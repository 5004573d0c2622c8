// Shared memory without names: sealed memfds, and reading another process's memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "platform/fd.h"
#include "pycomm/status.h"

namespace pycomm::platform {

enum class Access { kReadOnly, kReadWrite };

// A mapping that unmaps itself.
class Mapping {
 public:
  Mapping() = default;
  Mapping(std::byte* data, std::uint64_t bytes) : data_(data), bytes_(bytes) {}
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();

  std::byte* data() const { return data_; }
  std::uint64_t bytes() const { return bytes_; }
  bool contains(const void* pointer, std::uint64_t bytes) const;

 private:
  std::byte* data_ = nullptr;
  std::uint64_t bytes_ = 0;
};

// What a forked child sees of it.
enum class InForks { kUnmapped, kStaysMapped };

// A memfd of fixed size: sealed against growing and shrinking, so that a peer that maps it can
// never be made to fault. Pages are given by commit() and taken back by release().
class SealedMemory {
 public:
  // Errors: kSystem where memfd_create or sealing is refused (old kernel, seccomp).
  static Result<SealedMemory> create(const char* label, std::uint64_t bytes,
                                     InForks in_forks = InForks::kUnmapped);

  std::byte* data() const { return mapping_.data(); }
  std::uint64_t bytes() const { return mapping_.bytes(); }
  const Mapping& mapping() const { return mapping_; }
  int fd() const { return fd_.get(); }

  // Backs [offset, offset + bytes) with pages, or says that memory is short. Without it a write
  // could end in SIGBUS.
  Status commit(std::uint64_t offset, std::uint64_t bytes);
  // Gives the pages back; the range reads as zeros afterwards.
  void release(std::uint64_t offset, std::uint64_t bytes);

 private:
  UniqueFd fd_;
  Mapping mapping_;
};

// Replaces a mapping of `fd` by a private one at the same place; false if the system refuses.
bool map_privately(int fd, std::byte* data, std::uint64_t bytes);

// Maps a peer's memfd after checking that it is sealed and of a plausible size.
// Errors: kInternal if the peer sent something else; kSystem if mapping fails.
Result<Mapping> map_sealed(int fd, std::uint64_t bytes_max, Access access);

// Copies [address, address + bytes) of process `pid` to `out`. False with errno if refused.
bool read_process_memory(int pid, std::uint64_t address, std::byte* out, std::uint64_t bytes);
// Whether most of the first megabytes of [data, data + bytes) lie in huge pages; false where the
// kernel does not tell (before Linux 6.7).
bool has_huge_pages(const std::byte* data, std::uint64_t bytes);
// Lets processes of the same user read this one's memory where Yama restricts that to children.
void allow_memory_reads();

}  // namespace pycomm::platform

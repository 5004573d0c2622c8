// Memory for keys: a forked child finds zeros in it, a core dump leaves it out, and it is wiped
// when it goes.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>

#include "base/check.h"

namespace pycomm::platform {

// Overwrites in a way that the compiler keeps.
inline void wipe(void* data, std::size_t bytes) {
  std::memset(data, 0, bytes);
  asm volatile("" : : "r"(data) : "memory");
}

// One T, which must not own anything. Requires memory: an exhausted machine ends the process.
template <class T>
class Secret {
 public:
  Secret() {
    void* pages =
        mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    PYCOMM_CHECK(pages != MAP_FAILED);
    // Older kernels lack one or the other; then the key is where others keep theirs.
    static_cast<void>(madvise(pages, sizeof(T), MADV_DONTDUMP));
    static_cast<void>(madvise(pages, sizeof(T), MADV_WIPEONFORK));
    value_ = new (pages) T();
  }
  ~Secret() {
    wipe(value_, sizeof(T));
    munmap(value_, sizeof(T));
  }
  Secret(const Secret&) = delete;
  Secret& operator=(const Secret&) = delete;

  T* operator->() { return value_; }
  const T* operator->() const { return value_; }
  T& operator*() { return *value_; }
  const T& operator*() const { return *value_; }

 private:
  T* value_;
};

}  // namespace pycomm::platform

// What a spinning thread does between looks.
#pragma once

namespace pycomm::base {

inline void spin_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline constexpr int kCacheLineBytes = 64;

}  // namespace pycomm::base

#include "bare_loops.h"

#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "machine_limits.h"
#include "two_processes.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace pycomm::bench {
namespace {

constexpr std::uint64_t kChunk = 128 * 1024;
constexpr std::uint64_t kReadChunk = 1024 * 1024;  // of process_vm_readv without a sum
constexpr std::uint64_t kSlots = 3;

// What each of the two does, in bytes.
struct Work {
  std::uint64_t gives[2];    // to the other one
  bool folds[2];             // what it takes is added to its own, else copied
  std::uint64_t own[2];      // copied from its input to its output
  bool has_results = false;  // the folded halves are given in turn
  bool in_place = false;
};

Work work_of(const std::string& operation, std::uint64_t bytes) {
  const std::uint64_t part = bytes / 2;
  if (operation == "all_reduce") return {{part, part}, {true, true}, {0, 0}, true, true};
  if (operation == "reduce_scatter") return {{part, part}, {true, true}, {0, 0}};
  if (operation == "all_gather" || operation == "all_to_all") {
    return {{part, part}, {false, false}, {part, part}};
  }
  if (operation == "broadcast") return {{bytes, 0}, {false, false}, {0, 0}};
  if (operation == "reduce") return {{0, bytes}, {true, false}, {0, 0}, false, true};
  if (operation == "gather") return {{0, part}, {false, false}, {part, 0}};
  if (operation == "scatter") return {{part, 0}, {false, false}, {part, 0}};
  if (operation == "sendrecv") return {{bytes, bytes}, {false, false}, {0, 0}};
  return {};
}

enum class Way { kCachedWindow, kStreamedWindow, kReadv };

void copy(char* out, const char* in, std::uint64_t bytes, bool streams) {
#if defined(__SSE2__)
  if (streams && reinterpret_cast<std::uintptr_t>(out) % 16 == 0) {
    std::uint64_t i = 0;
    for (; i + 64 <= bytes; i += 64) {
      for (std::uint64_t k = 0; k < 64; k += 16) {
        _mm_stream_si128(reinterpret_cast<__m128i*>(out + i + k),
                         _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i + k)));
      }
    }
    _mm_sfence();
    std::memcpy(out + i, in + i, bytes - i);
    return;
  }
#endif
  static_cast<void>(streams);
  std::memcpy(out, in, bytes);
}

__attribute__((target_clones("avx512f", "avx2", "default"))) void add_block(float* out,
                                                                            const float* a,
                                                                            const float* b,
                                                                            std::uint64_t count) {
#pragma GCC ivdep
  for (std::uint64_t i = 0; i < count; ++i) out[i] = a[i] + b[i];
}

// out = a + b, and, where there is one, also to `result`.
void add(char* out, const char* a, const char* b, std::uint64_t bytes, char* result, bool streams) {
  constexpr std::uint64_t kBlock = 4096;
  for (std::uint64_t first = 0; first < bytes; first += kBlock) {
    const std::uint64_t n = std::min(kBlock, bytes - first);
    add_block(reinterpret_cast<float*>(out + first), reinterpret_cast<const float*>(a + first),
              reinterpret_cast<const float*>(b + first), n / sizeof(float));
    if (result != nullptr) copy(result + first, out + first, n, streams);
  }
}

// A rank's own memory, touched, in pages of one kind.
class Memory {
 public:
  Memory(std::uint64_t bytes, Pages pages) : bytes_((bytes + kHuge - 1) / kHuge * kHuge + kHuge) {
    base_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    const auto at = reinterpret_cast<std::uintptr_t>(base_);
    data = reinterpret_cast<char*>((at + kHuge - 1) / kHuge * kHuge);
    madvise(data, bytes_ - kHuge, pages == Pages::kHuge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    std::memset(data, 0, bytes_ - kHuge);
  }
  ~Memory() { munmap(base_, bytes_); }
  Memory(const Memory&) = delete;

  char* data;

 private:
  static constexpr std::uint64_t kHuge = 2 << 20;
  std::uint64_t bytes_;
  void* base_;
};

struct alignas(128) Counter {
  std::atomic<std::uint64_t> value;
};

// Counters, then a window for each, each with cells for what is given and for results.
struct Board {
  Counter given[2], folded[2], taken[2];
  alignas(4096) char window[2][2][kSlots][kChunk];
};

class Rank {
 public:
  Rank(const Work& work, Way way, bool streams_results, Pages pages, int me, Board& board,
       Flags& flags)
      : work_(work),
        way_(way),
        streams_(streams_results),
        me_(me),
        other_(1 - me),
        board_(board),
        flags_(flags),
        chunk_(way == Way::kReadv && !work.folds[0] ? kReadChunk : kChunk),
        input_(largest(work), pages),
        output_(work.in_place ? 1 : largest(work), pages),
        scratch_memory_(kChunk, pages),
        in_(input_.data),
        out_(work.in_place ? in_ : output_.data),
        scratch_(scratch_memory_.data) {
    chunks_ = (std::max(work.gives[0], work.gives[1]) + chunk_ - 1) / chunk_;
    flags.pids[me] = getpid();
    flags.address[me] = reinterpret_cast<std::uintptr_t>(in_);
  }

  void once() {
    for (std::uint64_t i = 0; i < chunks_ + 2; ++i) {
      if (i < chunks_) give(i);
      if (i >= 1 && i - 1 < chunks_) take(i - 1);
      if (i >= 2 && work_.has_results) take_result(i - 2);
    }
    base_ += chunks_;
    if (way_ == Way::kReadv) {  // nobody's memory changes while it is read
      flags_.exchange(me_, ++round_);
    }
    if (work_.own[me_] > 0) {
      copy(out_ + work_.gives[other_], in_ + work_.gives[me_], work_.own[me_], streams_);
    }
  }

  std::uint64_t round_ = 0;

 private:
  static std::uint64_t largest(const Work& work) {
    return 2 * std::max(work.gives[0], work.gives[1]) + std::max(work.own[0], work.own[1]);
  }
  static void await(const Counter& counter, std::uint64_t value) {
    while (counter.value.load(std::memory_order_acquire) < value) pause_cpu();
  }
  std::uint64_t bytes_of(std::uint64_t total, std::uint64_t c) const {
    return c * chunk_ < total ? std::min(chunk_, total - c * chunk_) : 0;
  }
  char* cell(int owner, int kind, std::uint64_t c) const {
    return board_.window[owner][kind][(base_ + c) % kSlots];
  }

  // The other's part comes first in the input, mine behind it.
  void give(std::uint64_t c) {
    const std::uint64_t bytes = bytes_of(work_.gives[me_], c);
    if (bytes == 0) return;
    if (way_ != Way::kReadv) {
      if (base_ + c >= kSlots) await(board_.taken[other_], base_ + c + 1 - kSlots);
      copy(cell(me_, 0, c), in_ + c * chunk_, bytes, way_ == Way::kStreamedWindow);
    } else if (c == 0) {
      flags_.exchange(me_, ++round_);
    }
    board_.given[me_].value.store(base_ + c + 1, std::memory_order_release);
  }

  const char* source(std::uint64_t c, std::uint64_t bytes, char* scratch) {
    if (way_ != Way::kReadv) {
      await(board_.given[other_], base_ + c + 1);
      return cell(other_, 0, c);
    }
    if (c == 0 && work_.gives[me_] == 0) flags_.exchange(me_, ++round_);
    iovec local{scratch, bytes};
    iovec remote{reinterpret_cast<void*>(flags_.address[other_] + c * chunk_), bytes};
    if (process_vm_readv(flags_.pids[other_], &local, 1, &remote, 1, 0) < 0) refused_ = true;
    return scratch;
  }

  void take(std::uint64_t c) {
    const std::uint64_t bytes = bytes_of(work_.gives[other_], c);
    if (bytes == 0) return;
    char* out = out_ + c * chunk_;
    if (work_.folds[me_]) {
      char* result = nullptr;
      if (work_.has_results) {
        if (base_ + c >= kSlots) await(board_.folded[other_], base_ + c + 1 - kSlots);
        result = cell(me_, 1, c);
      }
      const char* theirs = source(c, bytes, scratch_);
      const char* mine = in_ + (work_.in_place && !work_.has_results ? 0 : work_.gives[me_]);
      add(out + (work_.has_results ? work_.gives[me_] : 0), mine + c * chunk_, theirs, bytes,
          result, way_ != Way::kCachedWindow);
    } else {
      const char* theirs = source(c, bytes, out);
      if (theirs != out) copy(out, theirs, bytes, streams_);
    }
    board_.taken[me_].value.store(base_ + c + 1, std::memory_order_release);
  }

  void take_result(std::uint64_t c) {
    const std::uint64_t bytes = bytes_of(work_.gives[me_], c);
    await(board_.taken[other_], base_ + c + 1);
    copy(out_ + c * chunk_, cell(other_, 1, c), bytes, streams_);
    board_.folded[me_].value.store(base_ + c + 1, std::memory_order_release);
  }

 public:
  bool refused_ = false;

 private:
  const Work work_;
  const Way way_;
  const bool streams_;
  const int me_, other_;
  Board& board_;
  Flags& flags_;
  const std::uint64_t chunk_;
  Memory input_, output_, scratch_memory_;
  char* const in_;
  char* const out_;
  char* const scratch_;
  std::uint64_t chunks_ = 0;
  std::uint64_t base_ = 0;  // chunks of earlier rounds
};

double seconds_of(const Work& work, Way way, bool streams, std::uint64_t bytes, Pages pages) {
  Shared memory(sizeof(Board));
  std::memset(memory.data, 0, sizeof(Board));
  auto& board = *reinterpret_cast<Board*>(memory.data);
  return in_two([&](int me, Flags& flags) {
    Rank rank(work, way, streams, pages, me, board, flags);
    const int batch = static_cast<int>(std::clamp<std::uint64_t>(65536 / (bytes + 1), 1, 200));
    const int batches =
        static_cast<int>(std::clamp<std::uint64_t>((std::uint64_t{64} << 20) / (bytes + 1), 5, 40));
    std::vector<double> times;
    for (int b = 0; b < batches; ++b) {
      flags.exchange(me, ++rank.round_);
      const auto start = Clock::now();
      for (int i = 0; i < batch; ++i) rank.once();
      // Both have done their part.
      flags.exchange(me, ++rank.round_);
      times.push_back(seconds_since(start) / batch);
    }
    return rank.refused_ ? std::numeric_limits<double>::infinity() : median(times);
  });
}

}  // namespace

double bare_seconds(const std::string& operation, std::uint64_t bytes, Pages pages) {
  if (operation == "barrier") return flag_exchange_ns(20'000) * 1e-9;
  const Work work = work_of(operation, bytes / 8 * 8);
  if (work.gives[0] + work.gives[1] == 0) return 0;
  double best = std::numeric_limits<double>::infinity();
  for (const Way way : {Way::kCachedWindow, Way::kStreamedWindow, Way::kReadv}) {
    for (const bool streams : {false, true}) {
      const bool is_pointless = (streams && bytes < kChunk) ||
                                (way == Way::kReadv && bytes < 4096) ||
                                (way == Way::kReadv && work.has_results);
      if (!is_pointless) best = std::min(best, seconds_of(work, way, streams, bytes, pages));
    }
  }
  return best;
}

double bare_shared_seconds(std::uint64_t bytes) {
  return std::min(shared_all_reduce_s(bytes, SharedPass::kWhole),
                  shared_all_reduce_s(bytes, SharedPass::kReadOnly));
}

}  // namespace pycomm::bench

// The last operations of a group, for post-mortems. Sixteen bytes each and no clock: a record costs
// two stores, and all of them stay in a corner of the first-level cache.
//
// Thread: the group's holder writes, anyone reads; an entry that is being written may be read as
// half of two records, and is then left out.
#pragma once

#include <array>
#include <atomic>
#include <optional>
#include <vector>

#include "pycomm/communicator.h"

namespace pycomm::communicator {

class FlightRecorder {
 public:
  void begin(std::uint64_t op_number, Signature signature) {
    Entry& entry = entries_[op_number % kSize];
    entry.signature.store(signature, std::memory_order_relaxed);
    entry.op_and_state.store(op_number << kStateBits | kBegun, std::memory_order_release);
  }
  void end(std::uint64_t op_number, StatusCode code) {
    entries_[op_number % kSize].op_and_state.store(
        op_number << kStateBits | kBegun | kFinished | static_cast<std::uint64_t>(code),
        std::memory_order_relaxed);
  }
  // Of an operation that is recent enough.
  std::optional<Signature> signature_of(std::uint64_t op_number) const {
    const std::optional<FlightRecord> record = read(op_number);
    if (!record) return std::nullopt;
    return record->signature;
  }
  // Oldest first; without the operation that confirmed the group.
  std::vector<FlightRecord> snapshot(std::uint64_t last_op_number) const {
    std::vector<FlightRecord> result;
    if (last_op_number == UINT64_MAX) return result;  // none yet
    const std::uint64_t first = last_op_number < kSize ? 1 : last_op_number - kSize + 1;
    for (std::uint64_t op = first; op <= last_op_number; ++op) {
      if (const auto record = read(op)) result.push_back(*record);
    }
    return result;
  }

 private:
  static constexpr std::uint64_t kSize = 256;
  static constexpr int kStateBits = 8;
  static constexpr std::uint64_t kFinished = 128;
  static constexpr std::uint64_t kBegun = 64;
  struct Entry {
    std::atomic<Signature> signature{0};
    std::atomic<std::uint64_t> op_and_state{0};
  };

  std::optional<FlightRecord> read(std::uint64_t op_number) const {
    const Entry& entry = entries_[op_number % kSize];
    const std::uint64_t before = entry.op_and_state.load(std::memory_order_acquire);
    const Signature signature = entry.signature.load(std::memory_order_acquire);
    const std::uint64_t after = entry.op_and_state.load(std::memory_order_relaxed);
    const bool is_whole = before >> kStateBits == after >> kStateBits;
    if (!is_whole || before >> kStateBits != op_number || (before & kBegun) == 0) {
      return std::nullopt;
    }
    return FlightRecord{op_number, signature, (after & kFinished) != 0,
                        static_cast<StatusCode>(after & (kBegun - 1))};
  }

  std::array<Entry, kSize> entries_{};
};

}  // namespace pycomm::communicator

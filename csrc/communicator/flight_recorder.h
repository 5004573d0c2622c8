// The last operations of a group, for post-mortems. Sixteen bytes each and no clock: a record costs
// two stores, and all of them stay in a corner of the first-level cache.
#pragma once

#include <array>
#include <optional>
#include <vector>

#include "pycomm/communicator.h"

namespace pycomm::communicator {

class FlightRecorder {
 public:
  void begin(std::uint64_t op_number, Signature signature) {
    entries_[op_number % kSize] = {signature, op_number << kStateBits};
  }
  void end(std::uint64_t op_number, StatusCode code) {
    Entry& entry = entries_[op_number % kSize];
    entry.op_and_state = op_number << kStateBits | kFinished | static_cast<std::uint64_t>(code);
  }
  // Of an operation that is recent enough.
  std::optional<Signature> signature_of(std::uint64_t op_number) const {
    const Entry& entry = entries_[op_number % kSize];
    if (entry.op_and_state >> kStateBits != op_number) return std::nullopt;
    return entry.signature;
  }
  // Oldest first.
  std::vector<FlightRecord> snapshot(std::uint64_t last_op_number) const {
    std::vector<FlightRecord> result;
    const std::uint64_t first = last_op_number < kSize ? 1 : last_op_number - kSize + 1;
    for (std::uint64_t op = first; op <= last_op_number; ++op) {
      const Entry& entry = entries_[op % kSize];
      if (entry.op_and_state >> kStateBits != op) continue;
      result.push_back({op, entry.signature, (entry.op_and_state & kFinished) != 0,
                        static_cast<StatusCode>(entry.op_and_state & (kFinished - 1))});
    }
    return result;
  }

 private:
  static constexpr std::uint64_t kSize = 256;
  static constexpr int kStateBits = 8;
  static constexpr std::uint64_t kFinished = 128;
  struct Entry {
    Signature signature = 0;
    std::uint64_t op_and_state = 0;
  };
  std::array<Entry, kSize> entries_{};
};

}  // namespace pycomm::communicator

// The last operations of a group, for post-mortems. Two stores an operation, no clock.
#pragma once

#include <array>
#include <vector>

#include "pycomm/communicator.h"

namespace pycomm::communicator {

class FlightRecorder {
 public:
  void begin(std::uint64_t op_number, Signature signature) {
    records_[op_number % kSize] = {op_number, signature, false, StatusCode::kOk};
  }
  void end(std::uint64_t op_number, StatusCode code) {
    FlightRecord& record = records_[op_number % kSize];
    record.is_finished = true;
    record.code = code;
  }
  // Oldest first.
  std::vector<FlightRecord> snapshot(std::uint64_t last_op_number) const {
    std::vector<FlightRecord> result;
    const std::uint64_t first = last_op_number < kSize ? 1 : last_op_number - kSize + 1;
    for (std::uint64_t op = first; op <= last_op_number; ++op) {
      if (records_[op % kSize].op_number == op) result.push_back(records_[op % kSize]);
    }
    return result;
  }

 private:
  static constexpr std::uint64_t kSize = 1024;
  std::array<FlightRecord, kSize> records_{};
};

}  // namespace pycomm::communicator

// What one direction of a link does to packets: bytes and time in, times of departure out. No I/O,
// no clock; all chance comes from the seed.
#pragma once

#include <array>

#include "base/clock.h"
#include "base/rng.h"
#include "pycomm/relay.h"

namespace pycomm::lab {

struct Fate {
  int num_copies = 0;  // 0: lost
  std::array<base::TimeNs, 2> at{};
  bool is_marked = false;  // Congestion Experienced
};

class LinkModel {
 public:
  explicit LinkModel(std::uint64_t seed) : rng_(seed) {}

  void set_shape(const LinkShape& shape) { shape_ = shape; }
  Fate admit(std::uint32_t bytes, base::TimeNs now);
  LinkReport& report() { return report_; }
  const LinkReport& report() const { return report_; }

 private:
  bool is_chosen(double probability);
  bool is_lost();
  base::TimeNs departure(base::TimeNs sent);

  LinkShape shape_;
  LinkReport report_;
  base::Rng rng_;
  bool is_in_burst_ = false;
  base::TimeNs free_at_ = 0;  // when the rate has sent what came before
  base::TimeNs last_departure_ = 0;
};

}  // namespace pycomm::lab

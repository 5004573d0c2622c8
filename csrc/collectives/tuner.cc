#include "collectives/tuner.h"

#include <algorithm>
#include <bit>
#include <sstream>

namespace pycomm::collectives {
namespace {

constexpr std::uint32_t kTrials = 2;        // of every way, at first
constexpr std::uint32_t kTrialEvery = 100;  // operations of one kind and size, later
constexpr double kSurprise = 1.5;           // times slower than it was
constexpr std::uint32_t kStrikes = 3;
constexpr std::uint32_t kLearntMin = 8;  // before anything is worth writing down
constexpr double kNever = 1e12;          // ns: longer than anything that was timed

std::string row_name(std::size_t row) {
  const std::size_t kind = row % kNumCollectives;
  return std::string(row >= kNumCollectives ? "mapped:" : "") +
         to_string(static_cast<OpKind>(kind));
}

}  // namespace

Tuner::Cell& Tuner::cell(const What& what) {
  const int size_class = std::min<int>(std::bit_width(what.bytes), kClasses - 1);
  const int row = static_cast<int>(what.kind) + (what.is_mapped ? kNumCollectives : 0);
  return cells_[static_cast<std::size_t>(row)][static_cast<std::size_t>(size_class)];
}

Way Tuner::choose(const What& what, const Ways& possible) {
  Cell& here = cell(what);
  std::size_t best = kNumWays, rarest = kNumWays;
  for (std::size_t way = 0; way < kNumWays; ++way) {
    const Arm& arm = here.arms[way];
    if (!possible[way]) continue;
    if (arm.count < kTrials) return static_cast<Way>(way);
    if (best == kNumWays || arm.ns < here.arms[best].ns) best = way;
    if (rarest == kNumWays || arm.count < here.arms[rarest].count) rarest = way;
  }
  if (best == kNumWays) return Way::kStreamedWindow;
  if (++here.since_trial < kTrialEvery) return static_cast<Way>(best);
  here.since_trial = 0;
  return static_cast<Way>(rarest);
}

void Tuner::record(const What& what, Way way, base::TimeNs spent) {
  Cell& here = cell(what);
  Arm& arm = here.arms[static_cast<std::size_t>(way)];
  const auto ns = static_cast<double>(spent);
  ++arm.count;
  if (arm.count <= kTrials) {  // the first one is cold
    arm.ns = arm.count == 1 ? ns : std::min(arm.ns, ns);
    return;
  }
  const bool is_surprise = ns > kSurprise * arm.ns;
  arm.ns += (std::min(ns, 4 * arm.ns) - arm.ns) / 4;
  here.strikes = is_surprise ? here.strikes + 1 : 0;
  if (here.strikes < kStrikes) return;
  // Something has changed: the other ways are asked again, once.
  here.strikes = 0;
  for (Arm& other : here.arms) {
    if (&other != &arm) other.count = std::min(other.count, kTrials - 1);
  }
}

void Tuner::refuse(const What& what, Way way) {
  Arm& arm = cell(what).arms[static_cast<std::size_t>(way)];
  arm = {kNever, std::max(arm.count, kTrials)};
}

std::string Tuner::to_text() const {
  std::ostringstream text;
  for (std::size_t kind = 0; kind < cells_.size(); ++kind) {
    for (std::size_t size_class = 0; size_class < kClasses; ++size_class) {
      const Cell& here = cells_[kind][size_class];
      std::uint32_t total = 0;
      for (const Arm& arm : here.arms) total += arm.count;
      if (total < kLearntMin && !here.is_loaded) continue;
      text << row_name(kind) << ' ' << size_class;
      for (const Arm& arm : here.arms) {
        const bool is_known = arm.count >= kTrials && arm.ns < kNever;
        text << ' ' << (is_known ? static_cast<std::uint64_t>(arm.ns) : 0);
      }
      text << '\n';
    }
  }
  return text.str();
}

void Tuner::from_text(const std::string& text) {
  std::istringstream lines(text);
  std::string name;
  std::uint64_t size_class = 0;
  std::array<std::uint64_t, kNumWays> ns{};
  while (lines >> name >> size_class) {
    for (std::uint64_t& value : ns) lines >> value;
    if (!lines) return;
    std::size_t kind = 0;
    while (kind < cells_.size() && name != row_name(kind)) ++kind;
    const bool is_plausible = std::all_of(ns.begin(), ns.end(), [](std::uint64_t value) {
      return static_cast<double>(value) < kNever;
    });
    if (kind == cells_.size() || size_class >= kClasses || !is_plausible) return;
    cells_[kind][size_class].is_loaded = true;
    for (std::size_t way = 0; way < ns.size(); ++way) {
      if (ns[way] == 0) continue;
      cells_[kind][size_class].arms[way] = {static_cast<double>(ns[way]), kTrials};
    }
  }
}

// Measured on one machine, in both of its states: a line that another processor's cache holds is
// slow to write, unless the two share that cache; the kernel's one copy wins for parts from 64 KiB
// to 1 MiB where everyone gives as much as it takes, and loses where small pages or memory itself
// are the limit.
Way Tuner::first_guess(OpKind kind, std::uint64_t bytes, bool is_crowded) {
  const bool is_symmetric = kind == OpKind::kAllGather || kind == OpKind::kAllToAll;
  if (is_symmetric && bytes >= 64 * 1024 && bytes < 1024 * 1024) return Way::kPull;
  return is_crowded ? Way::kCachedWindow : Way::kStreamedWindow;
}

}  // namespace pycomm::collectives

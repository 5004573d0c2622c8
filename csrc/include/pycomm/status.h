// Errors by value. The core never throws; every fallible call returns a Status or a Result<T>.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>
#include <variant>

namespace pycomm {

// Index of a process inside its group, 0 <= rank < world_size. kNoRank where none applies.
using Rank = std::int32_t;
inline constexpr Rank kNoRank = -1;

enum class StatusCode : std::uint8_t {
  kOk,
  kInvalidUsage,  // the caller's fault: arguments, mismatched operations, unequal configuration
  kSystem,        // the operating system refused: sockets, memory, descriptors
  kTimeout,       // a deadline passed
  kPeerLost,      // a peer died or left; rank() names it
  kAborted,       // the group was shut down or failed earlier
  kInternal,      // a bug here, or a peer that breaks the protocol
};

const char* to_string(StatusCode code);

// Ok is one null pointer: no allocation, and a move of eight bytes. Copies share the text.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(const Status& other) : rep_(other.rep_) { retain(); }
  Status(Status&& other) noexcept : rep_(std::exchange(other.rep_, nullptr)) {}
  Status& operator=(Status other) noexcept {
    std::swap(rep_, other.rep_);
    return *this;
  }
  ~Status() {
    if (rep_ != nullptr) release();
  }
  static Status error(StatusCode code, std::string message, Rank rank = kNoRank);

  bool is_ok() const { return rep_ == nullptr; }
  StatusCode code() const { return rep_ ? rep_->code : StatusCode::kOk; }
  // The rank at fault where one is known, in the numbering of the group that reports.
  Rank rank() const { return rep_ ? rep_->rank : kNoRank; }
  const std::string& message() const;
  std::string to_string() const;

 private:
  struct Rep {
    std::atomic<int> num_owners;
    StatusCode code;
    Rank rank;
    std::string message;
  };
  void retain() const {
    if (rep_ != nullptr) rep_->num_owners.fetch_add(1, std::memory_order_relaxed);
  }
  void release();

  Rep* rep_ = nullptr;
};

// Either a value or the Status that says why there is none.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}
  Result(Status status) : value_(std::move(status)) {}

  bool is_ok() const { return std::holds_alternative<T>(value_); }
  Status status() const { return is_ok() ? Status() : std::get<Status>(value_); }
  T& value() & { return std::get<T>(value_); }
  const T& value() const& { return std::get<T>(value_); }
  T&& value() && { return std::get<T>(std::move(value_)); }

 private:
  std::variant<T, Status> value_;
};

#define PYCOMM_RETURN_IF_ERROR(expression)              \
  do {                                                  \
    ::pycomm::Status pycomm_status_ = (expression);     \
    if (!pycomm_status_.is_ok()) return pycomm_status_; \
  } while (false)

}  // namespace pycomm

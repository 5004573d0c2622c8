#include "work.h"

#include <c10/util/Exception.h>

#include <atomic>

#include "python/signals.h"

namespace pycomm::torch_backend {
namespace {

constexpr std::int64_t kLookForSignalsMs = 50;

}  // namespace

std::exception_ptr to_exception(const Status& status) {
  if (status.is_ok()) return nullptr;
  return std::make_exception_ptr(c10::DistBackendError(
      {__func__, "pycomm", static_cast<std::uint32_t>(__LINE__)}, "pycomm: " + status.to_string()));
}

CommunicationTime& communication_time() {
  static CommunicationTime time;
  return time;
}

// With a title c10d makes a record for the profiler, whether there is one or not.
DoneWork::DoneWork(int rank, c10d::OpType type, const char* title,
                   const std::vector<at::Tensor>& inputs, std::vector<at::Tensor> outputs)
    : c10d::Work(rank, type, at::hasCallbacks() ? title : nullptr,
                 at::hasCallbacks() ? std::optional(inputs) : std::nullopt),
      outputs_(std::move(outputs)) {}

void DoneWork::set_done(const Status& status) {
  error_ = to_exception(status);
  finish(error_);
}

bool DoneWork::wait(std::chrono::milliseconds) {
  if (error_) std::rethrow_exception(error_);
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> DoneWork::getFuture() {
  auto future =
      c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  if (error_) {
    future->setError(error_);
  } else {
    future->markCompleted(at::IValue(outputs_));
  }
  return future;
}

Work::Work(int rank, c10d::OpType type, const char* title, std::vector<at::Tensor> inputs,
           std::vector<at::Tensor> outputs)
    : c10d::Work(rank, type, title, std::move(inputs)), outputs_(std::move(outputs)) {}

void Work::add_operations(const std::vector<std::shared_ptr<Operation>>& operations,
                          const std::function<void()>& finish_up) {
  operations_.insert(operations_.end(), operations.begin(), operations.end());
  if (finish_up) finish_ups_.push_back(finish_up);
  if (!operations_.empty()) op_number_ = operations_.front()->op_number();
}

int Work::sourceRank() const {
  TORCH_CHECK(operations_.size() == 1 && operations_[0]->source() != kNoRank,
              "pycomm: only a receive that is done has a source rank");
  return operations_[0]->source();
}

void Work::finish_with(const Status& status, std::exception_ptr error) {
  if (!error) error = to_exception(status);
  {
    std::lock_guard lock(status_mutex_);
    error_ = error;
  }
  finish(error);
}

bool Work::is_done() const {
  for (const auto& operation : operations_) {
    if (!operation->is_done()) return false;
  }
  return true;
}

void Work::settle() {
  std::call_once(settled_, [this] {
    Status status;
    std::int64_t longest_ns = 0;
    for (const auto& operation : operations_) {
      if (status.is_ok()) status = operation->status();
      longest_ns = std::max(longest_ns, operation->duration_ns());
    }
    if (counts_communication) communication_time().operations_ns += longest_ns;
    std::exception_ptr error;
    if (status.is_ok() && !finish_ups_.empty()) {
      // As the issuing thread would have done it, whichever thread this is.
      at::ThreadLocalStateGuard guard(issuer_);
      try {
        for (const auto& finish_up : finish_ups_) finish_up();
      } catch (...) {
        error = std::current_exception();
      }
    }
    finish_ups_.clear();
    finish_with(status, error);
  });
}

bool Work::isCompleted() {
  if (!is_done()) return false;
  settle();
  return true;
}

bool Work::isSuccess() const { return is_done() && exception() == nullptr; }

std::exception_ptr Work::exception() const {
  if (!is_done()) return nullptr;
  const_cast<Work*>(this)->settle();
  std::lock_guard lock(status_mutex_);
  return error_;
}

bool Work::wait(std::chrono::milliseconds timeout) {
  const WaitTimer timer;
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  for (const auto& operation : operations_) {
    while (!operation->is_done()) {
      std::int64_t slice = kLookForSignalsMs;
      if (timeout != kNoTimeout) {
        const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
            deadline - std::chrono::steady_clock::now());
        TORCH_CHECK_WITH(DistBackendError, left.count() > 0,
                         "pycomm: timeout: wait() gave up after ", timeout.count(), " ms");
        slice = std::min<std::int64_t>(slice, left.count());
      }
      const Status status = operation->wait(slice);
      if (!operation->is_done() && status.code() != StatusCode::kTimeout) {
        std::rethrow_exception(to_exception(status));  // not this process's operation
      }
      if (!operation->is_done() && python::has_signal()) python::rethrow_signal();
    }
  }
  if (const std::exception_ptr error = exception()) std::rethrow_exception(error);
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> Work::getFuture() {
  bool is_new = false;
  {
    std::lock_guard lock(status_mutex_);
    if (!future_) {
      future_ =
          c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
      is_new = true;
    }
  }
  if (!is_new) return future_;
  if (is_done()) {
    complete_future();
    return future_;
  }
  auto self = c10::intrusive_ptr<Work>::reclaim_copy(this);
  auto left = std::make_shared<std::atomic<std::size_t>>(operations_.size());
  for (const auto& operation : operations_) {
    operation->on_done([self, left] {
      if (left->fetch_sub(1) == 1) self->complete_future();
    });
  }
  return future_;
}

void Work::complete_future() {
  if (const std::exception_ptr error = exception()) {
    future_->setError(error);
  } else {
    future_->markCompleted(at::IValue(outputs_));
  }
}

}  // namespace pycomm::torch_backend

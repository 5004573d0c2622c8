// c10d::Work over an operation of the core.
#pragma once

#include <ATen/ThreadLocalState.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "pycomm/communicator.h"

namespace pycomm::torch_backend {

// Turns a status into the exception that Python sees: torch.distributed.DistBackendError.
std::exception_ptr to_exception(const Status& status);

// What communication took in this process, and how much of it a caller waited for.
struct CommunicationTime {
  std::atomic<std::int64_t> operations_ns{0};  // from each operation's start to its end
  std::atomic<std::int64_t> waited_ns{0};      // inside blocking calls and wait()
};
CommunicationTime& communication_time();
// Whether this thread's operations count; a thread that writes checkpoints has its own time.
inline thread_local bool counts_communication = true;

// Adds the time of a scope.
class WaitTimer {
 public:
  ~WaitTimer() {
    if (counts_communication) communication_time().waited_ns += spent_ns();
  }
  std::int64_t spent_ns() const {
    return std::chrono::nanoseconds(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// An operation that has ended before anyone sees it. Half of the cost of a small operation is what
// there is to wait for: here that is nothing.
class DoneWork final : public c10d::Work {
 public:
  DoneWork(int rank, c10d::OpType type, const char* title, const std::vector<at::Tensor>& inputs,
           std::vector<at::Tensor> outputs);

  void set_done(const Status& status);

  bool isCompleted() override { return true; }
  bool isSuccess() const override { return error_ == nullptr; }
  std::exception_ptr exception() const override { return error_; }
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  std::vector<at::Tensor> outputs_;
  std::exception_ptr error_;
};

// One operation, or several that were issued together.
// Thread: any. What finishes up runs once, after success and before anyone sees it: copies that
// results still need. Futures complete on the core's completion thread, never on its progress
// thread.
class Work final : public c10d::Work {
 public:
  Work(int rank, c10d::OpType type, const char* title, std::vector<at::Tensor> inputs,
       std::vector<at::Tensor> outputs);

  // Before anyone waits: what it stands for.
  void add_operations(const std::vector<std::shared_ptr<Operation>>& operations,
                      const std::function<void()>& finish_up);
  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  std::vector<at::Tensor> result() override { return outputs_; }
  int sourceRank() const override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  std::uint64_t getSequencenumber() const override { return op_number_; }

 private:
  bool is_done() const;
  void settle();  // once all operations are done; any thread
  void finish_with(const Status& status, std::exception_ptr error);
  void complete_future();

  std::vector<std::shared_ptr<Operation>> operations_;
  std::vector<std::function<void()>> finish_ups_;
  std::vector<at::Tensor> outputs_;
  std::uint64_t op_number_ = 0;
  at::ThreadLocalState issuer_;  // grad and inference mode for finish_ups_
  std::once_flag settled_;
  mutable std::mutex status_mutex_;
  std::exception_ptr error_;  // set by settling
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace pycomm::torch_backend

// The torch.distributed backend "pycomm": c10d's calls over a Communicator.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "tensors.h"
#include "work.h"

namespace pycomm::torch_backend {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using TensorLists = std::vector<Tensors>;

class ProcessGroup final : public c10d::Backend {
 public:
  ProcessGroup(std::unique_ptr<Communicator> communicator, const std::string& group_name,
               std::chrono::milliseconds timeout);
  ~ProcessGroup() override;

  const std::string getBackendName() const override { return "pycomm"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs,
                  const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& to,
                        std::vector<std::int64_t>& from,
                        const c10d::AllToAllOptions& options) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

  // Operations between the two are issued at once and waited for together.
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override;

  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                    const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& options) override;

  // In memory that the host's other ranks can reach, where there is some.
  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;

  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;

  // Errors: the group has been shut down. Held for as long as a call runs, whatever a signal
  // handler does to the group meanwhile.
  std::shared_ptr<Communicator> communicator();

 private:
  // How c10d and its profiler call an operation.
  struct Title {
    c10d::OpType type;
    const char* text;
  };
  WorkPtr issue(Title title, std::vector<Staged> staged, Tensors inputs, Tensors outputs,
                std::chrono::milliseconds timeout);
  WorkPtr run(Title title, Staged& staged, Tensors inputs, Tensors outputs,
              std::chrono::milliseconds timeout);
  void prepare(Staged& staged, std::chrono::milliseconds timeout) const;
  c10::intrusive_ptr<Work> coalescing_here();
  WorkPtr issue_one(Title title, Staged staged, Tensors inputs, Tensors outputs,
                    std::chrono::milliseconds timeout, bool is_async);
  Staged stage_all_gather(const at::Tensor& output, const at::Tensor& input) const;
  Staged stage_reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                              const c10d::ReduceOp& op) const;
  void check_rank_list(const Tensors& list, const char* operation) const;
  WorkPtr point_to_point(OpKind kind, Title title, Tensors& tensors, int peer, int tag);

  std::shared_ptr<Communicator> take_communicator(bool leaves);

  std::mutex communicator_mutex_;
  std::shared_ptr<Communicator> communicator_;
  c10::intrusive_ptr<Options> options_;
  std::atomic<bool> is_coalescing_{false};
  std::mutex coalescing_mutex_;
  c10::intrusive_ptr<Work> coalesced_;  // while coalescing
  std::thread::id coalescing_thread_;
};

// Collective. `store` is used during the call only. Throws c10::DistBackendError.
c10::intrusive_ptr<ProcessGroup> create_process_group(const c10::intrusive_ptr<c10d::Store>& store,
                                                      int rank, int size,
                                                      std::chrono::milliseconds timeout,
                                                      const std::string& group_name,
                                                      const std::vector<int>& global_ranks);

}  // namespace pycomm::torch_backend

// The torch.distributed backend "pycomm": c10d's calls over a Communicator.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "work.h"

namespace pycomm::torch_backend {

class ProcessGroup final : public c10d::Backend {
 public:
  ProcessGroup(std::unique_ptr<Communicator> communicator, const std::string& group_name,
               std::chrono::milliseconds timeout);
  ~ProcessGroup() override;

  const std::string getBackendName() const override { return "pycomm"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override;

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(
      std::vector<at::Tensor>& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                           std::vector<at::Tensor>& inputs,
                                           const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override;

  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override;

  void abort() override;
  void shutdown() override;

  // Errors: the group has been shut down. Held for as long as a call runs, whatever a signal
  // handler does to the group meanwhile.
  std::shared_ptr<Communicator> communicator();

 private:
  using Copies = std::function<void()>;
  c10::intrusive_ptr<c10d::Work> issue(const c10::intrusive_ptr<Work>& work,
                                       std::vector<OpRequest> requests, bool is_async,
                                       Copies finish_up);

  std::shared_ptr<Communicator> communicator_;
  c10::intrusive_ptr<Options> options_;
};

// Collective. `store` is used during the call only. Throws c10::DistBackendError.
c10::intrusive_ptr<ProcessGroup> create_process_group(const c10::intrusive_ptr<c10d::Store>& store,
                                                      int rank, int size,
                                                      std::chrono::milliseconds timeout,
                                                      const std::string& group_name);

}  // namespace pycomm::torch_backend

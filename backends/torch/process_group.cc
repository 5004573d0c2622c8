#include "process_group.h"

#include "tensors.h"

namespace pycomm::torch_backend {
namespace {

// c10d's store as the core's.
class StoreAdapter final : public Store {
 public:
  explicit StoreAdapter(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  Status set(const std::string& key, const std::string& value) override {
    return guarded([&] { store_->set(key, value); });
  }

  Result<std::string> get(const std::string& key, std::int64_t timeout_ms) override {
    std::string value;
    Status status = guarded([&] {
      store_->wait({key}, std::chrono::milliseconds(timeout_ms));
      value = store_->get_to_str(key);
    });
    if (!status.is_ok()) return status;
    return value;
  }

 private:
  template <class F>
  static Status guarded(F&& body) {
    try {
      body();
      return Status();
    } catch (const std::exception& error) {
      const std::string text = error.what();
      const bool is_timeout =
          text.find("imeout") != std::string::npos || text.find("timed out") != std::string::npos;
      return Status::error(is_timeout ? StatusCode::kTimeout : StatusCode::kSystem,
                           "the rendezvous store: " + text.substr(0, text.find('\n')));
    }
  }

  c10::intrusive_ptr<c10d::Store> store_;
};

std::int64_t timeout_ms(std::chrono::milliseconds timeout) {
  return timeout == c10d::kUnsetTimeout ? -1 : timeout.count();
}

void check_one(const std::vector<at::Tensor>& tensors, const char* operation) {
  TORCH_CHECK(tensors.size() == 1, "pycomm: ", operation, " takes one tensor per rank");
  check_movable(tensors[0], operation);
}

OpRequest reducing_request(const at::Tensor& flat, const c10d::ReduceOp& op) {
  OpRequest request = moving_request(OpKind::kAllReduce, flat);
  request.dtype = reducible_dtype(flat.scalar_type());
  request.op = reduce_op(op);
  return request;
}

}  // namespace

ProcessGroup::ProcessGroup(std::unique_ptr<Communicator> communicator,
                           const std::string& group_name, std::chrono::milliseconds timeout)
    : Backend(communicator->rank(), communicator->world_size()),
      communicator_(std::move(communicator)),
      options_(c10::make_intrusive<Options>("pycomm", timeout)) {
  options_->group_name = group_name;
  communicator_->set_interrupt_check(has_python_signal);
}

// Joins threads that never need the GIL; a Python caller may hold it.
ProcessGroup::~ProcessGroup() = default;

std::shared_ptr<Communicator> ProcessGroup::communicator() {
  TORCH_CHECK(communicator_, "pycomm: group '", options_->group_name, "' has been shut down");
  return communicator_;
}

void ProcessGroup::setTimeout(std::chrono::milliseconds timeout) {
  options_->timeout = timeout;
  communicator()->set_timeout_ms(timeout.count());
}

c10::intrusive_ptr<c10d::Work> ProcessGroup::issue(const c10::intrusive_ptr<Work>& work,
                                                   std::vector<OpRequest> requests, bool is_async,
                                                   Copies finish_up) {
  const std::shared_ptr<Communicator> communicator = this->communicator();
  if (!is_async && requests.size() == 1) {
    const Status status = communicator->run(requests[0]);
    rethrow_python_signal();
    if (status.is_ok() && finish_up) finish_up();
    work->set_done(status);
    return work;
  }
  std::vector<std::shared_ptr<Operation>> operations;
  operations.reserve(requests.size());
  for (const OpRequest& request : requests) operations.push_back(communicator->start(request));
  work->set_operations(std::move(operations), std::move(finish_up));
  return work;
}

c10::intrusive_ptr<c10d::Work> ProcessGroup::allreduce(std::vector<at::Tensor>& tensors,
                                                       const c10d::AllreduceOptions& options) {
  check_one(tensors, "all_reduce");
  const at::Tensor& tensor = tensors[0];
  auto work = c10::make_intrusive<Work>(getRank(), c10d::OpType::ALLREDUCE, "pycomm:all_reduce",
                                        tensors, tensors);
  const at::Tensor flat = tensor.contiguous();
  OpRequest request = reducing_request(flat, options.reduceOp);
  request.timeout_ms = timeout_ms(options.timeout);
  Copies finish_up;
  if (!flat.is_same(tensor)) finish_up = [flat, tensor] { tensor.copy_(flat); };
  if (options.asyncOp) request.keepalive = keep({flat});
  return issue(work, {request}, options.asyncOp, std::move(finish_up));
}

c10::intrusive_ptr<c10d::Work> ProcessGroup::allreduce_coalesced(
    std::vector<at::Tensor>& tensors, const c10d::AllreduceCoalescedOptions& options) {
  auto work = c10::make_intrusive<Work>(getRank(), c10d::OpType::ALLREDUCE_COALESCED,
                                        "pycomm:all_reduce", tensors, tensors);
  std::vector<OpRequest> requests;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;
  for (const at::Tensor& tensor : tensors) {
    check_movable(tensor, "all_reduce");
    const at::Tensor flat = tensor.contiguous();
    if (!flat.is_same(tensor)) copies.emplace_back(tensor, flat);
    requests.push_back(reducing_request(flat, options.reduceOp));
    requests.back().timeout_ms = timeout_ms(options.timeout);
    requests.back().keepalive = keep({flat});
  }
  return issue(work, std::move(requests), true, [copies] {
    for (const auto& [tensor, flat] : copies) tensor.copy_(flat);
  });
}

c10::intrusive_ptr<c10d::Work> ProcessGroup::broadcast(std::vector<at::Tensor>& tensors,
                                                       const c10d::BroadcastOptions& options) {
  check_one(tensors, "broadcast");
  const at::Tensor& tensor = tensors[0];
  auto work = c10::make_intrusive<Work>(getRank(), c10d::OpType::BROADCAST, "pycomm:broadcast",
                                        tensors, tensors);
  const at::Tensor flat = tensor.contiguous();
  OpRequest request = moving_request(OpKind::kBroadcast, flat);
  request.root = static_cast<Rank>(options.rootRank);
  request.timeout_ms = timeout_ms(options.timeout);
  Copies finish_up;
  if (!flat.is_same(tensor)) finish_up = [flat, tensor] { tensor.copy_(flat); };
  if (options.asyncOp) request.keepalive = keep({flat});
  return issue(work, {request}, options.asyncOp, std::move(finish_up));
}

c10::intrusive_ptr<c10d::Work> ProcessGroup::_allgather_base(
    at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  check_movable(input, "all_gather");
  check_movable(output, "all_gather");
  TORCH_CHECK(
      output.numel() == input.numel() * getSize() && output.scalar_type() == input.scalar_type(),
      "pycomm: all_gather of ", input.numel(), " elements of ", input.scalar_type(), " from ",
      getSize(), " ranks needs an output of as many, not ", output.numel(), " of ",
      output.scalar_type());
  auto work =
      c10::make_intrusive<Work>(getRank(), c10d::OpType::_ALLGATHER_BASE, "pycomm:all_gather",
                                std::vector<at::Tensor>{input}, std::vector<at::Tensor>{output});
  const at::Tensor flat_input = input.contiguous();
  const at::Tensor flat_output =
      output.is_contiguous() ? output : at::empty_like(output, at::MemoryFormat::Contiguous);
  OpRequest request = moving_request(OpKind::kAllGather, flat_input);
  request.output = data_of(flat_output);
  request.timeout_ms = timeout_ms(options.timeout);
  if (options.asyncOp) request.keepalive = keep({flat_input, flat_output});
  Copies finish_up;
  if (!flat_output.is_same(output)) {
    finish_up = [flat_output, output] { output.copy_(flat_output); };
  }
  return issue(work, {request}, options.asyncOp, std::move(finish_up));
}

c10::intrusive_ptr<c10d::Work> ProcessGroup::allgather(
    std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
    const c10d::AllgatherOptions& options) {
  check_one(inputs, "all_gather");
  TORCH_CHECK(outputs.size() == 1 && outputs[0].size() == static_cast<std::size_t>(getSize()),
              "pycomm: all_gather needs one output tensor per rank");
  const at::Tensor flat_input = inputs[0].contiguous();
  for (const at::Tensor& output : outputs[0]) {
    check_movable(output, "all_gather");
    TORCH_CHECK(
        output.numel() == flat_input.numel() && output.scalar_type() == flat_input.scalar_type(),
        "pycomm: all_gather needs outputs like its input (for uneven sizes, pad)");
  }
  auto work = c10::make_intrusive<Work>(getRank(), c10d::OpType::ALLGATHER, "pycomm:all_gather",
                                        inputs, outputs[0]);
  const at::Tensor gathered = at::empty({getSize(), flat_input.numel()}, flat_input.options());
  OpRequest request = moving_request(OpKind::kAllGather, flat_input);
  request.output = data_of(gathered);
  request.timeout_ms = timeout_ms(options.timeout);
  if (options.asyncOp) request.keepalive = keep({flat_input, gathered});
  return issue(work, {request}, options.asyncOp, [gathered, targets = outputs[0]] {
    for (std::size_t r = 0; r < targets.size(); ++r) {
      targets[r].copy_(gathered[static_cast<std::int64_t>(r)].view_as(targets[r]));
    }
  });
}

c10::intrusive_ptr<c10d::Work> ProcessGroup::barrier(const c10d::BarrierOptions& options) {
  auto work = c10::make_intrusive<Work>(getRank(), c10d::OpType::BARRIER, "pycomm:barrier",
                                        std::vector<at::Tensor>{}, std::vector<at::Tensor>{});
  OpRequest request;
  request.timeout_ms = timeout_ms(options.timeout);
  return issue(work, {request}, options.asyncOp, {});
}

std::uint64_t ProcessGroup::getSequenceNumberForGroup() {
  const auto records = communicator()->flight_records();
  return records.empty() ? 0 : records.back().op_number;
}

void ProcessGroup::abort() {
  if (communicator_) communicator_->abort("aborted by this process");
}

void ProcessGroup::shutdown() {
  // Someone is inside a call, perhaps below us on this stack: it ends, and lets go.
  if (communicator_.use_count() > 1) communicator_->abort("the group was shut down");
  communicator_.reset();
}

c10::intrusive_ptr<ProcessGroup> create_process_group(const c10::intrusive_ptr<c10d::Store>& store,
                                                      int rank, int size,
                                                      std::chrono::milliseconds timeout,
                                                      const std::string& group_name) {
  std::string complaint;
  pycomm::Options options = pycomm::Options::from_environment(&complaint);
  TORCH_CHECK(complaint.empty(), "pycomm: ", complaint);
  options.timeout_ms = timeout.count();
  options.group_name = group_name.empty() ? "default" : group_name;
  options.framework = std::string("torch ") + PYCOMM_TORCH_VERSION;
  StoreAdapter adapter(store);
  auto communicator = Communicator::create(adapter, rank, size, options);
  if (!communicator.is_ok()) std::rethrow_exception(to_exception(communicator.status()));
  return c10::make_intrusive<ProcessGroup>(std::move(communicator).value(), options.group_name,
                                           timeout);
}

}  // namespace pycomm::torch_backend

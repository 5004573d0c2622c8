// c10d's operations, each a request of the core.
#include "process_group.h"

namespace pycomm::torch_backend {
namespace {

using c10d::OpType;

const at::Tensor& only(const Tensors& tensors, const char* operation) {
  TORCH_CHECK(tensors.size() == 1, "pycomm: ", operation, " takes one tensor per rank, not ",
              tensors.size());
  return tensors[0];
}

void check_equal_sizes(const Tensors& a, std::size_t b, const char* operation) {
  TORCH_CHECK(!a.empty() && a.size() == b, "pycomm: ", operation,
              " needs as many outputs as inputs");
}

Staged stage_all_reduce(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  Staged staged(OpKind::kAllReduce, "all_reduce");
  staged.part(tensor);
  staged.reduction(op);
  staged.in_place(tensor);
  return staged;
}

// Elements for each rank, from rows of a tensor's first dimension.
std::vector<std::uint64_t> to_counts(const std::vector<std::int64_t>& rows,
                                     const at::Tensor& tensor, int size) {
  TORCH_CHECK(tensor.dim() > 0, "pycomm: all_to_all splits the first dimension, and there is none");
  const std::uint64_t num_rows = static_cast<std::uint64_t>(tensor.size(0));
  const std::uint64_t per_row = num_rows == 0 ? 0 : Staged::units(tensor) / num_rows;
  std::vector<std::uint64_t> counts(static_cast<std::size_t>(size), 0);
  if (rows.empty()) {
    TORCH_CHECK(num_rows % counts.size() == 0, "pycomm: all_to_all of ", num_rows,
                " rows does not divide among ", size, " ranks; give split sizes");
    std::fill(counts.begin(), counts.end(), num_rows / counts.size() * per_row);
    return counts;
  }
  TORCH_CHECK(rows.size() == counts.size(), "pycomm: all_to_all needs a split size for each of ",
              size, " ranks, not ", rows.size());
  std::uint64_t sum = 0;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    TORCH_CHECK(rows[r] >= 0, "pycomm: a split size is negative");
    sum += static_cast<std::uint64_t>(rows[r]);
    counts[r] = static_cast<std::uint64_t>(rows[r]) * per_row;
  }
  TORCH_CHECK(sum == num_rows, "pycomm: the split sizes add up to ", sum, ", but the tensor has ",
              num_rows, " rows");
  return counts;
}

}  // namespace

// ---------------------------------------------------------------- reductions

WorkPtr ProcessGroup::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  if (tensors.size() == 1 && tensors[0].is_sparse()) return allreduce_sparse(tensors, options);
  return issue_one({OpType::ALLREDUCE, "pycomm:all_reduce"},
                   stage_all_reduce(only(tensors, "all_reduce"), options.reduceOp), tensors,
                   tensors, options.timeout, options.asyncOp);
}

WorkPtr ProcessGroup::allreduce_coalesced(Tensors& tensors,
                                          const c10d::AllreduceCoalescedOptions& options) {
  std::vector<Staged> staged;
  for (const at::Tensor& tensor : tensors) {
    staged.push_back(stage_all_reduce(tensor, options.reduceOp));
  }
  return issue({OpType::ALLREDUCE_COALESCED, "pycomm:all_reduce"}, std::move(staged), tensors,
               tensors, options.timeout);
}

WorkPtr ProcessGroup::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const at::Tensor& tensor = only(tensors, "reduce");
  Staged staged(OpKind::kReduce, "reduce");
  staged.part(tensor);
  staged.reduction(options.reduceOp);
  staged.request.root = static_cast<Rank>(options.rootRank);
  if (options.rootRank == getRank()) {
    staged.in_place(tensor);
  } else {
    staged.input(tensor);
  }
  return issue_one({OpType::REDUCE, "pycomm:reduce"}, std::move(staged), tensors, tensors,
                   options.timeout, options.asyncOp);
}

Staged ProcessGroup::stage_reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                          const c10d::ReduceOp& op) const {
  TORCH_CHECK(
      input.numel() == output.numel() * getSize() && input.scalar_type() == output.scalar_type(),
      "pycomm: reduce_scatter to ", output.numel(), " elements of ", output.scalar_type(), " on ",
      getSize(), " ranks needs an input of as many for each, not ", input.numel(), " of ",
      input.scalar_type());
  Staged staged(OpKind::kReduceScatter, "reduce_scatter");
  staged.part(output);
  staged.reduction(op);
  staged.input(input);
  staged.output(output);
  return staged;
}

WorkPtr ProcessGroup::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                           const c10d::ReduceScatterOptions& options) {
  return issue_one({OpType::_REDUCE_SCATTER_BASE, "pycomm:reduce_scatter"},
                   stage_reduce_scatter(output, input, options.reduceOp), {input}, {output},
                   options.timeout, options.asyncOp);
}

WorkPtr ProcessGroup::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                     const c10d::ReduceScatterOptions& options) {
  const at::Tensor& output = only(outputs, "reduce_scatter");
  TORCH_CHECK(inputs.size() == 1, "pycomm: reduce_scatter takes one list of inputs");
  check_rank_list(inputs[0], "reduce_scatter");
  check_alike(inputs[0], output, "reduce_scatter");
  Staged staged(OpKind::kReduceScatter, "reduce_scatter");
  staged.part(output);
  staged.reduction(options.reduceOp);
  staged.input(inputs[0]);
  staged.output(output);
  return issue_one({OpType::REDUCE_SCATTER, "pycomm:reduce_scatter"}, std::move(staged), inputs[0],
                   outputs, options.timeout, options.asyncOp);
}

WorkPtr ProcessGroup::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                      const c10d::ReduceScatterOptions& options) {
  check_equal_sizes(outputs, inputs.size(), "reduce_scatter");
  std::vector<Staged> staged;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    staged.push_back(stage_reduce_scatter(outputs[i], inputs[i], options.reduceOp));
  }
  return issue({OpType::REDUCE_SCATTER_TENSOR_COALESCED, "pycomm:reduce_scatter"},
               std::move(staged), inputs, outputs, options.timeout);
}

// ---------------------------------------------------------------- moves

WorkPtr ProcessGroup::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const at::Tensor& tensor = only(tensors, "broadcast");
  Staged staged(OpKind::kBroadcast, "broadcast");
  staged.part(tensor);
  staged.request.root = static_cast<Rank>(options.rootRank);
  staged.in_place(tensor);
  return issue_one({OpType::BROADCAST, "pycomm:broadcast"}, std::move(staged), tensors, tensors,
                   options.timeout, options.asyncOp);
}

Staged ProcessGroup::stage_all_gather(const at::Tensor& output, const at::Tensor& input) const {
  TORCH_CHECK(
      output.numel() == input.numel() * getSize() && output.scalar_type() == input.scalar_type(),
      "pycomm: all_gather of ", input.numel(), " elements of ", input.scalar_type(), " from ",
      getSize(), " ranks needs an output of as many, not ", output.numel(), " of ",
      output.scalar_type());
  Staged staged(OpKind::kAllGather, "all_gather");
  staged.part(input);
  staged.input(input);
  staged.output(output);
  return staged;
}

WorkPtr ProcessGroup::_allgather_base(at::Tensor& output, at::Tensor& input,
                                      const c10d::AllgatherOptions& options) {
  return issue_one({OpType::_ALLGATHER_BASE, "pycomm:all_gather"}, stage_all_gather(output, input),
                   {input}, {output}, options.timeout, options.asyncOp);
}

WorkPtr ProcessGroup::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                      const c10d::AllgatherOptions& options) {
  check_equal_sizes(outputs, inputs.size(), "all_gather");
  std::vector<Staged> staged;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    staged.push_back(stage_all_gather(outputs[i], inputs[i]));
  }
  return issue({OpType::COALESCED, "pycomm:all_gather"}, std::move(staged), inputs, outputs,
               options.timeout);
}

void ProcessGroup::check_rank_list(const Tensors& list, const char* operation) const {
  TORCH_CHECK(list.size() == static_cast<std::size_t>(getSize()), "pycomm: ", operation,
              " needs one tensor for each of ", getSize(), " ranks, not ", list.size());
}

WorkPtr ProcessGroup::allgather(TensorLists& outputs, Tensors& inputs,
                                const c10d::AllgatherOptions& options) {
  const at::Tensor& input = only(inputs, "all_gather");
  TORCH_CHECK(outputs.size() == 1, "pycomm: all_gather takes one list of outputs");
  check_rank_list(outputs[0], "all_gather");
  check_alike(outputs[0], input, "all_gather");
  Staged staged(OpKind::kAllGather, "all_gather");
  staged.part(input);
  staged.input(input);
  staged.output(outputs[0]);
  return issue_one({OpType::ALLGATHER, "pycomm:all_gather"}, std::move(staged), inputs, outputs[0],
                   options.timeout, options.asyncOp);
}

// Here outputs[r][i] is what rank r gives as inputs[i].
WorkPtr ProcessGroup::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) {
  std::vector<Staged> staged;
  Tensors all;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    Tensors parts;
    for (const Tensors& of_rank : outputs) {
      check_equal_sizes(inputs, of_rank.size(), "all_gather");
      parts.push_back(of_rank[i]);
    }
    check_rank_list(parts, "all_gather");
    check_alike(parts, inputs[i], "all_gather");
    Staged& one = staged.emplace_back(OpKind::kAllGather, "all_gather");
    one.part(inputs[i]);
    one.input(inputs[i]);
    one.output(parts);
    all.insert(all.end(), parts.begin(), parts.end());
  }
  return issue({OpType::ALLGATHER_COALESCED, "pycomm:all_gather"}, std::move(staged), inputs, all,
               options.timeout);
}

WorkPtr ProcessGroup::gather(TensorLists& outputs, Tensors& inputs,
                             const c10d::GatherOptions& options) {
  const at::Tensor& input = only(inputs, "gather");
  Staged staged(OpKind::kGather, "gather");
  staged.part(input);
  staged.request.root = static_cast<Rank>(options.rootRank);
  staged.input(input);
  const bool is_root = options.rootRank == getRank();
  TORCH_CHECK(outputs.size() == (is_root ? 1 : 0),
              "pycomm: gather takes a list of outputs on the root, and on no other rank");
  if (is_root) {
    check_rank_list(outputs[0], "gather");
    check_alike(outputs[0], input, "gather");
    staged.output(outputs[0]);
  }
  return issue_one({OpType::GATHER, "pycomm:gather"}, std::move(staged), inputs,
                   is_root ? outputs[0] : Tensors{}, options.timeout, options.asyncOp);
}

WorkPtr ProcessGroup::scatter(Tensors& outputs, TensorLists& inputs,
                              const c10d::ScatterOptions& options) {
  const at::Tensor& output = only(outputs, "scatter");
  Staged staged(OpKind::kScatter, "scatter");
  staged.part(output);
  staged.request.root = static_cast<Rank>(options.rootRank);
  const bool is_root = options.rootRank == getRank();
  TORCH_CHECK(inputs.size() == (is_root ? 1 : 0),
              "pycomm: scatter takes a list of inputs on the root, and on no other rank");
  if (is_root) {
    check_rank_list(inputs[0], "scatter");
    check_alike(inputs[0], output, "scatter");
    staged.input(inputs[0]);
  }
  staged.output(output);
  return issue_one({OpType::SCATTER, "pycomm:scatter"}, std::move(staged),
                   is_root ? inputs[0] : Tensors{}, outputs, options.timeout, options.asyncOp);
}

WorkPtr ProcessGroup::alltoall_base(at::Tensor& output, at::Tensor& input,
                                    std::vector<std::int64_t>& to, std::vector<std::int64_t>& from,
                                    const c10d::AllToAllOptions& options) {
  TORCH_CHECK(input.scalar_type() == output.scalar_type(),
              "pycomm: all_to_all needs one dtype, not ", input.scalar_type(), " and ",
              output.scalar_type());
  // c10d gives output splits first: rows that come from each rank.
  const auto splits = std::make_shared<Splits>(
      Splits{to_counts(from, input, getSize()), to_counts(to, output, getSize())});
  const bool is_even = to.empty() && from.empty();
  Staged staged(is_even ? OpKind::kAllToAll : OpKind::kAllToAllUneven, "all_to_all");
  staged.part(input);
  staged.request.count = is_even ? splits->send[0] : 0;
  if (!is_even) staged.request.splits = splits;
  staged.input(input);
  staged.output(output);
  return issue_one({OpType::ALLTOALL_BASE, "pycomm:all_to_all"}, std::move(staged), {input},
                   {output}, options.timeout, options.asyncOp);
}

WorkPtr ProcessGroup::alltoall(Tensors& outputs, Tensors& inputs,
                               const c10d::AllToAllOptions& options) {
  check_rank_list(outputs, "all_to_all");
  check_rank_list(inputs, "all_to_all");
  const auto splits = std::make_shared<Splits>();
  for (std::size_t r = 0; r < inputs.size(); ++r) {
    TORCH_CHECK(inputs[r].scalar_type() == inputs[0].scalar_type() &&
                    outputs[r].scalar_type() == inputs[0].scalar_type(),
                "pycomm: all_to_all needs tensors of one dtype");
    splits->send.push_back(Staged::units(inputs[r]));
    splits->recv.push_back(Staged::units(outputs[r]));
  }
  Staged staged(OpKind::kAllToAllUneven, "all_to_all");
  staged.part(inputs[0]);
  staged.request.count = 0;
  staged.request.splits = splits;
  staged.input(inputs);
  staged.output(outputs);
  return issue_one({OpType::ALLTOALL, "pycomm:all_to_all"}, std::move(staged), inputs, outputs,
                   options.timeout, options.asyncOp);
}

// ---------------------------------------------------------------- barriers

WorkPtr ProcessGroup::barrier(const c10d::BarrierOptions& options) {
  return issue_one({OpType::BARRIER, "pycomm:barrier"}, Staged(OpKind::kBarrier, "barrier"), {}, {},
                   options.timeout, options.asyncOp);
}

// Rank 0 hears from everyone, then everyone from rank 0: who is missing is known by name. It always
// waits for all of them to the end, so `wait_all_ranks` changes nothing.
void ProcessGroup::monitoredBarrier(const c10d::BarrierOptions& options, bool) {
  at::Tensor here = at::zeros({1}, at::kByte);
  const Title title{OpType::BARRIER, "pycomm:monitored_barrier"};
  Staged gather(OpKind::kGather, "monitored_barrier");
  gather.part(here);
  gather.input(here);
  gather.output(at::empty({getSize()}, at::kByte));
  Staged barrier(OpKind::kBarrier, "monitored_barrier");
  try {
    for (Staged* one : {&gather, &barrier}) {
      issue_one(title, std::move(*one), {}, {}, options.timeout, false)->wait();
    }
  } catch (const c10::DistBackendError& error) {
    if (getError() != c10d::ErrorType::TIMEOUT) throw;
    std::rethrow_exception(to_exception(
        Status::error(StatusCode::kTimeout,
                      "Rank " + std::to_string(getRank()) +
                          " timed out in monitoredBarrier: " + error.what_without_backtrace())));
  }
}

// ---------------------------------------------------------------- sends and receives

WorkPtr ProcessGroup::point_to_point(OpKind kind, Title title, Tensors& tensors, int peer,
                                     int tag) {
  const at::Tensor& tensor = only(tensors, title.text);
  TORCH_CHECK(tag >= 0, "pycomm: a tag is not negative");
  Staged staged(kind, title.text);
  staged.part(tensor);
  staged.request.root = peer;
  staged.request.tag = static_cast<std::uint32_t>(tag);
  if (kind == OpKind::kSend) {
    staged.input(tensor);
  } else {
    staged.output(tensor);
  }
  return issue_one(title, std::move(staged), tensors, tensors, c10d::kUnsetTimeout, true);
}

WorkPtr ProcessGroup::send(Tensors& tensors, int to, int tag) {
  return point_to_point(OpKind::kSend, {OpType::SEND, "pycomm:send"}, tensors, to, tag);
}

WorkPtr ProcessGroup::recv(Tensors& tensors, int from, int tag) {
  return point_to_point(OpKind::kRecv, {OpType::RECV, "pycomm:recv"}, tensors, from, tag);
}

WorkPtr ProcessGroup::recvAnysource(Tensors& tensors, int tag) {
  return point_to_point(OpKind::kRecv, {OpType::RECVANYSOURCE, "pycomm:recvAnySource"}, tensors,
                        kAnySource, tag);
}

// ---------------------------------------------------------------- sparse

// Ranks gather how much each holds, then everyone's indices and values, padded to the most; their
// coalesced sum is the result. Runs in the caller: it is three operations in a row.
WorkPtr ProcessGroup::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) {
  const at::Tensor& tensor = only(tensors, "all_reduce");
  TORCH_CHECK(tensor.is_sparse() && tensor.device().is_cpu(),
              "pycomm: all_reduce of sparse tensors takes COO tensors on the CPU");
  TORCH_CHECK(
      options.reduceOp.op_ == c10d::ReduceOp::SUM || options.reduceOp.op_ == c10d::ReduceOp::AVG,
      "pycomm: sparse tensors can be summed or averaged only; call .to_dense() first");
  const at::Tensor mine = tensor.coalesce();
  const auto gather = [&](const at::Tensor& part) {
    auto sizes = part.sizes().vec();
    sizes[0] *= getSize();
    at::Tensor all = at::empty(sizes, part.options());
    issue_one({OpType::_ALLREDUCE_SPARSE, "pycomm:sparse_all_reduce"}, stage_all_gather(all, part),
              {part}, {all}, options.timeout, false)
        ->wait();
    return all;
  };
  // The numbers that must agree travel with those that may differ.
  std::vector<std::int64_t> shape = mine.sizes().vec();
  shape.push_back(mine.sparse_dim());
  shape.push_back(mine._nnz());
  const at::Tensor shapes = gather(at::tensor(shape, at::kLong)).view({getSize(), -1});
  const at::Tensor same = shapes.narrow(1, 0, shapes.size(1) - 1);
  TORCH_CHECK((same == same[0]).all().item<bool>(),
              "pycomm: ranks call sparse all_reduce on tensors of different shapes");
  const at::Tensor counts = shapes.select(1, -1);
  const std::int64_t most = counts.max().item<std::int64_t>();
  const auto padded = [&](const at::Tensor& part) {  // rows are elements
    auto sizes = part.sizes().vec();
    sizes[0] = most;
    at::Tensor result = at::zeros(sizes, part.options());
    result.narrow(0, 0, part.size(0)).copy_(part);
    return result;
  };
  at::Tensor sum = at::zeros_like(mine);
  if (most > 0) {
    const at::Tensor indices = gather(padded(mine.indices().t().contiguous()));
    const at::Tensor values = gather(padded(mine.values().contiguous()));
    for (int r = 0; r < getSize(); ++r) {
      const std::int64_t count = counts[r].item<std::int64_t>();
      sum = sum + at::sparse_coo_tensor(indices.narrow(0, r * most, count).t().contiguous(),
                                        values.narrow(0, r * most, count), mine.sizes());
    }
  }
  if (options.reduceOp.op_ == c10d::ReduceOp::AVG) sum = sum / getSize();
  at::Tensor result = tensor;
  result.copy_(sum.coalesce());
  auto work = c10::make_intrusive<DoneWork>(getRank(), OpType::_ALLREDUCE_SPARSE,
                                            "pycomm:sparse_all_reduce", tensors, tensors);
  work->set_done(Status());
  return work;
}

}  // namespace pycomm::torch_backend

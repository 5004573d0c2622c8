#include "collectives/flat_exchange.h"

#include <cstring>

#include "base/check.h"
#include "kernels/reduce.h"

namespace pycomm::collectives {

FlatExchange::FlatExchange(Rank rank, const std::vector<std::byte*>& areas) : rank_(rank) {
  PYCOMM_CHECK(areas.size() <= kLocalWorldMax);
  for (std::byte* area : areas) areas_.push_back(reinterpret_cast<const FlatArea*>(area));
  mine_ = reinterpret_cast<FlatArea*>(areas[static_cast<std::size_t>(rank)]);
}

void FlatExchange::publish(Signature signature, const void* payload, std::uint64_t bytes) {
  const std::uint64_t sequence = this->sequence() + 1;
  sequence_.store(sequence, std::memory_order_relaxed);
  FlatSlot& slot = mine_->slots[sequence & 1];
  slot.signature = signature;
  slot.bytes = bytes;
  if (bytes == 8) {
    std::memcpy(slot.small, payload, 8);
  } else if (bytes > 0) {
    std::memcpy(bytes <= FlatSlot::kSmallBytes ? slot.small : slot.large, payload, bytes);
  }
  // No fence: it would wait for the cache line before the peers' lines may be asked for. Sleepers
  // pay instead (platform::process_barrier).
  slot.sequence.store(sequence, std::memory_order_release);
  std::atomic_signal_fence(std::memory_order_seq_cst);
}

void publish_request(FlatExchange& flat, const OpRequest& request, Signature signature) {
  const bool is_silent =
      request.kind == OpKind::kBarrier ||
      ((request.kind == OpKind::kBroadcast || request.kind == OpKind::kScatter) &&
       request.root != flat.rank());
  if (is_silent) return flat.publish(signature, nullptr, 0);
  const std::uint64_t bytes = flat_bytes(request.kind, request.bytes(), flat.world_size());
  if (!request.input_parts) return flat.publish(signature, request.input, bytes);
  std::byte row[kFlatBytesMax];
  for (Rank p = 0; p < flat.world_size() && bytes > 0; ++p) {
    const auto index = static_cast<std::uint64_t>(p);
    std::memcpy(row + index * request.bytes(), request.input_at(index * request.count),
                request.bytes());
  }
  flat.publish(signature, row, bytes);
}

std::string describe_difference(std::uint64_t op, Rank rank, Signature mine, Rank peer,
                                Signature theirs) {
  return "ranks disagree on operation " + std::to_string(op) + ": rank " + std::to_string(rank) +
         " calls " + describe_signature(mine) + ", rank " + std::to_string(peer) + " calls " +
         describe_signature(theirs);
}

Status compare_signatures(const FlatExchange& flat, Signature signature, std::uint64_t op) {
  for (Rank p = 0; p < flat.world_size(); ++p) {
    const Signature theirs = flat.signature(p);
    if (__builtin_expect(theirs != signature, 0)) {
      return Status::error(StatusCode::kInvalidUsage,
                           describe_difference(op, flat.rank(), signature, p, theirs), p);
    }
  }
  return Status();
}

Status collect_result(const FlatExchange& flat, const OpRequest& request, Signature signature,
                      std::uint64_t op_number) {
  PYCOMM_RETURN_IF_ERROR(compare_signatures(flat, signature, op_number));
  const std::uint64_t bytes = request.bytes();
  const int n = flat.world_size();
  if (bytes == 0) return Status();
  const std::uint64_t published = flat_bytes(request.kind, bytes, n);
  const std::uint64_t mine = static_cast<std::uint64_t>(flat.rank()) * bytes;
  const bool is_root = request.root == flat.rank();
  const auto gather = [&](std::uint64_t offset) {
    for (Rank p = 0; p < n; ++p) {
      std::memcpy(request.output_at(static_cast<std::uint64_t>(p) * request.count),
                  flat.payload(p, published) + offset, bytes);
    }
  };
  const auto fold = [&](std::uint64_t offset) {
    const std::byte* inputs[kLocalWorldMax];
    for (Rank p = 0; p < n; ++p) inputs[p] = flat.payload(p, published) + offset;
    std::byte* output = request.output;
    kernels::fold({&output, 1}, inputs, n, request.count, request.dtype, request.op,
                  request.scale(n));
  };
  switch (request.kind) {
    case OpKind::kBroadcast:
      if (!is_root || request.output != request.input) {
        std::memcpy(request.output, flat.payload(request.root, bytes), bytes);
      }
      break;
    case OpKind::kScatter:
      std::memcpy(request.output, flat.payload(request.root, published) + mine, bytes);
      break;
    case OpKind::kGather:
      if (is_root) gather(0);
      break;
    case OpKind::kAllGather: gather(0); break;
    case OpKind::kAllToAll: gather(mine); break;
    case OpKind::kAllReduce: fold(0); break;
    case OpKind::kReduce:
      if (is_root) fold(0);
      break;
    case OpKind::kReduceScatter: fold(mine); break;
    default: break;
  }
  return Status();
}

}  // namespace pycomm::collectives

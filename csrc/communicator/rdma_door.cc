#include "communicator/rdma_door.h"

#include <algorithm>
#include <atomic>

#include "base/log.h"
#include "platform/system.h"
#include "transport/rdma/factory.h"
#include "transport/tcp/factory.h"

namespace pycomm::communicator {
namespace {

using platform::real_clock;
using transport::rdma::Establishment;

constexpr std::int64_t kNapNs = 50'000;

}  // namespace

bool RdmaDoor::wants(const std::string& process_id) const {
  const Rank peer = gathering_.rank_of(process_id);
  return peer != kNoRank &&
         choose_path(gathering_.mine(), gathering_.hellos[static_cast<std::size_t>(peer)],
                     gathering_.options.transport) == Path::kRdma;
}

Status RdmaDoor::begin(std::unique_ptr<platform::ByteStream> stream,
                       const std::string& process_id) {
  transport::rdma::LinkOptions options;
  options.eager_bytes_max = gathering_.options.eager_bytes_max;
  options.rdma = gathering_.options.rdma;
  auto link = transport::rdma::make_link(std::move(stream), gathering_.engine.rdma(), options,
                                         real_clock().now_ns());
  if (!link.is_ok()) return link.status();
  openings_.push_back({process_id, std::move(link).value()});
  return Status();
}

// The opening is over.
Status RdmaDoor::conclude(Opening& opening) {
  if (const Status& failure = opening.link->failure(); !failure.is_ok()) return failure;
  if (transport::rdma::establishment(*opening.link) == Establishment::kDone) {
    static std::atomic<bool> said{false};
    if (gathering_.options.tls.is_set() && !said.exchange(true)) {
      base::log(base::LogLevel::kWarn, base::Subsystem::kNet,
                "PYCOMM_TRANSPORT=rdma: tensors cross the fabric unencrypted, in spite of "
                "PYCOMM_CERTS");
    }
    return gathering_.engine.add_link(opening.process_id, std::move(opening.link));
  }
  std::string reason;
  auto stream = transport::rdma::take_stream(*opening.link, &reason);
  const Rank peer = gathering_.rank_of(opening.process_id);
  const std::string who = "RDMA to rank " + std::to_string(peer) + ": " + reason;
  if (gathering_.options.transport == TransportChoice::kRdma) {
    return Status::error(StatusCode::kInvalidUsage, "PYCOMM_TRANSPORT=rdma, but " + who, peer);
  }
  base::log(base::LogLevel::kWarn, base::Subsystem::kNet, who + "; TCP is used instead");
  transport::tcp::LinkOptions options;
  options.eager_bytes_max = gathering_.options.eager_bytes_max;
  return gathering_.engine.add_link(opening.process_id,
                                    transport::tcp::make_link(std::move(stream), options));
}

bool RdmaDoor::advance() {
  bool moved = false;
  for (std::size_t i = 0; i < openings_.size();) {
    Opening& opening = openings_[i];
    moved |= opening.link->progress();
    const bool is_over = !opening.link->failure().is_ok() ||
                         transport::rdma::establishment(*opening.link) != Establishment::kUnderWay;
    if (opening.is_awaited || !is_over) {
      ++i;
      continue;
    }
    moved = true;
    const Status status = conclude(opening);
    if (!status.is_ok()) {
      base::log(base::LogLevel::kWarn, base::Subsystem::kNet,
                "a connection was given up: " + status.message());
    }
    openings_.erase(openings_.begin() + static_cast<std::ptrdiff_t>(i));
  }
  return moved;
}

Status RdmaDoor::await(const std::string& process_id) {
  const auto find = [&] {
    return std::find_if(openings_.begin(), openings_.end(),
                        [&](const Opening& opening) { return opening.process_id == process_id; });
  };
  auto it = find();
  if (it == openings_.end()) return Status();
  it->is_awaited = true;
  for (;;) {
    const bool moved = advance();
    it = find();
    if (!it->link->failure().is_ok() ||
        transport::rdma::establishment(*it->link) != Establishment::kUnderWay) {
      break;
    }
    if (real_clock().now_ns() > gathering_.deadline) {
      return Status::error(StatusCode::kTimeout, "RDMA did not come about in time");
    }
    PYCOMM_RETURN_IF_ERROR(gathering_.meeting.check_now_and_then());
    if (!moved) platform::sleep_ns(kNapNs);
  }
  Opening opening = std::move(*it);
  openings_.erase(it);
  return conclude(opening);
}

}  // namespace pycomm::communicator

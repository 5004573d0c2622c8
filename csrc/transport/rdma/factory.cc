#include "transport/rdma/factory.h"

#include <string_view>

#include "transport/rdma/link.h"

namespace pycomm::transport::rdma {

Result<std::shared_ptr<CoreLink>> make_link(std::unique_ptr<platform::ByteStream> stream,
                                            const Place& place, const LinkOptions& options,
                                            base::TimeNs now) {
  auto poller = platform::Poller::create();
  if (!poller.is_ok()) return poller.status();
  PYCOMM_RETURN_IF_ERROR(poller.value().add(stream->fd(), 0));
  return std::shared_ptr<CoreLink>(std::make_shared<RdmaLink>(std::move(stream), place, options,
                                                              std::move(poller).value(), now));
}

Establishment establishment(const CoreLink& link) {
  return static_cast<const RdmaLink&>(link).establishment();
}

std::unique_ptr<platform::ByteStream> take_stream(CoreLink& link, std::string* reason) {
  return static_cast<RdmaLink&>(link).take_stream(reason);
}

std::optional<RdmaStats> link_stats(const CoreLink& link) {
  if (std::string_view(link.transport()) != "rdma") return std::nullopt;
  return static_cast<const RdmaLink&>(link).stats();
}

}  // namespace pycomm::transport::rdma

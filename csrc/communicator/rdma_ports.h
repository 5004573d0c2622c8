// Which RDMA ports this process uses, and what is in the way of the others.
#pragma once

#include <string>
#include <vector>

#include "platform/verbs.h"

namespace pycomm::communicator {

// What PYCOMM_IB_HCA lets through and can be used, in the order in which it names them; *refusal
// tells of the rest.
std::vector<platform::verbs::PortInfo> usable_ports(
    const std::vector<platform::verbs::PortInfo>& ports, const RdmaOptions& options,
    std::string* refusal);

}  // namespace pycomm::communicator

// How a stream between two processes becomes an RDMA link: both have ports, and both speak over the
// stream until messages get through. Where none does, the stream goes on as a TCP link. Thread: the
// one that creates the group.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "communicator/bootstrap.h"
#include "communicator/engine.h"

namespace pycomm::communicator {

class RdmaDoor {
 public:
  explicit RdmaDoor(const Gathering& gathering) : gathering_(gathering) {}

  // Whether a stream to that process is to become an RDMA link.
  bool wants(const std::string& process_id) const;
  // Takes a stream on which membership is done. Errors: kSystem (descriptors).
  Status begin(std::unique_ptr<platform::ByteStream> stream, const std::string& process_id);
  // Until the engine has a link to that process. Errors: kTimeout; kInvalidUsage where RDMA alone
  // would do, with the reason.
  Status await(const std::string& process_id);
  // Moves on what has begun; true if anything moved.
  bool advance();

 private:
  struct Opening {
    std::string process_id;
    std::shared_ptr<transport::CoreLink> link;
    bool is_awaited = false;
  };
  Status conclude(Opening& opening);

  const Gathering& gathering_;
  std::vector<Opening> openings_;
};

}  // namespace pycomm::communicator

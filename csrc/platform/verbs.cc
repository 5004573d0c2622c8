#include "platform/verbs.h"

#include <iterator>

namespace pycomm::platform::verbs {

std::string describe_status(int status) {
  static constexpr const char* kNames[][2] = {
      {"IBV_WC_SUCCESS", "success"},
      {"IBV_WC_LOC_LEN_ERR", "local length error"},
      {"IBV_WC_LOC_QP_OP_ERR", "local queue pair operation error"},
      {"IBV_WC_LOC_EEC_OP_ERR", "local end-to-end context error"},
      {"IBV_WC_LOC_PROT_ERR", "local protection error"},
      {"IBV_WC_WR_FLUSH_ERR", "flushed"},
      {"IBV_WC_MW_BIND_ERR", "memory window bind error"},
      {"IBV_WC_BAD_RESP_ERR", "bad response"},
      {"IBV_WC_LOC_ACCESS_ERR", "local access error"},
      {"IBV_WC_REM_INV_REQ_ERR", "remote invalid request"},
      {"IBV_WC_REM_ACCESS_ERR", "remote access error"},
      {"IBV_WC_REM_OP_ERR", "remote operation error"},
      {"IBV_WC_RETRY_EXC_ERR", "no acknowledgement after all retries"},
      {"IBV_WC_RNR_RETRY_EXC_ERR", "receiver not ready after all retries"},
  };
  const bool is_known = status >= 0 && status < static_cast<int>(std::size(kNames));
  if (!is_known) return "verbs status " + std::to_string(status);
  return std::string(kNames[status][0]) + " (" + kNames[status][1] + ")";
}

}  // namespace pycomm::platform::verbs

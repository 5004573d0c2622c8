// libibverbs, loaded at run time. What the system's verbs.h defines inline goes through the
// driver's own table and needs no symbol; the rest is here.
#pragma once

#if __has_include(<infiniband/verbs.h>)
#define PYCOMM_HAVE_VERBS_HEADERS 1
#include <infiniband/verbs.h>
#undef ibv_reg_mr
#undef ibv_query_port
#else
#define PYCOMM_HAVE_VERBS_HEADERS 0
#endif

#if PYCOMM_HAVE_VERBS_HEADERS

#include <memory>
#include <string>
#include <vector>

#include "platform/verbs.h"

namespace pycomm::platform::verbs {

struct Symbols {
  decltype(&ibv_get_device_list) get_device_list;
  decltype(&ibv_free_device_list) free_device_list;
  decltype(&ibv_get_device_name) get_device_name;
  decltype(&ibv_open_device) open_device;
  decltype(&ibv_close_device) close_device;
  decltype(&ibv_query_device) query_device;
  int (*query_port)(ibv_context*, std::uint8_t, ibv_port_attr*);  // the compatible symbol
  decltype(&ibv_query_gid) query_gid;
  decltype(&ibv_query_pkey) query_pkey;
  decltype(&ibv_alloc_pd) alloc_pd;
  decltype(&ibv_dealloc_pd) dealloc_pd;
  decltype(&ibv_reg_mr) reg_mr;
  decltype(&ibv_dereg_mr) dereg_mr;
  decltype(&ibv_create_comp_channel) create_comp_channel;
  decltype(&ibv_destroy_comp_channel) destroy_comp_channel;
  decltype(&ibv_create_cq) create_cq;
  decltype(&ibv_destroy_cq) destroy_cq;
  decltype(&ibv_get_cq_event) get_cq_event;
  decltype(&ibv_ack_cq_events) ack_cq_events;
  decltype(&ibv_create_qp) create_qp;
  decltype(&ibv_modify_qp) modify_qp;
  decltype(&ibv_destroy_qp) destroy_qp;
  decltype(&ibv_fork_init) fork_init;
  // Null before rdma-core 34.
  ibv_mr* (*reg_dmabuf_mr)(ibv_pd*, std::uint64_t offset, std::size_t length, std::uint64_t iova,
                           int fd, int access);
};

// What is missing, or nothing.
const std::string& missing_symbol();
// Requires missing_symbol().empty().
const Symbols& ib();
// A call's failure; `error` 0 means errno.
Status refused(const char* call, int error);

struct OpenDevice {
  ibv_context* context = nullptr;
  OpenDevice() = default;
  OpenDevice(const OpenDevice&) = delete;
  OpenDevice& operator=(const OpenDevice&) = delete;
  ~OpenDevice() {
    if (context != nullptr) ib().close_device(context);
  }
};

// ibverbs_ports.cc
std::vector<PortInfo> find_ports(const RdmaOptions& options, std::string* refusal);
// Null, with errno, if it cannot be opened.
std::shared_ptr<OpenDevice> open_device(const std::string& name);

}  // namespace pycomm::platform::verbs

#endif  // PYCOMM_HAVE_VERBS_HEADERS

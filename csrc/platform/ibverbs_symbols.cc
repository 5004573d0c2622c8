#include "platform/ibverbs_symbols.h"

#if PYCOMM_HAVE_VERBS_HEADERS

#include <dlfcn.h>

#include <cerrno>

#include "platform/system.h"

namespace pycomm::platform::verbs {
namespace {

static_assert(kStatusFlushed == IBV_WC_WR_FLUSH_ERR);
static_assert(kStatusRemoteAccess == IBV_WC_REM_ACCESS_ERR);
static_assert(kStatusRetryExceeded == IBV_WC_RETRY_EXC_ERR);

struct Loaded {
  Symbols symbols{};
  std::string missing;

  Loaded() {
    void* library = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      missing = "libibverbs.so.1 is not installed (libibverbs1, or rdma-core)";
      return;
    }
    const auto bind = [&](const char* name, auto* out) {
      *out = reinterpret_cast<std::remove_pointer_t<decltype(out)>>(dlsym(library, name));
      if (*out == nullptr && missing.empty()) missing = std::string(name) + " is not in libibverbs";
    };
    bind("ibv_get_device_list", &symbols.get_device_list);
    bind("ibv_free_device_list", &symbols.free_device_list);
    bind("ibv_get_device_name", &symbols.get_device_name);
    bind("ibv_open_device", &symbols.open_device);
    bind("ibv_close_device", &symbols.close_device);
    bind("ibv_query_device", &symbols.query_device);
    bind("ibv_query_port", &symbols.query_port);
    bind("ibv_query_gid", &symbols.query_gid);
    bind("ibv_query_pkey", &symbols.query_pkey);
    bind("ibv_alloc_pd", &symbols.alloc_pd);
    bind("ibv_dealloc_pd", &symbols.dealloc_pd);
    bind("ibv_reg_mr", &symbols.reg_mr);
    bind("ibv_dereg_mr", &symbols.dereg_mr);
    bind("ibv_create_comp_channel", &symbols.create_comp_channel);
    bind("ibv_destroy_comp_channel", &symbols.destroy_comp_channel);
    bind("ibv_create_cq", &symbols.create_cq);
    bind("ibv_destroy_cq", &symbols.destroy_cq);
    bind("ibv_get_cq_event", &symbols.get_cq_event);
    bind("ibv_ack_cq_events", &symbols.ack_cq_events);
    bind("ibv_create_qp", &symbols.create_qp);
    bind("ibv_modify_qp", &symbols.modify_qp);
    bind("ibv_destroy_qp", &symbols.destroy_qp);
    bind("ibv_fork_init", &symbols.fork_init);
    symbols.reg_dmabuf_mr =
        reinterpret_cast<decltype(symbols.reg_dmabuf_mr)>(dlsym(library, "ibv_reg_dmabuf_mr"));
    // Pinned pages must stay the parent's after a fork. Where the kernel copies them (5.12 and
    // later), that is all; elsewhere the library takes them away from children.
    constexpr int kUnneeded = 2;
    using State = int (*)();
    const auto state = reinterpret_cast<State>(dlsym(library, "ibv_is_fork_initialized"));
    const bool is_unneeded = state != nullptr && state() == kUnneeded;
    if (missing.empty() && !is_unneeded) symbols.fork_init();
  }
};

const Loaded& loaded() {
  static const auto* once = new Loaded;
  return *once;
}

}  // namespace

const std::string& missing_symbol() { return loaded().missing; }
const Symbols& ib() { return loaded().symbols; }

Status refused(const char* call, int error) {
  errno = error != 0 ? error : errno;
  return system_error(call);
}

}  // namespace pycomm::platform::verbs

#endif  // PYCOMM_HAVE_VERBS_HEADERS

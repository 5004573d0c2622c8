// libibverbs behind the interface of verbs.h. The library is loaded at run time, so that one
// binary serves with and without it; what verbs.h (the system's) defines inline goes through the
// driver's own table and needs no symbol.
#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "platform/device_memory.h"
#include "platform/system.h"
#include "platform/verbs.h"

#if __has_include(<infiniband/verbs.h>)
#define PYCOMM_HAVE_VERBS_HEADERS 1
#include <infiniband/verbs.h>
#undef ibv_reg_mr
#undef ibv_query_port
#else
#define PYCOMM_HAVE_VERBS_HEADERS 0
#endif

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

#if !PYCOMM_HAVE_VERBS_HEADERS

Library* ibverbs(std::string* refusal) {
  *refusal =
      "this build had no libibverbs headers (install libibverbs-dev or rdma-core-devel, "
      "then build again)";
  return nullptr;
}

#else

namespace {

static_assert(kStatusFlushed == IBV_WC_WR_FLUSH_ERR);
static_assert(kStatusRemoteAccess == IBV_WC_REM_ACCESS_ERR);
static_assert(kStatusRetryExceeded == IBV_WC_RETRY_EXC_ERR);

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
    symbols.reg_dmabuf_mr = reinterpret_cast<decltype(symbols.reg_dmabuf_mr)>(
        dlsym(library, "ibv_reg_dmabuf_mr"));
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
const Symbols& ib() { return loaded().symbols; }

Status refused(const char* what, int error) {
  errno = error != 0 ? error : errno;
  return system_error(what);
}

unsigned flag_if(unsigned condition, unsigned flag) { return condition != 0 ? flag : 0; }

class IbMemory final : public Memory {
 public:
  explicit IbMemory(ibv_mr* memory) : memory_(memory) {}
  ~IbMemory() override { ib().dereg_mr(memory_); }
  std::uint32_t local_key() const override { return memory_->lkey; }
  std::uint32_t remote_key() const override { return memory_->rkey; }

 private:
  ibv_mr* const memory_;
};

struct OpenDevice {
  ibv_context* context = nullptr;
  ~OpenDevice() {
    if (context != nullptr) ib().close_device(context);
  }
};

class IbPair final : public Pair {
 public:
  IbPair(ibv_qp* pair, const PortInfo& port, std::uint32_t inline_bytes_max)
      : pair_(pair),
        port_(port),
        inline_bytes_max_(inline_bytes_max),
        first_psn_(static_cast<std::uint32_t>(random_u64()) & 0xffffff) {}
  ~IbPair() override { ib().destroy_qp(pair_); }

  PairAddress address() const override {
    PairAddress address;
    address.gid = port_.gid;
    address.number = pair_->qp_num;
    address.first_psn = first_psn_;
    address.lid = port_.lid;
    address.mtu_code = port_.mtu_code;
    address.max_reads = static_cast<std::uint8_t>(std::clamp(port_.max_reads, 1, 16));
    address.is_ethernet = port_.is_ethernet;
    return address;
  }
  std::uint32_t inline_bytes_max() const override { return inline_bytes_max_; }

  Status initialise() {
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_INIT;
    attr.port_num = port_.number;
    attr.pkey_index = port_.pkey_index;
    attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
                           (port_.has_atomics ? IBV_ACCESS_REMOTE_ATOMIC : 0);
    const int error = ib().modify_qp(
        pair_, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
    return error == 0 ? Status() : refused("ibv_modify_qp to INIT", error);
  }

  Status connect(const PairAddress& theirs, const RdmaOptions& options) override {
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_RTR;
    attr.path_mtu = static_cast<ibv_mtu>(std::min(port_.mtu_code, theirs.mtu_code));
    attr.dest_qp_num = theirs.number;
    attr.rq_psn = theirs.first_psn;
    attr.max_dest_rd_atomic = static_cast<std::uint8_t>(std::clamp(port_.max_reads, 1, 16));
    attr.min_rnr_timer = 12;  // 0.64 ms
    attr.ah_attr.dlid = theirs.lid;
    attr.ah_attr.sl = options.service_level;
    attr.ah_attr.port_num = port_.number;
    if (port_.is_ethernet || options.gid_index >= 0) {
      attr.ah_attr.is_global = 1;
      std::memcpy(&attr.ah_attr.grh.dgid, theirs.gid.data(), theirs.gid.size());
      attr.ah_attr.grh.sgid_index = static_cast<std::uint8_t>(port_.gid_index);
      attr.ah_attr.grh.hop_limit = 255;
      attr.ah_attr.grh.traffic_class = options.traffic_class;
    }
    int error =
        ib().modify_qp(pair_, &attr,
                       IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                           IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
    if (error != 0) return refused("ibv_modify_qp to RTR", error);
    attr = {};
    attr.qp_state = IBV_QPS_RTS;
    attr.timeout = options.timeout_code;
    attr.retry_cnt = options.num_retries;
    attr.rnr_retry = 7;  // for ever: credits see to it that it does not come to that
    attr.sq_psn = first_psn_;
    attr.max_rd_atomic = std::max<std::uint8_t>(
        1, std::min<std::uint8_t>(theirs.max_reads,
                                  static_cast<std::uint8_t>(std::clamp(port_.max_reads, 1, 16))));
    error = ib().modify_qp(pair_, &attr,
                           IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                               IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
    return error == 0 ? Status() : refused("ibv_modify_qp to RTS", error);
  }

  // The kernel resolves the other end's address on Ethernet.
  bool may_block() const override { return port_.is_ethernet; }

  void break_off() override {
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_ERR;
    ib().modify_qp(pair_, &attr, IBV_QP_STATE);
  }

  Status post_receive(std::uint64_t id, void* data, std::uint32_t bytes,
                      std::uint32_t local_key) override {
    ibv_sge piece{reinterpret_cast<std::uint64_t>(data), bytes, local_key};
    ibv_recv_wr request{};
    request.wr_id = id;
    request.sg_list = &piece;
    request.num_sge = 1;
    ibv_recv_wr* bad = nullptr;
    const int error = ibv_post_recv(pair_, &request, &bad);
    return error == 0 ? Status() : refused("ibv_post_recv", error);
  }

  Status post_send(const SendRequest& request) override {
    using Kind = SendRequest::Kind;
    ibv_sge piece{reinterpret_cast<std::uint64_t>(request.data), request.bytes, request.local_key};
    ibv_send_wr raw{};
    raw.wr_id = request.id;
    raw.sg_list = &piece;
    raw.num_sge = request.bytes > 0 ? 1 : 0;
    raw.send_flags = flag_if(request.is_signalled, IBV_SEND_SIGNALED) |
                     flag_if(request.is_inline, IBV_SEND_INLINE);
    raw.wr.rdma.remote_addr = request.remote_address;
    raw.wr.rdma.rkey = request.remote_key;
    switch (request.kind) {
      case Kind::kSend: raw.opcode = IBV_WR_SEND; break;
      case Kind::kWrite: raw.opcode = IBV_WR_RDMA_WRITE; break;
      case Kind::kRead: raw.opcode = IBV_WR_RDMA_READ; break;
      case Kind::kWriteWithImmediate:
        raw.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
        raw.imm_data = htobe32(request.immediate);
        break;
      case Kind::kFetchAdd:
        raw.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
        raw.wr.atomic.remote_addr = request.remote_address;
        raw.wr.atomic.rkey = request.remote_key;
        raw.wr.atomic.compare_add = request.add;
        raw.wr.atomic.swap = 0;
        break;
    }
    ibv_send_wr* bad = nullptr;
    const int error = ibv_post_send(pair_, &raw, &bad);
    return error == 0 ? Status() : refused("ibv_post_send", error);
  }

 private:
  ibv_qp* const pair_;
  const PortInfo port_;
  const std::uint32_t inline_bytes_max_;
  const std::uint32_t first_psn_;
};

class IbDomain final : public Domain {
 public:
  IbDomain(std::shared_ptr<OpenDevice> device, PortInfo port)
      : device_(std::move(device)), port_(std::move(port)) {}
  ~IbDomain() override {
    if (queue_ != nullptr) {
      if (num_unacked_ > 0) ib().ack_cq_events(queue_, num_unacked_);
      ib().destroy_cq(queue_);
    }
    if (channel_ != nullptr) ib().destroy_comp_channel(channel_);
    if (domain_ != nullptr) ib().dealloc_pd(domain_);
  }

  Status open(int num_completions) {
    domain_ = ib().alloc_pd(device_->context);
    if (domain_ == nullptr) return refused("ibv_alloc_pd", 0);
    channel_ = ib().create_comp_channel(device_->context);
    if (channel_ == nullptr) return refused("ibv_create_comp_channel", 0);
    const int flags = fcntl(channel_->fd, F_GETFL);
    if (flags < 0 || fcntl(channel_->fd, F_SETFL, flags | O_NONBLOCK) != 0) {
      return system_error("fcntl of a completion channel");
    }
    queue_ = ib().create_cq(device_->context, num_completions, nullptr, channel_, 0);
    return queue_ != nullptr ? Status() : refused("ibv_create_cq", 0);
  }

  const PortInfo& port() const override { return port_; }
  int fd() const override { return channel_->fd; }

  Result<std::unique_ptr<Memory>> register_device_memory(const void* data, std::uint64_t bytes,
                                                         unsigned access) override {
    std::string why = "ibv_reg_dmabuf_mr is not in this libibverbs";
    if (ib().reg_dmabuf_mr != nullptr) {
      auto exported = export_dma_buf(data, bytes);
      if (exported.is_ok()) {
        ibv_mr* memory = ib().reg_dmabuf_mr(domain_, exported.value().offset, bytes,
                                            reinterpret_cast<std::uint64_t>(data),
                                            exported.value().fd.get(), flags_of(access));
        if (memory != nullptr) return std::unique_ptr<Memory>(new IbMemory(memory));
        why = refused("ibv_reg_dmabuf_mr", 0).message();
      } else {
        why = exported.status().message();
      }
    }
    auto memory = register_memory(data, bytes, access);
    if (memory.is_ok()) return memory;
    return Status::error(StatusCode::kSystem,
                         why + "; nvidia_peermem: " + memory.status().message());
  }

  Result<std::unique_ptr<Memory>> register_memory(const void* data, std::uint64_t bytes,
                                                  unsigned access) override {
    ibv_mr* memory = ib().reg_mr(domain_, const_cast<void*>(data), bytes, flags_of(access));
    if (memory == nullptr) return refused("ibv_reg_mr", 0);
    return std::unique_ptr<Memory>(new IbMemory(memory));
  }

  Result<std::unique_ptr<Pair>> create_pair(const PairLimits& limits) override {
    ibv_qp* pair = nullptr;
    std::uint32_t inline_bytes_max = 0;
    // What a device takes inline it does not say; it refuses what is too much.
    for (const std::uint32_t inline_bytes : {220u, 64u, 0u}) {
      ibv_qp_init_attr init{};
      init.send_cq = init.recv_cq = queue_;
      init.qp_type = IBV_QPT_RC;
      init.cap = {limits.num_sends, limits.num_receives, 1, 1, inline_bytes};
      pair = ib().create_qp(domain_, &init);
      inline_bytes_max = init.cap.max_inline_data;
      if (pair != nullptr || errno == ENOMEM) break;
    }
    if (pair == nullptr) return refused("ibv_create_qp", 0);
    auto made = std::make_unique<IbPair>(pair, port_, inline_bytes_max);
    if (Status status = made->initialise(); !status.is_ok()) return status;
    return std::unique_ptr<Pair>(std::move(made));
  }

  int poll(Completion* out, int count) override {
    constexpr int kBatch = 32;
    ibv_wc raw[kBatch];
    const int n = ibv_poll_cq(queue_, std::min(count, kBatch), raw);
    for (int i = 0; i < n; ++i) {
      Completion& c = out[i];
      c = {};
      c.id = raw[i].wr_id;
      c.pair = raw[i].qp_num;
      c.status = raw[i].status;
      if (raw[i].status != IBV_WC_SUCCESS) continue;
      c.is_receive = (raw[i].opcode & IBV_WC_RECV) != 0;
      c.has_immediate = c.is_receive && (raw[i].wc_flags & IBV_WC_WITH_IMM) != 0;
      c.immediate = c.has_immediate ? be32toh(raw[i].imm_data) : 0;
      c.bytes = raw[i].byte_len;
    }
    return n;
  }

  Status arm() override {
    const int error = ibv_req_notify_cq(queue_, 0);
    return error == 0 ? Status() : refused("ibv_req_notify_cq", error);
  }
  void clear_events() override {
    ibv_cq* queue = nullptr;
    void* context = nullptr;
    while (ib().get_cq_event(channel_, &queue, &context) == 0) {
      // Acknowledged in batches: each takes a lock in the library.
      if (++num_unacked_ == 64) {
        ib().ack_cq_events(queue_, num_unacked_);
        num_unacked_ = 0;
      }
    }
  }

 private:
  int flags_of(unsigned access) const {
    return static_cast<int>(
        flag_if(access & kLocalWrite, IBV_ACCESS_LOCAL_WRITE) |
        flag_if(access & kRemoteWrite, IBV_ACCESS_REMOTE_WRITE) |
        flag_if(access & kRemoteRead, IBV_ACCESS_REMOTE_READ) |
        flag_if((access & kRemoteAtomic) && port_.has_atomics, IBV_ACCESS_REMOTE_ATOMIC));
  }

  const std::shared_ptr<OpenDevice> device_;
  const PortInfo port_;
  ibv_pd* domain_ = nullptr;
  ibv_comp_channel* channel_ = nullptr;
  ibv_cq* queue_ = nullptr;
  unsigned num_unacked_ = 0;
};

class IbPort final : public Port {
 public:
  IbPort(std::shared_ptr<OpenDevice> device, PortInfo info)
      : device_(std::move(device)), info_(std::move(info)) {}
  const PortInfo& info() const override { return info_; }
  Result<std::unique_ptr<Domain>> create_domain(int num_completions) override {
    auto domain = std::make_unique<IbDomain>(device_, info_);
    if (Status status = domain->open(num_completions); !status.is_ok()) return status;
    return std::unique_ptr<Domain>(std::move(domain));
  }
  std::vector<int> fds() const override {
    return {device_->context->cmd_fd, device_->context->async_fd};
  }

 private:
  const std::shared_ptr<OpenDevice> device_;
  const PortInfo info_;
};

bool is_zero(const Gid& gid) {
  return std::all_of(gid.begin(), gid.end(), [](std::uint8_t b) { return b == 0; });
}

// RoCE v2 on an IPv4 address is what every fabric routes; then v2 on a global IPv6 address, then on
// a link-local one. -1: none.
int best_roce_gid(ibv_context* context, const PortInfo& port, int num_gids) {
  int best = -1, best_score = 0;
  for (int i = 0; i < num_gids; ++i) {
    ibv_gid raw{};
    if (ib().query_gid(context, port.number, i, &raw) != 0) continue;
    Gid gid;
    std::memcpy(gid.data(), raw.raw, gid.size());
    if (is_zero(gid)) continue;
    const auto type =
        read_file("/sys/class/infiniband/" + port.device + "/ports/" + std::to_string(port.number) +
                  "/gid_attrs/types/" + std::to_string(i));
    if (!type || type->find("RoCE v2") == std::string::npos) continue;
    static constexpr std::uint8_t kIpv4Prefix[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
    const bool is_ipv4 = std::memcmp(gid.data(), kIpv4Prefix, sizeof kIpv4Prefix) == 0;
    const bool is_link_local = gid[0] == 0xfe && (gid[1] & 0xc0) == 0x80;
    const int score = is_ipv4 ? 3 : is_link_local ? 1 : 2;
    if (score > best_score) {
      best = i;
      best_score = score;
    }
  }
  return best;
}

void choose_pkey(ibv_context* context, const RdmaOptions& options, int table_length,
                 PortInfo* port) {
  if (options.pkey == 0) return;
  for (int i = 0; i < table_length; ++i) {
    __be16 key = 0;
    if (ib().query_pkey(context, port->number, i, &key) != 0) continue;
    // The top bit says full or limited membership.
    if ((be16toh(key) & 0x7fff) == (options.pkey & 0x7fff)) {
      port->pkey_index = static_cast<std::uint16_t>(i);
      return;
    }
  }
  port->use = {false, "the port is not a member of the partition in PYCOMM_IB_PKEY"};
}

void describe_port(ibv_context* context, const RdmaOptions& options, PortInfo* port) {
  ibv_port_attr attr{};
  if (ib().query_port(context, port->number, &attr) != 0) {
    port->use = {false, refused("ibv_query_port", 0).message()};
    return;
  }
  port->is_ethernet = attr.link_layer == IBV_LINK_LAYER_ETHERNET;
  port->lid = attr.lid;
  port->mtu_code = static_cast<std::uint8_t>(attr.active_mtu);
  if (attr.state != IBV_PORT_ACTIVE) {
    static constexpr const char* kStates[] = {"NOP", "DOWN", "INIT", "ARMED", "ACTIVE", "DEFER"};
    const bool is_known = static_cast<unsigned>(attr.state) < std::size(kStates);
    port->use = {false, std::string("its port is ") + (is_known ? kStates[attr.state] : "odd") +
                            " (link down, or no subnet manager)"};
    return;
  }
  port->gid_index = options.gid_index >= 0 ? options.gid_index
                    : port->is_ethernet    ? best_roce_gid(context, *port, attr.gid_tbl_len)
                                           : 0;
  ibv_gid gid{};
  if (port->gid_index >= 0 && ib().query_gid(context, port->number, port->gid_index, &gid) == 0) {
    std::memcpy(port->gid.data(), gid.raw, port->gid.size());
  }
  if (port->is_ethernet && (port->gid_index < 0 || is_zero(port->gid))) {
    port->use = {false, options.gid_index >= 0
                            ? "it has no GID at PYCOMM_IB_GID_INDEX"
                            : "it has no RoCE v2 GID (no address on its network interface?)"};
    return;
  }
  choose_pkey(context, options, attr.pkey_tbl_len, port);
}

std::string why_not_opened(const ibv_device* device) {
  // The library tries several ways, and errno is the last one's.
  const int error = errno;
  const std::string node = std::string("/dev/infiniband/") + device->dev_name;
  if (access(node.c_str(), F_OK) == 0 && access(node.c_str(), R_OK | W_OK) != 0) {
    return "this user may not open " + node + " (Permission denied)";
  }
  return "it cannot be opened: " + std::string(std::strerror(error));
}

class IbLibrary final : public Library {
 public:
  std::vector<PortInfo> ports(const RdmaOptions& options, std::string* refusal) override {
    std::vector<PortInfo> found;
    int count = 0;
    ibv_device** devices = ib().get_device_list(&count);
    if (devices == nullptr || count == 0) {
      *refusal = devices == nullptr ? refused("ibv_get_device_list", 0).message()
                                    : "there is no RDMA device";
    }
    for (int i = 0; i < count; ++i) {
      const std::string name = ib().get_device_name(devices[i]);
      OpenDevice device;
      device.context = ib().open_device(devices[i]);
      ibv_device_attr attr{};
      if (device.context == nullptr || ib().query_device(device.context, &attr) != 0) {
        PortInfo port;
        port.device = name;
        port.use = {false, why_not_opened(devices[i])};
        found.push_back(port);
        continue;
      }
      for (std::uint8_t number = 1; number <= attr.phys_port_cnt; ++number) {
        PortInfo port;
        port.device = name;
        port.number = number;
        port.max_reads = std::min(attr.max_qp_rd_atom, attr.max_qp_init_rd_atom);
        port.has_atomics = attr.atomic_cap != IBV_ATOMIC_NONE;
        describe_port(device.context, options, &port);
        found.push_back(port);
      }
    }
    if (devices != nullptr) ib().free_device_list(devices);
    return found;
  }

  Result<std::shared_ptr<Port>> open(const PortInfo& info) override {
    int count = 0;
    ibv_device** devices = ib().get_device_list(&count);
    auto device = std::make_shared<OpenDevice>();
    for (int i = 0; i < count; ++i) {
      if (info.device == ib().get_device_name(devices[i])) {
        device->context = ib().open_device(devices[i]);
      }
    }
    if (devices != nullptr) ib().free_device_list(devices);
    if (device->context == nullptr) return refused(("opening " + info.device).c_str(), 0);
    return std::shared_ptr<Port>(std::make_shared<IbPort>(std::move(device), info));
  }
};

}  // namespace

Library* ibverbs(std::string* refusal) {
  if (!loaded().missing.empty()) {
    *refusal = loaded().missing;
    return nullptr;
  }
  static auto* library = new IbLibrary;
  return library;
}

#endif  // PYCOMM_HAVE_VERBS_HEADERS

}  // namespace pycomm::platform::verbs

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
#include "platform/ibverbs_symbols.h"
#include "platform/system.h"
#include "platform/verbs.h"

namespace pycomm::platform::verbs {

#if !PYCOMM_HAVE_VERBS_HEADERS

Library* ibverbs(std::string* refusal) {
  *refusal =
      "this build had no libibverbs headers (install libibverbs-dev or rdma-core-devel, "
      "then build again)";
  return nullptr;
}

#else

namespace {

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

  Result<std::unique_ptr<Memory> > register_device_memory(const void* data, std::uint64_t bytes,
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

  Result<std::unique_ptr<Memory> > register_memory(const void* data, std::uint64_t bytes,
                                                   unsigned access) override {
    ibv_mr* memory = ib().reg_mr(domain_, const_cast<void*>(data), bytes, flags_of(access));
    if (memory == nullptr) return refused("ibv_reg_mr", 0);
    return std::unique_ptr<Memory>(new IbMemory(memory));
  }

  Result<std::unique_ptr<Pair> > create_pair(const PairLimits& limits) override {
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
  Result<std::unique_ptr<Domain> > create_domain(int num_completions) override {
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

class IbLibrary final : public Library {
 public:
  std::vector<PortInfo> ports(const RdmaOptions& options, std::string* refusal) override {
    return find_ports(options, refusal);
  }
  Result<std::shared_ptr<Port> > open(const PortInfo& info) override {
    auto device = open_device(info.device);
    if (device == nullptr) return refused(("opening " + info.device).c_str(), 0);
    return std::shared_ptr<Port>(std::make_shared<IbPort>(std::move(device), info));
  }
};

}  // namespace

Library* ibverbs(std::string* refusal) {
  if (!missing_symbol().empty()) {
    *refusal = missing_symbol();
    return nullptr;
  }
  static auto* library = new IbLibrary;
  return library;
}

#endif  // PYCOMM_HAVE_VERBS_HEADERS

}  // namespace pycomm::platform::verbs

// A throwaway that shows that verbs fit the contract: a toy link on a reliable connection. A post
// of a large message registers its memory and sends the clear-to-send with address and key; the
// sender answers with one RDMA WRITE straight from its memory. fetch_add is the NIC's own atomic.
// It carries all_reduces of the ordinary executor, and a barrier on counters.
//
//   verbs_probe [device0 device1]     two forked ranks, rxe0 and rxe1 by default
//
// What it is not: cached registrations, credits, many devices, an event-driven wait. The RDMA
// transport replaces it.
#include <infiniband/verbs.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <map>
#include <unordered_map>

#include "base/hash.h"
#include "collectives/execution.h"
#include "platform/system.h"
#include "transport/frame.h"

namespace pycomm::probe {
namespace {

using transport::FrameHeader;
using transport::FrameKind;

constexpr std::uint64_t kEagerBytes = 1024;
constexpr int kNumReceives = 128;
constexpr std::uint64_t kCellBytes = sizeof(FrameHeader) + kEagerBytes;
constexpr int kRoceV2Ipv4Gid = 1;  // of an rxe device with one IPv4 address

struct Address {
  std::uint32_t qp_number;
  std::uint32_t first_psn;
  ibv_gid gid;
};

struct RemoteRegion {
  std::uint64_t address;
  std::uint64_t bytes;
  std::uint32_t key;
};

class VerbsProbeLink final : public Link, public RemoteMemory {
 public:
  // Errors: false with a line on stderr.
  bool open(const char* device_name, int socket) {
    int count = 0;
    ibv_device** devices = ibv_get_device_list(&count);
    for (int i = 0; i < count; ++i) {
      if (std::strcmp(ibv_get_device_name(devices[i]), device_name) == 0) {
        context_ = ibv_open_device(devices[i]);
      }
    }
    ibv_free_device_list(devices);
    if (context_ == nullptr) return complain("no such device");
    domain_ = ibv_alloc_pd(context_);
    queue_ = ibv_create_cq(context_, 1024, nullptr, nullptr, 0);
    if (domain_ == nullptr || queue_ == nullptr) return complain("protection domain or queue");
    ibv_qp_init_attr init{};
    init.send_cq = init.recv_cq = queue_;
    init.qp_type = IBV_QPT_RC;
    init.cap = {256, kNumReceives, 1, 1, 0};
    pair_ = ibv_create_qp(domain_, &init);
    cells_.resize(kNumReceives * kCellBytes);
    cells_region_ = ibv_reg_mr(domain_, cells_.data(), cells_.size(), IBV_ACCESS_LOCAL_WRITE);
    out_cells_.resize(kNumReceives * kCellBytes);
    out_region_ = ibv_reg_mr(domain_, out_cells_.data(), out_cells_.size(), 0);
    if (pair_ == nullptr || cells_region_ == nullptr || out_region_ == nullptr) {
      return complain("queue pair or registration");
    }
    return connect(socket);
  }

  const char* transport() const override { return "verbs-probe"; }
  std::uint64_t bytes_written() const { return counters_.bytes_direct; }
  std::uint64_t num_atomics() const { return num_atomics_; }

  // --- messages
  void post(Transfer& t) override {
    t.state = TransferState::kPending;
    if (!failure_.is_ok()) return finish(t, failure_);
    if (const auto it = unexpected_.find(t.id); it != unexpected_.end()) {
      std::memcpy(t.data, it->second.data(), t.bytes);
      counters_.bytes_staged += t.bytes;
      unexpected_.erase(it);
      return finish(t, Status());
    }
    posts_[t.id] = &t;
    if (t.bytes <= kEagerBytes) return;
    ibv_mr* region =
        ibv_reg_mr(domain_, t.data, t.bytes, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
    if (region == nullptr) return finish(t, Status::error(StatusCode::kSystem, "ibv_reg_mr"));
    regions_[&t] = region;
    FrameHeader clear = header(FrameKind::kClear, t.id);
    clear.argument = reinterpret_cast<std::uint64_t>(t.data);
    clear.key = region->rkey;
    clear.message_bytes = t.bytes;
    send_cell(clear, nullptr, 0);
  }

  void send(Transfer& t) override {
    t.state = TransferState::kPending;
    if (!failure_.is_ok()) return finish(t, failure_);
    if (t.bytes <= kEagerBytes) {
      FrameHeader eager = header(FrameKind::kEager, t.id);
      eager.payload_bytes = static_cast<std::uint32_t>(t.bytes);
      send_cell(eager, t.data, t.bytes);
      counters_.bytes_staged += t.bytes;
      return finish(t, Status());
    }
    if (const auto it = clears_.find(t.id); it != clears_.end()) {
      write_cleared(t, it->second);
      clears_.erase(it);
    } else {
      sends_[t.id] = &t;
    }
  }

  void cancel(Transfer& t) override {
    posts_.erase(t.id);
    sends_.erase(t.id);
    release(t);
  }
  bool is_offered(const TransferId&) const override { return false; }
  void retire(std::uint64_t, std::uint64_t) override {}

  bool progress() override {
    ibv_wc done[16];
    const int n = ibv_poll_cq(queue_, 16, done);
    for (int i = 0; i < n; ++i) {
      if (done[i].status != IBV_WC_SUCCESS) {
        fail(std::string("verbs: ") + ibv_wc_status_str(done[i].status));
      } else if (done[i].opcode == IBV_WC_RECV) {
        take_cell(done[i].wr_id);
      } else if (done[i].wr_id != 0) {
        auto* t = reinterpret_cast<Transfer*>(done[i].wr_id);
        release(*t);
        finish(*t, Status());
      }
    }
    return n > 0;
  }

  Viability is_viable() const override { return {failure_.is_ok(), failure_.message()}; }
  RemoteMemory* remote_memory() override { return this; }
  LinkCounters counters() const override { return counters_; }
  void close() override { send_cell(header(FrameKind::kGoodbye, {}), nullptr, 0); }
  bool peer_departed() const { return departed_; }

  // --- remote memory
  bool can_write() const override { return true; }
  bool can_fetch_add() const override { return true; }
  Status expose(std::uint64_t region, std::byte* data, std::uint64_t bytes, RegionKind) override {
    ibv_mr* memory =
        ibv_reg_mr(domain_, data, bytes,
                   IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC);
    if (memory == nullptr) return Status::error(StatusCode::kSystem, "ibv_reg_mr");
    exposed_[region] = memory;
    FrameHeader offer = header(FrameKind::kRequest, {});
    offer.signature = region;
    offer.argument = reinterpret_cast<std::uint64_t>(data);
    offer.message_bytes = bytes;
    offer.key = memory->rkey;
    send_cell(offer, nullptr, 0);
    return Status();
  }
  void withdraw(std::uint64_t region) override {
    ibv_dereg_mr(exposed_[region]);
    exposed_.erase(region);
  }
  bool knows(std::uint64_t region) const { return remote_.contains(region); }
  std::byte* map(std::uint64_t, std::uint64_t) override { return nullptr; }
  void read(Transfer& t, std::uint64_t, std::uint64_t) override {
    finish(t, Status::error(StatusCode::kInvalidUsage, "the probe does not read"));
  }
  void write(Transfer& t, std::uint64_t region, std::uint64_t offset) override {
    t.state = TransferState::kPending;
    submit(t, IBV_WR_RDMA_WRITE, remote_.at(region).address + offset, remote_.at(region).key, 0);
  }
  void fetch_add(Transfer& t, std::uint64_t region, std::uint64_t offset,
                 std::uint64_t delta) override {
    t.state = TransferState::kPending;
    ++num_atomics_;
    submit(t, IBV_WR_ATOMIC_FETCH_AND_ADD, remote_.at(region).address + offset,
           remote_.at(region).key, delta);
  }

 private:
  bool complain(const char* what) {
    std::perror(what);
    return false;
  }

  static FrameHeader header(FrameKind kind, const TransferId& id) {
    FrameHeader h;
    h.kind = static_cast<std::uint8_t>(kind);
    h.set_id(id);
    return h;
  }

  static void finish(Transfer& t, Status status) {
    t.state = status.is_ok() ? TransferState::kDone : TransferState::kFailed;
    t.status = std::move(status);
  }

  void fail(const std::string& why) {
    failure_ = Status::error(StatusCode::kPeerLost, why);
    for (auto* map : {&posts_, &sends_}) {
      for (auto& [id, t] : *map) finish(*t, failure_);
      map->clear();
    }
  }

  void release(Transfer& t) {
    const auto it = regions_.find(&t);
    if (it == regions_.end()) return;
    ibv_dereg_mr(it->second);
    regions_.erase(it);
  }

  // Swaps addresses over the local socket and brings the pair to ready-to-send.
  bool connect(int socket) {
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_INIT;
    attr.port_num = 1;
    attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
    if (ibv_modify_qp(pair_, &attr,
                      IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS)) {
      return complain("to init");
    }
    for (std::uint64_t i = 0; i < kNumReceives; ++i) post_receive(i);
    Address mine{pair_->qp_num, 100, {}};
    if (ibv_query_gid(context_, 1, kRoceV2Ipv4Gid, &mine.gid) != 0) return complain("gid");
    Address theirs{};
    if (::send(socket, &mine, sizeof mine, 0) != sizeof mine ||
        recv(socket, &theirs, sizeof theirs, MSG_WAITALL) != sizeof theirs) {
      return complain("exchange");
    }
    attr = {};
    attr.qp_state = IBV_QPS_RTR;
    attr.path_mtu = IBV_MTU_1024;
    attr.dest_qp_num = theirs.qp_number;
    attr.rq_psn = theirs.first_psn;
    attr.max_dest_rd_atomic = 4;
    attr.min_rnr_timer = 12;
    attr.ah_attr.is_global = 1;
    attr.ah_attr.port_num = 1;
    attr.ah_attr.grh.dgid = theirs.gid;
    attr.ah_attr.grh.sgid_index = kRoceV2Ipv4Gid;
    attr.ah_attr.grh.hop_limit = 64;
    if (ibv_modify_qp(pair_, &attr,
                      IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                          IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER)) {
      return complain("to receive");
    }
    attr.qp_state = IBV_QPS_RTS;
    attr.timeout = 14;
    attr.retry_cnt = 7;
    attr.rnr_retry = 7;
    attr.sq_psn = mine.first_psn;
    attr.max_rd_atomic = 4;
    if (ibv_modify_qp(pair_, &attr,
                      IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                          IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC)) {
      return complain("to send");
    }
    return true;
  }

  void post_receive(std::uint64_t cell) {
    ibv_sge piece{reinterpret_cast<std::uint64_t>(cells_.data() + cell * kCellBytes), kCellBytes,
                  cells_region_->lkey};
    ibv_recv_wr request{};
    request.wr_id = cell;
    request.sg_list = &piece;
    request.num_sge = 1;
    ibv_recv_wr* bad = nullptr;
    if (ibv_post_recv(pair_, &request, &bad) != 0) fail("ibv_post_recv");
  }

  void send_cell(const FrameHeader& h, const std::byte* payload, std::uint64_t bytes) {
    std::byte* cell = out_cells_.data() + next_out_++ % kNumReceives * kCellBytes;
    std::memcpy(cell, &h, sizeof h);
    if (bytes > 0) std::memcpy(cell + sizeof h, payload, bytes);
    ibv_sge piece{reinterpret_cast<std::uint64_t>(cell),
                  static_cast<std::uint32_t>(sizeof h + bytes), out_region_->lkey};
    ibv_send_wr request{};
    request.opcode = IBV_WR_SEND;
    request.sg_list = &piece;
    request.num_sge = 1;
    request.send_flags = IBV_SEND_SIGNALED;
    ibv_send_wr* bad = nullptr;
    if (ibv_post_send(pair_, &request, &bad) != 0) fail("ibv_post_send");
  }

  // One work request straight from, or into, the transfer's own memory.
  void submit(Transfer& t, ibv_wr_opcode opcode, std::uint64_t address, std::uint32_t key,
              std::uint64_t delta) {
    ibv_mr* region = ibv_reg_mr(domain_, t.data, t.bytes, IBV_ACCESS_LOCAL_WRITE);
    if (region == nullptr) return finish(t, Status::error(StatusCode::kSystem, "ibv_reg_mr"));
    regions_[&t] = region;
    ibv_sge piece{reinterpret_cast<std::uint64_t>(t.data), static_cast<std::uint32_t>(t.bytes),
                  region->lkey};
    ibv_send_wr request{};
    request.wr_id = reinterpret_cast<std::uint64_t>(&t);
    request.opcode = opcode;
    request.sg_list = &piece;
    request.num_sge = 1;
    request.send_flags = IBV_SEND_SIGNALED;
    if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
      request.wr.atomic.remote_addr = address;
      request.wr.atomic.rkey = key;
      request.wr.atomic.compare_add = delta;
    } else {
      request.wr.rdma.remote_addr = address;
      request.wr.rdma.rkey = key;
      counters_.bytes_direct += t.bytes;
    }
    ibv_send_wr* bad = nullptr;
    if (ibv_post_send(pair_, &request, &bad) != 0) fail("ibv_post_send");
  }

  void write_cleared(Transfer& t, const FrameHeader& clear) {
    submit(t, IBV_WR_RDMA_WRITE, clear.argument, clear.key, 0);
    send_cell(header(FrameKind::kData, t.id), nullptr, 0);  // behind the write on the same pair
  }

  void take_cell(std::uint64_t cell) {
    FrameHeader h;
    const std::byte* at = cells_.data() + cell * kCellBytes;
    std::memcpy(&h, at, sizeof h);
    const auto it = posts_.find(h.id());
    switch (static_cast<FrameKind>(h.kind)) {
      case FrameKind::kEager:
        if (it == posts_.end()) {
          unexpected_[h.id()].assign(at + sizeof h, at + sizeof h + h.payload_bytes);
        } else {
          std::memcpy(it->second->data, at + sizeof h, it->second->bytes);
          counters_.bytes_staged += it->second->bytes;
          finish(*it->second, Status());
          posts_.erase(it);
        }
        break;
      case FrameKind::kClear:
        if (const auto waiting = sends_.find(h.id()); waiting != sends_.end()) {
          write_cleared(*waiting->second, h);
          sends_.erase(waiting);
        } else {
          clears_[h.id()] = h;
        }
        break;
      case FrameKind::kData:
        if (it != posts_.end()) {
          release(*it->second);
          finish(*it->second, Status());
          posts_.erase(it);
        }
        break;
      case FrameKind::kRequest: remote_[h.signature] = {h.argument, h.message_bytes, h.key}; break;
      case FrameKind::kGoodbye: departed_ = true; break;
      default: break;
    }
    post_receive(cell);
  }

  template <class T>
  using ById = std::unordered_map<TransferId, T, base::TransferIdHash>;

  ibv_context* context_ = nullptr;
  ibv_pd* domain_ = nullptr;
  ibv_cq* queue_ = nullptr;
  ibv_qp* pair_ = nullptr;
  std::vector<std::byte> cells_, out_cells_;
  ibv_mr* cells_region_ = nullptr;
  ibv_mr* out_region_ = nullptr;
  std::uint64_t next_out_ = 0;
  ById<Transfer*> posts_, sends_;
  ById<FrameHeader> clears_;
  ById<std::vector<std::byte>> unexpected_;
  std::map<Transfer*, ibv_mr*> regions_;
  std::map<std::uint64_t, ibv_mr*> exposed_;
  std::map<std::uint64_t, RemoteRegion> remote_;
  Status failure_;
  bool departed_ = false;
  LinkCounters counters_;
  std::uint64_t num_atomics_ = 0;
};

constexpr std::uint64_t kCounterRegion = 7;

// A barrier on counters: one atomic each way, then a look at one's own memory.
Status counter_barrier(VerbsProbeLink& link, std::uint64_t* counter, std::uint64_t round) {
  alignas(8) std::uint64_t old = 0;
  Transfer add;
  add.id = {2, round, 0, 0, 0};
  add.data = reinterpret_cast<std::byte*>(&old);
  add.bytes = sizeof old;
  link.remote_memory()->fetch_add(add, kCounterRegion, 0, 1);
  const base::TimeNs deadline = platform::real_clock().now_ns() + base::ms_to_ns(20'000);
  while (!add.is_finished() || std::atomic_ref(*counter).load() < round) {
    link.progress();
    if (!link.is_viable().viable)
      return Status::error(StatusCode::kPeerLost, link.is_viable().reason);
    if (platform::real_clock().now_ns() > deadline) {
      return Status::error(StatusCode::kTimeout, "counter barrier");
    }
  }
  if (add.state != TransferState::kDone || old != round - 1) {
    return Status::error(StatusCode::kInternal, "a wrong counter");
  }
  return Status();
}

Status all_reduce(VerbsProbeLink& link, collectives::GroupContext& group, std::uint64_t op,
                  std::uint64_t count) {
  std::vector<float> data(count);
  for (std::uint64_t i = 0; i < count; ++i) {
    data[i] = static_cast<float>(i % 101) * static_cast<float>(group.rank + 1);
  }
  OpRequest request;
  request.kind = OpKind::kAllReduce;
  request.dtype = DType::kFloat32;
  request.count = count;
  request.input = request.output = reinterpret_cast<std::byte*>(data.data());
  request.op_number = op;
  const base::Clock& clock = platform::real_clock();
  collectives::Execution execution(group, request, clock.now_ns() + base::ms_to_ns(30'000));
  while (!execution.is_finished()) {
    link.progress();
    execution.advance(clock.now_ns());
  }
  if (!execution.status().is_ok()) return execution.status();
  for (std::uint64_t i = 0; i < count; ++i) {
    if (data[i] != static_cast<float>(i % 101) * 3.0f) {
      return Status::error(StatusCode::kInternal, "a wrong sum at " + std::to_string(i));
    }
  }
  return Status();
}

int run_rank(Rank rank, const char* device, int socket) {
  VerbsProbeLink link;
  if (!link.open(device, socket)) return 1;
  alignas(8) std::uint64_t counter = 0;
  if (!link.expose(kCounterRegion, reinterpret_cast<std::byte*>(&counter), sizeof counter,
                   RegionKind::kHost)
           .is_ok()) {
    return 1;
  }
  const base::TimeNs deadline = platform::real_clock().now_ns() + base::ms_to_ns(20'000);
  while (!link.knows(kCounterRegion)) {
    link.progress();
    if (platform::real_clock().now_ns() > deadline) return 1;
  }
  collectives::GroupContext group;
  group.group = 1;
  group.rank = rank;
  group.world_size = 2;
  group.links = {rank == 0 ? nullptr : &link, rank == 0 ? &link : nullptr};
  std::uint64_t op = 0;
  Status status;
  for (const std::uint64_t count : {2u, 10'000u, 262'144u}) {
    if (status.is_ok()) status = all_reduce(link, group, ++op, count);
  }
  for (std::uint64_t round = 1; round <= 10 && status.is_ok(); ++round) {
    status = counter_barrier(link, &counter, round);
  }
  if (!status.is_ok()) {
    std::fprintf(stderr, "verbs_probe rank %d: %s\n", rank, status.to_string().c_str());
    return 1;
  }
  link.close();
  while (!link.peer_departed() && link.progress() | (platform::real_clock().now_ns() < deadline)) {
  }
  if (rank == 0) {
    std::printf(
        "5 verbs      holds  8 B, 40 KB and 1 MiB all_reduce by RDMA WRITE (%llu bytes straight "
        "from and into user memory) and 10 barriers by FETCH_ADD (%llu atomics) over "
        "rdma_rxe; sums and counters right\n",
        static_cast<unsigned long long>(link.bytes_written()),
        static_cast<unsigned long long>(link.num_atomics()));
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace
}  // namespace pycomm::probe

int main(int argc, char** argv) {
  const char* devices[2] = {argc > 2 ? argv[1] : "rxe0", argc > 2 ? argv[2] : "rxe1"};
  int sockets[2];
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) != 0) return 1;
  const pid_t child = fork();
  if (child == 0) _exit(pycomm::probe::run_rank(1, devices[1], sockets[1]));
  const int mine = pycomm::probe::run_rank(0, devices[0], sockets[0]);
  int status = 0;
  waitpid(child, &status, 0);
  return mine != 0 || !WIFEXITED(status) ? 1 : WEXITSTATUS(status);
}

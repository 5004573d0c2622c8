#include "process_group.h"

#include <algorithm>

#include "allocator.h"
#include "python/signals.h"

namespace pycomm::torch_backend {
namespace {

// c10d's store as the core's.
class StoreAdapter final : public Store {
 public:
  explicit StoreAdapter(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  Status set(const std::string& key, const std::string& value) override {
    return guarded([&] { store_->set(key, value); });
  }

  Result<std::string> get(const std::string& key, std::int64_t timeout_ms) override {
    std::string value;
    Status status = guarded([&] {
      store_->wait({key}, std::chrono::milliseconds(timeout_ms));
      value = store_->get_to_str(key);
    });
    if (!status.is_ok()) return status;
    return value;
  }

  Result<bool> has(const std::string& key) override {
    bool found = false;
    PYCOMM_RETURN_IF_ERROR(guarded([&] { found = store_->check({key}); }));
    return found;
  }

 private:
  template <class F>
  static Status guarded(F&& body) {
    try {
      body();
      return Status();
    } catch (const std::exception& error) {
      const std::string text = error.what();
      const bool is_timeout =
          text.find("imeout") != std::string::npos || text.find("timed out") != std::string::npos;
      return Status::error(is_timeout ? StatusCode::kTimeout : StatusCode::kSystem,
                           "the rendezvous store: " + text.substr(0, text.find('\n')));
    }
  }

  c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace

ProcessGroup::ProcessGroup(std::unique_ptr<Communicator> communicator,
                           const std::string& group_name, std::chrono::milliseconds timeout)
    : Backend(communicator->rank(), communicator->world_size()),
      communicator_(std::move(communicator)),
      options_(c10::make_intrusive<Options>("pycomm", timeout)) {
  options_->group_name = group_name;
}

// The last group joins threads that may be inside Python callbacks.
ProcessGroup::~ProcessGroup() {
  python::without_gil([this] { communicator_.reset(); });
}

std::shared_ptr<Communicator> ProcessGroup::communicator() {
  auto held = take_communicator(false);
  TORCH_CHECK(held, "pycomm: group '", options_->group_name, "' has been shut down");
  return held;
}

// What an operation's copies and timeouts need is decided here, once for all of them.
WorkPtr ProcessGroup::issue(Title title, std::vector<Staged> staged, Tensors inputs,
                            Tensors outputs, std::chrono::milliseconds timeout) {
  const std::shared_ptr<Communicator> communicator = this->communicator();
  auto work = c10::make_intrusive<Work>(getRank(), title.type, title.text, std::move(inputs),
                                        std::move(outputs));
  for (Staged& one : staged) prepare(one, timeout);
  const c10::intrusive_ptr<Work> together = coalescing_here();
  std::vector<std::shared_ptr<Operation>> operations;
  for (Staged& one : staged) {
    one.request.keepalive = one.keepalive();
    operations.push_back(communicator->start(one.request));
  }
  std::function<void()> finish_up;
  if (std::any_of(staged.begin(), staged.end(), [](const Staged& s) { return s.needs_finish(); })) {
    finish_up = [staged = std::move(staged)] {
      for (const Staged& one : staged) one.finish();
    };
  }
  if (together && finish_up) {  // whoever is waited for first does it
    finish_up = [finish_up, only = std::make_shared<std::once_flag>()] {
      std::call_once(*only, finish_up);
    };
  }
  if (together) together->add_operations(operations, finish_up);
  work->add_operations(operations, finish_up);
  return work;
}

void ProcessGroup::prepare(Staged& staged, std::chrono::milliseconds timeout) const {
  const auto chosen = timeout == c10d::kUnsetTimeout ? options_->timeout : timeout;
  staged.request.timeout_ms = chosen.count();
  staged.part_ways(getRank());
}

c10::intrusive_ptr<Work> ProcessGroup::coalescing_here() {
  if (!is_coalescing_.load(std::memory_order_acquire)) return nullptr;
  std::lock_guard lock(coalescing_mutex_);
  return coalescing_thread_ == std::this_thread::get_id() ? coalesced_ : nullptr;
}

// An operation that its caller waits for at once: nothing of it lives on.
WorkPtr ProcessGroup::run(Title title, Staged& staged, Tensors inputs, Tensors outputs,
                          std::chrono::milliseconds timeout) {
  const std::shared_ptr<Communicator> communicator = this->communicator();
  auto work = c10::make_intrusive<DoneWork>(getRank(), title.type, title.text, std::move(inputs),
                                            std::move(outputs));
  prepare(staged, timeout);
  // Peers that are stopped inside it may write shared tensors after it has failed here.
  if (shared_memory_owner(staged.request.output) != MemoryOwner::kNobody) {
    staged.request.keepalive = staged.keepalive();
  }
  const Status status = [&] {
    const WaitTimer timer;
    Status result = communicator->run(staged.request);
    if (counts_communication) communication_time().operations_ns += timer.spent_ns();
    return result;
  }();
  python::rethrow_signal();
  if (status.is_ok()) staged.finish();
  work->set_done(status);
  return work;
}

WorkPtr ProcessGroup::issue_one(Title title, Staged staged, Tensors inputs, Tensors outputs,
                                std::chrono::milliseconds timeout, bool is_async) {
  if (!is_async && !coalescing_here()) {
    return run(title, staged, std::move(inputs), std::move(outputs), timeout);
  }
  std::vector<Staged> list;
  list.push_back(std::move(staged));
  return issue(title, std::move(list), std::move(inputs), std::move(outputs), timeout);
}

void ProcessGroup::startCoalescing() {
  std::lock_guard lock(coalescing_mutex_);
  // One that an exception left behind is dropped: its operations have their own Works.
  is_coalescing_ = true;
  coalescing_thread_ = std::this_thread::get_id();
  coalesced_ = c10::make_intrusive<Work>(getRank(), c10d::OpType::COALESCED, "pycomm:coalesced",
                                         Tensors{}, Tensors{});
}

WorkPtr ProcessGroup::endCoalescing() {
  std::lock_guard lock(coalescing_mutex_);
  TORCH_CHECK(coalesced_, "pycomm: endCoalescing() without startCoalescing()");
  is_coalescing_ = false;
  return std::exchange(coalesced_, nullptr);
}

std::uint64_t ProcessGroup::getSequenceNumberForGroup() {
  const auto records = communicator()->flight_records();
  return records.empty() ? 0 : records.back().op_number;
}

std::shared_ptr<Communicator> ProcessGroup::take_communicator(bool leaves) {
  std::lock_guard lock(communicator_mutex_);
  return leaves ? std::move(communicator_) : communicator_;
}

c10d::ErrorType ProcessGroup::getError() {
  const std::shared_ptr<Communicator> communicator = take_communicator(false);
  const Status health = communicator ? communicator->health() : Status();
  switch (health.code()) {
    case StatusCode::kOk: return c10d::ErrorType::SUCCESS;
    case StatusCode::kTimeout: return c10d::ErrorType::TIMEOUT;
    case StatusCode::kPeerLost: return c10d::ErrorType::REMOTE_ERROR;
    default: return c10d::ErrorType::COMM_ERROR;
  }
}

at::Tensor ProcessGroup::allocateTensor(long size, at::TensorOptions options) {
  const auto bytes = static_cast<std::uint64_t>(size) * options.dtype().itemsize();
  if (auto memory = communicator()->allocate_shared(bytes); memory.is_ok()) {
    const std::shared_ptr<std::byte>& data = memory.value();
    return at::from_blob(data.get(), {size}, [data](void*) {}, options);
  }
  return at::empty({size}, options);
}

c10::intrusive_ptr<c10d::Backend> ProcessGroup::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                      const std::vector<int>& ranks,
                                                      const c10::intrusive_ptr<Options>& options) {
  const auto mine = std::find(ranks.begin(), ranks.end(), getRank());
  if (mine == ranks.end()) return nullptr;
  return create_process_group(store, static_cast<int>(mine - ranks.begin()),
                              static_cast<int>(ranks.size()), options->timeout, options->group_name,
                              ranks);
}

void ProcessGroup::abort() {
  if (const auto communicator = take_communicator(false)) {
    communicator->abort("aborted by this process");
  }
}

void ProcessGroup::shutdown() {
  std::shared_ptr<Communicator> leaving = take_communicator(true);
  // Someone is inside a call, perhaps below us on this stack: it ends, and lets go.
  if (leaving.use_count() > 1) leaving->abort("the group was shut down");
  python::without_gil([&] { leaving.reset(); });
}

c10::intrusive_ptr<ProcessGroup> create_process_group(const c10::intrusive_ptr<c10d::Store>& store,
                                                      int rank, int size,
                                                      std::chrono::milliseconds timeout,
                                                      const std::string& group_name,
                                                      const std::vector<int>& global_ranks) {
  Resolution resolution = resolve_options();
  pycomm::Options& options = resolution.options;
  options.timeout_ms = timeout.count();
  options.group_name = group_name.empty() ? "default" : group_name;
  options.global_ranks = global_ranks;
  options.is_interrupted = python::has_signal;
  if (options.shm_tensors && options.complaint.empty()) share_all_tensors();
  options.framework = std::string("torch ") + PYCOMM_TORCH_VERSION;
  StoreAdapter adapter(store);
  auto communicator = Communicator::create(adapter, rank, size, options);
  python::rethrow_signal();
  if (!communicator.is_ok()) std::rethrow_exception(to_exception(communicator.status()));
  return c10::make_intrusive<ProcessGroup>(std::move(communicator).value(), options.group_name,
                                           timeout);
}

}  // namespace pycomm::torch_backend

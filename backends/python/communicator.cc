// The binding behind pycomm.Communicator: requests on arrays, and a store written in Python.
#include "communicator.h"

#include <pybind11/stl.h>

#include <algorithm>

#include "arrays.h"
#include "pycomm/communicator.h"
#include "rows.h"
#include "signals.h"

namespace py = pybind11;

namespace pycomm::python {
namespace {

[[noreturn]] void raise(const Status& status) {
  py::gil_scoped_acquire gil;
  const py::object error =
      py::module_::import("pycomm.errors")
          .attr("make_error")(static_cast<int>(status.code()), to_string(status.code()),
                              status.message(), status.rank());
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw py::error_already_set();
}

void check(const Status& status) {
  if (!status.is_ok()) raise(status);
}

// A Python object with set(key, value), get(key, timeout_ms) and has(key); get raises TimeoutError.
class PythonStore final : public Store {
 public:
  explicit PythonStore(py::object store) : store_(std::move(store)) {}

  Status set(const std::string& key, const std::string& value) override {
    return guarded([&] { store_.attr("set")(key, py::bytes(value)); });
  }
  Result<std::string> get(const std::string& key, std::int64_t timeout_ms) override {
    std::string value;
    PYCOMM_RETURN_IF_ERROR(
        guarded([&] { value = store_.attr("get")(key, timeout_ms).cast<std::string>(); }));
    return value;
  }
  Result<bool> has(const std::string& key) override {
    bool found = false;
    PYCOMM_RETURN_IF_ERROR(guarded([&] { found = store_.attr("has")(key).cast<bool>(); }));
    return found;
  }

 private:
  template <class F>
  static Status guarded(F&& body) {
    py::gil_scoped_acquire gil;
    try {
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
      body();
      return Status();
    } catch (py::error_already_set& error) {
      const bool is_timeout = error.matches(PyExc_TimeoutError);
      const std::string text = py::str(error.value()).cast<std::string>();
      if (!error.matches(PyExc_Exception)) {  // KeyboardInterrupt goes up by itself
        kept_signal = std::current_exception();
      }
      return Status::error(is_timeout ? StatusCode::kTimeout : StatusCode::kSystem,
                           "the rendezvous: " + text);
    }
  }

  py::object store_;
};

struct Arguments {
  OpKind kind;
  py::object input;   // None where the operation reads nothing here
  py::object output;  // None where it writes nothing
  ReduceOp op;
  Rank root;
  std::uint32_t tag;
  std::int64_t timeout_ms;
  std::vector<std::uint64_t> send_counts;  // rows
  std::vector<std::uint64_t> recv_counts;
  std::uint64_t row_elements;
};

// An operation and the arrays that it works on. Its group holds it too, so that a handle that is
// dropped takes no memory away from under the operation.
struct Running {
  std::shared_ptr<Operation> operation;
  std::vector<std::unique_ptr<Array>> arrays;
};

class Handle {
 public:
  explicit Handle(std::shared_ptr<Running> running) : running_(std::move(running)) {}

  bool is_done() const { return running_->operation->is_done(); }
  Rank source() const { return running_->operation->source(); }

  // Looks for signals in between, so that ctrl-C gets through.
  void wait(std::int64_t timeout_ms) {
    constexpr std::int64_t kSliceMs = 50;
    const std::shared_ptr<Operation> operation = running_->operation;
    Status status = Status::error(StatusCode::kTimeout, "not done yet");
    {
      py::gil_scoped_release no_gil;
      for (std::int64_t waited = 0; !operation->is_done(); waited += kSliceMs) {
        if (timeout_ms >= 0 && waited >= timeout_ms) break;
        status =
            operation->wait(timeout_ms < 0 ? kSliceMs : std::min(timeout_ms - waited, kSliceMs));
        const bool goes_on = !operation->is_done() && status.code() == StatusCode::kTimeout;
        if (!goes_on || has_signal()) break;
      }
    }
    rethrow_signal();
    if (!operation->is_done()) return check(status);
    running_->arrays.clear();
    check(operation->status());
  }

 private:
  std::shared_ptr<Running> running_;
};

class Group {
 public:
  Group(py::object store, Rank rank, int world_size, const std::string& name,
        const std::map<std::string, std::string>& settings, const std::vector<int>& global_ranks) {
    Resolution resolution = resolve_options(settings);
    resolution.options.group_name = name;
    resolution.options.global_ranks = global_ranks;
    resolution.options.is_interrupted = has_signal;
    PythonStore adapter(std::move(store));
    Result<std::unique_ptr<Communicator>> made = Status::error(StatusCode::kInternal, "not made");
    {
      py::gil_scoped_release no_gil;
      made = Communicator::create(adapter, rank, world_size, resolution.options);
    }
    rethrow_signal();
    if (!made.is_ok()) raise(made.status());
    communicator_ = std::move(made).value();
  }
  ~Group() { close(); }

  void close() {
    std::shared_ptr<Communicator> leaving = std::move(communicator_);  // under the GIL
    std::vector<std::shared_ptr<Running>> running = std::move(running_);
    running_.clear();
    {
      py::gil_scoped_release no_gil;
      // Someone is inside a call, perhaps below us on this stack: it ends, and lets go.
      if (leaving.use_count() > 1) leaving->abort("the communicator was closed");
      leaving.reset();
    }
    // What is not over even now (we are inside a signal handler of a call) keeps its memory.
    for (const auto& one : running) {
      if (!one->operation->is_done()) new std::shared_ptr<Running>(one);
    }
  }

  void run(const Arguments& arguments) {
    const std::shared_ptr<Communicator> communicator = held();
    std::vector<std::unique_ptr<Array>> arrays;
    const OpRequest request = to_request(arguments, &arrays);
    Status status;
    {
      py::gil_scoped_release no_gil;
      status = communicator->run(request);
    }
    rethrow_signal();
    check(status);
  }

  std::unique_ptr<Handle> start(const Arguments& arguments) {
    const std::shared_ptr<Communicator> communicator = held();
    auto running = std::make_shared<Running>();
    const OpRequest request = to_request(arguments, &running->arrays);
    {
      py::gil_scoped_release no_gil;
      running->operation = communicator->start(request);
    }
    std::erase_if(running_, [](const auto& r) { return r->operation->is_done(); });
    running_.push_back(running);
    return std::make_unique<Handle>(std::move(running));
  }

  std::shared_ptr<Communicator> held() const {
    if (!communicator_) {
      raise(Status::error(StatusCode::kInvalidUsage, "the communicator has been closed"));
    }
    return communicator_;
  }

 private:
  OpRequest to_request(const Arguments& a, std::vector<std::unique_ptr<Array>>* arrays) const {
    OpRequest request;
    request.kind = a.kind;
    request.op = a.op;
    request.root = a.root;
    request.tag = a.tag;
    request.timeout_ms = a.timeout_ms;
    const Array* in = a.input.is_none() ? nullptr : take(a.input, false, arrays);
    const Array* out = a.output.is_none() ? nullptr : take(a.output, true, arrays);
    if (in == nullptr && out == nullptr) return request;
    const Array& any = in != nullptr ? *in : *out;
    if (in != nullptr && out != nullptr &&
        (in->element_bytes() != out->element_bytes() ||
         (in->dtype() != nullptr) != (out->dtype() != nullptr) ||
         (in->dtype() != nullptr && *in->dtype() != *out->dtype()))) {
      throw py::type_error("pycomm: input and output have different element types");
    }
    if (any.dtype() == nullptr && reduces(a.kind)) {
      throw py::type_error("pycomm: no reduction is defined on this element type");
    }
    const std::uint64_t unit = any.dtype() != nullptr ? 1 : any.element_bytes();
    request.dtype = any.dtype() != nullptr ? *any.dtype() : DType::kUInt8;
    request.input = in != nullptr ? in->data() : nullptr;
    request.output = out != nullptr ? out->data() : nullptr;
    request.count = count_of(a, in, out) * unit;
    if (a.kind == OpKind::kAllToAllUneven) {
      auto splits = std::make_shared<Splits>(Splits{a.send_counts, a.recv_counts});
      for (auto* counts : {&splits->send, &splits->recv}) {
        for (std::uint64_t& count : *counts) count *= a.row_elements * unit;
      }
      request.splits = std::move(splits);
      request.count = 0;
    }
    return request;
  }

  static const Array* take(const py::object& object, bool writable,
                           std::vector<std::unique_ptr<Array>>* arrays) {
    arrays->push_back(std::make_unique<Array>(object, writable));
    return arrays->back().get();
  }

  // Elements of one rank's part; the sizes of what was given must fit it.
  std::uint64_t count_of(const Arguments& a, const Array* in, const Array* out) const {
    const auto n = static_cast<std::uint64_t>(communicator_->world_size());
    const bool gathers = a.kind == OpKind::kAllGather || a.kind == OpKind::kGather;
    const bool spreads = a.kind == OpKind::kReduceScatter || a.kind == OpKind::kScatter;
    if (a.kind == OpKind::kAllToAllUneven) {
      const auto check_total = [&](const std::vector<std::uint64_t>& counts, const Array* array) {
        std::uint64_t rows = 0;
        for (const std::uint64_t count : counts) rows += count;
        return array != nullptr && rows * a.row_elements == array->num_elements();
      };
      if (!check_total(a.send_counts, in) || !check_total(a.recv_counts, out)) {
        throw py::value_error("pycomm: the counts do not add up to the rows of the arrays");
      }
      return 0;
    }
    const std::uint64_t in_parts = spreads || a.kind == OpKind::kAllToAll ? n : 1;
    const std::uint64_t out_parts = gathers || a.kind == OpKind::kAllToAll ? n : 1;
    const std::uint64_t count =
        in != nullptr ? in->num_elements() / in_parts : out->num_elements() / out_parts;
    const bool fits = (in == nullptr || in->num_elements() == count * in_parts) &&
                      (out == nullptr || out->num_elements() == count * out_parts);
    if (!fits) {
      throw py::value_error(
          std::string("pycomm: ") + to_string(a.kind) + " among " + std::to_string(n) +
          " ranks: input and output of " + std::to_string(in ? in->num_elements() : 0) + " and " +
          std::to_string(out ? out->num_elements() : 0) + " elements do not fit each other");
    }
    return count;
  }

  std::shared_ptr<Communicator> communicator_;
  std::vector<std::shared_ptr<Running>> running_;
};

}  // namespace

void bind_communicator(py::module_& m) {
  py::enum_<OpKind>(m, "OpKind")
      .value("BARRIER", OpKind::kBarrier)
      .value("ALL_REDUCE", OpKind::kAllReduce)
      .value("BROADCAST", OpKind::kBroadcast)
      .value("ALL_GATHER", OpKind::kAllGather)
      .value("REDUCE", OpKind::kReduce)
      .value("REDUCE_SCATTER", OpKind::kReduceScatter)
      .value("GATHER", OpKind::kGather)
      .value("SCATTER", OpKind::kScatter)
      .value("ALL_TO_ALL", OpKind::kAllToAll)
      .value("ALL_TO_ALL_UNEVEN", OpKind::kAllToAllUneven)
      .value("SEND", OpKind::kSend)
      .value("RECV", OpKind::kRecv);
  py::enum_<ReduceOp>(m, "ReduceOp")
      .value("SUM", ReduceOp::kSum)
      .value("AVG", ReduceOp::kAvg)
      .value("PRODUCT", ReduceOp::kProduct)
      .value("MIN", ReduceOp::kMin)
      .value("MAX", ReduceOp::kMax)
      .value("BAND", ReduceOp::kBitAnd)
      .value("BOR", ReduceOp::kBitOr)
      .value("BXOR", ReduceOp::kBitXor);
  m.attr("ANY_SOURCE") = kAnySource;
  py::class_<Handle>(m, "Handle")
      .def("is_done", &Handle::is_done)
      .def("wait", &Handle::wait, py::arg("timeout_ms") = -1)
      .def_property_readonly("source", &Handle::source);
  py::class_<Group> group(m, "Group");
  group.def(py::init<py::object, Rank, int, const std::string&,
                     const std::map<std::string, std::string>&, const std::vector<int>&>(),
            py::arg("store"), py::arg("rank"), py::arg("world_size"), py::arg("name"),
            py::arg("settings"), py::arg("global_ranks"));
  group.def("close", &Group::close);
  const auto bind = [&](const char* name, auto method) {
    group.def(
        name,
        [method](Group& self, OpKind kind, py::object input, py::object output, ReduceOp op,
                 Rank root, std::uint32_t tag, std::int64_t timeout_ms,
                 std::vector<std::uint64_t> send_counts, std::vector<std::uint64_t> recv_counts,
                 std::uint64_t row_elements) {
          return (self.*method)({kind, std::move(input), std::move(output), op, root, tag,
                                 timeout_ms, std::move(send_counts), std::move(recv_counts),
                                 row_elements});
        },
        py::arg("kind"), py::arg("input"), py::arg("output"), py::arg("op") = ReduceOp::kSum,
        py::arg("root") = 0, py::arg("tag") = 0, py::arg("timeout_ms") = -1,
        py::arg("send_counts") = std::vector<std::uint64_t>(),
        py::arg("recv_counts") = std::vector<std::uint64_t>(), py::arg("row_elements") = 1);
  };
  bind("run", &Group::run);
  bind("start", &Group::start);
  group.def("abort", [](Group& self, const std::string& reason) {
    const auto communicator = self.held();
    py::gil_scoped_release no_gil;
    communicator->abort(reason);
  });
  group.def("set_timeout_ms",
            [](Group& self, std::int64_t ms) { self.held()->set_timeout_ms(ms); });
  group.def("peer_stats", [](Group& self) { return peer_stats_rows(self.held()->peer_stats()); });
  group.def("flight_records",
            [](Group& self) { return flight_record_rows(self.held()->flight_records()); });
  group.def("dump_flight_records", [](Group& self, const std::string& folder) {
    const auto path = self.held()->dump_flight_records(folder);
    if (!path.is_ok()) raise(path.status());
    return path.value();
  });
}

}  // namespace pycomm::python

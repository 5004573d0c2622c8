// The binding behind pycomm.Communicator: requests on arrays, and a store written in Python.
#include "communicator.h"

#include <pybind11/stl.h>

#include <algorithm>

#include "arrays.h"
#include "pycomm/communicator.h"
#include "raise.h"
#include "rows.h"
#include "shard_barrier.h"
#include "signals.h"

namespace py = pybind11;

namespace pycomm::python {
namespace {

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

// As little as there is to letting go of the interpreter.
class WithoutGil {
 public:
  WithoutGil() : thread_(PyEval_SaveThread()) {}
  ~WithoutGil() { PyEval_RestoreThread(thread_); }
  WithoutGil(const WithoutGil&) = delete;

 private:
  PyThreadState* const thread_;
};

// What is asked for, apart from the arrays.
struct Call {
  OpKind kind;
  ReduceOp op = ReduceOp::kSum;
  Rank root = 0;
  std::uint32_t tag = 0;
  std::int64_t timeout_ms = -1;
  std::vector<std::uint64_t> send_counts;  // rows
  std::vector<std::uint64_t> recv_counts;
  std::uint64_t row_elements = 1;
};

struct Arguments {
  Call call;
  py::object input;   // None where the operation reads nothing here
  py::object output;  // None where it writes nothing
};

// Shared memory as a buffer of bytes.
struct SharedBuffer {
  explicit SharedBuffer(std::uint64_t size) : bytes(size) {
    auto memory = allocate_shared_memory(size);
    if (!memory.is_ok()) raise(memory.status());
    data = std::move(memory).value();
  }
  std::uint64_t bytes;
  std::shared_ptr<std::byte> data;
};

// Operations and the arrays that they work on. Their group holds it too, so that a handle that is
// dropped takes no memory away from under them.
struct Running {
  std::vector<std::shared_ptr<Operation>> operations;
  std::vector<std::unique_ptr<Array>> arrays;

  bool is_done() const {
    return std::all_of(operations.begin(), operations.end(),
                       [](const auto& operation) { return operation->is_done(); });
  }
};

class Handle {
 public:
  explicit Handle(std::shared_ptr<Running> running) : running_(std::move(running)) {}

  bool is_done() const { return running_->is_done(); }
  Rank source() const { return running_->operations.front()->source(); }

  void wait(std::int64_t timeout_ms) {
    const std::shared_ptr<Running> running = running_;
    for (const auto& operation : running->operations) wait_for(*operation, timeout_ms);
    running->arrays.clear();
    for (const auto& operation : running->operations) check(operation->status());
  }

 private:
  // Looks for signals in between, so that ctrl-C gets through.
  static void wait_for(Operation& operation, std::int64_t timeout_ms) {
    constexpr std::int64_t kSliceMs = 50;
    Status status = Status::error(StatusCode::kTimeout, "not done yet");
    {
      py::gil_scoped_release no_gil;
      for (std::int64_t waited = 0; !operation.is_done(); waited += kSliceMs) {
        if (timeout_ms >= 0 && waited >= timeout_ms) break;
        status =
            operation.wait(timeout_ms < 0 ? kSliceMs : std::min(timeout_ms - waited, kSliceMs));
        const bool goes_on = !operation.is_done() && status.code() == StatusCode::kTimeout;
        if (!goes_on || has_signal()) break;
      }
    }
    rethrow_signal();
    if (!operation.is_done()) check(status);
  }

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
      if (!one->is_done()) new std::shared_ptr<Running>(one);
    }
  }

  void run(const Arguments& arguments) {
    const std::shared_ptr<Communicator> communicator = held();
    std::vector<std::unique_ptr<Array>> arrays;
    OpRequest request = to_request(arguments, &arrays);
    keep_if_shared(request, arguments.output);
    Status status;
    {
      py::gil_scoped_release no_gil;
      status = communicator->run(request);
    }
    rethrow_signal();
    check(status);
  }

  // run() of plain contiguous buffers, without what the general way costs; false if they are not.
  bool run_thin(const Call& call, PyObject* input, PyObject* output) {
    const std::shared_ptr<Communicator> communicator = held();
    Array in, out;
    const bool is_in_place = input == output;
    if (output != Py_None && !out.take_plain(output, true)) return false;
    if (input != Py_None && !is_in_place && !in.take_plain(input, false)) return false;
    const Array* reads = input == Py_None ? nullptr : is_in_place ? &out : &in;
    OpRequest request = to_request(call, reads, output == Py_None ? nullptr : &out);
    keep_if_shared(request, py::reinterpret_borrow<py::object>(output));
    Status status;
    {
      const WithoutGil no_gil;
      status = communicator->run(request);
    }
    rethrow_signal();
    check(status);
    return true;
  }

  std::unique_ptr<Handle> start(const Arguments& arguments) {
    const std::shared_ptr<Communicator> communicator = held();
    auto running = std::make_shared<Running>();
    OpRequest request = to_request(arguments, &running->arrays);
    keep_if_shared(request, arguments.output);
    {
      py::gil_scoped_release no_gil;
      running->operations.push_back(communicator->start(request));
    }
    std::erase_if(running_, [](const auto& r) { return r->is_done(); });
    running_.push_back(running);
    return std::make_unique<Handle>(std::move(running));
  }

  // A receive and a send that need not wait for each other, of plain contiguous buffers; false if
  // they are not.
  bool exchange_thin(PyObject* input, Rank to, PyObject* output, Rank source, std::uint32_t tag) {
    const std::shared_ptr<Communicator> communicator = held();
    auto in = std::make_unique<Array>(), out = std::make_unique<Array>();
    if (!in->take_plain(input, false) || !out->take_plain(output, true)) return false;
    const std::vector<OpRequest> requests{
        to_request({OpKind::kRecv, ReduceOp::kSum, source, tag}, nullptr, out.get()),
        to_request({OpKind::kSend, ReduceOp::kSum, to, tag}, in.get(), nullptr)};
    std::vector<std::shared_ptr<Operation>> left;
    Status status;
    {
      const WithoutGil no_gil;
      status = communicator->run_all(requests, &left);
    }
    if (!left.empty()) {
      auto running = std::make_shared<Running>();
      running->operations = std::move(left);
      running->arrays.push_back(std::move(in));
      running->arrays.push_back(std::move(out));
      running_.push_back(std::move(running));
    }
    rethrow_signal();
    check(status);
    return true;
  }

  std::shared_ptr<Communicator> held() const {
    if (!communicator_) {
      raise(Status::error(StatusCode::kInvalidUsage, "the communicator has been closed"));
    }
    return communicator_;
  }

 private:
  // Peers that are stopped inside an operation that failed here may still write a shared array: its
  // memory is kept until they cannot.
  static void keep_if_shared(OpRequest& request, const py::object& output) {
    if (shared_memory_owner(request.output) == MemoryOwner::kNobody) return;
    request.keepalive = std::shared_ptr<void>(output.inc_ref().ptr(), [](void* object) {
      if (!Py_IsInitialized()) return;
      py::gil_scoped_acquire gil;
      Py_DECREF(static_cast<PyObject*>(object));
    });
  }

  OpRequest to_request(const Arguments& a, std::vector<std::unique_ptr<Array>>* arrays) const {
    const Array* in = a.input.is_none() ? nullptr : take(a.input, false, arrays);
    const Array* out = a.output.is_none() ? nullptr : take(a.output, true, arrays);
    return to_request(a.call, in, out);
  }

  OpRequest to_request(const Call& a, const Array* in, const Array* out) const {
    const auto kind = static_cast<int>(a.kind), op = static_cast<int>(a.op);
    if (kind < 0 || kind >= kNumOpKinds || op < 0 || op >= kNumReduceOps) {
      throw py::value_error("pycomm: no such operation");
    }
    OpRequest request;
    request.kind = a.kind;
    request.op = a.op;
    request.root = a.root;
    request.tag = a.tag;
    request.timeout_ms = a.timeout_ms;
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
  std::uint64_t count_of(const Call& a, const Array* in, const Array* out) const {
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

namespace {

// Plain functions of CPython: a call through pybind11 costs as much as the exchange behind it.
template <class Body>
PyObject* guarded(PyObject* capsule, Body&& body) {
  try {
    const bool is_done = body(*static_cast<Group*>(PyCapsule_GetPointer(capsule, nullptr)));
    return PyBool_FromLong(is_done ? 1 : 0);
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const py::builtin_exception& error) {
    error.set_error();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

int to_int(PyObject* number) {
  const long value = PyLong_AsLong(number);
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  return static_cast<int>(value);
}

// (kind, input, output, op, root) -> whether it was done
PyObject* run_thin(PyObject* self, PyObject* const* args, Py_ssize_t num_args) {
  return guarded(self, [&](Group& group) {
    if (num_args != 5) throw py::type_error("run_thin takes 5 arguments");
    Call call;
    call.kind = static_cast<OpKind>(to_int(args[0]));
    call.op = static_cast<ReduceOp>(to_int(args[3]));
    call.root = static_cast<Rank>(to_int(args[4]));
    return group.run_thin(call, args[1], args[2]);
  });
}

// (input, to, output, source, tag) -> whether it was done
PyObject* exchange_thin(PyObject* self, PyObject* const* args, Py_ssize_t num_args) {
  return guarded(self, [&](Group& group) {
    if (num_args != 5) throw py::type_error("exchange_thin takes 5 arguments");
    return group.exchange_thin(args[0], to_int(args[1]), args[2], to_int(args[3]),
                               static_cast<std::uint32_t>(to_int(args[4])));
  });
}

template <class Function>
PyCFunction as_fast_call(Function* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function));
}
PyMethodDef kRunThin{"run_thin", as_fast_call(&run_thin), METH_FASTCALL, nullptr};
PyMethodDef kExchangeThin{"exchange_thin", as_fast_call(&exchange_thin), METH_FASTCALL, nullptr};

// Both, which keep the group for as long as they live.
py::tuple thin_entries(const py::object& group) {
  const auto capsule = py::reinterpret_steal<py::object>(PyCapsule_New(
      group.cast<Group*>(), nullptr,
      [](PyObject* self) { Py_DECREF(static_cast<PyObject*>(PyCapsule_GetContext(self))); }));
  if (!capsule) throw py::error_already_set();
  PyCapsule_SetContext(capsule.ptr(), py::object(group).release().ptr());
  py::list functions;
  for (PyMethodDef* method : {&kRunThin, &kExchangeThin}) {
    const auto function = py::reinterpret_steal<py::object>(PyCFunction_New(method, capsule.ptr()));
    if (!function) throw py::error_already_set();
    functions.append(function);
  }
  return functions;
}

}  // namespace

void bind_communicator(py::module_& m) {
  // As whole numbers: hashing and converting an enum would cost more than a small operation.
  py::dict kinds, ops;
  for (int kind = 0; kind < kNumOpKinds; ++kind) kinds[to_string(static_cast<OpKind>(kind))] = kind;
  for (int op = 0; op < kNumReduceOps; ++op) ops[to_string(static_cast<ReduceOp>(op))] = op;
  m.attr("OP_KINDS") = kinds;
  m.attr("REDUCE_OPS") = ops;
  m.attr("ANY_SOURCE") = kAnySource;
  py::class_<Handle>(m, "Handle")
      .def("is_done", &Handle::is_done)
      .def("wait", &Handle::wait, py::arg("timeout_ms") = -1)
      .def_property_readonly("source", &Handle::source);
  py::class_<SharedBuffer>(m, "SharedBuffer", py::buffer_protocol())
      .def(py::init<std::uint64_t>(), py::arg("bytes"))
      .def_buffer([](SharedBuffer& self) {
        return py::buffer_info(reinterpret_cast<std::uint8_t*>(self.data.get()),
                               static_cast<py::ssize_t>(self.bytes));
      });
  py::class_<Group> group(m, "Group");
  group.def(py::init<py::object, Rank, int, const std::string&,
                     const std::map<std::string, std::string>&, const std::vector<int>&>(),
            py::arg("store"), py::arg("rank"), py::arg("world_size"), py::arg("name"),
            py::arg("settings"), py::arg("global_ranks"));
  group.def("close", &Group::close);
  group.def("thin_entries", &thin_entries);
  const auto bind = [&](const char* name, auto method) {
    group.def(
        name,
        [method](Group& self, int kind, py::object input, py::object output, int op, Rank root,
                 std::uint32_t tag, std::int64_t timeout_ms, std::vector<std::uint64_t> send_counts,
                 std::vector<std::uint64_t> recv_counts, std::uint64_t row_elements) {
          return (self.*method)(
              {{static_cast<OpKind>(kind), static_cast<ReduceOp>(op), root, tag, timeout_ms,
                std::move(send_counts), std::move(recv_counts), row_elements},
               std::move(input),
               std::move(output)});
        },
        py::arg("kind"), py::arg("input"), py::arg("output"), py::arg("op") = 0,
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
  group.def(
      "create_shard_barrier",
      [](Group& self, int num_shards) { return create_shard_barrier(*self.held(), num_shards); },
      py::arg("num_shards"));
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

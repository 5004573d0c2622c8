#include "arrays.h"

#include <cstring>
#include <optional>
#include <string>

namespace py = pybind11;

namespace pycomm::python {
namespace {

// DLPack's structures, version 0.8 (https://dmlc.github.io/dlpack/latest/c_api.html): the layout is
// frozen, and a header for it would be all of the dependency.
struct DLDevice {
  std::int32_t device_type;
  std::int32_t device_id;
};
struct DLDataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};
struct DLTensor {
  void* data;
  DLDevice device;
  std::int32_t ndim;
  DLDataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};
struct DLManagedTensor {
  DLTensor dl_tensor;
  void* manager_ctx;
  void (*deleter)(DLManagedTensor*);
};
constexpr std::int32_t kDlCpu = 1;
constexpr std::int32_t kDlPinned = 3;
enum : std::uint8_t {
  kDlInt = 0,
  kDlUInt = 1,
  kDlFloat = 2,
  kDlBFloat = 4,
  kDlComplex = 5,
  kDlBool = 6
};

std::optional<DType> from_dlpack(DLDataType type) {
  if (type.lanes != 1) return std::nullopt;
  switch (type.code) {
    case kDlInt:
      if (type.bits == 8) return DType::kInt8;
      if (type.bits == 16) return DType::kInt16;
      if (type.bits == 32) return DType::kInt32;
      if (type.bits == 64) return DType::kInt64;
      break;
    case kDlUInt:
      if (type.bits == 8) return DType::kUInt8;
      break;
    case kDlFloat:
      if (type.bits == 16) return DType::kFloat16;
      if (type.bits == 32) return DType::kFloat32;
      if (type.bits == 64) return DType::kFloat64;
      break;
    case kDlBFloat:
      if (type.bits == 16) return DType::kBFloat16;
      break;
    case kDlComplex:
      if (type.bits == 64) return DType::kComplex64;
      if (type.bits == 128) return DType::kComplex128;
      break;
    case kDlBool: return DType::kBool;
    default: break;
  }
  return std::nullopt;
}

// Of the struct module's codes; integers by their size, which is the platform's.
std::optional<DType> from_format(const char* format, std::size_t bytes) {
  if (format == nullptr) return DType::kUInt8;
  std::string_view code = format;
  if (!code.empty() && std::strchr("@=<", code[0]) != nullptr) code.remove_prefix(1);
  if (code == "f") return DType::kFloat32;
  if (code == "d") return DType::kFloat64;
  if (code == "e") return DType::kFloat16;
  if (code == "Zf") return DType::kComplex64;
  if (code == "Zd") return DType::kComplex128;
  if (code == "?") return DType::kBool;
  if (code == "B" || code == "c") return DType::kUInt8;
  if (code.size() == 1 && std::strchr("bhilq", code[0]) != nullptr) {
    if (bytes == 1) return DType::kInt8;
    if (bytes == 2) return DType::kInt16;
    if (bytes == 4) return DType::kInt32;
    if (bytes == 8) return DType::kInt64;
  }
  return std::nullopt;
}

bool is_contiguous(const DLTensor& tensor) {
  if (tensor.strides == nullptr) return true;
  std::int64_t expected = 1;
  for (std::int32_t d = tensor.ndim - 1; d >= 0; --d) {
    if (tensor.shape[d] > 1 && tensor.strides[d] != expected) return false;
    expected *= tensor.shape[d];
  }
  return true;
}

[[noreturn]] void refuse(const py::object& object, const char* why) {
  throw py::type_error(std::string("pycomm: a ") + Py_TYPE(object.ptr())->tp_name + " " + why);
}

}  // namespace

Array::Array(const py::object& object, bool writable) {
  if (take_buffer(object, writable)) return;
  if (!py::hasattr(object, "__dlpack__")) {
    refuse(object, "is no array: it has neither the buffer protocol nor DLPack");
  }
  take_dlpack(object);
}

bool Array::take_buffer(const py::object& object, bool writable) {
  if (!PyObject_CheckBuffer(object.ptr())) return false;
  const int flags = PyBUF_FORMAT | PyBUF_STRIDES | (writable ? PyBUF_WRITABLE : 0);
  if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) {
    PyErr_Clear();
    // Types without a code of the struct module (ml_dtypes' bfloat16) may still have DLPack.
    if (py::hasattr(object, "__dlpack__") && !writable) return false;
    refuse(object, writable ? "cannot be written to" : "gives no access to its memory");
  }
  has_view_ = true;
  if (view_.itemsize <= 0) refuse(object, "has elements of no size");
  if (view_.format != nullptr && std::strchr(view_.format, 'O') != nullptr) {
    refuse(object, "holds Python objects, whose addresses mean nothing elsewhere");
  }
  if (PyBuffer_IsContiguous(&view_, 'C') == 0) refuse(object, "is not contiguous in C order");
  read_view();
  return true;
}

bool Array::take_plain(PyObject* object, bool writable) {
  if (!PyObject_CheckBuffer(object)) return false;
  const int flags = PyBUF_FORMAT | PyBUF_C_CONTIGUOUS | (writable ? PyBUF_WRITABLE : 0);
  if (PyObject_GetBuffer(object, &view_, flags) != 0) {
    PyErr_Clear();
    return false;
  }
  has_view_ = true;
  if (view_.itemsize <= 0) return false;
  if (view_.format != nullptr && std::strchr(view_.format, 'O') != nullptr) return false;
  read_view();
  return true;
}

void Array::read_view() {
  data_ = static_cast<std::byte*>(view_.buf);
  element_bytes_ = static_cast<std::uint64_t>(view_.itemsize);
  num_elements_ = static_cast<std::uint64_t>(view_.len / view_.itemsize);
  const auto dtype = from_format(view_.format, static_cast<std::size_t>(view_.itemsize));
  has_dtype_ = dtype.has_value();
  dtype_ = dtype.value_or(DType::kUInt8);
}

void Array::take_dlpack(const py::object& object) {
  const auto device = object.attr("__dlpack_device__")().cast<py::tuple>();
  const int kind = py::int_(device[0]).cast<int>();
  if (kind != kDlCpu && kind != kDlPinned) {
    refuse(object, "lies on a device; this group moves memory of the host");
  }
  capsule_ = object.attr("__dlpack__")();
  auto* managed = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule_.ptr(), "dltensor"));
  if (managed == nullptr) throw py::error_already_set();
  const DLTensor& tensor = managed->dl_tensor;
  if (!is_contiguous(tensor)) refuse(object, "is not contiguous in C order");
  num_elements_ = 1;
  for (std::int32_t d = 0; d < tensor.ndim; ++d) {
    num_elements_ *= static_cast<std::uint64_t>(tensor.shape[d]);
  }
  data_ = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
  element_bytes_ = (std::uint64_t{tensor.dtype.bits} * tensor.dtype.lanes + 7) / 8;
  const auto dtype = from_dlpack(tensor.dtype);
  has_dtype_ = dtype.has_value();
  dtype_ = dtype.value_or(DType::kUInt8);
}

// A capsule that nobody has consumed frees its tensor by itself.
Array::~Array() {
  if (has_view_) PyBuffer_Release(&view_);
}

}  // namespace pycomm::python

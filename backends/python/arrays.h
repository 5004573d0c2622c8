// Arrays of any Python library as flat memory: by the buffer protocol (NumPy, bytes, array) or by
// DLPack (torch, CuPy, JAX). Nothing is copied.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "pycomm/operation.h"

namespace pycomm::python {

// Memory of one array, held for as long as this object lives. Needs the GIL to make and to drop.
class Array {
 public:
  // Errors (as Python exceptions): TypeError for what is no array, is not contiguous in C order, is
  // on a device, holds Python objects, or is a read-only buffer and shall be written (DLPack does
  // not tell of read-only memory).
  Array(const pybind11::object& object, bool writable);
  Array() = default;  // of nothing
  // Takes a contiguous buffer; false for anything else, without an exception. Once.
  bool take_plain(PyObject* object, bool writable);
  ~Array();
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  std::byte* data() const { return data_; }
  std::uint64_t num_elements() const { return num_elements_; }
  std::uint64_t element_bytes() const { return element_bytes_; }
  // Null if the core has no arithmetic for its element type, which then moves as bytes.
  const DType* dtype() const { return has_dtype_ ? &dtype_ : nullptr; }

 private:
  void read_view();
  bool take_buffer(const pybind11::object& object, bool writable);
  void take_dlpack(const pybind11::object& object);

  Py_buffer view_{};
  bool has_view_ = false;
  pybind11::object capsule_;
  std::byte* data_ = nullptr;
  std::uint64_t num_elements_ = 0;
  std::uint64_t element_bytes_ = 1;
  bool has_dtype_ = false;
  DType dtype_ = DType::kUInt8;
};

}  // namespace pycomm::python

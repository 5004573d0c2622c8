// The core and the interpreter: signals (ctrl-C) inside a wait, and the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>
#include <utility>

namespace pycomm::python {

inline thread_local std::exception_ptr kept_signal;

// For Communicator::set_interrupt_check: whether Python has a signal to handle. The exception that
// its handler raised is kept for this thread.
inline bool has_signal() {
  if (!Py_IsInitialized()) return false;
  if (kept_signal) return true;
  pybind11::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() == 0) return false;
  kept_signal = std::make_exception_ptr(pybind11::error_already_set());
  return true;
}

// Throws what has_signal() kept for this thread, if anything.
inline void rethrow_signal() {
  if (kept_signal) std::rethrow_exception(std::exchange(kept_signal, nullptr));
}

// For what joins threads that may want the interpreter: runs `body` without the GIL, if this thread
// has it.
template <class Body>
void without_gil(Body&& body) {
  if (Py_IsInitialized() && PyGILState_Check()) {
    pybind11::gil_scoped_release no_gil;
    body();
  } else {
    body();
  }
}

}  // namespace pycomm::python

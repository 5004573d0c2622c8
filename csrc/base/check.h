// Checks for bugs. They stay on in release: a wrong gradient costs more than a dead process.
#pragma once

namespace pycomm::base {

[[noreturn]] void check_failed(const char* file, int line, const char* expression);

}  // namespace pycomm::base

#define PYCOMM_CHECK(expression)                      \
  (__builtin_expect(static_cast<bool>(expression), 1) \
       ? static_cast<void>(0)                         \
       : ::pycomm::base::check_failed(__FILE__, __LINE__, #expression))

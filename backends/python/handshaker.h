// pycomm.control.handshake for the core; installed once by each module.
#pragma once

namespace pycomm::python {

void install_handshaker();

}  // namespace pycomm::python

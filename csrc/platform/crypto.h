// HMAC-SHA256 (RFC 2104, FIPS 180-4) from the system's libcrypto, loaded at run time so that
// building needs no headers beyond a compiler's.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "pycomm/status.h"
#include "pycomm/transport.h"

namespace pycomm::platform {

using Mac = std::array<std::uint8_t, 32>;

// Whether libcrypto was found; the reason names the package that brings it.
Viability crypto_viability();
// Requires crypto_viability().viable.
Mac hmac_sha256(const std::string& key, const std::string& message);
// In time that does not depend on the contents.
bool equal_macs(const Mac& a, const Mac& b);

}  // namespace pycomm::platform

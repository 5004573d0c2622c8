// AES-128-GCM by libipsec-mb (x86, BSD-3): three times OpenSSL's on packets. Compiled in where its
// header is, loaded at run time.
#pragma once

#include <memory>

#include "platform/aead.h"
#include "pycomm/transport.h"

namespace pycomm::platform::ipsec_mb {

Viability viability();
// Null where viability() says no.
std::unique_ptr<Aead> make_aead(std::span<const std::uint8_t> key);
std::unique_ptr<HeaderProtection> make_header_protection(std::span<const std::uint8_t> key);

}  // namespace pycomm::platform::ipsec_mb

#include "platform/crypto.h"

#include <dlfcn.h>

#include "base/check.h"

namespace pycomm::platform {
namespace {

// Signatures as in OpenSSL 1.1 and 3 (openssl/hmac.h, openssl/evp.h).
struct Libcrypto {
  const void* (*evp_sha256)() = nullptr;
  unsigned char* (*hmac)(const void* md, const void* key, int key_bytes, const unsigned char* data,
                         std::size_t bytes, unsigned char* out, unsigned* out_bytes) = nullptr;

  Libcrypto() {
    for (const char* name : {"libcrypto.so.3", "libcrypto.so.1.1"}) {
      void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
      if (library == nullptr) continue;
      evp_sha256 = reinterpret_cast<decltype(evp_sha256)>(dlsym(library, "EVP_sha256"));
      hmac = reinterpret_cast<decltype(hmac)>(dlsym(library, "HMAC"));
      if (is_usable()) return;
    }
  }
  bool is_usable() const { return evp_sha256 != nullptr && hmac != nullptr; }
};

const Libcrypto& libcrypto() {
  static const Libcrypto library;
  return library;
}

}  // namespace

Viability crypto_viability() {
  if (libcrypto().is_usable()) return {};
  return {false, "libcrypto (OpenSSL 1.1 or 3) was not found; install libssl3"};
}

Mac hmac_sha256(const std::string& key, const std::string& message) {
  Mac mac{};
  unsigned bytes = 0;
  PYCOMM_CHECK(libcrypto().is_usable());
  const auto* data = reinterpret_cast<const unsigned char*>(message.data());
  PYCOMM_CHECK(libcrypto().hmac(libcrypto().evp_sha256(), key.data(), static_cast<int>(key.size()),
                                data, message.size(), mac.data(), &bytes) != nullptr);
  PYCOMM_CHECK(bytes == mac.size());
  return mac;
}

bool equal_macs(const Mac& a, const Mac& b) {
  std::uint8_t difference = 0;
  for (std::size_t i = 0; i < a.size(); ++i) difference |= a[i] ^ b[i];
  return difference == 0;
}

}  // namespace pycomm::platform

// AES-128-GCM and ChaCha20-Poly1305 for QUIC packets (RFC 9001 sections 5.3, 5.4): libipsec-mb
// where pycomm was built with its header and finds it, else OpenSSL 3. Keys lie in memory that a
// forked child finds empty and a core dump leaves out, as far as it is ours (OpenSSL keeps its
// own).
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "pycomm/status.h"

namespace pycomm::platform {

enum class Cipher : std::uint8_t { kAes128Gcm, kChaCha20Poly1305 };
enum class CryptoLibrary : std::uint8_t { kAny, kOpenssl, kIpsecMb };

inline constexpr std::size_t kTagBytes = 16;
inline constexpr std::size_t kNonceBytes = 12;
inline constexpr std::size_t kSampleBytes = 16;
using Nonce = std::array<std::uint8_t, kNonceBytes>;
using HeaderMask = std::array<std::uint8_t, 5>;

// One direction's key.
class Aead {
 public:
  virtual ~Aead() = default;

  // Seals the pieces, one after the other, to `out`: their bytes and kTagBytes. `out` may not
  // overlap them.
  virtual void seal(const Nonce& nonce, std::span<const std::uint8_t> aad, const iovec* pieces,
                    int num_pieces, std::uint8_t* out) = 0;
  // Opens in place; `sealed` ends with the tag. False: forged, and the bytes are wiped.
  virtual bool open(const Nonce& nonce, std::span<const std::uint8_t> aad,
                    std::span<std::uint8_t> sealed) = 0;
  virtual const char* library_name() const = 0;
};

// Header protection with a key of its own, which outlives key updates.
class HeaderProtection {
 public:
  virtual ~HeaderProtection() = default;
  virtual HeaderMask mask(std::span<const std::uint8_t, kSampleBytes> sample) = 0;
};

std::size_t key_bytes(Cipher cipher);
// Errors: kSystem (neither library is here; or not the one that was asked for).
Result<std::unique_ptr<Aead>> make_aead(Cipher cipher, std::span<const std::uint8_t> key,
                                        CryptoLibrary library = CryptoLibrary::kAny);
Result<std::unique_ptr<HeaderProtection>> make_header_protection(
    Cipher cipher, std::span<const std::uint8_t> key, CryptoLibrary library = CryptoLibrary::kAny);

}  // namespace pycomm::platform

#include "platform/aead.h"

#include <algorithm>

#include "base/check.h"
#include "platform/aead_ipsec_mb.h"
#include "platform/openssl.h"
#include "platform/secret_memory.h"

namespace pycomm::platform {
namespace {

using openssl::library;

// openssl/evp.h
constexpr int kGetTag = 0x10, kSetTag = 0x11;

struct Freed {
  void operator()(openssl::CipherState* state) const { library().EVP_CIPHER_CTX_free(state); }
};
using State = std::unique_ptr<openssl::CipherState, Freed>;

State make_state(const openssl::Cipher* cipher, std::span<const std::uint8_t> key, bool encrypts) {
  State state(library().EVP_CIPHER_CTX_new());
  PYCOMM_CHECK(state != nullptr);
  const auto init = encrypts ? library().EVP_EncryptInit_ex : library().EVP_DecryptInit_ex;
  PYCOMM_CHECK(init(state.get(), cipher, nullptr, key.data(), nullptr) == 1);
  return state;
}

class OpensslAead final : public Aead {
 public:
  OpensslAead(Cipher cipher, std::span<const std::uint8_t> key) {
    const openssl::Cipher* method = cipher == Cipher::kAes128Gcm
                                        ? library().EVP_aes_128_gcm()
                                        : library().EVP_chacha20_poly1305();
    sealing_ = make_state(method, key, true);
    opening_ = make_state(method, key, false);
  }

  void seal(const Nonce& nonce, std::span<const std::uint8_t> aad, const iovec* pieces,
            int num_pieces, std::uint8_t* out) override {
    openssl::CipherState* s = sealing_.get();
    int written = 0;
    bool ok = library().EVP_EncryptInit_ex(s, nullptr, nullptr, nullptr, nonce.data()) == 1 &&
              library().EVP_EncryptUpdate(s, nullptr, &written, aad.data(),
                                          static_cast<int>(aad.size())) == 1;
    for (int i = 0; i < num_pieces && ok; ++i) {
      ok = library().EVP_EncryptUpdate(s, out, &written,
                                       static_cast<const unsigned char*>(pieces[i].iov_base),
                                       static_cast<int>(pieces[i].iov_len)) == 1;
      out += written;
    }
    ok = ok && library().EVP_EncryptFinal_ex(s, out, &written) == 1 &&
         library().EVP_CIPHER_CTX_ctrl(s, kGetTag, kTagBytes, out) == 1;
    PYCOMM_CHECK(ok);
  }

  bool open(const Nonce& nonce, std::span<const std::uint8_t> aad,
            std::span<std::uint8_t> sealed) override {
    openssl::CipherState* s = opening_.get();
    const auto bytes = sealed.size() - kTagBytes;
    int written = 0;
    const bool ok =
        library().EVP_DecryptInit_ex(s, nullptr, nullptr, nullptr, nonce.data()) == 1 &&
        library().EVP_DecryptUpdate(s, nullptr, &written, aad.data(),
                                    static_cast<int>(aad.size())) == 1 &&
        library().EVP_DecryptUpdate(s, sealed.data(), &written, sealed.data(),
                                    static_cast<int>(bytes)) == 1 &&
        library().EVP_CIPHER_CTX_ctrl(s, kSetTag, kTagBytes, sealed.data() + bytes) == 1 &&
        library().EVP_DecryptFinal_ex(s, sealed.data() + bytes, &written) == 1;
    if (!ok) wipe(sealed.data(), sealed.size());
    return ok;
  }

  const char* library_name() const override { return "OpenSSL"; }

 private:
  State sealing_, opening_;
};

class OpensslHeaderProtection final : public HeaderProtection {
 public:
  OpensslHeaderProtection(Cipher cipher, std::span<const std::uint8_t> key)
      : is_aes_(cipher == Cipher::kAes128Gcm),
        state_(make_state(is_aes_ ? library().EVP_aes_128_ecb() : library().EVP_chacha20(), key,
                          true)) {
    library().EVP_CIPHER_CTX_set_padding(state_.get(), 0);
  }

  HeaderMask mask(std::span<const std::uint8_t, kSampleBytes> sample) override {
    std::array<std::uint8_t, kSampleBytes> block{};
    HeaderMask mask{};
    int written = 0;
    if (is_aes_) {
      PYCOMM_CHECK(library().EVP_EncryptUpdate(state_.get(), block.data(), &written, sample.data(),
                                               kSampleBytes) == 1);
    } else {  // the sample is counter and nonce, RFC 9001 section 5.4.4
      const HeaderMask zeros{};
      PYCOMM_CHECK(library().EVP_EncryptInit_ex(state_.get(), nullptr, nullptr, nullptr,
                                                sample.data()) == 1);
      PYCOMM_CHECK(library().EVP_EncryptUpdate(state_.get(), block.data(), &written, zeros.data(),
                                               static_cast<int>(zeros.size())) == 1);
    }
    std::copy_n(block.begin(), mask.size(), mask.begin());
    return mask;
  }

 private:
  const bool is_aes_;
  const State state_;
};

}  // namespace

std::size_t key_bytes(Cipher cipher) { return cipher == Cipher::kAes128Gcm ? 16 : 32; }

Result<std::unique_ptr<Aead>> make_aead(Cipher cipher, std::span<const std::uint8_t> key,
                                        CryptoLibrary library) {
  PYCOMM_CHECK(key.size() == key_bytes(cipher));
  if (library != CryptoLibrary::kOpenssl && cipher == Cipher::kAes128Gcm) {
    if (auto aead = ipsec_mb::make_aead(key)) return aead;
  }
  if (library == CryptoLibrary::kIpsecMb) {
    return Status::error(StatusCode::kSystem, "libipsec-mb: " + ipsec_mb::viability().reason);
  }
  if (const Viability v = openssl::viability(); !v.viable) {
    return Status::error(StatusCode::kSystem, v.reason);
  }
  return std::unique_ptr<Aead>(std::make_unique<OpensslAead>(cipher, key));
}

Result<std::unique_ptr<HeaderProtection>> make_header_protection(Cipher cipher,
                                                                 std::span<const std::uint8_t> key,
                                                                 CryptoLibrary library) {
  PYCOMM_CHECK(key.size() == key_bytes(cipher));
  if (library != CryptoLibrary::kOpenssl && cipher == Cipher::kAes128Gcm) {
    if (auto protection = ipsec_mb::make_header_protection(key)) return protection;
  }
  if (const Viability v = openssl::viability(); !v.viable) {
    return Status::error(StatusCode::kSystem, v.reason);
  }
  return std::unique_ptr<HeaderProtection>(std::make_unique<OpensslHeaderProtection>(cipher, key));
}

}  // namespace pycomm::platform

#include "platform/aead_ipsec_mb.h"

#if defined(__x86_64__) && __has_include(<intel-ipsec-mb.h>)
#include <dlfcn.h>
#include <intel-ipsec-mb.h>

#include <cstring>

#include "platform/secret_memory.h"

namespace pycomm::platform::ipsec_mb {
namespace {

// One manager a process: its functions are pure, its own state is only used by job interfaces.
IMB_MGR* manager() {
  static IMB_MGR* const it = []() -> IMB_MGR* {
    void* library = dlopen("libIPSec_MB.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return nullptr;
    const auto allocate =
        reinterpret_cast<IMB_MGR* (*)(std::uint64_t)>(dlsym(library, "alloc_mb_mgr"));
    const auto initialize =
        reinterpret_cast<void (*)(IMB_MGR*, IMB_ARCH*)>(dlsym(library, "init_mb_mgr_auto"));
    if (allocate == nullptr || initialize == nullptr) return nullptr;
    IMB_MGR* made = allocate(0);
    if (made != nullptr) initialize(made, nullptr);
    return made;
  }();
  return it;
}

struct Keys {
  alignas(64) gcm_key_data key;
  gcm_context_data context;
};

class IpsecAead final : public Aead {
 public:
  explicit IpsecAead(std::span<const std::uint8_t> key) {
    IMB_AES128_GCM_PRE(manager(), key.data(), &keys_->key);
  }

  void seal(const Nonce& nonce, std::span<const std::uint8_t> aad, const iovec* pieces,
            int num_pieces, std::uint8_t* out) override {
    IMB_MGR* m = manager();
    if (num_pieces == 1) {
      IMB_AES128_GCM_ENC(m, &keys_->key, &keys_->context, out,
                         static_cast<const std::uint8_t*>(pieces[0].iov_base), pieces[0].iov_len,
                         nonce.data(), aad.data(), aad.size(), out + pieces[0].iov_len, kTagBytes);
      return;
    }
    IMB_AES128_GCM_INIT(m, &keys_->key, &keys_->context, nonce.data(), aad.data(), aad.size());
    for (int i = 0; i < num_pieces; ++i) {
      IMB_AES128_GCM_ENC_UPDATE(m, &keys_->key, &keys_->context, out,
                                static_cast<const std::uint8_t*>(pieces[i].iov_base),
                                pieces[i].iov_len);
      out += pieces[i].iov_len;
    }
    IMB_AES128_GCM_ENC_FINALIZE(m, &keys_->key, &keys_->context, out, kTagBytes);
  }

  bool open(const Nonce& nonce, std::span<const std::uint8_t> aad,
            std::span<std::uint8_t> sealed) override {
    const std::size_t bytes = sealed.size() - kTagBytes;
    std::array<std::uint8_t, kTagBytes> tag;
    IMB_AES128_GCM_DEC(manager(), &keys_->key, &keys_->context, sealed.data(), sealed.data(), bytes,
                       nonce.data(), aad.data(), aad.size(), tag.data(), kTagBytes);
    std::uint8_t difference = 0;
    for (std::size_t i = 0; i < kTagBytes; ++i) difference |= tag[i] ^ sealed[bytes + i];
    if (difference != 0) wipe(sealed.data(), sealed.size());
    return difference == 0;
  }

  const char* library_name() const override { return "libipsec-mb"; }

 private:
  Secret<Keys> keys_;
};

struct Schedule {
  alignas(16) std::uint32_t encrypting[4 * 15];
  alignas(16) std::uint32_t decrypting[4 * 15];
};

class IpsecHeaderProtection final : public HeaderProtection {
 public:
  explicit IpsecHeaderProtection(std::span<const std::uint8_t> key) {
    IMB_AES_KEYEXP_128(manager(), key.data(), schedule_->encrypting, schedule_->decrypting);
  }
  // One block of CFB over zeros is the block cipher itself.
  HeaderMask mask(std::span<const std::uint8_t, kSampleBytes> sample) override {
    std::array<std::uint8_t, kSampleBytes> zeros{}, block{};
    IMB_AES128_CFB_ONE(manager(), block.data(), zeros.data(), sample.data(), schedule_->encrypting,
                       block.size());
    HeaderMask mask;
    std::memcpy(mask.data(), block.data(), mask.size());
    return mask;
  }

 private:
  Secret<Schedule> schedule_;
};

}  // namespace

Viability viability() {
  if (manager() != nullptr) return {};
  return {false, "libIPSec_MB.so.1 is not here; install libipsec-mb1"};
}

std::unique_ptr<Aead> make_aead(std::span<const std::uint8_t> key) {
  if (manager() == nullptr) return nullptr;
  return std::make_unique<IpsecAead>(key);
}

std::unique_ptr<HeaderProtection> make_header_protection(std::span<const std::uint8_t> key) {
  if (manager() == nullptr) return nullptr;
  return std::make_unique<IpsecHeaderProtection>(key);
}

}  // namespace pycomm::platform::ipsec_mb

#else

namespace pycomm::platform::ipsec_mb {

Viability viability() { return {false, "pycomm was built without its header"}; }
std::unique_ptr<Aead> make_aead(std::span<const std::uint8_t>) { return nullptr; }
std::unique_ptr<HeaderProtection> make_header_protection(std::span<const std::uint8_t>) {
  return nullptr;
}

}  // namespace pycomm::platform::ipsec_mb

#endif

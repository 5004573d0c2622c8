#include "platform/openssl.h"

#include <dlfcn.h>

#include <string>

#include "base/check.h"

namespace pycomm::platform::openssl {
namespace {

struct Loaded {
  Library library{};
  std::string missing;

  template <class F>
  void bind(void* from, const char* name, F* out) {
    *out = from == nullptr ? nullptr : reinterpret_cast<F>(dlsym(from, name));
    if (*out == nullptr && missing.empty()) missing = name;
  }

  Loaded() {
    void* crypto = dlopen("libcrypto.so.3", RTLD_NOW | RTLD_LOCAL);
    void* ssl = dlopen("libssl.so.3", RTLD_NOW | RTLD_LOCAL);
    if (crypto == nullptr || ssl == nullptr) {
      missing = crypto == nullptr ? "libcrypto.so.3" : "libssl.so.3";
      return;
    }
#define PYCOMM_BIND(from, name) bind(from, #name, &library.name)
    PYCOMM_BIND(crypto, EVP_sha256);
    PYCOMM_BIND(crypto, EVP_aes_128_gcm);
    PYCOMM_BIND(crypto, EVP_chacha20_poly1305);
    PYCOMM_BIND(crypto, EVP_aes_128_ecb);
    PYCOMM_BIND(crypto, EVP_chacha20);
    PYCOMM_BIND(crypto, EVP_CIPHER_CTX_new);
    PYCOMM_BIND(crypto, EVP_CIPHER_CTX_free);
    PYCOMM_BIND(crypto, EVP_CIPHER_CTX_ctrl);
    PYCOMM_BIND(crypto, EVP_CIPHER_CTX_set_padding);
    PYCOMM_BIND(crypto, EVP_EncryptInit_ex);
    PYCOMM_BIND(crypto, EVP_EncryptUpdate);
    PYCOMM_BIND(crypto, EVP_EncryptFinal_ex);
    PYCOMM_BIND(crypto, EVP_DecryptInit_ex);
    PYCOMM_BIND(crypto, EVP_DecryptUpdate);
    PYCOMM_BIND(crypto, EVP_DecryptFinal_ex);
    PYCOMM_BIND(crypto, X509_digest);
    PYCOMM_BIND(crypto, X509_check_host);
    PYCOMM_BIND(crypto, X509_free);
    PYCOMM_BIND(crypto, X509_verify_cert_error_string);
    PYCOMM_BIND(crypto, X509_STORE_CTX_get_current_cert);
    PYCOMM_BIND(crypto, X509_STORE_CTX_get_error_depth);
    PYCOMM_BIND(crypto, X509_STORE_CTX_set_error);
    PYCOMM_BIND(crypto, X509_STORE_CTX_get_ex_data);
    PYCOMM_BIND(crypto, BIO_meth_new);
    PYCOMM_BIND(crypto, BIO_meth_set_write);
    PYCOMM_BIND(crypto, BIO_meth_set_read);
    PYCOMM_BIND(crypto, BIO_meth_set_ctrl);
    PYCOMM_BIND(crypto, BIO_new);
    PYCOMM_BIND(crypto, BIO_set_data);
    PYCOMM_BIND(crypto, BIO_get_data);
    PYCOMM_BIND(crypto, BIO_set_init);
    PYCOMM_BIND(crypto, BIO_set_flags);
    PYCOMM_BIND(crypto, BIO_clear_flags);
    PYCOMM_BIND(crypto, ERR_get_error);
    PYCOMM_BIND(crypto, ERR_peek_last_error);
    PYCOMM_BIND(crypto, ERR_reason_error_string);
    PYCOMM_BIND(crypto, ERR_clear_error);
    PYCOMM_BIND(ssl, TLS_method);
    PYCOMM_BIND(ssl, SSL_CTX_new);
    PYCOMM_BIND(ssl, SSL_CTX_free);
    PYCOMM_BIND(ssl, SSL_CTX_ctrl);
    PYCOMM_BIND(ssl, SSL_CTX_set_ciphersuites);
    PYCOMM_BIND(ssl, SSL_CTX_set_num_tickets);
    PYCOMM_BIND(ssl, SSL_CTX_use_certificate_chain_file);
    PYCOMM_BIND(ssl, SSL_CTX_use_PrivateKey_file);
    PYCOMM_BIND(ssl, SSL_CTX_check_private_key);
    PYCOMM_BIND(ssl, SSL_CTX_set_default_passwd_cb);
    PYCOMM_BIND(ssl, SSL_CTX_load_verify_locations);
    PYCOMM_BIND(ssl, SSL_CTX_set_verify);
    PYCOMM_BIND(ssl, SSL_get_ex_data_X509_STORE_CTX_idx);
    PYCOMM_BIND(ssl, SSL_new);
    PYCOMM_BIND(ssl, SSL_free);
    PYCOMM_BIND(ssl, SSL_set_bio);
    PYCOMM_BIND(ssl, SSL_set_accept_state);
    PYCOMM_BIND(ssl, SSL_set_connect_state);
    PYCOMM_BIND(ssl, SSL_set_ex_data);
    PYCOMM_BIND(ssl, SSL_get_ex_data);
    PYCOMM_BIND(ssl, SSL_set1_host);
    PYCOMM_BIND(ssl, SSL_do_handshake);
    PYCOMM_BIND(ssl, SSL_read_ex);
    PYCOMM_BIND(ssl, SSL_write_ex);
    PYCOMM_BIND(ssl, SSL_shutdown);
    PYCOMM_BIND(ssl, SSL_get_error);
    PYCOMM_BIND(ssl, SSL_get1_peer_certificate);
    PYCOMM_BIND(ssl, SSL_get_verify_result);
    PYCOMM_BIND(ssl, SSL_export_keying_material);
#undef PYCOMM_BIND
  }
};

const Loaded& loaded() {
  static const Loaded it;
  return it;
}

}  // namespace

Viability viability() {
  if (loaded().missing.empty()) return {};
  return {false, "OpenSSL 3 is not here (" + loaded().missing + "); install libssl3"};
}

const Library& library() {
  PYCOMM_CHECK(loaded().missing.empty());
  return loaded().library;
}

}  // namespace pycomm::platform::openssl

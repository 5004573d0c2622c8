// The part of OpenSSL 3 that pycomm uses, loaded at run time, so that one binary serves with and
// without it and building needs no headers. Signatures and constants as in openssl/{ssl,x509,bio,
// evp}.h of OpenSSL 3.0; all of them are part of its stable interface.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pycomm/transport.h"

namespace pycomm::platform::openssl {

struct Context;      // SSL_CTX
struct Connection;   // SSL
struct Method;       // SSL_METHOD
struct Certificate;  // X509
struct Checking;     // X509_STORE_CTX
struct Bio;          // BIO
struct BioMethod;    // BIO_METHOD
struct Digest;       // EVP_MD
struct Cipher;       // EVP_CIPHER
struct CipherState;  // EVP_CIPHER_CTX

using VerifyCallback = int (*)(int ok, Checking* checking);

struct Library {
  // libcrypto
  const Digest* (*EVP_sha256)();
  const Cipher* (*EVP_aes_128_gcm)();
  const Cipher* (*EVP_chacha20_poly1305)();
  const Cipher* (*EVP_aes_128_ecb)();
  const Cipher* (*EVP_chacha20)();
  CipherState* (*EVP_CIPHER_CTX_new)();
  void (*EVP_CIPHER_CTX_free)(CipherState*);
  int (*EVP_CIPHER_CTX_ctrl)(CipherState*, int type, int number, void* pointer);
  int (*EVP_CIPHER_CTX_set_padding)(CipherState*, int);
  int (*EVP_EncryptInit_ex)(CipherState*, const Cipher*, void* engine, const unsigned char* key,
                            const unsigned char* iv);
  int (*EVP_EncryptUpdate)(CipherState*, unsigned char* out, int* written, const unsigned char* in,
                           int bytes);
  int (*EVP_EncryptFinal_ex)(CipherState*, unsigned char* out, int* written);
  int (*EVP_DecryptInit_ex)(CipherState*, const Cipher*, void* engine, const unsigned char* key,
                            const unsigned char* iv);
  int (*EVP_DecryptUpdate)(CipherState*, unsigned char* out, int* written, const unsigned char* in,
                           int bytes);
  int (*EVP_DecryptFinal_ex)(CipherState*, unsigned char* out, int* written);
  int (*X509_digest)(const Certificate*, const Digest*, unsigned char* out, unsigned* bytes);
  int (*X509_check_host)(Certificate*, const char* name, std::size_t bytes, unsigned flags,
                         char** peer_name);
  void (*X509_free)(Certificate*);
  const char* (*X509_verify_cert_error_string)(long error);
  Certificate* (*X509_STORE_CTX_get_current_cert)(const Checking*);
  int (*X509_STORE_CTX_get_error_depth)(const Checking*);
  void (*X509_STORE_CTX_set_error)(Checking*, int error);
  void* (*X509_STORE_CTX_get_ex_data)(const Checking*, int index);
  BioMethod* (*BIO_meth_new)(int type, const char* name);
  int (*BIO_meth_set_write)(BioMethod*, int (*)(Bio*, const char*, int));
  int (*BIO_meth_set_read)(BioMethod*, int (*)(Bio*, char*, int));
  int (*BIO_meth_set_ctrl)(BioMethod*, long (*)(Bio*, int, long, void*));
  Bio* (*BIO_new)(const BioMethod*);
  void (*BIO_set_data)(Bio*, void*);
  void* (*BIO_get_data)(Bio*);
  void (*BIO_set_init)(Bio*, int);
  void (*BIO_set_flags)(Bio*, int);
  void (*BIO_clear_flags)(Bio*, int);
  unsigned long (*ERR_get_error)();
  unsigned long (*ERR_peek_last_error)();
  const char* (*ERR_reason_error_string)(unsigned long);
  void (*ERR_clear_error)();
  // libssl
  const Method* (*TLS_method)();
  Context* (*SSL_CTX_new)(const Method*);
  void (*SSL_CTX_free)(Context*);
  long (*SSL_CTX_ctrl)(Context*, int command, long number, void* pointer);
  int (*SSL_CTX_set_ciphersuites)(Context*, const char*);
  int (*SSL_CTX_set_num_tickets)(Context*, std::size_t);
  int (*SSL_CTX_use_certificate_chain_file)(Context*, const char*);
  int (*SSL_CTX_use_PrivateKey_file)(Context*, const char*, int type);
  int (*SSL_CTX_check_private_key)(const Context*);
  void (*SSL_CTX_set_default_passwd_cb)(Context*, int (*)(char*, int, int, void*));
  int (*SSL_CTX_load_verify_locations)(Context*, const char* file, const char* folder);
  void (*SSL_CTX_set_verify)(Context*, int mode, VerifyCallback);
  int (*SSL_get_ex_data_X509_STORE_CTX_idx)();
  Connection* (*SSL_new)(Context*);
  void (*SSL_free)(Connection*);
  void (*SSL_set_bio)(Connection*, Bio* read, Bio* write);
  void (*SSL_set_accept_state)(Connection*);
  void (*SSL_set_connect_state)(Connection*);
  int (*SSL_set_ex_data)(Connection*, int index, void*);
  void* (*SSL_get_ex_data)(const Connection*, int index);
  int (*SSL_set1_host)(Connection*, const char*);
  int (*SSL_do_handshake)(Connection*);
  int (*SSL_read_ex)(Connection*, void*, std::size_t, std::size_t* read);
  int (*SSL_write_ex)(Connection*, const void*, std::size_t, std::size_t* written);
  int (*SSL_shutdown)(Connection*);
  int (*SSL_get_error)(const Connection*, int result);
  Certificate* (*SSL_get1_peer_certificate)(const Connection*);
  long (*SSL_get_verify_result)(const Connection*);
  int (*SSL_export_keying_material)(Connection*, unsigned char* out, std::size_t bytes,
                                    const char* label, std::size_t label_bytes,
                                    const unsigned char* context, std::size_t context_bytes,
                                    int has_context);
};

// Whether OpenSSL 3 was found whole; the reason names the package that brings it.
Viability viability();
// Requires viability().viable.
const Library& library();

}  // namespace pycomm::platform::openssl

#include "platform/tls.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <set>
#include <sstream>

#include "base/check.h"
#include "platform/openssl.h"
#include "platform/system.h"

namespace pycomm::platform {
namespace {

using openssl::library;

// openssl/ssl.h, openssl/x509_vfy.h, openssl/bio.h
constexpr int kSetMinVersion = 123;
constexpr int kSetMode = 33;
constexpr int kSetReadAhead = 41;
constexpr int kSetSessionCacheMode = 44;
constexpr long kTls13 = 0x0304;
constexpr long kPartialWrite = 1, kMovingBuffer = 2, kReleaseBuffers = 16;
constexpr int kPem = 1;
constexpr int kVerifyPeer = 1, kRequireCertificate = 2;
constexpr int kErrorSsl = 1, kWantRead = 2, kWantWrite = 3, kErrorSyscall = 5, kZeroReturn = 6;
constexpr int kRevoked = 23;  // X509_V_ERR_CERT_REVOKED
constexpr unsigned kNoPartialWildcards = 4;
constexpr int kSourceSink = 0x0400;
constexpr int kBioRead = 1, kBioWrite = 2, kBioRetry = 8;
constexpr int kBioFlush = 11;

constexpr std::size_t kRecordBytes = 16 * 1024;
constexpr int kFingerprintBytes = 32;
constexpr const char* kExporterLabel = "EXPORTER-pycomm-membership";
constexpr const char* kCiphers = "TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256";

std::string last_reason() {
  const unsigned long error = library().ERR_peek_last_error();
  const char* reason = error == 0 ? nullptr : library().ERR_reason_error_string(error);
  return reason == nullptr ? "no reason given" : reason;
}

// --- a BIO over a socket that raises no SIGPIPE; its data is the descriptor
int fd_of(openssl::Bio* bio) {
  return static_cast<int>(reinterpret_cast<std::intptr_t>(library().BIO_get_data(bio)));
}

int bio_result(openssl::Bio* bio, const IoResult& result, int direction) {
  library().BIO_clear_flags(bio, kBioRead | kBioWrite | kBioRetry);
  if (result.outcome == IoOutcome::kMoved) return static_cast<int>(result.bytes);
  if (result.outcome == IoOutcome::kWouldBlock) library().BIO_set_flags(bio, direction | kBioRetry);
  return result.outcome == IoOutcome::kClosed ? 0 : -1;
}

int bio_write(openssl::Bio* bio, const char* data, int bytes) {
  const iovec vector{const_cast<char*>(data), static_cast<std::size_t>(bytes)};
  return bio_result(bio, write_vectors(fd_of(bio), &vector, 1), kBioWrite);
}

int bio_read(openssl::Bio* bio, char* data, int bytes) {
  return bio_result(bio, read_some(fd_of(bio), data, static_cast<std::uint64_t>(bytes)), kBioRead);
}

long bio_control(openssl::Bio*, int command, long, void*) { return command == kBioFlush ? 1 : 0; }

const openssl::BioMethod* bio_method() {
  static openssl::BioMethod* const method = [] {
    openssl::BioMethod* made = library().BIO_meth_new(kSourceSink, "socket without signals");
    library().BIO_meth_set_write(made, bio_write);
    library().BIO_meth_set_read(made, bio_read);
    library().BIO_meth_set_ctrl(made, bio_control);
    return made;
  }();
  return method;
}

struct Freed {
  void operator()(openssl::Context* context) const { library().SSL_CTX_free(context); }
  void operator()(openssl::Connection* connection) const { library().SSL_free(connection); }
  void operator()(openssl::Certificate* certificate) const { library().X509_free(certificate); }
};
using ContextPtr = std::unique_ptr<openssl::Context, Freed>;
using ConnectionPtr = std::unique_ptr<openssl::Connection, Freed>;
using CertificatePtr = std::unique_ptr<openssl::Certificate, Freed>;

std::string fingerprint(const openssl::Certificate* certificate) {
  std::array<unsigned char, kFingerprintBytes> digest{};
  unsigned bytes = 0;
  library().X509_digest(certificate, library().EVP_sha256(), digest.data(), &bytes);
  std::string text;
  for (const unsigned char byte : digest) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

// SHA-256 fingerprints, one a line; colons and case do not matter, # begins a comment.
Result<std::set<std::string>> read_denied(const std::string& path) {
  std::set<std::string> denied;
  if (path.empty()) return denied;
  const auto contents = read_file(path);
  if (!contents) {
    return Status::error(StatusCode::kInvalidUsage, "'" + path + "' cannot be read");
  }
  std::istringstream lines(*contents);
  for (std::string line; std::getline(lines, line);) {
    std::string hex;
    for (const char c : line.substr(0, line.find('#'))) {
      if (std::strchr(": \t\r", c) != nullptr) continue;
      hex += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    }
    if (hex.empty()) continue;
    if (hex.size() != 2 * kFingerprintBytes ||
        hex.find_first_not_of("0123456789abcdef") != std::string::npos) {
      return Status::error(StatusCode::kInvalidUsage,
                           "'" + path + "' has a line that is no SHA-256 fingerprint: " + line);
    }
    denied.insert(hex);
  }
  return denied;
}

class OpensslStream final : public ByteStream {
 public:
  OpensslStream(std::shared_ptr<void> keeps, openssl::Context* context, UniqueFd socket,
                const std::set<std::string>* denied)
      : keeps_(std::move(keeps)),
        socket_(std::move(socket)),
        connection_(library().SSL_new(context)),
        denied_(denied) {
    PYCOMM_CHECK(connection_ != nullptr);
    openssl::Bio* bio = library().BIO_new(bio_method());
    PYCOMM_CHECK(bio != nullptr);
    library().BIO_set_data(bio, reinterpret_cast<void*>(std::intptr_t{socket_.get()}));
    library().BIO_set_init(bio, 1);
    library().SSL_set_bio(connection_.get(), bio, bio);
    library().SSL_set_ex_data(connection_.get(), 0, this);
  }

  void begin_connecting(const std::string& peer_name) {
    PYCOMM_CHECK(library().SSL_set1_host(connection_.get(), peer_name.c_str()) == 1);
    library().SSL_set_connect_state(connection_.get());
  }
  void begin_accepting() { library().SSL_set_accept_state(connection_.get()); }

  int fd() const override { return socket_.get(); }
  bool is_encrypted() const override { return true; }

  IoResult shake_hands() override {
    library().ERR_clear_error();
    const int result = library().SSL_do_handshake(connection_.get());
    return result == 1 ? IoResult{IoOutcome::kMoved} : outcome_of(result);
  }

  bool peer_is_named(const std::string& name) const override {
    const CertificatePtr peer(library().SSL_get1_peer_certificate(connection_.get()));
    return peer && library().X509_check_host(peer.get(), name.data(), name.size(),
                                             kNoPartialWildcards, nullptr) == 1;
  }

  std::string export_secret() const override {
    std::string secret(32, '\0');
    PYCOMM_CHECK(library().SSL_export_keying_material(
                     connection_.get(), reinterpret_cast<unsigned char*>(secret.data()),
                     secret.size(), kExporterLabel, std::strlen(kExporterLabel), nullptr, 0,
                     0) == 1);
    return secret;
  }

  bool is_denied(const openssl::Certificate* certificate) const {
    return !denied_->empty() && denied_->contains(fingerprint(certificate));
  }

  IoResult write_vectors(const iovec* vectors, int count) override {
    std::uint64_t taken = 0;
    int at = 0;
    std::size_t skip = 0;  // of vectors[at]
    while (at < count) {
      IoResult result = flush();
      if (result.outcome == IoOutcome::kMoved) {
        const Piece piece = next_piece(vectors, count, &at, &skip);
        result = seal(piece.data, piece.bytes);
        if (result.outcome == IoOutcome::kMoved) taken += piece.bytes;
      }
      if (result.outcome == IoOutcome::kMoved) continue;
      if (taken > 0) break;
      return result;
    }
    return {IoOutcome::kMoved, taken};
  }

  IoResult flush() override {
    while (sealed_bytes_ > 0) {
      library().ERR_clear_error();
      std::size_t written = 0;
      // It only compares the length: the record is sealed already.
      const int result =
          library().SSL_write_ex(connection_.get(), record_.data(), sealed_bytes_, &written);
      if (result != 1) return outcome_of(result);
      sealed_bytes_ = 0;
    }
    return {IoOutcome::kMoved};
  }

  IoResult read_some(void* data, std::uint64_t bytes) override {
    library().ERR_clear_error();
    std::size_t got = 0;
    const int result = library().SSL_read_ex(connection_.get(), data, bytes, &got);
    return result == 1 ? IoResult{IoOutcome::kMoved, got} : outcome_of(result);
  }

  void end_writing() override {
    if (has_ended_ || flush().outcome == IoOutcome::kWouldBlock) return;
    has_ended_ = true;
    library().ERR_clear_error();
    library().SSL_shutdown(connection_.get());
    platform::end_writing(socket_.get());
  }

  std::string explain(const IoResult& failed) const override {
    if (!fault_.empty()) return "TLS: " + fault_;
    return std::string("TCP: ") + std::strerror(failed.error);
  }

 private:
  struct Piece {
    const char* data;
    std::size_t bytes;
  };
  // What goes into one record: a long vector from where it lies, short ones together.
  Piece next_piece(const iovec* vectors, int count, int* at, std::size_t* skip) {
    const auto base = [&] { return static_cast<const char*>(vectors[*at].iov_base) + *skip; };
    const auto left = [&] { return vectors[*at].iov_len - *skip; };
    const auto advance = [&](std::size_t bytes) {
      *skip += bytes;
      while (*at < count && *skip == vectors[*at].iov_len) {
        *skip = 0;
        ++*at;
      }
    };
    if (left() >= kRecordBytes || *at + 1 == count) {
      const Piece piece{base(), std::min(left(), kRecordBytes)};
      advance(piece.bytes);
      return piece;
    }
    std::size_t filled = 0;
    while (*at < count && filled < kRecordBytes) {
      const std::size_t bytes = std::min(left(), kRecordBytes - filled);
      std::memcpy(record_.data() + filled, base(), bytes);
      filled += bytes;
      advance(bytes);
    }
    return {record_.data(), filled};
  }

  IoResult seal(const char* data, std::size_t bytes) {
    library().ERR_clear_error();
    std::size_t written = 0;
    const int result = library().SSL_write_ex(connection_.get(), data, bytes, &written);
    if (result == 1) return {IoOutcome::kMoved};
    const IoResult outcome = outcome_of(result);
    if (outcome.outcome != IoOutcome::kWouldBlock) return outcome;
    sealed_bytes_ = bytes;  // taken: a part may have left already
    return {IoOutcome::kMoved};
  }

  IoResult outcome_of(int result) {
    switch (library().SSL_get_error(connection_.get(), result)) {
      case kWantRead:
      case kWantWrite: return {IoOutcome::kWouldBlock};
      case kZeroReturn: return {IoOutcome::kClosed};
      case kErrorSyscall: return {IoOutcome::kFailed, 0, errno};
      case kErrorSsl:
      default: break;
    }
    fault_ = last_reason();
    if (fault_ == "unexpected eof while reading") return {IoOutcome::kClosed};
    const long verdict = library().SSL_get_verify_result(connection_.get());
    if (verdict != 0) {
      fault_ = std::string("the peer's certificate is refused: ") +
               (verdict == kRevoked ? "it is denied by PYCOMM_TLS_DENIED"
                                    : library().X509_verify_cert_error_string(verdict));
    } else if (fault_.find("alert") != std::string::npos) {
      fault_ = "the peer refused this rank's certificate: " + fault_;
    }
    return {IoOutcome::kFailed};
  }

  const std::shared_ptr<void> keeps_;  // the context
  const UniqueFd socket_;
  const ConnectionPtr connection_;
  const std::set<std::string>* const denied_;
  std::string fault_;
  std::array<char, kRecordBytes> record_{};
  std::size_t sealed_bytes_ = 0;  // of a record that OpenSSL holds and the socket did not take
  bool has_ended_ = false;
};

int on_verify(int ok, openssl::Checking* checking) {
  if (ok != 1 || library().X509_STORE_CTX_get_error_depth(checking) != 0) return ok;
  const int index = library().SSL_get_ex_data_X509_STORE_CTX_idx();
  auto* connection =
      static_cast<openssl::Connection*>(library().X509_STORE_CTX_get_ex_data(checking, index));
  const auto* stream = static_cast<OpensslStream*>(library().SSL_get_ex_data(connection, 0));
  if (!stream->is_denied(library().X509_STORE_CTX_get_current_cert(checking))) return 1;
  library().X509_STORE_CTX_set_error(checking, kRevoked);
  return 0;
}

// Refuses to ask on a terminal.
int no_password(char*, int, int, void*) { return 0; }

class OpensslContext final : public TlsContext,
                             public std::enable_shared_from_this<OpensslContext> {
 public:
  OpensslContext(ContextPtr context, std::set<std::string> denied)
      : context_(std::move(context)), denied_(std::move(denied)) {}

  std::unique_ptr<ByteStream> connect(UniqueFd socket, const std::string& peer_name) override {
    auto stream = make(std::move(socket));
    stream->begin_connecting(peer_name);
    return stream;
  }
  std::unique_ptr<ByteStream> accept(UniqueFd socket) override {
    auto stream = make(std::move(socket));
    stream->begin_accepting();
    return stream;
  }

 private:
  std::unique_ptr<OpensslStream> make(UniqueFd socket) {
    return std::make_unique<OpensslStream>(shared_from_this(), context_.get(), std::move(socket),
                                           &denied_);
  }

  const ContextPtr context_;
  const std::set<std::string> denied_;
};

Status file_error(const char* what, const std::string& path) {
  return Status::error(StatusCode::kInvalidUsage, std::string(what) + " '" + path +
                                                      "' cannot be used: " + last_reason() +
                                                      " (pycomm certs makes such files)");
}

}  // namespace

Result<std::shared_ptr<TlsContext>> TlsContext::load(const TlsOptions& options) {
  if (const Viability ssl = openssl::viability(); !ssl.viable) {
    return Status::error(StatusCode::kSystem, "TLS needs OpenSSL: " + ssl.reason);
  }
  auto denied = read_denied(options.denied_file);
  if (!denied.is_ok()) return denied.status();
  // Its permissions are looked at; OpenSSL reads it.
  if (auto key = read_private_file(options.key_file); !key.is_ok()) return key.status();
  library().ERR_clear_error();
  ContextPtr context(library().SSL_CTX_new(library().TLS_method()));
  PYCOMM_CHECK(context != nullptr);
  openssl::Context* c = context.get();
  library().SSL_CTX_ctrl(c, kSetMinVersion, kTls13, nullptr);
  library().SSL_CTX_ctrl(c, kSetMode, kPartialWrite | kMovingBuffer | kReleaseBuffers, nullptr);
  library().SSL_CTX_ctrl(c, kSetReadAhead, 1, nullptr);
  library().SSL_CTX_ctrl(c, kSetSessionCacheMode, 0, nullptr);
  library().SSL_CTX_set_num_tickets(c, 0);
  PYCOMM_CHECK(library().SSL_CTX_set_ciphersuites(c, kCiphers) == 1);
  library().SSL_CTX_set_default_passwd_cb(c, no_password);
  library().SSL_CTX_set_verify(c, kVerifyPeer | kRequireCertificate, on_verify);
  if (library().SSL_CTX_load_verify_locations(c, options.ca_file.c_str(), nullptr) != 1) {
    return file_error("the CA's certificate", options.ca_file);
  }
  if (library().SSL_CTX_use_certificate_chain_file(c, options.certificate_file.c_str()) != 1) {
    return file_error("this rank's certificate", options.certificate_file);
  }
  if (library().SSL_CTX_use_PrivateKey_file(c, options.key_file.c_str(), kPem) != 1 ||
      library().SSL_CTX_check_private_key(c) != 1) {
    return file_error("this rank's key", options.key_file);
  }
  return std::shared_ptr<TlsContext>(
      std::make_shared<OpensslContext>(std::move(context), std::move(denied).value()));
}

}  // namespace pycomm::platform

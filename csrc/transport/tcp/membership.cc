#include "transport/tcp/membership.h"

#include <algorithm>

#include "base/check.h"
#include "platform/crypto.h"
#include "transport/frame.h"

namespace pycomm::transport::tcp {
namespace {

constexpr std::size_t kIdBytes = 32;
constexpr std::size_t kMacBytes = 32;
constexpr std::size_t kReasonBytesMax = 250;

std::string preamble() {
  std::string text = "pycommT";
  text += static_cast<char>('0' + kProtocolVersion);
  return text;
}

const std::size_t kHelloBytes = preamble().size() + 3 * kIdBytes;

bool is_hex_id(std::string_view text) {
  return text.size() == kIdBytes && std::all_of(text.begin(), text.end(), [](char c) {
           return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
         });
}

bool same_mac(std::string_view a, std::string_view b) {
  platform::Mac left{}, right{};
  if (a.size() != left.size() || b.size() != right.size()) return false;
  std::copy(a.begin(), a.end(), left.begin());
  std::copy(b.begin(), b.end(), right.begin());
  return platform::equal_macs(left, right);
}

Status wrong_secret() {
  return Status::error(StatusCode::kInvalidUsage,
                       "the peer does not hold this job's secret (PYCOMM_SECRET_FILE must name "
                       "files with the same contents on every host)");
}

Status refused(std::string reason) {
  for (char& c : reason) {
    if (c < ' ' || c > '~') c = '?';
  }
  return Status::error(StatusCode::kInvalidUsage, "the peer refused: " + reason);
}

}  // namespace

Membership Membership::connector(std::string secret, const std::string& self,
                                 const std::string& peer, const std::string& nonce) {
  Membership m;
  PYCOMM_CHECK(is_hex_id(self) && is_hex_id(peer) && is_hex_id(nonce));
  m.state_ = State::kAnswer;
  m.secret_ = std::move(secret);
  m.self_ = self;
  m.peer_ = peer;
  m.nonce_ = nonce;
  m.transcript_ = preamble() + self + peer + nonce;
  m.wanted_ = 1;
  return m;
}

Membership Membership::acceptor(std::string secret, const std::string& self,
                                const std::string& nonce) {
  Membership m;
  PYCOMM_CHECK(is_hex_id(self) && is_hex_id(nonce));
  m.secret_ = std::move(secret);
  m.self_ = self;
  m.nonce_ = nonce;
  m.wanted_ = kHelloBytes;
  return m;
}

std::string Membership::start() const {
  return state_ == State::kAnswer ? transcript_ : std::string();
}

std::string Membership::refusal(std::string_view reason) {
  reason = reason.substr(0, kReasonBytesMax);
  return 'r' + std::string(1, static_cast<char>(reason.size())) + std::string(reason);
}

void Membership::expect(State state, std::size_t bytes) {
  state_ = state;
  wanted_ = bytes;
}

std::string Membership::mac(const char* label) const {
  const platform::Mac mac = platform::hmac_sha256(secret_, label + transcript_);
  return std::string(mac.begin(), mac.end());
}

Status Membership::feed(std::string_view in, std::string* out) {
  while (!in.empty() && !is_done()) {
    const std::size_t take = std::min(in.size(), wanted());
    buffer_.append(in.substr(0, take));
    in.remove_prefix(take);
    if (wanted() == 0) {
      PYCOMM_RETURN_IF_ERROR(step(out));
      buffer_.clear();
    }
  }
  return Status();
}

Status Membership::step(std::string* out) {
  switch (state_) {
    case State::kHello: return on_hello(out);
    case State::kAnswer:
      if (buffer_ == "r") {
        expect(State::kRefusal, 1);
      } else if (buffer_ == "c") {
        expect(State::kChallenge, kIdBytes + kMacBytes);
      } else {
        return Status::error(StatusCode::kInternal, "the peer does not speak this protocol");
      }
      return Status();
    case State::kChallenge: return on_challenge(out);
    case State::kProof:
      if (!same_mac(buffer_, mac("connector"))) return wrong_secret();
      *out += 'k';
      state_ = State::kDone;
      return Status();
    case State::kVerdict:
      if (buffer_ == "r") {
        expect(State::kRefusal, 1);
        return Status();
      }
      if (buffer_ != "k") return wrong_secret();
      state_ = State::kDone;
      return Status();
    case State::kRefusal: {
      const auto bytes = static_cast<unsigned char>(buffer_[0]);
      if (bytes == 0) return refused("no reason given");
      expect(State::kReason, bytes);
      return Status();
    }
    case State::kReason: return refused(buffer_);
    case State::kDone: break;
  }
  return Status();
}

Status Membership::on_hello(std::string* out) {
  const std::string head = preamble();
  const std::string_view hello = buffer_;
  if (hello.substr(0, head.size()) != head) {
    return Status::error(StatusCode::kInternal, "the connection does not speak this protocol");
  }
  const std::string_view from = hello.substr(head.size(), kIdBytes);
  const std::string_view to = hello.substr(head.size() + kIdBytes, kIdBytes);
  const std::string_view nonce = hello.substr(head.size() + 2 * kIdBytes, kIdBytes);
  if (!is_hex_id(from) || !is_hex_id(nonce)) {
    return Status::error(StatusCode::kInternal, "a malformed hello");
  }
  if (to != self_) {
    return Status::error(StatusCode::kInvalidUsage, "the connection is meant for another process");
  }
  peer_ = from;
  transcript_ = buffer_ + nonce_;
  *out += 'c' + nonce_ + mac("acceptor");
  expect(State::kProof, kMacBytes);
  return Status();
}

Status Membership::on_challenge(std::string* out) {
  const std::string_view answer = buffer_;
  const std::string_view nonce = answer.substr(0, kIdBytes);
  if (!is_hex_id(nonce)) return Status::error(StatusCode::kInternal, "a malformed challenge");
  transcript_ += nonce;
  if (!same_mac(answer.substr(kIdBytes), mac("acceptor"))) return wrong_secret();
  *out += mac("connector");
  expect(State::kVerdict, 1);
  return Status();
}

}  // namespace pycomm::transport::tcp

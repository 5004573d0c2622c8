#include "transport/quic/endpoint.h"

#include <algorithm>
#include <cstring>

#include "platform/crypto.h"
#include "platform/system.h"

namespace pycomm::transport::quic {
namespace {

using base::TimeNs;

constexpr int kReceivesInARow = 8;
constexpr std::size_t kBatchBytes = 65'000;
constexpr TimeNs kErrorsEveryNs = 5'000'000;
constexpr std::size_t kHandshakeBytesMax = 2'048;  // of a datagram; handshakes use 1,200
constexpr std::size_t kResetTokenBytes = 16;
constexpr std::size_t kResetBytes = 41;  // looks like a short packet; RFC 9000 section 10.3
constexpr std::uint8_t kLongHeaderBit = 0x80, kFixedBit = 0x40;

std::uint64_t key_of(const std::uint8_t* id) {
  std::uint64_t key;
  std::memcpy(&key, id, sizeof key);
  return key;
}

std::uint64_t key_of(const std::string& id) {
  return key_of(reinterpret_cast<const std::uint8_t*>(id.data()));
}

}  // namespace

Result<std::unique_ptr<Endpoint>> Endpoint::open(const std::string& address,
                                                 std::uint16_t first_port, std::uint16_t last_port,
                                                 std::string reset_key) {
  auto socket = platform::UdpSocket::open(address, first_port, last_port);
  if (!socket.is_ok()) return socket.status();
  std::unique_ptr<Endpoint> endpoint(new Endpoint(std::move(socket).value()));
  endpoint->reset_key_ = std::move(reset_key);
  endpoint->batch_.resize(kBatchBytes);
  return endpoint;
}

void Endpoint::add(Session& session) {
  for (const ConnectionId& id : session.own_ids()) {
    if (id.bytes.size() == kOwnIdBytes) by_id_[key_of(id.bytes)] = &session;
  }
}

void Endpoint::remove(Session& session) {
  std::erase_if(by_id_, [&](const auto& item) { return item.second == &session; });
  waiting_.erase(&session);
}

const UdpAddress& Endpoint::address_of(const platform::UdpPeer& peer) {
  if (!(peer == last_peer_) || last_address_.host.empty()) {
    last_peer_ = peer;
    last_address_ = {peer.host_text(), peer.port_number()};
  }
  return last_address_;
}

bool Endpoint::progress(TimeNs now) {
  bool moved = false;
  for (int i = 0; i < kReceivesInARow; ++i) {
    const auto arrivals = socket_.receive();
    if (arrivals.empty()) break;
    moved = true;
    for (const platform::UdpArrival& arrival : arrivals) {
      for (std::size_t at = 0; at < arrival.bytes.size(); at += arrival.segment) {
        const std::size_t bytes = std::min(arrival.segment, arrival.bytes.size() - at);
        dispatch(arrival.bytes.subspan(at, bytes), arrival.from, arrival.ecn, now);
      }
    }
  }
  if (moved || now < look_for_errors_at_) return moved;
  look_for_errors_at_ = now + kErrorsEveryNs;
  for (const platform::UdpPeer& peer : socket_.take_unreachable()) {
    const UdpAddress& address = address_of(peer);
    for (auto& [id, session] : by_id_) {
      const UdpAddress& theirs = session->peer();
      if (theirs.port == address.port && theirs.host == address.host) session->on_unreachable(now);
    }
  }
  return false;
}

void Endpoint::dispatch(std::span<std::uint8_t> datagram, const platform::UdpPeer& from,
                        std::uint8_t ecn, TimeNs now) {
  if (datagram.size() < 1 + kOwnIdBytes) return;
  const bool is_short = (datagram[0] & kLongHeaderBit) == 0;
  if (is_short) {
    const auto found = by_id_.find(key_of(datagram.data() + 1));
    if (found != by_id_.end()) {
      found->second->receive(datagram, address_of(from), static_cast<Ecn>(ecn), now);
      return;
    }
  }
  on_unknown(datagram, from, now);
}

void Endpoint::on_unknown(std::span<std::uint8_t> datagram, const platform::UdpPeer& from,
                          TimeNs now) {
  const bool is_short = (datagram[0] & (kLongHeaderBit | kFixedBit)) == kFixedBit;
  if (is_short && datagram.size() >= kResetTokenBytes + 5) {
    const auto token = datagram.last(kResetTokenBytes);
    for (auto& [id, session] : by_id_) {
      if (session->is_reset_token(token)) return session->on_reset();
    }
  }
  if (num_shaking_ > 0 || !is_short) {
    if (datagram.size() > kHandshakeBytesMax) return;
    if (unclaimed_.size() >= kUnclaimedMax) unclaimed_.pop_front();
    unclaimed_.push_back({std::string(datagram.begin(), datagram.end()), address_of(from)});
    return;
  }
  // Shorter than what it answers, and few: two endpoints must not reset each other for ever.
  if (datagram.size() <= kResetBytes || reset_key_.empty()) return;
  if (now - resets_since_ > 1'000'000'000) {
    resets_since_ = now;
    num_resets_ = 0;
  }
  if (++num_resets_ > kResetsPerSecond || !platform::crypto_viability().viable) return;
  std::string reset;
  while (reset.size() < kResetBytes - kResetTokenBytes) {
    const std::uint64_t noise = platform::random_u64();
    reset.append(reinterpret_cast<const char*>(&noise), sizeof noise);
  }
  reset.resize(kResetBytes - kResetTokenBytes);
  reset[0] = static_cast<char>((reset[0] & 0x3f) | kFixedBit);
  const std::string id(reinterpret_cast<const char*>(datagram.data()) + 1, kOwnIdBytes);
  const platform::Mac token = platform::hmac_sha256(reset_key_, id);
  reset.append(token.begin(), token.begin() + kResetTokenBytes);
  send(reset, address_of(from));
}

void Endpoint::send(const std::string& datagram, const UdpAddress& to) {
  const auto peer = platform::UdpPeer::parse(to.host, to.port);
  if (!peer.is_ok()) return;
  // Lost if the socket is full, as on the way: a handshake repeats what it needs.
  socket_.send(peer.value(),
               {reinterpret_cast<const std::uint8_t*>(datagram.data()), datagram.size()},
               datagram.size());
}

bool Endpoint::flush(Session& session, TimeNs now) {
  if (const auto it = waiting_.find(&session); it != waiting_.end()) {
    Waiting& w = it->second;
    const auto result = socket_.send(w.to, w.bytes, w.segment);
    if (result.outcome == platform::IoOutcome::kWouldBlock) {
      w.bytes.erase(w.bytes.begin(), w.bytes.begin() + static_cast<std::ptrdiff_t>(result.bytes));
      return false;
    }
    waiting_.erase(it);
  }
  for (;;) {
    std::size_t segment = 0;
    const std::size_t bytes = session.send(batch_, &segment, now);
    if (bytes == 0) return true;
    const auto to = platform::UdpPeer::parse(session.peer().host, session.peer().port);
    if (!to.is_ok()) return true;
    const auto result = socket_.send(to.value(), {batch_.data(), bytes}, segment);
    if (result.outcome == platform::IoOutcome::kWouldBlock) {
      waiting_[&session] = {to.value(),
                            {batch_.begin() + static_cast<std::ptrdiff_t>(result.bytes),
                             batch_.begin() + static_cast<std::ptrdiff_t>(bytes)},
                            segment};
      return false;
    }
  }
}

}  // namespace pycomm::transport::quic

// Fuzzes a QUIC session: datagrams as they come off the wire, and frames of a peer that holds the
// keys and is hostile all the same.
#include "quic_pair.h"

namespace {

using namespace pycomm;
using transport::quic::Protection;
using transport::quic::TrafficSecret;

TrafficSecret secret_of(const std::string& text) {
  TrafficSecret secret;
  std::copy(text.begin(), text.end(), secret.bytes.begin());
  return secret;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto [client, server] = test::make_handed_over();
  test::Bulk bulk(20'000);
  base::TimeNs now = 1'000'000'000;
  transport::quic::Stream stream(bulk, bulk, 1 << 20);
  auto session = transport::quic::Session::create(client, {}, stream, now).value();
  auto peer = Protection::create(
                  transport::quic::Cipher::kAes128Gcm, secret_of(server.sending_secret),
                  secret_of(server.receiving_secret), {}, transport::quic::CryptoLibrary::kAny)
                  .value();
  std::vector<std::uint8_t> out(65'000);
  const auto move = [&] {
    now += 5'000'000;
    session->on_timer(now);
    std::size_t segment = 0;
    session->send(out, &segment, now);
    static_cast<void>(session->next_deadline());
  };
  move();
  // One byte says how long the next packet's frames are; 0: the rest is a datagram as it is.
  std::uint64_t number = 5;
  while (size > 1) {
    const std::size_t bytes = std::min<std::size_t>(*data == 0 ? size - 1 : *data, size - 1);
    std::vector<std::uint8_t> packet(data + 1, data + 1 + bytes);
    if (*data != 0) {
      packet.resize(std::max<std::size_t>(packet.size(), 4));
      const iovec piece{packet.data(), packet.size()};
      std::vector<std::uint8_t> sealed(packet.size() + 64);
      const auto& id = server.peer_ids[0].bytes;
      sealed.resize(peer->seal(number++, 4, {reinterpret_cast<const std::uint8_t*>(id.data()), 8},
                               &piece, 1, packet.size(), sealed.data()));
      packet = std::move(sealed);
    }
    session->receive(packet, {"server", static_cast<std::uint16_t>(1000 + *data % 2)},
                     static_cast<test::Ecn>(*data & 3), now);
    move();
    data += 1 + bytes;
    size -= 1 + bytes;
  }
  return 0;
}

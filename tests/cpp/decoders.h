// Every decoder of bytes that someone else wrote, as functions of arbitrary input; fuzz_*.cc and
// decoders_test.cc feed them.
#pragma once

#include <cstdint>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "communicator/bootstrap.h"
#include "transport/message_core.h"
#include "transport/tcp/membership.h"

namespace pycomm::test {

// Frames into a core that has posts, sends, announcements and a region open. Guards around each
// destination must survive.
inline void feed_message_core(const std::uint8_t* data, std::size_t size) {
  using namespace transport;
  CoreOptions options;
  options.eager_bytes_max = 256;
  options.eager_window_bytes = 4096;
  options.fragment_bytes_max = 512;
  MessageCore core(options, nullptr);
  struct Guarded {
    std::uint64_t before = 0x1122334455667788;
    alignas(8) std::byte bytes[1024];
    std::uint64_t after = 0x8877665544332211;
    bool is_whole() const { return before == 0x1122334455667788 && after == 0x8877665544332211; }
  };
  Guarded targets[4], region;
  std::deque<Transfer> transfers;
  for (std::uint32_t i = 0; i < 4; ++i) {
    Transfer t;
    t.id = {1, 2, 0, 0, i};
    t.signature = 9;
    t.data = targets[i].bytes;
    t.bytes = i < 2 ? 100 : 1000;
    transfers.push_back(t);
    core.post(transfers.back());
  }
  std::vector<std::byte> source(1000);
  for (std::uint32_t i = 0; i < 2; ++i) {
    Transfer t;
    t.id = {1, 3, 0, 0, i};
    t.data = source.data();
    t.bytes = 1000;
    transfers.push_back(t);
    core.send(transfers.back());
  }
  if (!core.expose(4, region.bytes, sizeof region.bytes, RegionKind::kHost).is_ok()) std::abort();
  std::size_t at = 0;
  while (size - at >= sizeof(FrameHeader)) {
    FrameHeader header;
    std::memcpy(&header, data + at, sizeof header);
    at += sizeof header;
    if (!core.begin(header).is_ok()) break;
    const std::uint64_t payload = header.payload_bytes;
    const std::uint64_t here = payload < size - at ? payload : size - at;
    if (std::byte* target = core.payload_target()) std::memcpy(target, data + at, here);
    at += here;
    if (here < payload || !core.end().is_ok()) break;
    while (core.front() != nullptr) core.pop();
  }
  for (Transfer& t : transfers) core.cancel(t);
  for (const Guarded& target : targets) {
    if (!target.is_whole()) std::abort();
  }
  if (!region.is_whole()) std::abort();
}

inline void feed_hello(const std::uint8_t* data, std::size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  auto hello = communicator::decode(text);
  if (!hello.is_ok()) return;
  // What was accepted must survive a round trip.
  if (hello.value().protocol != transport::kProtocolVersion) return;
  auto again = communicator::decode(communicator::encode(hello.value()));
  if (!again.is_ok() ||
      communicator::encode(again.value()) != communicator::encode(hello.value())) {
    std::abort();
  }
}

// Without the secret no input may ever finish a membership.
inline void feed_membership(const std::uint8_t* data, std::size_t size) {
  using transport::tcp::Membership;
  const std::string a(32, 'a'), b(32, 'b'), nonce(32, '0');
  Membership acceptor = Membership::acceptor("the secret of this job", a, nonce);
  Membership connector = Membership::connector("the secret of this job", b, a, nonce);
  for (Membership* side : {&acceptor, &connector}) {
    std::string out;
    const Status status = side->feed({reinterpret_cast<const char*>(data), size}, &out);
    if (status.is_ok() && side->is_done()) std::abort();
  }
}

}  // namespace pycomm::test

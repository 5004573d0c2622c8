#include "udp_pipe.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/udp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "platform/aead.h"
#include "two_processes.h"

#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103
#endif
#ifndef UDP_GRO
#define UDP_GRO 104
#endif

namespace pycomm::bench {
namespace {

using platform::Aead;
using platform::kTagBytes;

constexpr double kWarmUpS = 0.1, kMeasuredS = 0.4;
constexpr std::uint64_t kBatchBytes = 64'000;
constexpr int kBufferBytes = 8 << 20;
constexpr int kReceivedTogether = 8;
constexpr std::size_t kDatagramBytesMax = 65'536;

int open_socket() {
  const int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  sockaddr_in here{};
  here.sin_family = AF_INET;
  here.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  bind(fd, reinterpret_cast<sockaddr*>(&here), sizeof here);
  for (const int option : {SO_RCVBUF, SO_SNDBUF, SO_RCVBUFFORCE, SO_SNDBUFFORCE}) {
    setsockopt(fd, SOL_SOCKET, option, &kBufferBytes, sizeof kBufferBytes);
  }
  const int on = 1;
  setsockopt(fd, IPPROTO_UDP, UDP_GRO, &on, sizeof on);
  return fd;
}

// The number of a datagram is its first eight bytes, and its nonce.
platform::Nonce nonce_of(std::uint64_t number) {
  platform::Nonce nonce{};
  std::memcpy(nonce.data(), &number, sizeof number);
  return nonce;
}

void send_until_told(int fd, const sockaddr_in& to, std::uint64_t payload,
                     std::uint64_t source_bytes, Aead* aead,
                     const std::atomic<std::uint64_t>& is_over) {
  const std::vector<std::uint8_t> block(source_bytes, 7);
  const std::uint64_t per_batch = std::max<std::uint64_t>(1, kBatchBytes / payload);
  std::vector<std::uint8_t> batch(per_batch * payload);
  const std::uint64_t clear = payload - sizeof(std::uint64_t) - (aead != nullptr ? kTagBytes : 0);
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(std::uint16_t))] = {};
  iovec piece{batch.data(), batch.size()};
  msghdr message{};
  message.msg_name = const_cast<sockaddr_in*>(&to);
  message.msg_namelen = sizeof to;
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = IPPROTO_UDP;
  header->cmsg_type = UDP_SEGMENT;
  header->cmsg_len = CMSG_LEN(sizeof(std::uint16_t));
  const auto segment = static_cast<std::uint16_t>(payload);
  std::memcpy(CMSG_DATA(header), &segment, sizeof segment);
  std::uint64_t number = 0, at = 0;
  while (is_over.load(std::memory_order_relaxed) == 0) {
    for (std::uint64_t i = 0; i < per_batch; ++i) {
      std::uint8_t* out = batch.data() + i * payload;
      std::memcpy(out, &number, sizeof number);
      if (at + clear > block.size()) at = 0;
      if (aead != nullptr) {
        const iovec source{const_cast<std::uint8_t*>(block.data() + at), clear};
        aead->seal(nonce_of(number), {out, sizeof number}, &source, 1, out + sizeof number);
      } else {
        std::memcpy(out + sizeof number, block.data() + at, clear);
      }
      at += clear;
      ++number;
    }
    if (sendmsg(fd, &message, 0) < 0) return;  // no GSO here: nothing arrives
  }
}

// Takes in what is there; the bytes that were opened.
std::uint64_t receive(int fd, std::vector<std::uint8_t>& buffer, std::uint64_t payload,
                      Aead* aead) {
  std::array<mmsghdr, kReceivedTogether> messages{};
  std::array<iovec, kReceivedTogether> pieces;
  for (std::size_t i = 0; i < messages.size(); ++i) {
    pieces[i] = {buffer.data() + i * kDatagramBytesMax, kDatagramBytesMax};
    messages[i].msg_hdr.msg_iov = &pieces[i];
    messages[i].msg_hdr.msg_iovlen = 1;
  }
  const int count = recvmmsg(fd, messages.data(), messages.size(), MSG_DONTWAIT, nullptr);
  std::uint64_t total = 0;
  for (int i = 0; i < count; ++i) {
    const auto& message = messages[static_cast<std::size_t>(i)];
    auto* data = static_cast<std::uint8_t*>(message.msg_hdr.msg_iov->iov_base);
    for (std::uint64_t at = 0; at + payload <= message.msg_len; at += payload) {
      std::uint64_t number;
      std::memcpy(&number, data + at, sizeof number);
      const bool is_right =
          aead == nullptr || aead->open(nonce_of(number), {data + at, sizeof number},
                                        {data + at + sizeof number, payload - sizeof number});
      total += is_right ? payload : 0;
    }
  }
  return total;
}

double measure_arrivals(int fd, std::uint64_t payload, Aead* aead) {
  std::vector<std::uint8_t> buffer(kReceivedTogether * kDatagramBytesMax);
  std::uint64_t total = 0;
  const auto begin = Clock::now();
  double from = 0;
  for (;;) {
    const std::uint64_t bytes = receive(fd, buffer, payload, aead);
    if (bytes == 0) pause_cpu();
    const double now = seconds_since(begin);
    if (now < kWarmUpS) continue;
    if (from == 0) from = now;
    total += bytes;
    if (now > from + kMeasuredS) return static_cast<double>(total) / (now - from);
  }
}

std::unique_ptr<Aead> make_cipher(PipeCipher cipher) {
  constexpr std::array<std::uint8_t, 16> kKey{1, 2, 3};
  auto made =
      platform::make_aead(platform::Cipher::kAes128Gcm, kKey,
                          cipher == PipeCipher::kOpenssl ? platform::CryptoLibrary::kOpenssl
                                                         : platform::CryptoLibrary::kIpsecMb);
  return made.is_ok() ? std::move(made).value() : nullptr;
}

}  // namespace

double udp_pipe_bytes_per_s(std::uint64_t payload_bytes, std::uint64_t source_bytes,
                            PipeCipher cipher) {
  const bool is_sealed = cipher != PipeCipher::kNone;
  if (is_sealed && make_cipher(cipher) == nullptr) return 0;
  const int fds[2] = {open_socket(), open_socket()};
  sockaddr_in to{};
  socklen_t bytes = sizeof to;
  getsockname(fds[1], reinterpret_cast<sockaddr*>(&to), &bytes);
  const double result = in_two([&](int me, Flags& flags) {
    // Keys are made here: a forked child finds those of its parent empty.
    const std::unique_ptr<Aead> aead = is_sealed ? make_cipher(cipher) : nullptr;
    if (me == 0) {
      send_until_told(fds[0], to, payload_bytes, source_bytes, aead.get(), flags.word[1][0]);
      return 0.0;
    }
    const double rate = measure_arrivals(fds[1], payload_bytes, aead.get());
    flags.word[1][0].store(1);
    return rate;
  });
  for (const int fd : fds) close(fd);
  return result;
}

}  // namespace pycomm::bench

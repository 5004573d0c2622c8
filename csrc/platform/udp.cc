#include "platform/udp.h"

#include <arpa/inet.h>
#include <linux/errqueue.h>
#include <netinet/udp.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "platform/system.h"

#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103
#endif
#ifndef UDP_GRO
#define UDP_GRO 104
#endif

namespace pycomm::platform {
namespace {

constexpr std::size_t kDatagramBytesMax = 65'535;
constexpr int kBatch = 8;
constexpr int kBufferBytes = 8 << 20;
constexpr int kEct0 = 2;

bool set_option(int fd, int level, int name, int value) {
  return setsockopt(fd, level, name, &value, sizeof value) == 0;
}

sockaddr_in to_sockaddr(const UdpPeer& peer) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = peer.host;
  address.sin_port = peer.port;
  return address;
}

// True also for an ICMP error of an earlier datagram, which says nothing about this one.
bool is_passing(int error) { return error == EAGAIN || error == EINTR || error == ENOBUFS; }

void configure(int fd) {
  set_option(fd, IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_PROBE);  // we look for ourselves
  set_option(fd, IPPROTO_IP, IP_RECVTOS, 1);
  set_option(fd, IPPROTO_IP, IP_TOS, kEct0);
  set_option(fd, IPPROTO_IP, IP_RECVERR, 1);
  for (const auto& [forced, plain] :
       {std::pair{SO_RCVBUFFORCE, SO_RCVBUF}, std::pair{SO_SNDBUFFORCE, SO_SNDBUF}}) {
    if (!set_option(fd, SOL_SOCKET, forced, kBufferBytes)) {
      set_option(fd, SOL_SOCKET, plain, kBufferBytes);  // as much as the system allows
    }
  }
}

}  // namespace

Result<UdpPeer> UdpPeer::parse(const std::string& host, std::uint16_t port) {
  in_addr address;
  if (inet_pton(AF_INET, host.c_str(), &address) != 1) {
    return Status::error(StatusCode::kInvalidUsage, "'" + host + "' is not an IPv4 address");
  }
  return UdpPeer{address.s_addr, htons(port)};
}

std::string UdpPeer::host_text() const {
  std::array<char, INET_ADDRSTRLEN> text{};
  const in_addr address{host};
  inet_ntop(AF_INET, &address, text.data(), text.size());
  return text.data();
}

std::uint16_t UdpPeer::port_number() const { return ntohs(port); }

Result<UdpSocket> UdpSocket::open(const std::string& address, std::uint16_t first_port,
                                  std::uint16_t last_port) {
  auto local = UdpPeer::parse(address.empty() ? "0.0.0.0" : address, 0);
  if (!local.is_ok()) return local.status();
  const unsigned num_ports = last_port - first_port + 1u;
  const unsigned start = static_cast<unsigned>(random_u64() % num_ports);
  for (unsigned i = 0; i < num_ports; ++i) {
    UdpSocket made;
    made.fd_.reset(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!made.fd_) return system_error("socket(AF_INET, SOCK_DGRAM)");
    sockaddr_in where = to_sockaddr(local.value());
    where.sin_port = htons(static_cast<std::uint16_t>(first_port + (start + i) % num_ports));
    if (bind(made.fd_.get(), reinterpret_cast<sockaddr*>(&where), sizeof where) != 0) {
      if (errno == EADDRINUSE || errno == EACCES) continue;
      return system_error("a UDP socket on '" + address + "'");
    }
    socklen_t bytes = sizeof where;
    getsockname(made.fd_.get(), reinterpret_cast<sockaddr*>(&where), &bytes);
    made.port_ = ntohs(where.sin_port);
    configure(made.fd_.get());
    made.has_gso_ = set_option(made.fd_.get(), IPPROTO_UDP, UDP_SEGMENT, 0);
    made.has_gro_ = set_option(made.fd_.get(), IPPROTO_UDP, UDP_GRO, 1);
    made.buffer_.resize(kBatch * kDatagramBytesMax);
    made.arrivals_.reserve(kBatch);
    return made;
  }
  return Status::error(StatusCode::kSystem, "no UDP port of PYCOMM_PORT_RANGE " +
                                                std::to_string(first_port) + "-" +
                                                std::to_string(last_port) + " is free");
}

IoResult UdpSocket::send(const UdpPeer& to, std::span<const std::uint8_t> bytes,
                         std::size_t segment) {
  sockaddr_in address = to_sockaddr(to);
  std::uint64_t sent = 0;
  while (sent < bytes.size()) {
    const std::size_t rest = bytes.size() - sent;
    const bool is_many = has_gso_ && rest > segment;
    iovec piece{const_cast<std::uint8_t*>(bytes.data() + sent),
                is_many ? rest : std::min(rest, segment)};
    msghdr message{};
    message.msg_name = &address;
    message.msg_namelen = sizeof address;
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(std::uint16_t))] = {};
    if (is_many) {
      message.msg_control = control;
      message.msg_controllen = sizeof control;
      cmsghdr* header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = IPPROTO_UDP;
      header->cmsg_type = UDP_SEGMENT;
      header->cmsg_len = CMSG_LEN(sizeof(std::uint16_t));
      const auto size = static_cast<std::uint16_t>(segment);
      std::memcpy(CMSG_DATA(header), &size, sizeof size);
    }
    if (sendmsg(fd_.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0) {
      sent += piece.iov_len;
      continue;
    }
    if (is_passing(errno)) return {IoOutcome::kWouldBlock, sent, 0};
    if (is_many && (errno == EIO || errno == EINVAL)) {
      has_gso_ = false;  // an interface whose driver cannot; the plain way always works
      continue;
    }
    if (errno == ECONNREFUSED || errno == EMSGSIZE) {  // of an earlier one; too long for the link
      sent += errno == EMSGSIZE ? piece.iov_len : 0;
      continue;
    }
    return {IoOutcome::kFailed, sent, errno};
  }
  return {IoOutcome::kMoved, sent, 0};
}

std::span<UdpArrival> UdpSocket::receive() {
  arrivals_.clear();
  std::array<mmsghdr, kBatch> messages{};
  std::array<iovec, kBatch> pieces;
  std::array<sockaddr_in, kBatch> senders;
  struct alignas(cmsghdr) Control {
    char bytes[CMSG_SPACE(sizeof(int)) + CMSG_SPACE(sizeof(int))];
  };
  std::array<Control, kBatch> controls;
  for (std::size_t i = 0; i < kBatch; ++i) {
    pieces[i] = {buffer_.data() + i * kDatagramBytesMax, kDatagramBytesMax};
    msghdr& header = messages[i].msg_hdr;
    header.msg_name = &senders[i];
    header.msg_namelen = sizeof senders[i];
    header.msg_iov = &pieces[i];
    header.msg_iovlen = 1;
    header.msg_control = controls[i].bytes;
    header.msg_controllen = sizeof controls[i].bytes;
  }
  const int count = recvmmsg(fd_.get(), messages.data(), kBatch, MSG_DONTWAIT, nullptr);
  for (int i = 0; i < count; ++i) {
    msghdr& header = messages[static_cast<std::size_t>(i)].msg_hdr;
    const std::size_t bytes = messages[static_cast<std::size_t>(i)].msg_len;
    if (bytes == 0 || (header.msg_flags & MSG_TRUNC) != 0) continue;
    UdpArrival arrival;
    arrival.bytes = {static_cast<std::uint8_t*>(header.msg_iov->iov_base), bytes};
    arrival.segment = bytes;
    arrival.from = {senders[static_cast<std::size_t>(i)].sin_addr.s_addr,
                    senders[static_cast<std::size_t>(i)].sin_port};
    for (cmsghdr* c = CMSG_FIRSTHDR(&header); c != nullptr; c = CMSG_NXTHDR(&header, c)) {
      if (c->cmsg_level == IPPROTO_UDP && c->cmsg_type == UDP_GRO) {
        int size = 0;
        std::memcpy(&size, CMSG_DATA(c), sizeof size);
        if (size > 0) arrival.segment = static_cast<std::size_t>(size);
      } else if (c->cmsg_level == IPPROTO_IP && c->cmsg_type == IP_TOS) {
        arrival.ecn = *CMSG_DATA(c) & 3;
      }
    }
    arrivals_.push_back(arrival);
  }
  return arrivals_;
}

std::vector<UdpPeer> UdpSocket::take_unreachable() {
  std::vector<UdpPeer> found;
  for (;;) {
    sockaddr_in to{};
    char byte;
    iovec piece{&byte, 1};
    alignas(cmsghdr) char control[512];
    msghdr message{};
    message.msg_name = &to;
    message.msg_namelen = sizeof to;
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    if (recvmsg(fd_.get(), &message, MSG_ERRQUEUE | MSG_DONTWAIT) < 0) return found;
    for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c)) {
      if (c->cmsg_level != IPPROTO_IP || c->cmsg_type != IP_RECVERR) continue;
      sock_extended_err error{};
      std::memcpy(&error, CMSG_DATA(c), sizeof error);
      if (error.ee_errno == ECONNREFUSED) found.push_back({to.sin_addr.s_addr, to.sin_port});
    }
  }
}

}  // namespace pycomm::platform

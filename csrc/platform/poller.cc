#include "platform/poller.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <cerrno>

#include "platform/system.h"

namespace pycomm::platform {
namespace {

int timeout_ms_from_ns(std::int64_t ns) {
  if (ns < 0) return -1;
  const std::int64_t ms = (ns + 999'999) / 1'000'000;
  return ms > 60'000 ? 60'000 : static_cast<int>(ms);
}

}  // namespace

Result<Doorbell> Doorbell::create() {
  Doorbell bell;
  bell.fd_.reset(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!bell.fd_) return system_error("eventfd");
  return bell;
}

Doorbell Doorbell::adopt(UniqueFd fd) {
  Doorbell bell;
  bell.fd_ = std::move(fd);
  return bell;
}

void Doorbell::ring() const {
  const std::uint64_t one = 1;
  [[maybe_unused]] auto ignored = ::write(fd_.get(), &one, sizeof one);
}

void Doorbell::clear() const {
  std::uint64_t count;
  [[maybe_unused]] auto ignored = ::read(fd_.get(), &count, sizeof count);
}

bool Doorbell::wait(std::int64_t timeout_ns) const {
  pollfd entry{fd_.get(), POLLIN, 0};
  return poll(&entry, 1, timeout_ms_from_ns(timeout_ns)) > 0;
}

Result<Poller> Poller::create() {
  Poller poller;
  poller.fd_.reset(epoll_create1(EPOLL_CLOEXEC));
  if (!poller.fd_) return system_error("epoll_create1");
  return poller;
}

Status Poller::add(int fd, std::uint64_t token) const {
  epoll_event event{};
  event.events = EPOLLIN | EPOLLRDHUP;
  event.data.u64 = token;
  if (epoll_ctl(fd_.get(), EPOLL_CTL_ADD, fd, &event) != 0) return system_error("epoll_ctl");
  return Status();
}

void Poller::set_wants_write(int fd, std::uint64_t token, bool wants) {
  epoll_event event{};
  event.events = EPOLLIN | EPOLLRDHUP | (wants ? EPOLLOUT : 0u);
  event.data.u64 = token;
  epoll_ctl(fd_.get(), EPOLL_CTL_MOD, fd, &event);
}

void Poller::remove(int fd) { epoll_ctl(fd_.get(), EPOLL_CTL_DEL, fd, nullptr); }

void Poller::wait(std::int64_t timeout_ns, std::vector<Event>* events) const {
  epoll_event ready[32];
  const int n = epoll_wait(fd_.get(), ready, 32, timeout_ms_from_ns(timeout_ns));
  for (int i = 0; i < n; ++i) {
    events->push_back({ready[i].data.u64,
                       (ready[i].events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0,
                       (ready[i].events & EPOLLOUT) != 0});
  }
}

}  // namespace pycomm::platform

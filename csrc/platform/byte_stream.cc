#include "platform/byte_stream.h"

#include <cstring>

namespace pycomm::platform {
namespace {

class PlainStream final : public ByteStream {
 public:
  explicit PlainStream(UniqueFd socket) : socket_(std::move(socket)) {}

  int fd() const override { return socket_.get(); }
  IoResult write_vectors(const iovec* vectors, int count) override {
    return platform::write_vectors(socket_.get(), vectors, count);
  }
  IoResult read_some(void* data, std::uint64_t bytes) override {
    return platform::read_some(socket_.get(), data, bytes);
  }
  void end_writing() override { platform::end_writing(socket_.get()); }
  std::string explain(const IoResult& failed) const override {
    return std::string("TCP: ") + std::strerror(failed.error);
  }

 private:
  UniqueFd socket_;
};

}  // namespace

std::unique_ptr<ByteStream> make_plain_stream(UniqueFd socket) {
  return std::make_unique<PlainStream>(std::move(socket));
}

}  // namespace pycomm::platform

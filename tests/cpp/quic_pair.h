// Two QUIC sessions and the network between them, under a virtual clock: what the lab does to
// packets, in memory and by seed.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "lab/link_model.h"
#include "transport/quic/session.h"

namespace pycomm::test {

using transport::quic::Ecn;
using transport::quic::Session;
using transport::quic::SessionOptions;

// The two ends of one connection, as after a handshake.
inline std::pair<HandedOver, HandedOver> make_handed_over(bool chacha20 = false) {
  HandedOver ends[2];
  for (int i = 0; i < 2; ++i) {
    HandedOver& end = ends[i];
    end.is_client = i == 0;
    end.is_chacha20 = chacha20;
    end.sending_secret = std::string(32, static_cast<char>('a' + i));
    end.receiving_secret = std::string(32, static_cast<char>('b' - i));
    for (std::uint64_t s = 0; s < 3; ++s) {
      const std::string mine(8, static_cast<char>('A' + i + 2 * static_cast<int>(s)));
      const std::string theirs(8, static_cast<char>('B' - i + 2 * static_cast<int>(s)));
      end.own_ids.push_back({s, mine, std::string(16, static_cast<char>('0' + i))});
      end.peer_ids.push_back({s, theirs, std::string(16, static_cast<char>('1' - i))});
    }
    end.next_packet_number = 5;
    end.received = {{0, 5}};
    end.stream_id = 4;
    end.receive_max = end.stream_receive_max = end.send_max = end.stream_send_max = 1 << 20;
    end.datagram_bytes_max = 65'535;
    end.udp_payload_max = 65'527;
    end.rtt_us = 1'000;
    end.peer = {i == 0 ? "server" : "client", 1000};
  }
  return {ends[0], ends[1]};
}

// Sends a pattern of `bytes`, and checks the one that arrives.
class Bulk final : public transport::quic::StreamSource, public transport::quic::StreamSink {
 public:
  static std::uint8_t at(std::uint64_t offset) {
    return static_cast<std::uint8_t>((offset * 2654435761u) >> 11);
  }
  explicit Bulk(std::uint64_t bytes) : data_(bytes) {
    for (std::uint64_t i = 0; i < bytes; ++i) data_[i] = at(i);
  }
  std::uint64_t end_offset() const override {
    return std::min<std::uint64_t>(data_.size(), allowed_);
  }
  // Offers no more than the first so many bytes.
  void allow(std::uint64_t bytes) { allowed_ = bytes; }
  int gather(std::uint64_t offset, std::uint64_t bytes, iovec* out, int) override {
    out[0] = {data_.data() + offset, bytes};
    return 1;
  }
  void on_acked(std::uint64_t offset) override { acked_ = offset; }
  void on_bytes(std::uint64_t offset, std::span<const std::uint8_t> bytes) override {
    for (std::size_t i = 0; i < bytes.size(); ++i) is_right_ &= bytes[i] == at(offset + i);
    received_ += bytes.size();
  }
  void on_prefix(std::uint64_t offset) override { prefix_ = offset; }

  bool is_done_sending() const { return acked_ == data_.size(); }
  bool has_received(std::uint64_t bytes) const {
    return is_right_ && received_ == bytes && prefix_ == bytes;
  }
  std::uint64_t prefix() const { return prefix_; }

 private:
  std::vector<std::uint8_t> data_;
  std::uint64_t acked_ = 0, received_ = 0, prefix_ = 0;
  std::uint64_t allowed_ = UINT64_MAX;
  bool is_right_ = true;
};

class QuicPair {
 public:
  struct End {
    std::unique_ptr<Bulk> bulk;
    std::unique_ptr<transport::quic::Stream> stream;
    std::unique_ptr<Session> session;
    lab::LinkModel out{0};
    UdpAddress address;
  };

  QuicPair(std::uint64_t bytes_a, std::uint64_t bytes_b, const lab::LinkShape& shape,
           SessionOptions options = {}, bool chacha20 = false) {
    const auto [client, server] = make_handed_over(chacha20);
    const HandedOver states[2] = {client, server};
    for (int i = 0; i < 2; ++i) {
      End& end = ends[i];
      end.bulk = std::make_unique<Bulk>(i == 0 ? bytes_a : bytes_b);
      end.out = lab::LinkModel(options.seed * 2 + static_cast<std::uint64_t>(i));
      end.out.set_shape(shape);
      end.address = {i == 0 ? "client" : "server", 1000};
      end.stream = std::make_unique<transport::quic::Stream>(*end.bulk, *end.bulk,
                                                             options.receive_window_max);
      auto made = Session::create(states[i], options, *end.stream, now);
      end.session = std::move(made).value();
    }
  }

  // Runs until `done` or the virtual deadline; true if done.
  template <class F>
  bool run(base::TimeNs for_ns, F done) {
    const base::TimeNs until = now + for_ns;
    while (!done()) {
      for (int i = 0; i < 2; ++i) move(i);
      base::TimeNs next = until;
      for (const End& end : ends) next = std::min(next, end.session->next_deadline());
      if (!flying_.empty()) next = std::min(next, flying_.begin()->first.first);
      if (next >= until) {
        now = until;
        return done();
      }
      now = std::max(now + 1, next);
      deliver();
    }
    return true;
  }
  bool run_to_end(base::TimeNs for_ns) {
    return run(for_ns,
               [&] { return ends[0].bulk->is_done_sending() && ends[1].bulk->is_done_sending(); });
  }
  void set_shape(const lab::LinkShape& shape) {
    for (End& end : ends) end.out.set_shape(shape);
  }

  base::TimeNs now = 1'000'000'000;
  End ends[2];
  // May change, or drop (false), what is sent.
  std::function<bool(int from, std::vector<std::uint8_t>&)> tamper;

 private:
  struct Flying {
    int to;
    std::vector<std::uint8_t> bytes;
    UdpAddress from;
    bool is_marked;
  };

  void move(int i) {
    End& end = ends[i];
    end.session->on_timer(now);
    std::vector<std::uint8_t> batch(64'000);
    for (;;) {
      std::size_t size = 0;
      const std::size_t bytes = end.session->send(batch, &size, now);
      if (bytes == 0) break;
      for (std::size_t at = 0; at < bytes; at += size) {
        const std::size_t end_at = std::min(bytes, at + size);
        std::vector<std::uint8_t> packet(batch.begin() + static_cast<std::ptrdiff_t>(at),
                                         batch.begin() + static_cast<std::ptrdiff_t>(end_at));
        if (tamper && !tamper(i, packet)) continue;
        const lab::Fate fate = end.out.admit(static_cast<std::uint32_t>(packet.size() + 28), now);
        for (int copy = 0; copy < fate.num_copies; ++copy) {
          flying_.emplace(std::make_pair(fate.at[static_cast<std::size_t>(copy)], next_++),
                          Flying{1 - i, packet, end.address, fate.is_marked});
        }
      }
    }
  }

  void deliver() {
    while (!flying_.empty() && flying_.begin()->first.first <= now) {
      Flying packet = std::move(flying_.begin()->second);
      flying_.erase(flying_.begin());
      ends[packet.to].session->receive(packet.bytes, packet.from,
                                       packet.is_marked ? Ecn::kMarked : Ecn::kEct0, now);
    }
  }

  std::map<std::pair<base::TimeNs, std::uint64_t>, Flying> flying_;
  std::uint64_t next_ = 0;
};

}  // namespace pycomm::test

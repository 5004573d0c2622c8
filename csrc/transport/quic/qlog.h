// A trace of one connection for people and for qvis: packets with their frames, losses, and what
// recovery thinks. Source: draft-ietf-quic-qlog-main-schema-02 and -quic-events-01 (qlog 0.3, as
// qvis reads it), JSON text sequences (RFC 7464). No payload and no key is in it.
// Thread: the session's.
#pragma once

#include <cstdint>
#include <cstdio>
#include <memory>
#include <span>
#include <string>

#include "base/clock.h"
#include "pycomm/status.h"
#include "transport/quic/interval_set.h"

namespace pycomm::transport::quic {

class Qlog {
 public:
  // Makes `folder`/NAME.sqlog; a file of that name must not exist. Errors: kSystem.
  static Result<std::shared_ptr<Qlog>> open(const std::string& folder, const std::string& name,
                                            bool is_client, base::TimeNs now);
  ~Qlog();

  // --- frames of the packet in hand, then the packet
  void add_frame(const char* type);
  void add_frame(std::uint64_t type);  // by its number (RFC 9000 section 19)
  void add_stream(std::uint64_t id, std::uint64_t offset, std::uint64_t bytes);
  void add_ack(std::span<const Interval> descending);
  enum class Direction { kSent, kReceived };
  void end_packet(Direction direction, std::uint64_t number, std::size_t bytes, base::TimeNs now);

  void packet_lost(std::uint64_t number, base::TimeNs now);
  struct Metrics {
    base::TimeNs smoothed_rtt = 0, latest_rtt = 0, min_rtt = 0;
    std::uint64_t window_bytes = 0, in_flight_bytes = 0;
    double pacing_bytes_per_s = 0;
    bool operator==(const Metrics&) const = default;
  };
  // Each is written when it has changed.
  void metrics(const Metrics& metrics, base::TimeNs now);
  void mtu(std::uint64_t bytes, base::TimeNs now);
  void num_key_updates(std::uint64_t count, base::TimeNs now);
  void closed(const std::string& reason, base::TimeNs now);

 private:
  Qlog(std::FILE* file, std::string path, bool is_client, base::TimeNs begin)
      : file_(file), path_(std::move(path)), is_client_(is_client), begin_(begin) {}
  void event(const char* name, const std::string& data, base::TimeNs now);
  void write(const std::string& record);
  void flush();

  std::FILE* file_;  // null: the disk is full, say
  const std::string path_;
  const bool is_client_;
  const base::TimeNs begin_;
  std::string buffer_, frames_;
  Metrics metrics_;
  std::uint64_t mtu_ = 0, num_key_updates_ = 0;
  bool is_closed_ = false;
};

}  // namespace pycomm::transport::quic

#include "transport/quic/qlog.h"

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/log.h"
#include "transport/quic/frames.h"

namespace pycomm::transport::quic {
namespace {

using base::TimeNs;

constexpr char kRecordSeparator = '\x1e';
constexpr std::size_t kBufferBytes = 64 * 1024;

std::string ms(TimeNs ns) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3f", static_cast<double>(ns) / 1e6);
  return text;
}

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c >= ' ' && c <= '~' ? c : '?';
  }
  return out + '"';
}

const char* frame_name(std::uint64_t type) {
  switch (type) {
    case kFramePadding: return "padding";
    case kFramePing: return "ping";
    case kFrameResetStream: return "reset_stream";
    case kFrameStopSending: return "stop_sending";
    case kFrameCrypto: return "crypto";
    case kFrameNewToken: return "new_token";
    case kFrameMaxData: return "max_data";
    case kFrameMaxStreamData: return "max_stream_data";
    case kFrameMaxStreamsBidi:
    case kFrameMaxStreamsUni: return "max_streams";
    case kFrameDataBlocked: return "data_blocked";
    case kFrameStreamDataBlocked: return "stream_data_blocked";
    case kFrameStreamsBlockedBidi:
    case kFrameStreamsBlockedUni: return "streams_blocked";
    case kFrameNewConnectionId: return "new_connection_id";
    case kFrameRetireConnectionId: return "retire_connection_id";
    case kFramePathChallenge: return "path_challenge";
    case kFramePathResponse: return "path_response";
    case kFrameCloseTransport:
    case kFrameCloseApplication: return "connection_close";
    case kFrameHandshakeDone: return "handshake_done";
    case kFrameDatagram:
    case kFrameDatagramLength: return "datagram";
    default: return "unknown";
  }
}

}  // namespace

Result<std::shared_ptr<Qlog>> Qlog::open(const std::string& folder, const std::string& name,
                                         bool is_client, TimeNs now) {
  const std::string path = folder + "/" + name + ".sqlog";
  std::FILE* file = std::fopen(path.c_str(), "wbxe");
  if (file == nullptr) {
    return Status::error(StatusCode::kSystem, path + ": " + std::strerror(errno));
  }
  // Our own buffer: a forked child would write out the library's a second time.
  std::setvbuf(file, nullptr, _IONBF, 0);
  std::shared_ptr<Qlog> qlog(new Qlog(file, path, is_client, now));
  qlog->write(R"({"qlog_version":"0.3","qlog_format":"JSON-SEQ","title":"pycomm",)"
              R"("trace":{"vantage_point":{"name":"pycomm","type":")" +
              std::string(is_client ? "client" : "server") +
              R"("},"common_fields":{"protocol_type":["QUIC"],"time_format":"relative",)"
              R"("reference_time":0,"ODCID":)" +
              quoted(name) + "}}}");
  return qlog;
}

Qlog::~Qlog() {
  flush();
  if (file_ != nullptr) std::fclose(file_);
}

void Qlog::write(const std::string& record) {
  buffer_ += kRecordSeparator;
  buffer_ += record;
  buffer_ += '\n';
  if (buffer_.size() >= kBufferBytes) flush();
}

void Qlog::flush() {
  const std::string bytes = std::exchange(buffer_, {});
  if (file_ == nullptr || std::fwrite(bytes.data(), 1, bytes.size(), file_) == bytes.size()) return;
  base::log(base::LogLevel::kWarn, base::Subsystem::kNet,
            "the trace ends: " + path_ + ": " + std::strerror(errno));
  std::fclose(file_);
  file_ = nullptr;
}

void Qlog::event(const char* name, const std::string& data, TimeNs now) {
  write("{\"time\":" + ms(now - begin_) + ",\"name\":\"" + name + "\",\"data\":{" + data + "}}");
}

void Qlog::add_frame(const char* type) {
  if (!frames_.empty()) frames_ += ',';
  frames_ += std::string("{\"frame_type\":\"") + type + "\"}";
}

void Qlog::add_frame(std::uint64_t type) { add_frame(frame_name(type)); }

void Qlog::add_stream(std::uint64_t id, std::uint64_t offset, std::uint64_t bytes) {
  if (!frames_.empty()) frames_ += ',';
  frames_ += "{\"frame_type\":\"stream\",\"stream_id\":" + std::to_string(id) +
             ",\"offset\":" + std::to_string(offset) + ",\"length\":" + std::to_string(bytes) + "}";
}

void Qlog::add_ack(std::span<const Interval> descending) {
  if (!frames_.empty()) frames_ += ',';
  frames_ += "{\"frame_type\":\"ack\",\"acked_ranges\":[";
  for (std::size_t i = 0; i < descending.size(); ++i) {
    frames_ += (i == 0 ? "[" : ",[") + std::to_string(descending[i].begin) + "," +
               std::to_string(descending[i].end - 1) + "]";
  }
  frames_ += "]}";
}

void Qlog::end_packet(Direction direction, std::uint64_t number, std::size_t bytes, TimeNs now) {
  event(direction == Direction::kSent ? "transport:packet_sent" : "transport:packet_received",
        "\"header\":{\"packet_type\":\"1RTT\",\"packet_number\":" + std::to_string(number) +
            "},\"raw\":{\"length\":" + std::to_string(bytes) + "},\"frames\":[" + frames_ + "]",
        now);
  frames_.clear();
}

void Qlog::packet_lost(std::uint64_t number, TimeNs now) {
  event("recovery:packet_lost",
        "\"header\":{\"packet_type\":\"1RTT\",\"packet_number\":" + std::to_string(number) + "}",
        now);
}

void Qlog::metrics(const Metrics& m, TimeNs now) {
  if (m == metrics_) return;
  metrics_ = m;
  event("recovery:metrics_updated",
        "\"smoothed_rtt\":" + ms(m.smoothed_rtt) + ",\"latest_rtt\":" + ms(m.latest_rtt) +
            ",\"min_rtt\":" + ms(m.min_rtt) +
            ",\"congestion_window\":" + std::to_string(m.window_bytes) +
            ",\"bytes_in_flight\":" + std::to_string(m.in_flight_bytes) + ",\"pacing_rate\":" +
            std::to_string(static_cast<std::uint64_t>(8 * m.pacing_bytes_per_s)),
        now);
}

void Qlog::mtu(std::uint64_t bytes, TimeNs now) {
  if (bytes == mtu_) return;
  event("connectivity:mtu_updated",
        "\"old\":" + std::to_string(mtu_) + ",\"new\":" + std::to_string(bytes), now);
  mtu_ = bytes;
}

void Qlog::num_key_updates(std::uint64_t count, TimeNs now) {
  for (; num_key_updates_ < count; ++num_key_updates_) {
    event("security:key_updated",
          std::string("\"key_type\":\"") + (is_client_ ? "client" : "server") + "_1rtt_secret\"",
          now);
  }
}

void Qlog::closed(const std::string& reason, TimeNs now) {
  if (std::exchange(is_closed_, true)) return;
  event("connectivity:connection_closed", "\"reason\":" + quoted(reason), now);
}

}  // namespace pycomm::transport::quic

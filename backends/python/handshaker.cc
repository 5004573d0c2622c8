#include "handshaker.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>

#include "pycomm/handshaker.h"
#include "signals.h"

namespace py = pybind11;

namespace pycomm::python {
namespace {

// The exception's own words, without a traceback.
std::string text_of(py::error_already_set& error) {
  return py::str(error.value()).cast<std::string>();
}

std::vector<ConnectionId> ids_of(const py::handle& rows) {
  std::vector<ConnectionId> ids;
  for (const auto& [sequence, bytes, token] :
       rows.cast<std::vector<std::tuple<std::uint64_t, std::string, std::string>>>()) {
    ids.push_back({sequence, bytes, token});
  }
  return ids;
}

HandedOver state_of(const py::dict& d) {
  HandedOver s;
  const auto take = [&](const char* name, auto* out) {
    *out = d[name].cast<std::remove_pointer_t<decltype(out)>>();
  };
  take("is_client", &s.is_client);
  take("is_chacha20", &s.is_chacha20);
  take("sending_secret", &s.sending_secret);
  take("receiving_secret", &s.receiving_secret);
  s.own_ids = ids_of(d["own_ids"]);
  s.peer_ids = ids_of(d["peer_ids"]);
  take("next_packet_number", &s.next_packet_number);
  take("received", &s.received);
  take("stream_id", &s.stream_id);
  take("receive_max", &s.receive_max);
  take("received_bytes", &s.received_bytes);
  take("stream_receive_max", &s.stream_receive_max);
  take("send_max", &s.send_max);
  take("sent_bytes", &s.sent_bytes);
  take("stream_send_max", &s.stream_send_max);
  take("datagram_bytes_max", &s.datagram_bytes_max);
  take("udp_payload_max", &s.udp_payload_max);
  take("idle_timeout_ms", &s.idle_timeout_ms);
  take("ack_delay_exponent", &s.ack_delay_exponent);
  take("ack_delay_max_ms", &s.ack_delay_max_ms);
  take("rtt_us", &s.rtt_us);
  const auto [host, port] = d["peer"].cast<std::pair<std::string, std::uint16_t>>();
  s.peer = {host, port};
  take("peer_process_id", &s.peer_process_id);
  take("path", &s.path);
  return s;
}

class PythonHandshaker final : public Handshaker {
 public:
  explicit PythonHandshaker(py::object object) : object_(std::move(object)) {}
  ~PythonHandshaker() override {
    py::gil_scoped_acquire gil;
    object_ = py::object();
  }

  void connect(const HandshakeTarget& t) override {
    guarded([&] {
      object_.attr("connect")(t.address.host, t.address.port, t.process_id, t.name, t.path);
    });
  }
  void receive(const std::string& datagram, const UdpAddress& from) override {
    guarded([&] { object_.attr("receive")(py::bytes(datagram), from.host, from.port); });
  }
  std::vector<Datagram> take_datagrams() override {
    std::vector<Datagram> result;
    guarded([&] {
      for (const auto& [bytes, host, port] :
           object_.attr("take_datagrams")()
               .cast<std::vector<std::tuple<std::string, std::string, std::uint16_t>>>()) {
        result.push_back({bytes, {host, port}});
      }
    });
    return result;
  }
  bool has_heard(const std::string& process_id, int path) override {
    bool heard = false;
    guarded([&] { heard = object_.attr("has_heard")(process_id, path).cast<bool>(); });
    return heard;
  }
  std::vector<HandedOver> take_established() override {
    std::vector<HandedOver> result;
    guarded([&] {
      for (const py::handle& row : object_.attr("take_established")()) {
        result.push_back(state_of(row.cast<py::dict>()));
      }
    });
    return result;
  }
  std::vector<Failure> take_failures() override {
    std::vector<Failure> result;
    guarded([&] {
      for (const auto& [process_id, reason, path] :
           object_.attr("take_failures")()
               .cast<std::vector<std::tuple<std::string, std::string, int>>>()) {
        result.push_back({process_id, reason, path});
      }
    });
    if (!error_.empty()) result.push_back({"", std::exchange(error_, {}), -1});
    return result;
  }

 private:
  // What a hostile datagram makes aioquic throw is told as a failure, and goes on. A signal that
  // came while Python ran is kept for whoever asks has_signal().
  template <class F>
  void guarded(F body) {
    py::gil_scoped_acquire gil;
    try {
      body();
    } catch (py::error_already_set& error) {
      if (!error.matches(PyExc_Exception)) {
        kept_signal = std::current_exception();
      } else {
        error_ = "the handshake: " + text_of(error);
      }
    }
  }

  py::object object_;
  std::string error_;
};

std::unique_ptr<Handshaker> make(const HandshakerOptions& o) {
  py::gil_scoped_acquire gil;
  try {
    py::dict options;
    options["ca_file"] = o.tls.ca_file;
    options["certificate_file"] = o.tls.certificate_file;
    options["key_file"] = o.tls.key_file;
    options["denied_file"] = o.tls.denied_file;
    options["secret"] = py::bytes(o.secret);
    options["reset_key"] = py::bytes(o.reset_key);
    options["process_id"] = o.process_id;
    options["expected"] = o.expected;
    options["keylog_file"] = o.keylog_file;
    return std::make_unique<PythonHandshaker>(
        py::module_::import("pycomm.control.handshake").attr("make")(options));
  } catch (py::error_already_set& error) {
    throw std::runtime_error(text_of(error));
  }
}

}  // namespace

void install_handshaker() { set_handshaker_factory(make); }

}  // namespace pycomm::python

// What a communicator tells of itself, as lists of dicts.
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

#include "pycomm/communicator.h"

namespace pycomm::python {

inline pybind11::dict path_row(const PathStats& path) {
  pybind11::dict row;
  row["peer"] = path.peer;
  row["rtt_s"] = path.rtt_s;
  row["bandwidth_bytes_per_s"] = path.bandwidth_bytes_per_s;
  row["bytes_sent"] = path.bytes_sent;
  row["packets_sent"] = path.packets_sent;
  row["packets_lost"] = path.packets_lost;
  row["bytes_resent"] = path.bytes_resent;
  row["window_bytes"] = path.window_bytes;
  row["mtu"] = path.mtu;
  return row;
}

inline pybind11::dict rdma_row(const RdmaStats& rdma) {
  pybind11::dict row;
  row["registrations"] = rdma.registrations;
  row["cache_hits"] = rdma.cache_hits;
  row["evictions"] = rdma.evictions;
  row["refusals"] = rdma.refusals;
  row["bytes_registered"] = rdma.bytes_registered;
  row["atomics"] = rdma.atomics;
  row["messages_again"] = rdma.messages_again;
  row["path_resets"] = rdma.path_resets;
  pybind11::list paths;
  for (const std::string& path : rdma.paths) paths.append(path);
  row["paths"] = paths;
  return row;
}

inline pybind11::list peer_stats_rows(const std::vector<PeerStats>& stats) {
  pybind11::list rows;
  for (const PeerStats& peer : stats) {
    pybind11::dict row;
    row["rank"] = peer.rank;
    row["transport"] = peer.transport;
    row["bytes_sent"] = peer.counters.bytes_sent;
    row["bytes_received"] = peer.counters.bytes_received;
    row["bytes_staged"] = peer.counters.bytes_staged;
    row["bytes_direct"] = peer.counters.bytes_direct;
    row["messages_sent"] = peer.counters.messages_sent;
    row["messages_received"] = peer.counters.messages_received;
    pybind11::list paths;
    for (const PathStats& path : peer.paths) paths.append(path_row(path));
    if (!peer.paths.empty()) row["paths"] = paths;
    if (peer.rdma) row["rdma"] = rdma_row(*peer.rdma);
    rows.append(row);
  }
  return rows;
}

inline pybind11::list flight_record_rows(const std::vector<FlightRecord>& records) {
  pybind11::list rows;
  for (const FlightRecord& record : records) {
    pybind11::dict row;
    row["op_number"] = record.op_number;
    row["operation"] = describe_signature(record.signature);
    row["is_finished"] = record.is_finished;
    row["status"] = to_string(record.code);
    rows.append(row);
  }
  return rows;
}

}  // namespace pycomm::python

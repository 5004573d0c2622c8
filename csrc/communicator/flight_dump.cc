#include "communicator/flight_dump.h"

#include <algorithm>

namespace pycomm::communicator {
namespace {

// The few opcodes of pickle protocol 2 that dictionaries, lists, texts and numbers take.
class PickleWriter {
 public:
  PickleWriter() : out_("\x80\x02") {}

  void begin_dict() { out_ += "}("; }
  void end_dict() { out_ += 'u'; }
  void begin_list() { out_ += "]("; }
  void end_list() { out_ += 'e'; }
  void text(const std::string& text) {
    out_ += 'X';
    little_endian(text.size(), 4);
    out_ += text;
  }
  void number(std::uint64_t value) {
    out_ += "\x8a\x09";  // nine bytes, so that it is not negative
    little_endian(value, 8);
    out_ += '\0';
  }
  void boolean(bool value) { out_ += value ? '\x88' : '\x89'; }
  void none() { out_ += 'N'; }

  std::string finish() { return std::move(out_) + "."; }

 private:
  void little_endian(std::uint64_t value, int bytes) {
    for (int i = 0; i < bytes; ++i) out_ += static_cast<char>(value >> (8 * i) & 0xff);
  }
  std::string out_;
};

// How torch calls the operation.
const char* torch_name(OpKind kind) {
  switch (kind) {
    case OpKind::kBarrier: return "all_reduce_barrier";
    case OpKind::kAllGather: return "_all_gather_base";
    case OpKind::kReduceScatter: return "_reduce_scatter_base";
    case OpKind::kAllToAll:
    case OpKind::kAllToAllUneven: return "all_to_all";
    default: return to_string(kind);
  }
}

struct Sizes {
  std::uint64_t input;
  std::uint64_t output;
};

Sizes sizes_of(OpKind kind, std::uint64_t count, std::uint64_t world_size) {
  switch (kind) {
    case OpKind::kAllGather:
    case OpKind::kGather: return {count, count * world_size};
    case OpKind::kReduceScatter:
    case OpKind::kScatter: return {count * world_size, count};
    case OpKind::kAllToAll: return {count * world_size, count * world_size};
    default: return {count, count};
  }
}

void write_entry(PickleWriter& out, const FlightGroup& group, const FlightRecord& record,
                 std::uint64_t record_id) {
  const auto kind = static_cast<OpKind>(record.signature >> 60);
  const auto dtype = static_cast<DType>(record.signature >> 55 & 31);
  const Sizes sizes = sizes_of(kind, record.signature & kCountMax, group.global_ranks.size());
  const auto field = [&](const char* name, auto&& write) {
    out.text(name);
    write();
  };
  const auto list_of = [&](auto&& write) {
    out.begin_list();
    write();
    out.end_list();
  };
  out.begin_dict();
  field("record_id", [&] { out.number(record_id); });
  field("pg_id", [&] { out.number(0); });
  field("process_group", [&] {
    list_of([&] {
      out.text(group.name);
      out.text(group.name);
    });
  });
  field("collective_seq_id", [&] { out.number(record.op_number); });
  field("p2p_seq_id", [&] { out.number(0); });
  field("op_id", [&] { out.number(record.op_number); });
  // The analyser takes names of its own backends only; gloo is the one for tensors on the host.
  field("profiling_name", [&] { out.text(std::string("gloo:") + torch_name(kind)); });
  field("time_created_ns", [&] { out.number(0); });
  for (const auto& [name, size] :
       {std::pair{"input_sizes", sizes.input}, std::pair{"output_sizes", sizes.output}}) {
    field(name, [&] { list_of([&] { list_of([&] { out.number(size); }); }); });
  }
  for (const char* name : {"input_dtypes", "output_dtypes"}) {
    field(name, [&] { list_of([&] { out.text(to_string(dtype)); }); });
  }
  const bool is_done = record.is_finished && record.code == StatusCode::kOk;
  field("state", [&] { out.text(is_done ? "completed" : "started"); });
  field("time_discovered_started_ns", [&] { out.none(); });
  field("time_discovered_completed_ns", [&] { out.none(); });
  field("retired", [&] { out.boolean(record.is_finished); });
  field("timeout_ms", [&] { out.number(0); });
  field("is_p2p", [&] { out.boolean(false); });
  field("frames", [&] { list_of([] {}); });
  field("pycomm", [&] {
    out.text(describe_signature(record.signature) + ": " +
             (record.is_finished ? to_string(record.code) : "under way"));
  });
  out.end_dict();
}

}  // namespace

std::string encode_flight_dump(const std::vector<FlightGroup>& groups) {
  PickleWriter out;
  out.begin_dict();
  out.text("version");
  out.text("2.10");
  out.text("pg_config");
  out.begin_dict();
  for (const FlightGroup& group : groups) {
    std::string ranks;
    for (const int rank : group.global_ranks) {
      ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
    }
    out.text(group.name);
    out.begin_dict();
    for (const auto& [name, value] : {std::pair<const char*, std::string>{"name", group.name},
                                      {"desc", group.name},
                                      {"ranks", "[" + ranks + "]"}}) {
      out.text(name);
      out.text(value);
    }
    out.end_dict();
  }
  out.end_dict();
  out.text("pg_status");
  out.begin_dict();
  out.end_dict();
  out.text("entries");
  out.begin_list();
  for (std::size_t g = 0; g < groups.size(); ++g) {
    for (const FlightRecord& record : groups[g].records) {
      // Where a recorder has forgotten its first operations, numbers still tell which ones remain.
      write_entry(out, groups[g], record, (std::uint64_t{g} << 32) + record.op_number);
    }
  }
  out.end_list();
  out.end_dict();
  return out.finish();
}

}  // namespace pycomm::communicator

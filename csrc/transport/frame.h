// What two message cores say to each other. A frame is this header and payload_bytes of payload.
// The layout is the wire format (little-endian) and the slot format of the shared-memory rings.
#pragma once

#include <cstdint>

#include "pycomm/transport.h"

namespace pycomm::transport {

inline constexpr std::uint32_t kProtocolVersion = 6;

enum class FrameKind : std::uint8_t {
  kEager = 1,    // a whole small message
  kRequest,      // "a message waits here": argument = its address if the receiver may pull, else 0
  kClear,        // the receiver has posted: send
  kData,         // a part of a cleared message; argument = offset
  kPulled,       // the receiver has read the message; key = the sender's announcement slot
  kCredit,       // argument = bytes of eager window given back
  kGoodbye,      // nothing follows
  kWrite,        // payload into a region; signature = region, argument = offset
  kFetchAdd,     // signature = region, argument = offset, message_bytes = delta
  kFetchReply,   // argument = the old value, key = 1 if the region refused it
  kGroupFailed,  // the sender's group failed: argument = StatusCode, key = rank at fault + 1
  kWhereabouts,  // the sender is in this operation, under this signature, and makes no headway
};
inline constexpr int kFrameKindMax = static_cast<int>(FrameKind::kWhereabouts);

struct FrameHeader {
  std::uint8_t kind = 0;
  std::uint8_t reserved[3] = {};
  std::uint32_t payload_bytes = 0;
  std::uint64_t group = 0;
  std::uint64_t op = 0;
  std::uint32_t epoch = 0;
  std::uint32_t step = 0;
  std::uint32_t chunk = 0;
  std::uint32_t key = 0;
  Signature signature = 0;
  std::uint64_t message_bytes = 0;
  std::uint64_t argument = 0;

  TransferId id() const { return {group, op, epoch, step, chunk}; }
  void set_id(const TransferId& id) {
    group = id.group;
    op = id.op;
    epoch = id.epoch;
    step = id.step;
    chunk = id.chunk;
  }
};
static_assert(sizeof(FrameHeader) == 64);

}  // namespace pycomm::transport

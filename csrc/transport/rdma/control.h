// What the two ends of an RDMA link say over the stream beside it, on which both have proved who
// they are: how their rails can be reached, when one is ready, and, when one broke, how much had
// arrived on it. A rail has generations: each is a fresh pair of queues with a fresh first number,
// so that packets of an earlier life mean nothing to a later one.
#pragma once

#include <cstdint>
#include <cstring>

#include "platform/verbs.h"
#include "transport/message_core.h"

namespace pycomm::transport::rdma {

struct ControlMessage {
  enum class Kind : std::uint8_t {
    kOffer = 1,  // the first; num_rails of this side
    kUp,         // this side's end of a rail of this generation
    kReady,      // it takes packets
    kDown,       // it takes no more; `received` messages had arrived
    kVerdict,    // of the creation; `mask` of rails that carried a message both ways
    kGone,       // the grant `token` was taken back: nothing may be written there any more
  };
  std::uint8_t kind = 0;
  std::uint8_t rail = 0;
  std::uint8_t num_rails = 0;
  std::uint8_t mask = 0;
  std::uint32_t generation = 0;
  std::uint64_t received = 0;
  std::uint64_t credit_address = 0;
  std::uint32_t credit_key = 0;
  std::uint32_t number = 0;
  std::uint32_t first_psn = 0;
  std::uint16_t lid = 0;
  std::uint8_t mtu_code = 0;
  std::uint8_t max_reads = 0;
  std::uint8_t is_ethernet = 0;
  std::uint8_t status = 0;  // of a kDown: the verbs status that broke it, 0: none
  std::uint8_t reserved[2] = {};
  std::uint32_t token = 0;
  std::uint8_t gid[16] = {};

  void set_address(const platform::verbs::PairAddress& address) {
    number = address.number;
    first_psn = address.first_psn;
    lid = address.lid;
    mtu_code = address.mtu_code;
    max_reads = address.max_reads;
    is_ethernet = address.is_ethernet ? 1 : 0;
    std::memcpy(gid, address.gid.data(), sizeof gid);
  }
  platform::verbs::PairAddress address() const {
    platform::verbs::PairAddress address;
    address.number = number & 0xffffff;
    address.first_psn = first_psn & 0xffffff;
    address.lid = lid;
    address.mtu_code = mtu_code;
    address.max_reads = max_reads;
    address.is_ethernet = is_ethernet != 0;
    std::memcpy(address.gid.data(), gid, sizeof gid);
    return address;
  }
  bool is_valid() const {
    if (kind < 1 || kind > static_cast<std::uint8_t>(Kind::kGone)) return false;
    if (rail >= kGrantKeysMax || num_rails > kGrantKeysMax) return false;
    return static_cast<Kind>(kind) != Kind::kUp || (mtu_code >= 1 && mtu_code <= 5);
  }
};
static_assert(sizeof(ControlMessage) == 64);

}  // namespace pycomm::transport::rdma

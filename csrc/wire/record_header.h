// RecordHeader: what the header of a REPLICATE says, which is sent in fields of a Header that other messages
// use for other things (docs/wire-format.md, REPLICATE). Nothing else reads or writes them there.
//
//   stream    job | table              status    count
//   position  sequence                 end_slot  clock
//   kind      aux                      applied   epoch
//   stamp     incarnation | worker     floor     dim: its distance below the stamp, is_shared in the last bit
//
// Threads: a value.

#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>

#include "wire/wire.h"

namespace shoal::wire {

struct RecordHeader {
  static constexpr std::uint32_t kNotCompared = 0xffffffffU;  // in place of a status

  std::uint64_t stream = 0;
  std::uint64_t position = 0;  // ALIVE: of the last record that was sent
  Record kind = Record::kAlive;
  std::uint64_t stamp = 0;  // 0: none, and no floor
  std::uint64_t floor = 0;  // when it is decoded, at most the one that was encoded
  bool is_shared = false;
  std::uint32_t status = 0;    // REQUEST
  std::uint32_t end_slot = 0;  // REQUEST
  std::uint32_t applied = 0;   // REQUEST

  Header header() const noexcept {
    Header header{.op = Op::kReplicate,
                  .dtype = kind == Record::kAlive || kind == Record::kRequest ? Dtype::kNone : Dtype::kUint8,
                  .table = static_cast<std::uint32_t>(stream),
                  .worker = static_cast<std::uint32_t>(stamp),
                  .incarnation = static_cast<std::uint32_t>(stamp >> 32U),
                  .sequence = position,
                  .epoch = applied,
                  .clock = end_slot,
                  .count = status,
                  .aux = static_cast<std::uint32_t>(kind),
                  .job = static_cast<std::uint32_t>(stream >> 32U)};
    if (stamp != 0) {
      const unsigned distance = coded_distance(stamp - std::min(floor, stamp));
      header.dim = static_cast<std::uint16_t>(2 * distance + (is_shared ? 1 : 0));
    }
    return header;
  }
  static RecordHeader of(const Header& header) noexcept {
    const std::uint64_t stamp = std::uint64_t{header.incarnation} << 32U | header.worker;
    return {.stream = stream_of(header),
            .position = header.sequence,
            .kind = Record{header.aux},
            .stamp = stamp,
            .floor = stamp - std::min(distance_of(header.dim / 2U), stamp),
            .is_shared = (header.dim & 1U) != 0,
            .status = header.count,
            .end_slot = header.clock,
            .applied = header.epoch};
  }
  // Of a REPLICATE, and of its reply.
  static std::uint64_t stream_of(const Header& header) noexcept {
    return std::uint64_t{header.job} << 32U | header.table;
  }

  // m * 2^e, from ten bits of m and five of e, rounded up: a backup never takes the floor for higher than it
  // is.
  static constexpr std::uint16_t kUnknownDistance = 0x7fff;
  static constexpr std::uint16_t coded_distance(std::uint64_t distance) noexcept {
    const int e = std::max(0, static_cast<int>(std::bit_width(distance)) - 10);
    const std::uint64_t m = (distance >> e) + ((distance & ((std::uint64_t{1} << e) - 1)) != 0 ? 1 : 0);
    const int more = m > 0x3ff ? 1 : 0;  // rounded up to 2^10
    return e + more > 31
               ? kUnknownDistance
               : static_cast<std::uint16_t>(m >> more | static_cast<std::uint64_t>(e + more) << 10U);
  }
  static constexpr std::uint64_t distance_of(std::uint16_t coded) noexcept {
    return coded == kUnknownDistance ? std::numeric_limits<std::uint64_t>::max()
                                     : std::uint64_t{coded & 0x3ffU} << (coded >> 10U);
  }
};

// The reply to a REPLICATE: all records up to the position are acknowledged, or a damaged message is refused.
struct RecordReply {
  std::uint64_t stream = 0;
  std::uint64_t position = 0;
  Status status = Status::kOk;
  std::uint32_t arrived = 0;  // 1 + first slot of the arc whose copy was completed last

  Header header() const noexcept {
    return {.op = Op::kReplicate,
            .status = status,
            .flags = kReply,
            .table = static_cast<std::uint32_t>(stream),
            .sequence = position,
            .aux = arrived,
            .job = static_cast<std::uint32_t>(stream >> 32U)};
  }
  static RecordReply of(const Header& header) noexcept {
    return {.stream = RecordHeader::stream_of(header),
            .position = header.sequence,
            .status = header.status,
            .arrived = header.aux};
  }
};

}  // namespace shoal::wire

// MessageShape: which frames a message has, by its op, status and flags; the table of docs/wire-format.md.
//
// Threads: pure functions.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "wire/wire.h"

namespace shoal::wire {

// The contents of one frame.
enum class FrameKind : std::uint8_t {
  kHashes,      // count of uint64, ascending strictly
  kListDigest,  // 16 bytes
  kValues,      // count x dim of the header's dtype
  kMap,         // a bit for each of count x dim values
  kNonzeros,    // of the header's dtype, one for each bit that is set in the map
  kCounts,      // of count rows, packed
  kElements,    // count elements of the header's dtype
  kNumbers,     // count of uint64
  kTables,      // aux of uint32, ascending strictly
  kSlots,       // count of uint16
  kText,        // count bytes
  kBytes,       // any number of bytes: the size of the frame
};

constexpr std::size_t kDigestBytes = 16;

struct MessageShape {
  std::array<FrameKind, kMaxFrames> kinds{};
  std::size_t frames = 0;
  std::uint8_t dtypes = 0;  // the dtypes that the header may name, one bit each
  std::uint16_t flags = 0;  // the flags that may be set
  bool is_nested = false;   // the frames are those of a message: a header, and at most kMaxNestedFrames
};

constexpr std::uint8_t bit(Dtype dtype) noexcept {
  return static_cast<std::uint8_t>(1U << static_cast<unsigned>(dtype));
}
// Of a header whose op and status are known.
MessageShape shape_of(const Header& header) noexcept;

// The number of bytes that payload[i], of this kind, must have. No product overflows: count and aux are below
// 2^32, dim is at most 2^12.
std::uint64_t size_of(FrameKind kind, const Header& header, std::span<const Frame> payload,
                      std::size_t i) noexcept;

// "hashes", "values": for messages.
const char* name_of(FrameKind kind) noexcept;

}  // namespace shoal::wire

#include "wire/wire.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>

#include "base/check.h"
#include "base/crc32c.h"

namespace shoal::wire {

namespace {

constexpr std::array<std::string_view, 23> kOps = {
    "none",  "pull",       "push",       "tick",      "assign",    "erase", "contains", "state",
    "slot",  "section",    "load begin", "load rows", "load end",  "stats", "reduce",   "load filter",
    "sweep", "save begin", "save poll",  "save end",  "replicate", "ping",  "prefetch"};
static_assert(kOps.size() == static_cast<std::size_t>(kLastOp) + 1);

constexpr std::array<std::string_view, 7> kDtypes = {"none",  "float32", "float16", "bfloat16",
                                                     "uint8", "uint64",  "float64"};

}  // namespace

std::string_view name(Op op) noexcept {
  return op <= kLastOp ? kOps[static_cast<std::size_t>(op)] : std::string_view("?");
}

std::string_view name(Dtype dtype) noexcept {
  return dtype <= Dtype::kFloat64 ? kDtypes[static_cast<std::size_t>(dtype)] : std::string_view("?");
}

std::string_view name(Status status) noexcept {
  switch (status) {
    case Status::kOk:
      return "ok";
    case Status::kDeferred:
      return "deferred";
    case Status::kBadRequest:
      return "bad request";
    case Status::kWrongEpoch:
      return "wrong epoch";
    case Status::kFenced:
      return "fenced";
    case Status::kNotAdmitted:
      return "not admitted";
    case Status::kNoTable:
      return "no table";
    case Status::kRetry:
      return "retry";
    case Status::kOverloaded:
      return "overloaded";
    case Status::kInternal:
      return "internal";
    case Status::kWrongVersion:
      return "version";
    case Status::kWrongJob:
      return "wrong job";
    case Status::kUnknownKeyList:
      return "unknown key list";
    case Status::kResourceExhausted:
      return "resource exhausted";
  }
  return "?";
}

std::string base_name(std::span<const std::uint64_t> words) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  if (std::ranges::all_of(words, [](std::uint64_t word) { return word == 0; })) {
    return {};
  }
  std::string name;
  for (const std::uint64_t word : words) {
    for (unsigned byte = 0; byte < 8; ++byte) {
      const std::uint64_t value = (word >> (8 * byte)) & 0xffU;
      name += kDigits[value >> 4U];
      name += kDigits[value & 0xfU];
    }
  }
  return name;
}

void encode(Header& header, std::span<const Frame> payload, std::span<std::byte, sizeof(Header)> out) {
  std::uint64_t bytes = 0;
  std::uint32_t crc = 0;
  for (const Frame frame : payload) {
    bytes += frame.size();
    crc = crc32c(frame, crc);
  }
  SHOAL_CHECK(bytes <= std::numeric_limits<std::uint32_t>::max(),
              "a message of " + std::to_string(bytes) + " bytes: below 4 GiB fit, send fewer rows at a time");
  header.payload_bytes = static_cast<std::uint32_t>(bytes);
  header.payload_crc = crc;
  std::memcpy(out.data(), &header, sizeof header);
  header.header_crc = crc32c(out.first<offsetof(Header, header_crc)>());
  std::memcpy(out.data() + offsetof(Header, header_crc), &header.header_crc, sizeof header.header_crc);
}

}  // namespace shoal::wire

#include "wire/wire.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <limits>
#include <new>
#include <string>

#include "base/check.h"
#include "base/crc32c.h"
#include "wire/counts.h"
#include "wire/values.h"

namespace shoal::wire {

namespace {

constexpr std::array<std::string_view, 20> kOps = {
    "none",   "pull",        "push",    "tick",       "assign",    "erase",    "contains",
    "state",  "slot",        "section", "load begin", "load rows", "load end", "stats",
    "reduce", "load filter", "sweep",   "save begin", "save poll", "save end"};
static_assert(kOps.size() == static_cast<std::size_t>(kLastOp) + 1);

constexpr std::array<std::string_view, 7> kDtypes = {"none",  "float32", "float16", "bfloat16",
                                                     "uint8", "uint64",  "float64"};

// What one frame holds.
enum class Part : std::uint8_t {
  kHashes,   // count of uint64, ascending strictly
  kDigest,   // 16 bytes
  kValues,   // count x dim of the header's dtype
  kMap,      // a bit for each of count x dim values
  kKept,     // of the header's dtype, as many as the map has bits
  kCounts,   // of count rows, packed
  kOnes,     // count of the header's dtype
  kNumbers,  // count of uint64
  kTables,   // aux of uint32, ascending strictly
  kSlots,    // count of uint16
  kText,     // count bytes
  kBytes,    // any number of bytes: the frame tells
};

constexpr std::size_t kDigestBytes = 16;

struct Shape {
  std::array<Part, kMaxFrames> parts{};
  std::size_t frames = 0;
  std::uint8_t dtypes = 0;  // those that may be named, one bit each
  std::uint16_t flags = 0;  // those that may be set
};

constexpr std::uint8_t bit(Dtype dtype) noexcept {
  return static_cast<std::uint8_t>(1U << static_cast<unsigned>(dtype));
}
constexpr std::uint8_t kWeights = bit(Dtype::kFloat32) | bit(Dtype::kFloat16) | bit(Dtype::kBfloat16);

constexpr Shape kNothing = {{}, 0, bit(Dtype::kNone), 0};
constexpr Shape kText = {{Part::kText}, 1, bit(Dtype::kNone), 0};

Shape shape_of_request(Op op) noexcept {
  switch (op) {
    case Op::kPull:
      return {{Part::kHashes}, 1, kWeights, kPacked | kKeep | kDigest};
    case Op::kPush:
      return {{Part::kHashes, Part::kValues}, 2, kWeights, kPacked | kKeep | kDigest | kCounted};
    case Op::kAssign:
      return {{Part::kHashes, Part::kValues}, 2, kWeights, kPacked};
    case Op::kTick:
      return {{Part::kNumbers, Part::kTables}, 2, bit(Dtype::kNone), 0};
    case Op::kErase:
    case Op::kContains:
    case Op::kState:
      return {{Part::kHashes}, 1, bit(Dtype::kNone), 0};
    case Op::kLoadBegin:
    case Op::kLoadEnd:
    case Op::kSaveBegin:
    case Op::kSaveEnd:
      return {{Part::kNumbers}, 1, bit(Dtype::kNone), 0};
    case Op::kSavePoll:
      return {{Part::kNumbers, Part::kBytes}, 2, bit(Dtype::kUint8), 0};
    case Op::kLoadRows:
    case Op::kLoadFilter:
      return {{Part::kBytes}, 1, bit(Dtype::kUint8), 0};
    case Op::kReduce:
    case Op::kSweep:
      return {{Part::kOnes}, 1, bit(Dtype::kFloat64), 0};
    case Op::kNone:
    case Op::kSlot:
    case Op::kSection:
    case Op::kStats:
      break;
  }
  return kNothing;
}

Shape shape_of_answer(Op op) noexcept {
  switch (op) {
    case Op::kPull:
      return {{Part::kValues}, 1, kWeights, kReply | kPacked};
    case Op::kContains:
      return {{Part::kOnes}, 1, bit(Dtype::kUint8), 0};
    case Op::kState:
      return {{Part::kValues}, 1, bit(Dtype::kFloat32), 0};
    case Op::kSlot:
      return {{Part::kHashes, Part::kValues}, 2, bit(Dtype::kFloat32), 0};
    case Op::kSection:
    case Op::kSavePoll:
      return {{Part::kBytes}, 1, bit(Dtype::kUint8), 0};
    case Op::kStats:
    case Op::kSweep:
    case Op::kSaveBegin:
      return {{Part::kNumbers}, 1, bit(Dtype::kNone), 0};
    case Op::kReduce:
      return {{Part::kOnes}, 1, bit(Dtype::kFloat64), 0};
    case Op::kNone:
    case Op::kPush:
    case Op::kTick:
    case Op::kAssign:
    case Op::kErase:
    case Op::kLoadBegin:
    case Op::kLoadRows:
    case Op::kLoadFilter:
    case Op::kLoadEnd:
    case Op::kSaveEnd:
      break;
  }
  return kNothing;
}

Shape shape_without_flags(const Header& header) noexcept {
  if (!header.is_reply()) {
    return shape_of_request(header.op);
  }
  switch (header.status) {
    case Status::kOk:
      return shape_of_answer(header.op);
    case Status::kBadRequest:
    case Status::kInternal:
    case Status::kResourceExhausted:
      return kText;
    case Status::kWrongEpoch:
      return {{Part::kSlots}, 1, bit(Dtype::kNone), 0};
    case Status::kDeferred:
    case Status::kFenced:
    case Status::kNotAdmitted:
    case Status::kNoTable:
    case Status::kRetry:
    case Status::kOverloaded:
    case Status::kWrongVersion:
    case Status::kWrongJob:
    case Status::kUnknownKeyList:
      break;
  }
  return kNothing;
}

Shape shape_of(const Header& header) noexcept {
  Shape shape = shape_without_flags(header);
  if ((header.flags & kDigest) != 0) {
    std::replace(shape.parts.begin(), shape.parts.end(), Part::kHashes, Part::kDigest);
  }
  // A PULL's request has no values: there the flag is about the reply.
  if ((header.flags & kPacked) != 0 && shape.frames > 0 && shape.parts[shape.frames - 1] == Part::kValues) {
    shape.parts[shape.frames - 1] = Part::kMap;
    shape.parts[shape.frames++] = Part::kKept;
  }
  if ((header.flags & kCounted & shape.flags) != 0) {
    shape.parts[shape.frames++] = Part::kCounts;
  }
  return shape;
}

__attribute__((format(printf, 3, 4))) bool wrong(Fault& fault, Status status, const char* format,
                                                 ...) noexcept {
  std::va_list numbers;
  va_start(numbers, format);
  std::vsnprintf(fault.text.data(), fault.text.size(), format, numbers);
  va_end(numbers);
  fault.status = status;
  return false;
}

using U64 = unsigned long long;  // what printf knows

Header header_at(Frame frame) noexcept {
  Header read;
  std::memcpy(&read, frame.data(), sizeof read);
  return read;
}

std::uint32_t crc_of_header(Frame frame) noexcept {
  return crc32c(frame.first(offsetof(Header, header_crc)));
}

bool read_header(std::span<const Frame> frames, const Limits& limits, Header& header, Fault& fault) noexcept {
  constexpr Status kBad = Status::kBadRequest;
  if (frames.empty() || frames.size() > 1 + kMaxFrames) {
    return wrong(fault, kBad, "a message has 1 to %zu frames, got %zu", 1 + kMaxFrames, frames.size());
  }
  if (frames[0].size() != sizeof(Header)) {
    return wrong(fault, kBad, "a header has %zu bytes, got %zu", sizeof(Header), frames[0].size());
  }
  const Header read = header_at(frames[0]);
  if (read.magic != kMagic) {
    return wrong(fault, kBad,
                 "no header of shoal begins with %08x: is something else connected to this port?",
                 static_cast<unsigned>(read.magic));
  }
  const std::uint32_t crc = crc_of_header(frames[0]);
  if (crc != read.header_crc) {
    return wrong(fault, kBad, "the header's crc32c is %08x, it says %08x: damaged on its way",
                 static_cast<unsigned>(crc), static_cast<unsigned>(read.header_crc));
  }
  header = read;
  if (read.version != kVersion) {
    return wrong(fault, Status::kWrongVersion,
                 "version %u of the wire format, this side speaks %u: run the same shoal everywhere",
                 static_cast<unsigned>(read.version), static_cast<unsigned>(kVersion));
  }
  if (read.op > kLastOp || (read.op == Op::kNone && !read.is_reply())) {
    return wrong(fault, kBad, "there is no op %u", static_cast<unsigned>(read.op));
  }
  if ((read.flags & ((1U << kPartShift) - 1U) & ~unsigned{kFlags}) != 0) {
    return wrong(fault, kBad, "flags %04x: of the lower eight, version 1 knows bits 0 to 4",
                 static_cast<unsigned>(read.flags));
  }
  if (read.is_reply() != limits.replies) {
    return wrong(fault, kBad, "%s where %s are taken", read.is_reply() ? "a reply" : "a request",
                 limits.replies ? "replies" : "requests");
  }
  if (name(read.status) == "?" || (!read.is_reply() && read.status != Status::kOk)) {
    return wrong(fault, kBad, "status %u in a %s", static_cast<unsigned>(read.status),
                 read.is_reply() ? "reply" : "request");
  }
  if (read.op == Op::kNone && read.status != Status::kBadRequest && read.status != Status::kWrongVersion &&
      read.status != Status::kInternal) {
    return wrong(fault, kBad, "status %u in a reply to no op", static_cast<unsigned>(read.status));
  }
  if (read.dtype > Dtype::kFloat64) {
    return wrong(fault, kBad, "there is no dtype %u", static_cast<unsigned>(read.dtype));
  }
  return true;
}

// Aligned: the frame itself, or a copy. Sockets hand out bytes wherever they stand in their own buffers.
template <class T>
bool view(Frame frame, Buffer<std::uint64_t>& copy, std::span<const T>& out, Fault& fault) noexcept {
  const std::byte* data = frame.empty() ? nullptr : frame.data();
  if (reinterpret_cast<std::uintptr_t>(data) % alignof(T) != 0) {
    try {
      const auto words = copy.claim((frame.size() + 7) / 8);
      std::memcpy(words.data(), frame.data(), frame.size());
      data = reinterpret_cast<const std::byte*>(words.data());
    } catch (const std::bad_alloc&) {
      return wrong(fault, Status::kInternal, "no memory for %zu bytes", frame.size());
    }
  }
  out = {reinterpret_cast<const T*>(data), frame.size() / sizeof(T)};
  return true;
}

template <class T>
bool check_ascending(std::span<const T> values, const char* what, Fault& fault) noexcept {
  bool ascending = true;
  for (std::size_t i = 1; i < values.size(); ++i) {
    ascending &= values[i - 1] < values[i];  // no branch: the loop becomes vector code
  }
  if (!ascending) {
    const auto at = std::adjacent_find(values.begin(), values.end(), std::greater_equal<>());
    return wrong(fault, Status::kBadRequest, "%s must ascend strictly: number %zu is %llu, after it %llu",
                 what, static_cast<std::size_t>(at - values.begin()), static_cast<U64>(at[0]),
                 static_cast<U64>(at[1]));
  }
  return true;
}

// How many bytes a frame must have. No product overflows: count and aux are below 2^32, dim is at most 2^12.
std::uint64_t size_of(Part part, const Header& header, std::span<const Frame> payload,
                      std::size_t i) noexcept {
  const std::uint64_t count = header.count;
  switch (part) {
    case Part::kHashes:
    case Part::kNumbers:
      return count * 8;
    case Part::kDigest:
      return kDigestBytes;
    case Part::kValues:
      return count * header.dim * bytes_of(header.dtype);
    case Part::kMap:
      return map_bytes(count * header.dim);
    case Part::kKept:
      return count_kept(payload[i - 1]) * bytes_of(header.dtype);
    case Part::kCounts:
      return packed_counts_bytes(payload[i], count);
    case Part::kOnes:
      return count * bytes_of(header.dtype);
    case Part::kTables:
      return std::uint64_t{header.aux} * 4;
    case Part::kSlots:
      return count * 2;
    case Part::kText:
      return count;
    case Part::kBytes:
      break;
  }
  return payload[i].size();
}

constexpr const char* name_of(Part part) noexcept {
  constexpr std::array<const char*, 12> kNames = {"hashes", "digest",  "values", "map",   "values", "counts",
                                                  "values", "numbers", "tables", "slots", "text",   "bytes"};
  return kNames[static_cast<std::size_t>(part)];
}

// Whether the last frame's bytes are the values as they are wanted.
bool is_plain(const Header& header, const Shape& shape) noexcept {
  const Part last = shape.parts[shape.frames - 1];
  return header.is_reply() && header.status == Status::kOk &&
         (last == Part::kOnes || (last == Part::kValues && header.dtype == Dtype::kFloat32));
}

// Sizes first, then checksums; what the frames mean comes after. `into` becomes empty where the values are not put there.
bool check_frames(const Header& header, const Shape& shape, std::span<const Frame> payload,
                  const Limits& limits, std::span<std::byte>& into, Fault& fault) noexcept {
  constexpr Status kBad = Status::kBadRequest;
  const std::string_view op = name(header.op);
  const auto op_size = static_cast<int>(op.size());
  if ((shape.dtypes & bit(header.dtype)) == 0) {
    return wrong(fault, kBad, "a %.*s has no values of dtype %s", op_size, op.data(),
                 name(header.dtype).data());
  }
  const unsigned flags = header.flags & kFlags & ~unsigned{kReply};
  if ((flags & ~unsigned{shape.flags}) != 0 || (flags & (kKeep | kDigest)) == (kKeep | kDigest)) {
    return wrong(fault, kBad, "a %.*s cannot have the flags %04x", op_size, op.data(),
                 static_cast<unsigned>(header.flags));
  }
  if (payload.size() != shape.frames) {
    return wrong(fault, kBad, "a %.*s has %zu frames behind its header, got %zu", op_size, op.data(),
                 shape.frames, payload.size());
  }
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < shape.frames; ++i) {
    const Part part = shape.parts[i];
    const bool rows = part == Part::kValues || part == Part::kMap;
    if (rows && (header.dim == 0 || header.dim > kMaxDim)) {
      return wrong(fault, kBad, "dim must be 1 to %zu, got %u", kMaxDim, static_cast<unsigned>(header.dim));
    }
    const std::uint64_t size = size_of(part, header, payload, i);
    if (payload[i].size() != size) {
      return wrong(fault, kBad, "the %s of a %.*s of %u need %llu bytes, got %zu", name_of(part), op_size,
                   op.data(), static_cast<unsigned>(header.count), static_cast<U64>(size), payload[i].size());
    }
    bytes += size;
    const std::uint64_t unpacked = rows ? std::uint64_t{header.count} * header.dim * sizeof(float) : 0;
    if (std::max(bytes, unpacked) > limits.payload_bytes) {
      return wrong(fault, kBad,
                   "%llu bytes in one message, at most %llu are taken: send fewer rows at a time",
                   static_cast<U64>(std::max(bytes, unpacked)), static_cast<U64>(limits.payload_bytes));
    }
  }
  if (bytes != header.payload_bytes) {
    return wrong(fault, kBad, "the header tells of %u bytes, %llu came",
                 static_cast<unsigned>(header.payload_bytes), static_cast<U64>(bytes));
  }
  if (payload.empty() || into.size() != payload.back().size() || !is_plain(header, shape)) {
    into = {};
  }
  std::uint32_t crc = 0;
  for (std::size_t i = 0; i < payload.size(); ++i) {
    const bool there = i + 1 == payload.size() && !into.empty();
    crc = there ? crc32c_copy(payload[i], into, crc) : crc32c(payload[i], crc);
  }
  if (crc != header.payload_crc) {
    return wrong(fault, kBad, "the payload's crc32c is %08x, the header says %08x: damaged on its way",
                 static_cast<unsigned>(crc), static_cast<unsigned>(header.payload_crc));
  }
  return true;
}

bool read_bytes(Frame frame, Buffer<std::uint64_t>& copy, Decoded& out, Fault& fault) noexcept {
  std::span<const std::uint64_t> words;  // what suits 8 bytes suits every dtype
  if (!view(frame, copy, words, fault)) {
    return false;
  }
  out.values = {reinterpret_cast<const std::byte*>(words.data()), frame.size()};
  return true;
}

// Weights or gradients, as float32 in the end: `map` is empty where the zeros are there.
bool read_weights(const Frame* map, Frame frame, Buffer<std::uint64_t>& copy, Decoded& out,
                  Fault& fault) noexcept {
  const std::uint64_t size = std::uint64_t{out.header.count} * out.header.dim;
  if (map != nullptr && !is_map(*map, size)) {
    return wrong(fault, Status::kBadRequest, "the map of %llu values has bits behind the last",
                 static_cast<U64>(size));
  }
  const bool wide = out.header.dtype == Dtype::kFloat32;
  if (wide && map == nullptr) {
    return read_bytes(frame, copy, out, fault);
  }
  std::span<const float> floats;
  std::span<const std::uint16_t> halves;
  if (wide ? !view(frame, copy, floats, fault) : !view(frame, copy, halves, fault)) {
    return false;
  }
  std::span<float> values;
  try {
    values = out.unpacked.claim(size);
  } catch (const std::bad_alloc&) {
    return wrong(fault, Status::kInternal, "no memory for %llu values", static_cast<U64>(size));
  }
  const auto half = out.header.dtype == Dtype::kFloat16 ? shoal::Dtype::kFloat16 : shoal::Dtype::kBfloat16;
  if (map == nullptr) {
    widen(halves, half, values);
  } else if (wide) {
    unpack(*map, floats, values);
  } else {
    unpack(*map, halves, half, values);
  }
  out.values = std::as_bytes(values);
  return true;
}

bool read_counts(Frame frame, Decoded& out, Fault& fault) noexcept {
  const std::uint64_t rows = out.header.count;
  std::span<std::uint32_t> counts;
  try {
    counts = out.unpacked_counts.claim(rows);
  } catch (const std::bad_alloc&) {
    return wrong(fault, Status::kInternal, "no memory for %llu counts", static_cast<U64>(rows));
  }
  if (!unpack_counts(frame, counts)) {
    return wrong(
        fault, Status::kBadRequest,
        "the counts of %llu rows are not packed as they must be: bits behind the last row, a byte for "
        "1, or four for less than 256",
        static_cast<U64>(rows));
  }
  out.counts = counts;
  return true;
}

bool read_frames(std::span<const Frame> payload, const Limits& limits, std::span<std::byte> into,
                 Decoded& out, Fault& fault) noexcept {
  const Shape shape = shape_of(out.header);
  if (!check_frames(out.header, shape, payload, limits, into, fault)) {
    return false;
  }
  bool good = true;
  for (std::size_t i = 0; i < shape.frames && good; ++i) {
    const Frame frame = payload[i];
    Buffer<std::uint64_t>& copy = out.copies[i];
    switch (shape.parts[i]) {
      case Part::kHashes:
        good = view(frame, copy, out.hashes, fault) && check_ascending(out.hashes, "hashes", fault);
        break;
      case Part::kDigest:
        out.digest = frame;
        break;
      case Part::kValues:
      case Part::kOnes:
        if (!into.empty()) {
          out.values = into;
        } else {
          good = shape.parts[i] == Part::kValues ? read_weights(nullptr, frame, copy, out, fault)
                                                 : read_bytes(frame, copy, out, fault);
        }
        break;
      case Part::kMap:  // read with what it maps
        break;
      case Part::kKept:
        good = read_weights(&payload[i - 1], frame, copy, out, fault);
        break;
      case Part::kCounts:
        good = read_counts(frame, out, fault);
        break;
      case Part::kBytes:
        good = read_bytes(frame, copy, out, fault);
        break;
      case Part::kNumbers:
        good = view(frame, copy, out.numbers, fault);
        break;
      case Part::kTables:
        good = view(frame, copy, out.tables, fault) && check_ascending(out.tables, "tables", fault);
        break;
      case Part::kSlots:
        good = view(frame, copy, out.slots, fault);
        break;
      case Part::kText:
        out.text = {reinterpret_cast<const char*>(frame.data()), frame.size()};
        break;
    }
  }
  return good;
}

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

Fault decode(std::span<const Frame> frames, const Limits& limits, Decoded& out,
             std::span<std::byte> into) noexcept {
  Fault fault;
  out.header = Header{.magic = 0, .version = 0, .worker = 0};
  out.hashes = {};
  out.digest = {};
  out.values = {};
  out.counts = {};
  out.numbers = {};
  out.tables = {};
  out.slots = {};
  out.text = {};
  if (read_header(frames, limits, out.header, fault)) {
    read_frames(frames.subspan(1), limits, into, out, fault);
  }
  return fault;
}

std::optional<Header> peek(std::span<const Frame> frames) noexcept {
  if (frames.empty() || frames[0].size() != sizeof(Header)) {
    return std::nullopt;
  }
  const Header header = header_at(frames[0]);
  const bool good = header.magic == kMagic && crc_of_header(frames[0]) == header.header_crc;
  return good ? std::optional(header) : std::nullopt;
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

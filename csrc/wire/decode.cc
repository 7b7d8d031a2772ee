// decode() and peek(): a message, checked front to back.

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <functional>
#include <new>

#include "base/crc32c.h"
#include "wire/counts.h"
#include "wire/message_shape.h"
#include "wire/values.h"
#include "wire/wire.h"

namespace shoal::wire {

namespace {

__attribute__((format(printf, 3, 4))) bool wrong(Fault& fault, Status status, const char* format,
                                                 ...) noexcept {
  std::va_list numbers;
  va_start(numbers, format);
  std::vsnprintf(fault.text.data(), fault.text.size(), format, numbers);
  va_end(numbers);
  fault.status = status;
  return false;
}

using U64 = unsigned long long;  // printf has a format for it

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
  static_assert(kFlags == (1U << kPartShift) - 1U, "all flags are known: check others here");
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
  if (read.op == Op::kReplicate && !read.is_reply() && Record{read.aux} > kLastRecord) {
    return wrong(fault, kBad, "there is no record of kind %u", static_cast<unsigned>(read.aux));
  }
  if (read.dtype > Dtype::kFloat64) {
    return wrong(fault, kBad, "there is no dtype %u", static_cast<unsigned>(read.dtype));
  }
  return true;
}

// An aligned view: of the frame itself, or of a copy. A socket's frames may begin anywhere in its buffers.
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
    ascending &= values[i - 1] < values[i];  // no branch, so that the loop is vectorized
  }
  if (!ascending) {
    const auto at = std::adjacent_find(values.begin(), values.end(), std::greater_equal<>());
    return wrong(fault, Status::kBadRequest, "%s must ascend strictly: number %zu is %llu, after it %llu",
                 what, static_cast<std::size_t>(at - values.begin()), static_cast<U64>(at[0]),
                 static_cast<U64>(at[1]));
  }
  return true;
}

// Whether the last frame's bytes are the values themselves.
bool is_plain(const Header& header, const MessageShape& shape) noexcept {
  const FrameKind last = shape.kinds[shape.frames - 1];
  return header.is_reply() && header.status == Status::kOk &&
         (last == FrameKind::kElements || (last == FrameKind::kValues && header.dtype == Dtype::kFloat32));
}

// Checks the sizes of a nested message: its header, and frames that nothing else is known of.
bool check_nested(const Header& header, std::span<const Frame> payload, const Limits& limits,
                  Fault& fault) noexcept {
  constexpr Status kBad = Status::kBadRequest;
  if (payload.empty() || payload.size() > 1 + kMaxNestedFrames) {
    return wrong(fault, kBad, "a nested message has 1 to %zu frames, got %zu", 1 + kMaxNestedFrames,
                 payload.size());
  }
  if (payload[0].size() < sizeof(Header) || payload[0].size() > kMaxRecordBytes) {
    return wrong(fault, kBad, "a nested header has %zu to %zu bytes, got %zu", sizeof(Header),
                 kMaxRecordBytes, payload[0].size());
  }
  std::uint64_t bytes = 0;
  for (const Frame frame : payload.subspan(1)) {
    bytes += frame.size();
  }
  if (bytes > limits.payload_bytes) {
    return wrong(fault, kBad, "%llu bytes in one message, at most %llu are taken", static_cast<U64>(bytes),
                 static_cast<U64>(limits.payload_bytes));
  }
  if (header.payload_bytes != 0 || header.payload_crc != 0) {
    return wrong(fault, kBad, "the header states %u payload bytes, crc32c %08x: a nested message has its own",
                 static_cast<unsigned>(header.payload_bytes), static_cast<unsigned>(header.payload_crc));
  }
  return true;
}

// Checks the sizes, then the checksums; the contents are checked later. `into` becomes empty if the values
// are not copied there.
bool check_frames(const Header& header, const MessageShape& shape, std::span<const Frame> payload,
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
  if (shape.is_nested) {
    return check_nested(header, payload, limits, fault);
  }
  if (payload.size() != shape.frames) {
    return wrong(fault, kBad, "a %.*s has %zu frames behind its header, got %zu", op_size, op.data(),
                 shape.frames, payload.size());
  }
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < shape.frames; ++i) {
    const FrameKind kind = shape.kinds[i];
    const bool rows = kind == FrameKind::kValues || kind == FrameKind::kMap;
    if (rows && (header.dim == 0 || header.dim > kMaxDim)) {
      return wrong(fault, kBad, "dim must be 1 to %zu, got %u", kMaxDim, static_cast<unsigned>(header.dim));
    }
    const std::uint64_t size = size_of(kind, header, payload, i);
    if (payload[i].size() != size) {
      return wrong(fault, kBad, "the %s of a %.*s of %u need %llu bytes, got %zu", name_of(kind), op_size,
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
    return wrong(fault, kBad, "the header states %u payload bytes, got %llu",
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
  std::span<const std::uint64_t> words;  // aligned for 8 bytes, hence for every dtype
  if (!view(frame, copy, words, fault)) {
    return false;
  }
  out.values = {reinterpret_cast<const std::byte*>(words.data()), frame.size()};
  return true;
}

// Weights or gradients, converted to float32. `map` is null if the values include their zeros.
bool read_weights(const Frame* map, Frame frame, Buffer<std::uint64_t>& copy, Decoded& out,
                  Fault& fault) noexcept {
  const std::uint64_t size = std::uint64_t{out.header.count} * out.header.dim;
  if (map != nullptr && !is_map(*map, size)) {
    return wrong(fault, Status::kBadRequest, "the map of %llu values has bits after the last one",
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
  const MessageShape shape = shape_of(out.header);
  if (!check_frames(out.header, shape, payload, limits, into, fault)) {
    return false;
  }
  if (shape.is_nested) {
    out.nested = payload;
  }
  bool good = true;
  for (std::size_t i = 0; i < shape.frames && good; ++i) {
    const Frame frame = payload[i];
    Buffer<std::uint64_t>& copy = out.copies[i];
    switch (shape.kinds[i]) {
      case FrameKind::kHashes:
        good = view(frame, copy, out.hashes, fault) && check_ascending(out.hashes, "hashes", fault);
        break;
      case FrameKind::kListDigest:
        out.digest = frame;
        break;
      case FrameKind::kValues:
      case FrameKind::kElements:
        if (!into.empty()) {
          out.values = into;
        } else {
          good = shape.kinds[i] == FrameKind::kValues ? read_weights(nullptr, frame, copy, out, fault)
                                                      : read_bytes(frame, copy, out, fault);
        }
        break;
      case FrameKind::kMap:  // read with the values that it maps
        break;
      case FrameKind::kNonzeros:
        good = read_weights(&payload[i - 1], frame, copy, out, fault);
        break;
      case FrameKind::kCounts:
        good = read_counts(frame, out, fault);
        break;
      case FrameKind::kBytes:
        good = read_bytes(frame, copy, out, fault);
        break;
      case FrameKind::kNumbers:
        good = view(frame, copy, out.numbers, fault);
        break;
      case FrameKind::kTables:
        good = view(frame, copy, out.tables, fault) && check_ascending(out.tables, "tables", fault);
        break;
      case FrameKind::kSlots:
        good = view(frame, copy, out.slots, fault);
        break;
      case FrameKind::kText:
        out.text = {reinterpret_cast<const char*>(frame.data()), frame.size()};
        break;
    }
  }
  return good;
}

}  // namespace

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
  out.nested = {};
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

}  // namespace shoal::wire

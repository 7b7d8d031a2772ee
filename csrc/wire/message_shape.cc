#include "wire/message_shape.h"

#include <algorithm>

#include "wire/counts.h"
#include "wire/values.h"

namespace shoal::wire {

namespace {

constexpr std::uint8_t kWeights = bit(Dtype::kFloat32) | bit(Dtype::kFloat16) | bit(Dtype::kBfloat16);

constexpr MessageShape kNoFrames = {{}, 0, bit(Dtype::kNone), 0};
constexpr MessageShape kTimedOnly = {{}, 0, bit(Dtype::kNone), kReply | kTimed};
constexpr MessageShape kText = {{FrameKind::kText}, 1, bit(Dtype::kNone), 0};

constexpr MessageShape kNested = {{}, 0, bit(Dtype::kNone), 0, true};

MessageShape shape_of_record(Record record) noexcept {
  switch (record) {
    case Record::kRequest:
      return kNested;
    case Record::kOrder:
    case Record::kCopyBegin:
    case Record::kCopyChunk:
    case Record::kCopyEnd:
      return {{FrameKind::kBytes}, 1, bit(Dtype::kUint8), 0};
    case Record::kAlive:
      break;
  }
  return kNoFrames;
}

MessageShape shape_of_request(const Header& header) noexcept {
  switch (header.op) {
    case Op::kPull:
      return {{FrameKind::kHashes}, 1, kWeights, kPacked | kKeep | kDigest | kTimed | kDated | kWhole};
    case Op::kPush:
      return {{FrameKind::kHashes, FrameKind::kValues},
              2,
              kWeights,
              kPacked | kKeep | kDigest | kCounted | kTimed | kWhole};
    case Op::kAssign:
      return {{FrameKind::kHashes, FrameKind::kValues}, 2, kWeights, kPacked | kTimed};
    case Op::kTick:
      return {{FrameKind::kNumbers, FrameKind::kTables}, 2, bit(Dtype::kNone), kTimed};
    case Op::kContains:
      return {{FrameKind::kHashes}, 1, bit(Dtype::kNone), kTimed};
    case Op::kPrefetch:
      return {{FrameKind::kHashes}, 1, bit(Dtype::kNone), kKeep | kDigest};
    case Op::kErase:
    case Op::kState:
      return {{FrameKind::kHashes}, 1, bit(Dtype::kNone), 0};
    case Op::kLoadBegin:
    case Op::kLoadEnd:
    case Op::kSaveBegin:
    case Op::kSaveEnd:
      return {{FrameKind::kNumbers}, 1, bit(Dtype::kNone), 0};
    case Op::kSavePoll:
      return {{FrameKind::kNumbers, FrameKind::kBytes}, 2, bit(Dtype::kUint8), 0};
    case Op::kLoadRows:
    case Op::kLoadFilter:
      return {{FrameKind::kBytes}, 1, bit(Dtype::kUint8), 0};
    case Op::kReduce:
    case Op::kSweep:
      return {{FrameKind::kElements}, 1, bit(Dtype::kFloat64), 0};
    case Op::kReplicate:
      return shape_of_record(Record{header.aux});
    case Op::kNone:
    case Op::kSlot:
    case Op::kSection:
    case Op::kStats:
    case Op::kPing:
      break;
  }
  return kNoFrames;
}

MessageShape shape_of_answer(Op op) noexcept {
  switch (op) {
    case Op::kPull:
      return {{FrameKind::kValues}, 1, kWeights, kReply | kPacked | kTimed | kDated | kWhole};
    case Op::kContains:
      return {{FrameKind::kElements}, 1, bit(Dtype::kUint8), kReply | kTimed};
    case Op::kState:
      return {{FrameKind::kValues}, 1, bit(Dtype::kFloat32), 0};
    case Op::kSlot:
      return {{FrameKind::kHashes, FrameKind::kValues}, 2, bit(Dtype::kFloat32), 0};
    case Op::kSection:
    case Op::kSavePoll:
      return {{FrameKind::kBytes}, 1, bit(Dtype::kUint8), 0};
    case Op::kStats:
    case Op::kSweep:
    case Op::kSaveBegin:
      return {{FrameKind::kNumbers}, 1, bit(Dtype::kNone), 0};
    case Op::kReduce:
      return {{FrameKind::kElements}, 1, bit(Dtype::kFloat64), 0};
    case Op::kPush:
    case Op::kTick:
    case Op::kAssign:
      return kTimedOnly;
    case Op::kNone:
    case Op::kErase:
    case Op::kLoadBegin:
    case Op::kLoadRows:
    case Op::kLoadFilter:
    case Op::kLoadEnd:
    case Op::kSaveEnd:
    case Op::kReplicate:
    case Op::kPing:
    case Op::kPrefetch:
      break;
  }
  return kNoFrames;
}

MessageShape shape_without_flags(const Header& header) noexcept {
  if (!header.is_reply()) {
    return shape_of_request(header);
  }
  switch (header.status) {
    case Status::kOk:
      return shape_of_answer(header.op);
    case Status::kBadRequest:
    case Status::kInternal:
    case Status::kResourceExhausted:
      return kText;
    case Status::kWrongEpoch:
      return {{FrameKind::kSlots}, 1, bit(Dtype::kNone), 0};
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
  return kNoFrames;
}

}  // namespace

MessageShape shape_of(const Header& header) noexcept {
  MessageShape shape = shape_without_flags(header);
  if ((header.flags & kDigest) != 0) {
    std::replace(shape.kinds.begin(), shape.kinds.end(), FrameKind::kHashes, FrameKind::kListDigest);
  }
  // A PULL's request has no values: there the flag is about the reply.
  if ((header.flags & kPacked) != 0 && shape.frames > 0 &&
      shape.kinds[shape.frames - 1] == FrameKind::kValues) {
    shape.kinds[shape.frames - 1] = FrameKind::kMap;
    shape.kinds[shape.frames++] = FrameKind::kNonzeros;
  }
  if ((header.flags & kCounted & shape.flags) != 0) {
    shape.kinds[shape.frames++] = FrameKind::kCounts;
  }
  return shape;
}

std::uint64_t size_of(FrameKind kind, const Header& header, std::span<const Frame> payload,
                      std::size_t i) noexcept {
  const std::uint64_t count = header.count;
  switch (kind) {
    case FrameKind::kHashes:
    case FrameKind::kNumbers:
      return count * 8;
    case FrameKind::kListDigest:
      return kDigestBytes;
    case FrameKind::kValues:
      return count * header.dim * bytes_of(header.dtype);
    case FrameKind::kMap:
      return map_bytes(count * header.dim);
    case FrameKind::kNonzeros:
      return count_kept(payload[i - 1]) * bytes_of(header.dtype);
    case FrameKind::kCounts:
      return packed_counts_bytes(payload[i], count);
    case FrameKind::kElements:
      return count * bytes_of(header.dtype);
    case FrameKind::kTables:
      return std::uint64_t{header.aux} * 4;
    case FrameKind::kSlots:
      return count * 2;
    case FrameKind::kText:
      return count;
    case FrameKind::kBytes:
      break;
  }
  return payload[i].size();
}

const char* name_of(FrameKind kind) noexcept {
  constexpr std::array<const char*, 12> kNames = {"hashes", "digest",  "values", "map",   "values", "counts",
                                                  "values", "numbers", "tables", "slots", "text",   "bytes"};
  return kNames[static_cast<std::size_t>(kind)];
}

}  // namespace shoal::wire

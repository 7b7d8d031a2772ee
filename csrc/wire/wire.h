// The messages of the data plane: one header of 64 bytes, then the frames that its op calls for.
// docs/wire-format.md is the contract, byte by byte. A message is checked once, front to back; decode()
// returns views of the received bytes, and the owner of a Decoded may index by its counts without further
// checks.
//
// Invariants of a Decoded after decode() returned no fault
//   I1  The header is valid: magic, version, its crc; op, status and dtype are known and go together.
//   I2  The frames are those of the op, in number and size; their bytes have the header's crc. (A nested
//       request's are covered by its own header: a second decode() checks it.)
//   I3  Hashes ascend strictly, and so do tables. Every view is aligned for its type.
//   I4  The frames together, and the values as float32, have at most Limits::payload_bytes.
//   I5  Counts are at least 1; there are as many as the header says, or none.
//
// Threads: none of its own; a Decoded has one owner, is reused, and lives as long as its frames.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/buffer.h"
#include "base/units.h"

namespace shoal::wire {

using Frame = std::span<const std::byte>;

inline constexpr std::uint32_t kMagic = 0x4c4f4853U;  // "SHOL" as it lies in memory
inline constexpr std::uint8_t kVersion = 2;
// flags: bits 0 to 7 are these; bits 8 to 15 are the client's number for a part of a call.
inline constexpr std::uint16_t kReply = 1U << 0U;
inline constexpr std::uint16_t kPacked = 1U
                                         << 1U;  // values without their zeros; in a PULL: the reply may be so
inline constexpr std::uint16_t kKeep = 1U << 2U;     // this key list will be used again: keep it
inline constexpr std::uint16_t kDigest = 1U << 3U;   // 16 bytes replace the key list
inline constexpr std::uint16_t kCounted = 1U << 4U;  // one more frame: how often each row occurred
inline constexpr std::uint16_t kTimed =
    1U << 5U;  // asks for the server's times (wire/times.h); the aux of the reply has them
inline constexpr std::uint16_t kDated =
    1U << 6U;  // in a PULL: asks which clocks the rows include; the clock of the reply has it
// Values are whole rows: in the reply to a PULL its columns and its state, in a PUSH what was added to them
// elsewhere.
inline constexpr std::uint16_t kWhole = 1U << 7U;
inline constexpr std::uint16_t kFlags =
    kReply | kPacked | kKeep | kDigest | kCounted | kTimed | kDated | kWhole;
inline constexpr unsigned kPartShift = 8;
inline constexpr std::size_t kMaxNestedFrames = 4;               // besides the nested header
inline constexpr std::size_t kMaxFrames = 1 + kMaxNestedFrames;  // besides the header
// Of the first frame of a nested request: its header, and bytes that are ignored.
inline constexpr std::size_t kMaxRecordBytes = 256;
inline constexpr std::size_t kMaxDim = 4096;
// The digest that names a delta's base checkpoint, a SHA-256, as four numbers: its bytes in order, the first
// one lowest.
inline constexpr std::size_t kBaseWords = 4;
// The sender is not a worker: a tool, or a server that reads another's rows.
inline constexpr std::uint32_t kAnonymous = 0xffffffffU;

enum class Op : std::uint8_t {
  kNone,  // only in replies to unreadable messages
  kPull,
  kPush,
  kTick,
  kAssign,
  kErase,
  kContains,
  kState,
  kSlot,
  kSection,
  kLoadBegin,
  kLoadRows,
  kLoadEnd,
  kStats,
  kReduce,
  kLoadFilter,
  kSweep,
  kSaveBegin,
  kSavePoll,
  kSaveEnd,
  kReplicate,  // a record of a primary's log, to a backup
  kPing,
  kPrefetch,
};
inline constexpr Op kLastOp = Op::kPrefetch;

// What a REPLICATE carries: its aux.
enum class Record : std::uint32_t {
  kAlive,    // nothing: its sequence is the position of the last record
  kRequest,  // a request, nested; the header of the REPLICATE has the log's numbers (wire/record_header.h)
  kOrder,    // a control order
  kCopyBegin,
  kCopyChunk,
  kCopyEnd,
};
inline constexpr Record kLastRecord = Record::kCopyEnd;

enum class Status : std::uint8_t {
  kOk = 0,
  kDeferred = 1,  // received; the answer follows
  kBadRequest = 16,
  kWrongEpoch = 17,
  kFenced = 18,
  kNotAdmitted = 19,
  kNoTable = 20,
  kRetry = 21,
  kOverloaded = 22,
  kInternal = 23,
  kWrongVersion = 24,
  kWrongJob = 25,
  kUnknownKeyList = 26,     // no list with that digest is kept: send the list itself
  kResourceExhausted = 27,  // the memory budget is exceeded
};

enum class Dtype : std::uint8_t { kNone, kFloat32, kFloat16, kBfloat16, kUint8, kUint64, kFloat64 };

constexpr std::size_t bytes_of(Dtype dtype) noexcept {
  constexpr std::array<std::size_t, 7> kBytes = {0, 4, 2, 2, 1, 8, 8};
  return kBytes[static_cast<std::size_t>(dtype)];
}

// "pull", "wrong epoch"; "?" for an unknown number.
std::string_view name(Op op) noexcept;
std::string_view name(Status status) noexcept;
std::string_view name(Dtype dtype) noexcept;

// 64 hexadecimal digits, as in a manifest; "" if all numbers are 0.
std::string base_name(std::span<const std::uint64_t> words);

struct Header {
  std::uint32_t magic = kMagic;
  std::uint8_t version = kVersion;
  Op op = Op::kNone;
  Status status = Status::kOk;
  Dtype dtype = Dtype::kNone;  // of the values; in a PULL, of the reply's values
  std::uint16_t flags = 0;
  std::uint16_t dim = 0;
  std::uint32_t table = 0;
  std::uint32_t worker = kAnonymous;
  std::uint32_t incarnation = 0;
  std::uint64_t sequence = 0;
  std::uint32_t epoch = 0;
  std::uint32_t clock = 0;
  std::uint32_t count = 0;  // keys or elements
  std::uint32_t aux = 0;    // by op
  std::uint32_t job = 0;
  std::uint32_t payload_bytes = 0;  // encode() sets these three
  std::uint32_t payload_crc = 0;
  std::uint32_t header_crc = 0;

  bool is_reply() const noexcept { return (flags & kReply) != 0; }
  std::uint8_t part() const noexcept { return static_cast<std::uint8_t>(flags >> kPartShift); }
};
static_assert(sizeof(Header) == 64 && alignof(Header) == 8);
static_assert(offsetof(Header, version) == 4 && offsetof(Header, op) == 5 && offsetof(Header, status) == 6 &&
              offsetof(Header, dtype) == 7 && offsetof(Header, flags) == 8 && offsetof(Header, dim) == 10 &&
              offsetof(Header, table) == 12 && offsetof(Header, worker) == 16 &&
              offsetof(Header, incarnation) == 20 && offsetof(Header, sequence) == 24 &&
              offsetof(Header, epoch) == 32 && offsetof(Header, clock) == 36 &&
              offsetof(Header, count) == 40 && offsetof(Header, aux) == 44 && offsetof(Header, job) == 48 &&
              offsetof(Header, payload_bytes) == 52 && offsetof(Header, payload_crc) == 56 &&
              offsetof(Header, header_crc) == 60);

// Why a message is invalid; false if it is valid.
struct Fault {
  Status status = Status::kOk;  // kBadRequest, kWrongVersion; kInternal: no memory for an aligned copy
  std::array<char, 192> text{};

  explicit operator bool() const noexcept { return status != Status::kOk; }
  std::string_view message() const noexcept { return text.data(); }
};

struct Limits {
  std::uint64_t payload_bytes = 64 * MiB;
  bool replies = false;  // a server takes requests, a client replies
};

// A checked message. Fields that its op does not use are empty.
struct Decoded {
  Header header;  // after a fault: zeros, unless its crc is right, so that the error reply names its sequence
  std::span<const std::uint64_t> hashes;
  Frame digest;                           // 16 bytes in place of the hashes
  std::span<const std::byte> values;      // of floats(), or count of header.dtype, or a section
  std::span<const std::uint32_t> counts;  // PUSH: how often each row occurred; empty if all occurred once
  std::span<const std::uint64_t>
      numbers;                            // TICK: sequences; LOAD_BEGIN: rows; LOAD_END; STATS; SWEEP; SAVE_*
  std::span<const std::uint32_t> tables;  // TICK
  std::span<const std::uint16_t> slots;   // WRONG_EPOCH: slots that are not here
  std::string_view text;          // BAD_REQUEST, INTERNAL, RESOURCE_EXHAUSTED: UTF-8, as the peer sent it
  std::span<const Frame> nested;  // REPLICATE of a request: its header, its frames; not yet decoded

  // Weights or gradients, count x dim.
  std::span<const float> floats() const noexcept {
    const bool there = header.dtype >= Dtype::kFloat32 && header.dtype <= Dtype::kBfloat16;
    return there ? as<float>() : std::span<const float>();
  }
  // REDUCE: its parameters, its results. SWEEP: its rules.
  std::span<const double> doubles() const noexcept {
    return header.dtype == Dtype::kFloat64 ? as<double>() : std::span<const double>();
  }

  // Buffers that are reused from message to message.
  std::array<Buffer<std::uint64_t>, kMaxFrames> copies;  // of frames that arrived misaligned
  Buffer<float> unpacked;
  Buffer<std::uint32_t> unpacked_counts;

 private:
  template <class T>
  std::span<const T> as() const noexcept {
    return {reinterpret_cast<const T*>(values.data()), values.size() / sizeof(T)};
  }
};

// Checks a message; frames[0] is its header. The checks are in the order of docs/wire-format.md: the first
// that fails is returned. `into`: if a reply's plain values have exactly as many bytes, they are copied there
// in the same pass that checks them, and `values` views it. After a fault its contents are unspecified.
Fault decode(std::span<const Frame> frames, const Limits& limits, Decoded& out,
             std::span<std::byte> into = {}) noexcept;

// The header alone; nullopt if it is invalid (decode() says why).
std::optional<Header> peek(std::span<const Frame> frames) noexcept;

// Fills in the header's sizes and checksums, and writes it. The payload is not checked. Throws
// std::invalid_argument if it has 4 GiB or more.
void encode(Header& header, std::span<const Frame> payload, std::span<std::byte, sizeof(Header)> out);

}  // namespace shoal::wire

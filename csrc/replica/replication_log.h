// ReplicationLog: the streams of an endpoint to its backups. A log with cumulative acknowledgements and
// go-back-N retransmission; a position is committed once every stream has acknowledged its records up to
// there. docs/replication.md is the protocol, replication_log.cc has copies and stamps.
//
//   append -> record 17 -> stream a: sequence 9, stream b: sequence 17
//   acknowledged(b, 16): committed() is 16, replies up to 16 leave (endpoint/held_replies.h)
//
// A stream of which nothing is heard for kSilentMs stops replies, although it may have acknowledged all
// records: another endpoint may have been promoted. A stream with a fault, or that its backup has fenced,
// stops them until it is closed.
//
// Invariants
//   I1  A stream keeps all its records above `acknowledged`, and no others.
//
// Threads: none of its own; one owner. Records are shared with the transport.

#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/units.h"
#include "replica/arc_copy.h"
#include "transport/shared_frame.h"
#include "wire/record_header.h"

namespace shoal {

using Milliseconds = std::uint64_t;
using StreamId = std::uint64_t;

// A message of a stream: a REPLICATE header, and frames that are sent in place.
struct StreamMessage {
  std::array<std::byte, sizeof(wire::Header)> header{};
  std::array<SharedFrame, wire::kMaxFrames> frames{};
  std::size_t count = 0;  // of the frames
};

// What is appended. Immutable; shared by streams and messages.
struct LogRecord {
  wire::Record kind = wire::Record::kAlive;
  wire::Status status = wire::Status::kOk;  // REQUEST: of its execution
  std::uint32_t end_slot = 0;               // REQUEST: the arcs below it have executed it
  std::array<SharedFrame, wire::kMaxFrames> frames{};
  std::size_t count = 0;

  std::size_t bytes() const noexcept;
};

class ReplicationLog {
 public:
  static constexpr Milliseconds kNever = std::numeric_limits<Milliseconds>::max();
  static constexpr Milliseconds kAliveMs = 200;   // a keep-alive after so long without a message
  static constexpr Milliseconds kSilentMs = 500;  // half of the time after which a server is suspected
  // From one time that everything unacknowledged is sent again to the next; doubles without progress.
  static constexpr Milliseconds kGapMs = 20;
  static constexpr Milliseconds kMaxGapMs = 1000;
  static constexpr std::size_t kMaxSentBytes = 64 * MiB;  // sent and not acknowledged, per stream

  static constexpr std::size_t kChunkBytes = 128 * KiB;
  static constexpr std::size_t kMaxCopyAhead = 4 * MiB;
  static constexpr std::size_t kMaxTakenBytes = 64 * MiB;  // pieces of a copy that are not appended
  static constexpr std::size_t kManyKeptBytes = 64 * MiB;  // records that the backup keeps for a copy

  // Of stamps: those of an epoch are above all of the epochs before.
  static constexpr unsigned kEpochShift = 36;

  struct Entry {
    std::shared_ptr<const LogRecord> record;
    std::uint64_t position = 0;
    std::uint64_t stamp = 0;
    bool is_shared = false;  // other streams have it too
    bool is_whole =
        false;  // REQUEST: all arcs that executed it are the stream's, so that the backup has the same status
    std::uint32_t applied =
        0;  // TICK: one more than ArcGroup::applied_sum() of the stream's arcs; 0: not compared
  };
  // The copy of one arc.
  struct Copy {
    using Piece = std::shared_ptr<const std::vector<std::byte>>;

    SlotRange range{};
    bool has_begun = false;
    bool was_delayed = false;           // by a save: the next one begins when all pieces are taken
    bool is_awaited = false;            // by a save
    std::shared_ptr<ArcCopy> source{};  // null once all pieces are taken
    std::deque<Piece> pieces{};         // taken and not appended
    std::size_t offset = 0;             // of the next chunk in the first one
    std::size_t taken_bytes = 0;        // of the pieces
    std::size_t kept_bytes = 0;         // of the records since COPY_BEGIN
    std::uint64_t bytes = 0;            // appended
    std::uint64_t total = 0;            // estimated
    std::uint64_t end_sequence = 0;     // of COPY_END; 0: not yet

    bool can_take() const noexcept { return source != nullptr && taken_bytes < kMaxTakenBytes; }
    bool is_taken() const noexcept { return has_begun && source == nullptr; }
  };
  struct Stream {
    StreamId id = 0;
    std::string address{};
    std::string server_key{};
    std::vector<SlotRange> in_sync{};
    std::optional<Copy> copy{};
    std::vector<SlotRange> arrived{};  // of in_sync: those that were copied since the last assignment
    std::deque<Entry> entries{};       // not acknowledged
    std::uint64_t acknowledged = 0;    // sequence
    std::uint64_t sent = 0;            // sequence
    std::size_t bytes = 0;             // of the entries
    std::size_t sent_bytes = 0;        // of those that were sent
    Milliseconds heard = 0;
    Milliseconds last_sent = 0;
    Milliseconds gap_ms = kGapMs;
    Milliseconds rewound = 0;
    Milliseconds rewind_at = kNever;  // a gap was reported too soon after the last time
    bool alive_due = false;
    bool fenced = false;
    std::string fault{};

    std::uint64_t last() const noexcept { return acknowledged + entries.size(); }
    bool stopped() const noexcept { return fenced || !fault.empty(); }
    bool is_in_sync(std::size_t slot) const noexcept;
    // Whether it gets the records of this slot's arc.
    bool has(std::size_t slot) const noexcept {
      return is_in_sync(slot) ||
             (copy && copy->has_begun && slot >= copy->range.first && slot < copy->range.end);
    }
  };

  bool has_streams() const noexcept { return !streams_.empty(); }
  std::map<StreamId, Stream>& streams() noexcept { return streams_; }
  const std::map<StreamId, Stream>& streams() const noexcept { return streams_; }
  Stream* find(StreamId id) noexcept;
  Stream& open(StreamId id, const std::string& address, const std::string& server_key);
  void close(StreamId id);

  // Gives the record a position and adds it to the streams that have one of the arcs; without arcs, to all.
  // `applied` is called for each of them. std::bad_alloc: it is missing in some of the streams.
  template <class Applied>
  void append(LogRecord record, std::span<const SlotRange> arcs, const Applied& applied,
              std::optional<StreamId> only = {}) {
    const auto shared = std::make_shared<const LogRecord>(std::move(record));
    ++position_;
    stamp_ += only ? 0U : 1U;
    const auto gets_it = [&](const Stream& stream) {
      return touches(stream, arcs) && (!only || *only == stream.id);
    };
    const bool is_shared = !only && have_several(arcs);
    for (auto& [id, stream] : streams_) {
      if (gets_it(stream)) {
        add(stream, {.record = shared,
                     .position = position_,
                     .stamp = stamp_,
                     .is_shared = is_shared,
                     .is_whole = std::ranges::all_of(
                         arcs, [&to = stream](const SlotRange& arc) { return to.is_in_sync(arc.first); }),
                     .applied = applied(stream)});
      }
    }
  }
  // Begins the copy of a stream, as of now.
  void begin_copy(Stream& stream, std::shared_ptr<ArcCopy> source);
  // Takes pieces of at most `allowed` bytes, but at least one; returns their bytes. SnapshotLostError.
  static std::size_t take_pieces(Copy& copy, std::size_t allowed);
  // Appends chunks of at most `allowed` bytes, and COPY_END after the last one; returns the bytes. Not more
  // than kMaxCopyAhead bytes are waiting to be acknowledged.
  std::size_t append_chunks(Stream& stream, std::uint64_t allowed);
  std::uint64_t position() const noexcept { return position_; }
  std::uint64_t stamp() const noexcept { return stamp_; }
  // Begins with stamps of at least this number, for orders of streams that an assignment appends.
  void advance_stamp(std::uint64_t least) noexcept { stamp_ = std::max(stamp_ + 1, least); }
  // All positions up to it are acknowledged by all streams.
  std::uint64_t committed() const noexcept;
  // Likewise, all stamps.
  std::uint64_t floor() const noexcept;
  // Whether replies to what has been appended so far may leave.
  bool is_committed() const noexcept { return committed() == position_ && !is_stopped(); }
  // Whether a stream is silent or stopped.
  bool is_stopped() const noexcept;

  // Of the records of the stream that has most.
  std::size_t unacknowledged_bytes() const noexcept;
  bool next_message(Stream& stream, StreamMessage& message) noexcept;
  void acknowledge(Stream& stream, const wire::RecordReply& reply, std::string_view text) noexcept;
  void rewind(Stream& stream) noexcept;
  void rewind_if_due(Stream& stream) noexcept;
  // Stops all streams.
  void stop(const char* why) noexcept;
  void on_time(Milliseconds now) noexcept;
  Milliseconds next_time() const noexcept;
  Milliseconds now() const noexcept { return now_; }

 private:
  static bool touches(const Stream& stream, std::span<const SlotRange> arcs) noexcept;
  // Whether several streams have one of these arcs; without arcs, whether there are several.
  bool have_several(std::span<const SlotRange> arcs) const noexcept;
  void add(Stream& stream, Entry entry);
  // Adds a record that no reply waits for.
  void add_copy(Stream& stream, wire::Record kind, SharedFrame frame);

  std::map<StreamId, Stream> streams_;
  std::uint64_t position_ = 0;
  std::uint64_t stamp_ = 0;
  Milliseconds now_ = 0;
};

}  // namespace shoal

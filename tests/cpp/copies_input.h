// One input of the fuzzer of copies: what a backup receives from a primary, made of arbitrary bytes.
//
// A primary executes requests that the bytes choose, and its arc is saved. The bytes of the copy, and orders
// as bytes, are damaged, under valid checksums, and go to a backup between records of other kinds. The backup
// answers every record, its tables stay consistent, and a copy that it accepts is one that a primary could
// have made: saved, restored and saved again it has the same bytes. tests/fuzz/copies/fuzz_copies.cc feeds it
// from libFuzzer, wire_corpus_test.cc from the committed corpus.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/byte_stream.h"
#include "base/crc32c.h"
#include "endpoint/endpoint.h"
#include "replica/arc.h"
#include "replica/arc_copy.h"
#include "replica/orders.h"
#include "service_input.h"

namespace shoal::copies_input {

using service_input::Broken;
using service_input::Bytes;
using service_input::kSlots;
using service_input::Source;

inline constexpr StreamId kStream = 5;
inline constexpr SlotRange kArc{0, 4};    // is copied
inline constexpr SlotRange kOther{4, 8};  // is in sync from the beginning
inline constexpr std::size_t kKindAt = 5;
inline constexpr std::byte kSlotPiece{2};
inline constexpr std::size_t kBucketsEnd = 9;  // of the body of a slot: behind the flags
inline constexpr std::size_t kCrcAt = 12;      // of a piece: server/arc_copy.h
inline constexpr std::size_t kLengthAt = 16;
inline constexpr std::size_t kBodyAt = ArcRestorer::kHeadBytes;
inline constexpr std::uint64_t kHuge = std::uint64_t{1} << 63U;

inline std::size_t place(Source& from, std::size_t size) {
  const std::size_t high = from.byte();
  return (high << 8U | from.byte()) % size;
}

// The arc of a primary that has executed some requests.
inline std::vector<Bytes> some_pieces(Source& from, const ServiceLimits& limits) {
  Service primary(Slots(kSlots), {kArc}, limits);
  primary.set_map(3, {kArc});
  service_input::set_up(primary, from);
  BufferPool pool;
  ReplyQueue out(pool);
  for (std::uint32_t count = from.below(6); count != 0; --count) {
    service_input::Made made = service_input::make(from);
    made.header.epoch = 3;
    std::array<std::byte, sizeof(wire::Header)> head;
    encode(made.header, service_input::covered(made), head);
    std::vector<wire::Frame> frames = {head};
    frames.insert(frames.end(), made.payload.begin(), made.payload.end());
    primary.handle("peer", frames, out);
    out.replies().clear();
  }
  primary.close_saves();
  try {
    return primary.save_arc(kArc);
  } catch (const std::invalid_argument&) {  // a table is being loaded
    return {};
  }
}

inline void damage(std::vector<Bytes>& pieces, Source& from) {
  for (std::uint32_t count = from.below(4); count != 0 && !pieces.empty(); --count) {
    Bytes& piece = pieces[from.byte() % pieces.size()];
    switch (from.below(8)) {
      case 0:
        pieces.erase(pieces.begin() + from.byte() % static_cast<std::ptrdiff_t>(pieces.size()));
        continue;
      case 1:
        std::swap(piece, pieces[from.byte() % pieces.size()]);
        continue;
      case 2:
        piece.resize(place(from, piece.size() + 64));
        break;
      case 3: {
        const std::size_t at = place(from, piece.size() + 1);
        piece.insert(piece.begin() + static_cast<std::ptrdiff_t>(at), 1 + from.below(16),
                     std::byte{from.byte()});
        break;
      }
      default:
        if (!piece.empty()) {
          piece[place(from, piece.size())] = std::byte{from.byte()};
        }
    }
    if (piece.size() >= kBodyAt + kBucketsEnd && piece[kKindAt] == kSlotPiece) {
      // Fewer than 65,536 buckets: an empty table may have had many, and it takes seconds to save them again.
      std::fill(piece.begin() + kBodyAt + kBucketsEnd - 6, piece.begin() + kBodyAt + kBucketsEnd,
                std::byte{0});
    }
    if (piece.size() >= kBodyAt) {
      const auto body = std::span(piece).subspan(kBodyAt);
      const std::uint32_t crc = crc32c(body);
      std::memcpy(piece.data() + kCrcAt, &crc, sizeof crc);
      if (from.below(8) != 0) {
        const std::uint64_t length = body.size();
        std::memcpy(piece.data() + kLengthAt, &length, sizeof length);
      }
    }
  }
}

inline Order some_order(Source& from) {
  const auto ranges = [&] {
    const std::size_t first = from.below(kSlots + 1);
    return std::vector<SlotRange>{{first, first + from.below(kSlots + 1)}};
  };
  switch (from.below(13)) {
    case 0:
      return StartJob{.job = 1 + from.below(2),
                      .mode = Mode{static_cast<std::uint8_t>(from.below(3))},
                      .staleness = from.below(3),
                      .mean = from.below(2) != 0,
                      .before = from.below(4)};
    case 1:
      return Admit{.rank = from.below(3), .incarnation = 1 + from.below(3), .clock = from.below(4)};
    case 2:
      return Fence{.rank = from.below(3), .incarnation = 1 + from.below(3)};
    case 3:
      return Dismiss{.rank = from.below(3), .incarnation = 1 + from.below(3)};
    case 4:
      return Hold{};
    case 5:
      return Resume{};
    case 6:
      return SetMemory{std::uint64_t{from.byte()} << 8U};
    case 7:
      return AddTable{.id = from.below(4),
                      .spec = TableSpec{.dim = 1 + from.below(3),
                                        .dtype = Dtype::kFloat32,
                                        .optimizer = Optimizer("SGD", {{"lr", 1.0}, {"weight_decay", 0.0}}),
                                        .init = Init("Zeros", 0.0, 0),
                                        .seed = 0}};
    case 8:
      return DropTable{from.below(4)};
    case 9:
      return ReleaseArcs{.arcs = ranges()};
    case 10:
      return AbortCopy{};
    case 11: {
      CatchUpArcs order{.epoch = from.below(3), .arcs = ranges(), .stamps = {from.below(8)}};
      for (std::uint32_t left = from.below(3); left != 0; --left) {
        service_input::Made request = service_input::make(from);
        KeptRecord record{.stamp = from.below(8),
                          .arcs = ranges(),
                          .is_request = from.below(4) != 0,
                          .end_slot = from.below(kSlots + 1)};
        Bytes head(sizeof(wire::Header));
        encode(request.header, service_input::covered(request),
               std::span<std::byte, sizeof(wire::Header)>(head));
        record.frames = {head};
        record.frames.insert(record.frames.end(), request.payload.begin(), request.payload.end());
        order.records.push_back(std::move(record));
      }
      return order;
    }
    default:
      return JoinArcs{.arcs = ranges()};
  }
}

// A backup, and the records of its stream.
class Backup {
 public:
  explicit Backup(const ServiceLimits& limits) : service_(Slots(kSlots), {}, limits) {
    service_.assign({.epoch = 1, .incoming = {{.stream = kStream, .in_sync = {kOther}}}});
  }

  void send(wire::Record kind, const Bytes& bytes) {
    const wire::RecordHeader record{.stream = kStream, .position = ++sequence_, .kind = kind};
    send(record.header(), kind == wire::Record::kAlive ? std::vector<Bytes>() : std::vector<Bytes>{bytes},
         true);
  }
  void send_request(Source& from) {
    service_input::Made nested = service_input::make(from);
    const std::uint32_t status = from.below(4) == 0 ? from.below(12) : wire::RecordHeader::kNotCompared;
    const wire::RecordHeader record{.stream = kStream,
                                    .position = ++sequence_,
                                    .kind = wire::Record::kRequest,
                                    .status = status,
                                    .end_slot = from.below(kSlots + 1)};
    Bytes head(sizeof(wire::Header));
    encode(nested.header, service_input::covered(nested), std::span<std::byte, sizeof(wire::Header)>(head));
    std::vector<Bytes> payload = {head};
    payload.insert(payload.end(), nested.payload.begin(), nested.payload.end());
    send(record.header(), payload, false);
  }
  // Lets the backup execute what it has kept, and checks what it has.
  void verify() {
    for (int turn = 0; turn < 3; ++turn) {
      service_.on_time(++now_, out_);
      service_.acknowledge(out_);
      service_input::check_replies(out_);
    }
    service_.with_follower(kStream, [](const ArcGroup& arcs) {
      for (const auto& [id, spec] : arcs.tables()) {
        std::unique_ptr<Shard> rows;
        try {
          rows = arcs.snapshot(id);
        } catch (const std::invalid_argument&) {  // some arcs lack the table
          continue;
        }
        if (const std::string broken = rows->verify(); !broken.empty()) {
          throw Broken("table " + std::to_string(id) + ": " + broken);
        }
      }
      for (const SlotRange& range : arcs.ranges()) {
        check_repeatable(arcs, range);
      }
    });
  }

 private:
  void send(wire::Header header, const std::vector<Bytes>& payload, bool is_covered) {
    const std::vector<wire::Frame> views(payload.begin(), payload.end());
    std::array<std::byte, sizeof(wire::Header)> head;
    encode(header, is_covered ? std::span(views) : std::span<const wire::Frame>(), head);
    std::vector<wire::Frame> frames = {head};
    frames.insert(frames.end(), views.begin(), views.end());
    service_.handle("primary", frames, out_);
    service_.acknowledge(out_);
    service_input::check_replies(out_);
  }
  static void check_repeatable(const ArcGroup& arcs, const SlotRange& range) {
    std::vector<Bytes> pieces;
    try {
      pieces = arcs.find(range).save();
    } catch (const std::invalid_argument&) {
      return;
    }
    ArcRestorer restorer;
    for (const Bytes& piece : pieces) {
      restorer.add(piece);
    }
    if (restorer.finish()->save() != pieces) {
      throw Broken("an arc that is restored from its own bytes has other bytes");
    }
  }

  Endpoint service_;
  BufferPool pool_;
  ReplyQueue out_{pool_};
  std::uint64_t sequence_ = 0;
  Milliseconds now_ = 0;
};

// Throws Broken if an invariant is violated.
inline void check(std::span<const std::uint8_t> bytes) {
  Source from(bytes);
  const ServiceLimits limits{.deferred_reads = 4,
                             .deferred_bytes = 4000,
                             .pending_bytes = 4000,
                             .reply_bytes = 4000,
                             .request_bytes = 4000,
                             .key_list_bytes = 500};
  Backup backup(limits);
  const auto others = [&](std::uint32_t most) {
    for (std::uint32_t count = from.below(most); count != 0; --count) {
      if (from.below(3) == 0) {
        backup.send_request(from);
        continue;
      }
      Bytes order = encode(some_order(from));
      if (from.below(4) == 0) {
        order[place(from, order.size())] = std::byte{from.byte()};
        order.resize(order.size() - (from.below(8) == 0 ? 1 : 0));
      }
      backup.send(wire::Record::kOrder, order);
    }
  };
  others(4);
  std::vector<Bytes> pieces = some_pieces(from, limits);
  damage(pieces, from);
  ByteWriter head;
  head.put(std::uint64_t{kArc.first});
  head.put(std::uint64_t{kArc.end});
  head.put(from.below(16) == 0 ? kHuge : std::uint64_t{1000});  // an estimate: nothing is allocated for it
  if (from.below(16) == 0) {
    head.bytes()[place(from, head.bytes().size())] = std::byte{from.byte()};
  }
  backup.send(wire::Record::kCopyBegin, head.take());
  for (const Bytes& piece : pieces) {
    if (!piece.empty() && from.below(16) != 1) {
      const std::size_t cut = from.below(4) == 0 ? place(from, piece.size()) : 0;
      if (cut != 0) {
        backup.send(wire::Record::kCopyChunk,
                    {piece.begin(), piece.begin() + static_cast<std::ptrdiff_t>(cut)});
      }
      backup.send(wire::Record::kCopyChunk, {piece.begin() + static_cast<std::ptrdiff_t>(cut), piece.end()});
    }
    others(2);
  }
  backup.send(wire::Record::kCopyEnd, {});
  backup.verify();
  others(6);
  backup.verify();
}

}  // namespace shoal::copies_input

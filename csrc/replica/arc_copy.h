// ArcCopy, ArcRestorer: serialize the whole state of an arc at one moment, piece by piece, and restore it as
// an equal arc in another process. Equal arcs have equal bytes.
//
//   piece   u32 magic | u8 version | u8 kind | u16 0 | u32 number | u32 crc32c, u64 bytes of the body | body
//
//   kHead   u32 slots of the table, first, end | u64 budget per slot (0: none) | u32 tables
//   kTable  u32 number | u32 length, description (shard/spec_bytes.h) | u8 status and text why a step was not
//           made (0: none failed) | u32 clock that ended jobs reached | state of the table
//   kSlot   the state of a slot, in the order of the slots, after the piece of its table
//   kTail   u32 jobs, each as in JobState::save(), the default job first; the last piece
//
// Threads: none of their own; one owner. The arc's owner calls next().

#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/byte_stream.h"
#include "replica/arc.h"
#include "replica/slot_range.h"
#include "shard/shard_copy.h"

namespace shoal {

class ArcCopy {
 public:
  // As of now. std::invalid_argument: a table is being saved, copied or loaded.
  explicit ArcCopy(const Arc& arc);

  const SlotRange& range() const noexcept { return range_; }
  // Of all pieces, estimated from the rows.
  std::uint64_t bytes() const noexcept { return bytes_; }
  bool done() const noexcept { return next_ == pieces_; }
  // The next piece. After SnapshotLostError there is none.
  std::vector<std::byte> next();
  // Ends the snapshots, for a save that begins: there are no more pieces.
  void cancel() noexcept;
  bool cancelled() const noexcept { return cancelled_; }

 private:
  struct Table {
    std::vector<std::byte> piece;  // without its number
    std::optional<ShardCopy> shard{};
  };

  SlotRange range_;
  std::uint64_t bytes_ = 0;
  std::size_t pieces_ = 0;
  std::size_t next_ = 0;  // number of the next piece
  std::vector<std::byte> head_;
  std::deque<Table> tables_;  // the first one is being copied
  std::size_t slot_ = 0;      // its next slot
  std::vector<std::byte> tail_;
  bool cancelled_ = false;
};

class ArcRestorer {
 public:
  static constexpr std::size_t kHeadBytes = 24;  // of a piece

  // `tier`: that of the arc here (Arc::set_tier).
  explicit ArcRestorer(std::shared_ptr<TierSpace> tier = {}) noexcept : tier_(std::move(tier)) {}

  // The bytes of the piece that begins with these kHeadBytes or more. std::invalid_argument: none does.
  static std::uint64_t piece_bytes(std::span<const std::byte> front);
  // Restores the next piece. std::invalid_argument names what is wrong; MemoryBudgetExceededError. After
  // either it is unusable.
  void add(std::span<const std::byte> piece);
  // The arc, after its last piece. It has no workspace until Arc::move_to(). std::invalid_argument: pieces
  // are missing.
  std::unique_ptr<Arc> finish();

 private:
  void add_head(ByteReader& in);
  void add_table(ByteReader& in);
  void add_tail(ByteReader& in);

  std::shared_ptr<TierSpace> tier_;
  std::size_t number_ = 0;  // of the next piece
  std::unique_ptr<Arc> arc_;
  std::size_t tables_ = 0;  // that have not begun
  std::map<std::uint32_t, std::size_t> dims_;
  Shard* shard_ = nullptr;  // of the last table
  std::size_t slot_ = 0;    // its next slot
  bool is_whole_ = false;
};

}  // namespace shoal

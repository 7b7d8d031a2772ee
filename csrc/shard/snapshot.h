// Snapshot: a shard as it was at one moment, read slot by slot while it goes on changing.
//
//   freeze(), Snapshot(), thaw()   the moment: no push is half done, and every slot is marked as to be saved yet
//   take(slot), read_slot(slot)    copy the slot's bytes under its lock, unmark it, and go on without the lock: lay over
//                                  the copy what the slot's PreImageLog has kept, sort, make columns, or the weights alone
//   a change of a marked slot      keeps what it is about to change in the PreImageLog first (table/pre_image_log.h)
//
// So a change waits for the moment, which ends when the pushes under way do, and for the copy of a slot, a thousandth of
// the table; never for a disk. Memory: a copy of one slot for each thread that takes, and what changes in slots before
// they are taken. Where that comes to `most` bytes, changes wait for slots to be taken, each up to kPatience (those of a
// data loop are sent again by their peers instead, server/service.h); at kHopeless times that, or where there is no memory,
// the save is lost, not the change.
//
// Deltas. A save may be the base of the next: from its moment on each slot remembers which parts of its hashes have changed
// (table/dirty_ranges.h). The next save may then take of each slot what has changed alone: these ranges, and all rows that they
// hold now; what the base has there and the delta has not was erased. A save that does not come to its end changes
// nothing: what had changed before its moment counts still. Exports do likewise, and neither knows of the other:
// each purpose has ranges of its own, made when they are first asked for. Of a slot where few ranges have changed only
// the rows in these are copied; other rows are not looked at.
//
// Results: take() gives the bytes that Shard::section() and filter() would have given at the moment, read_slot() and
// read_changes() the weights.
//
// Invariants
//   I1  a slot that was not taken is marked: it has a PreImageLog, and is watched.
//   I2  table + PreImageLog, where the PreImageLog has the last word, are the rows of the moment; and so it is with the slot's door.
//
// Threads: take(), read_slot() and read_changes() of different slots by any number of threads, while others use the shard.
// Made while the shard is frozen, where several shards are saved together while all are: so they are of one moment. One at
// a time for a shard.
// Fork: a child's copy ends without a word, and its takes throw WrongProcessError.

#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "shard/shard.h"

namespace shoal {

// The save cannot be finished: what had to be kept for it was more than there was memory for.
struct SnapshotLostError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Snapshot {
 public:
  static constexpr std::size_t kMin = std::size_t{64} << 20U;  // bytes kept before changes wait, or
  static constexpr std::size_t kShare = 16;                    // that part of the table, if it is more
  static constexpr std::size_t kHopeless = 4;
  static constexpr std::chrono::milliseconds kPatience{50};
  static constexpr std::size_t kFew = 4;  // where less than one range in so many has changed, rows are picked
  static constexpr std::size_t kNear = 3;  // rows in a range that has one, at most, on the average

  enum class Kind : std::uint8_t {
    kPlain,  // all rows; what is remembered for deltas of another save stays as it is
    kBase,   // all rows, and the next may be a delta
    kDelta,  // what has changed since the shard's base(), and the next may be a delta
  };
  // Those of a slot that have changed, which DirtyRanges tells by these three.
  struct Ranges {
    unsigned bits = 0;
    std::size_t count = 0;
    std::vector<std::byte> bytes;
  };
  struct Piece {
    std::size_t rows = 0;
    std::vector<std::byte> section;
    std::vector<std::byte> filter;
    // Of a delta: whether the filter is another than the base's, and the ranges.
    bool has_filter = false;
    Ranges ranges;
  };

  // The shard is frozen, and outlives this. `most` 0: as above. std::invalid_argument: the shard is being saved, or has no
  // base for a delta of that purpose.
  explicit Snapshot(Shard& shard, std::uint32_t store_clock = 0, Kind kind = Kind::kPlain,
                    std::size_t most = 0, Purpose purpose = Purpose::kSave);
  ~Snapshot();
  Snapshot(const Snapshot&) = delete;
  Snapshot& operator=(const Snapshot&) = delete;

  // Of the moment.
  std::uint64_t step() const noexcept { return step_; }
  std::uint32_t table_clock() const noexcept { return clock_; }
  std::size_t rows() const noexcept { return rows_; }
  std::size_t bytes() const noexcept { return bytes_; }
  std::size_t dim() const noexcept { return shard_.rows().dim(); }

  // Each slot once: std::invalid_argument. After any other exception the snapshot is of no use.
  Piece take(Slot slot);
  // Likewise, instead: what Shard::read_slot() would have given at the moment. Not of a delta.
  void read_slot(Slot slot, std::vector<std::uint64_t>& hashes, std::vector<float>& weights);
  // Of a delta: the rows in the ranges that have changed, and these ranges.
  Ranges read_changes(Slot slot, std::vector<std::uint64_t>& hashes, std::vector<float>& weights);
  // All was saved, under this name: it is the shard's base() of the purpose, unless the snapshot is plain.
  void done(std::string name);
  // Lets go of what was not taken: changes cost no more than without a save. Called by one thread when no take is under way.
  void close() noexcept;

 private:
  struct Copy;
  // A slot that is unmarked.
  struct Taken {
    std::unique_ptr<Copy> copy;
    std::unique_ptr<PreImageLog> pre_images;
    std::size_t kept = 0;     // bytes by the undo
    bool is_changed = false;  // false: a delta has nothing of its rows, and they were not copied
    bool is_picked = false;   // the copy has the rows in changed ranges alone
  };
  std::unique_ptr<Copy> borrow();
  Taken unmark(Slot slot);
  // What a delta is to hold; null where the snapshot is of all rows.
  const DirtyRanges* changed_of(Slot slot) const;
  std::vector<SlotTable::Entry> rows_of(const Taken& taken, const DirtyRanges* changed) const;
  static Ranges ranges_of(const DirtyRanges& changed);
  void give_back(Taken taken);
  void check_whole() const;

  Shard& shard_;
  std::uint64_t step_;
  std::uint32_t clock_;
  std::size_t rows_ = 0;
  std::size_t bytes_ = 0;
  Kind kind_;
  Purpose purpose_;
  bool open_ = true;
  bool done_ = false;
  std::mutex mutex_;  // guards the next: copies that nobody uses
  std::vector<std::unique_ptr<Copy>> idle_;
};

}  // namespace shoal

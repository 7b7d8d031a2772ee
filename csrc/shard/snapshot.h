// Snapshot: a consistent read of a shard as of one moment, slot by slot, while the shard keeps changing
// (copy-on-write): take() returns the bytes that Shard::section() and filter() would have returned then.
//
//   pause_writers(), Snapshot(), resume_writers()   the moment: no push is half done, each slot is marked
//   take(slot), read_slot(slot)                     copy the slot, unmark it, and overlay its PreImageLog
//   a change of a marked slot                       first logs the previous contents (shard/change_log.h)
//
// Invariants
//   I1  a slot that is not taken is marked: it has a PreImageLog, and is watched.
//   I2  the table overlaid with the PreImageLog equals the rows of the moment; so does the admission filter.
//
// Threads: take(), read_slot() and read_changes() in any number of threads for different slots, while others
// use the shard. One snapshot per shard at a time; to save several as of one moment, pause all of them first.
// Fork: the copy in a child process is destroyed silently, and its takes throw WrongProcessError.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "base/units.h"
#include "shard/shard.h"

namespace shoal {

// The save failed: memory for logging the previous contents ran out.
struct SnapshotLostError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Snapshot {
 public:
  static constexpr std::size_t kMin = 64 * MiB;  // bytes logged before changes wait, or
  static constexpr std::size_t kShare = 16;      // that part of the table, if it is more
  static constexpr std::size_t kFew = 4;  // where less than one range in so many has changed, rows are picked
  static constexpr std::size_t kNear = 3;  // rows in a range that has one, at most, on the average

  enum class Kind : std::uint8_t {
    kPlain,  // all rows; recorded changes are left as they are
    kBase,   // all rows; the next may be a delta
    kDelta,  // changes since the shard's base(); the next may be a delta
  };
  // The changed ranges of a slot, in the saved form of DirtyRanges.
  struct Ranges {
    unsigned bits = 0;
    std::size_t count = 0;
    std::vector<std::byte> bytes;
  };
  struct Piece {
    std::size_t rows = 0;
    std::vector<std::byte> section;
    std::vector<std::byte> filter;
    // In a delta: whether the filter differs from the base's, and the changed ranges.
    bool has_filter = false;
    Ranges ranges;
  };

  // Requires paused writers; the shard must outlive the snapshot. `limit` 0: the default, where the table is
  // saved by `parts` snapshots, which share kMin. Throws std::invalid_argument if the shard is being saved,
  // or has no base for a delta of that purpose.
  explicit Snapshot(Shard& shard, std::uint32_t store_clock = 0, Kind kind = Kind::kPlain,
                    std::size_t limit = 0, Purpose purpose = Purpose::kSave, std::size_t parts = 1);
  ~Snapshot();
  Snapshot(const Snapshot&) = delete;
  Snapshot& operator=(const Snapshot&) = delete;

  // As of the moment of the snapshot.
  std::uint64_t step() const noexcept { return step_; }
  std::uint32_t table_clock() const noexcept { return clock_; }
  std::size_t rows() const noexcept { return rows_; }
  std::size_t bytes() const noexcept { return bytes_; }
  std::size_t dim() const noexcept { return core_.rows.dim(); }

  // Takes each slot at most once, else throws std::invalid_argument. After any other exception the snapshot
  // is unusable.
  Piece take(Slot slot);
  // Takes a slot as the hashes and weights that Shard::read_slot() would have returned. Not for a delta.
  void read_slot(Slot slot, std::vector<std::uint64_t>& hashes, std::vector<float>& weights);
  // Takes the rows and the admission filter of a slot as they are (shard/shard_copy.h). Not for a delta.
  void take_state(Slot slot, ByteWriter& out);
  // Takes a slot of a delta as the rows in the changed ranges, and these ranges.
  Ranges read_changes(Slot slot, std::vector<std::uint64_t>& hashes, std::vector<float>& weights);
  // Completes the save under this name: it becomes the shard's base() of the purpose, unless the snapshot is
  // plain.
  void done(std::string name);
  // Releases the slots that were not taken. Called by one thread, with no take in progress.
  void close() noexcept;

 private:
  struct Copy;
  // A slot that is unmarked.
  struct Taken {
    std::unique_ptr<Copy> copy;
    std::unique_ptr<PreImageLog> pre_images;
    std::size_t logged = 0;   // bytes of the PreImageLog
    bool is_changed = false;  // false: no changes for the delta; rows were not copied
    bool is_picked = false;   // the copy holds only the rows in changed ranges
  };
  std::unique_ptr<Copy> borrow();
  Taken unmark(Slot slot);
  Taken unmark_resident(Slot slot);
  // The ranges of a delta; null if the snapshot holds all rows.
  const DirtyRanges* changed_of(Slot slot) const;
  std::vector<SlotTable::Entry> rows_of(const Taken& taken, const DirtyRanges* changed) const;
  static Ranges ranges_of(const DirtyRanges& changed);
  void give_back(Taken taken);
  void check_whole() const;

  ShardCore& core_;
  std::uint64_t step_;
  std::uint32_t clock_;
  std::size_t rows_ = 0;
  std::size_t bytes_ = 0;
  Kind kind_;
  Purpose purpose_;
  bool open_ = true;
  bool done_ = false;
  Mutex mutex_;
  std::vector<std::unique_ptr<Copy>> idle_ GUARDED_BY(mutex_);
};

}  // namespace shoal

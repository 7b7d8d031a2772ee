// AdmissionFilter: decides which keys of one slot get a row, and keeps the state of keys that wait for one.
// The rules are in policy/lifecycle.h.
//
//   AdmissionConfig    what the filters of a table's slots share: the rule, layouts and sizes
//   AdmissionFilter    of one slot: no state, an OccurrenceCounter or a Bloom filter
//   AdmissionSnapshot  the state of a filter at the moment a save began
//
// Keys are processed one after the other in hash order, however a batch is divided, so results do not depend
// on threads. make_room() comes first: it may run out of memory and then changes nothing; ask() allocates
// nothing. From mark() on, log() logs the previous state of keys before they are asked about or forgotten,
// for copy_to(). The j-th occurrence of a key in push number `step` is admitted at random by a hash of (seed,
// step, hash, j).
//
// Threads: not synchronized; the slot's owner locks. AdmissionConfig is immutable.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/byte_stream.h"
#include "policy/bloom.h"
#include "policy/lifecycle.h"
#include "policy/occurrence_counter.h"
#include "table/pre_image_log.h"

namespace shoal {

// The time of a push: the table's clock and the number of the push.
struct PushTime {
  std::uint32_t clock = 0;
  std::uint64_t step = 0;
};

class AdmissionConfig {
 public:
  // Throws std::invalid_argument if the capacity is below one waiting key per slot.
  AdmissionConfig(const Admission& rule, Slots slots);

  const Admission& rule() const noexcept { return rule_; }
  bool admits_all() const noexcept { return rule_.kind == Admission::Kind::kAll; }
  Slots slots() const noexcept { return slots_; }
  const Layout& counter_layout() const noexcept { return counter_; }
  Chunks& no_chunks() const noexcept { return no_chunks_; }
  const BloomShape* bloom() const noexcept { return bloom_ ? &*bloom_ : nullptr; }
  std::size_t max_counted(Slot slot) const noexcept;

 private:
  Admission rule_;
  Slots slots_;
  Layout counter_;
  mutable Chunks no_chunks_;  // which narrow rows do not use
  std::optional<BloomShape> bloom_;
};

// The state of a slot's admission filter at the moment a save began.
class AdmissionSnapshot {
 public:
  explicit AdmissionSnapshot(const AdmissionConfig& config)
      : waiting_(config.counter_layout(), Slot{0}), is_bloom_(config.bloom() != nullptr) {}

  // Writes the bytes that AdmissionFilter::save() would have written at that moment.
  void save(std::vector<std::byte>& bytes);
  // Writes the whole state, for AdmissionFilter::restore_all().
  void save_all(ByteWriter& out);
  // True if memory for the log ran out.
  bool lost() const noexcept { return changes_ != nullptr && changes_->lost; }

 private:
  friend class AdmissionFilter;
  struct Changes {
    Changes(const Layout& numbers, Slot slot)
        : candidates(numbers, slot, OccurrenceCounter::kRowBytes),
          bloom{.lines = {}, .changed = PreImageLog(numbers, slot, kCacheLine)} {}
    PreImageLog candidates;
    std::optional<std::uint64_t> counter_buckets{};  // nullopt: no key had waited yet
    Bloom::Before bloom;
    bool lost = false;
  };

  SlotTable waiting_;
  const bool is_bloom_;
  const Bloom* bloom_ = nullptr;
  Region lines_;
  bool has_waiting_ = false;
  std::unique_ptr<Changes> changes_;
};

class AdmissionFilter {
 public:
  static constexpr std::size_t kAny = ~std::size_t{0};

  AdmissionFilter(const AdmissionConfig& config, Slot slot);

  // Number of waiting keys that are counted exactly; 0 for a Bloom filter.
  std::size_t waiting() const noexcept { return counter_ ? counter_->size() : 0; }
  std::size_t bytes() const noexcept;

  // Makes room for `more` new keys. A Bloom filter always allocates its fixed size. An exact counter stays
  // within `bytes` in total, and discards keys if that is not enough.
  void make_room(std::size_t more, std::size_t bytes = kAny);
  // Least value of bytes() after make_room().
  std::size_t least_bytes() const noexcept;
  void prefetch(std::uint64_t hash) const noexcept;
  // Counts `count` occurrences of a key without a row. Returns true if the key gets a row.
  bool ask(std::uint64_t hash, std::uint32_t count, const PushTime& now) noexcept;
  // Removes a key that got a row without ask().
  void forget(std::uint64_t hash) noexcept;

  // Removes keys that have waited too long. Returns their number if they are counted individually.
  std::size_t sweep(std::uint32_t clock);
  void clear() noexcept;

  // save() writes the state, or nothing if there is none. restore() reads the state of a slot of any number
  // of slots and keeps the part that belongs to this slot. Throws std::invalid_argument, with nothing
  // changed, if no filter of this table can have written the bytes.
  void save(std::vector<std::byte>& bytes) const;
  void restore(Slots cut, Slot slot, std::span<const std::byte> bytes);

  // Into a new filter, what AdmissionSnapshot::save_all() has written: both are equal afterwards, and decide
  // alike.
  void restore_all(ByteReader& in);

  // For a save, see above. `numbers` is the layout of a PreImageLog and must outlive the save.
  void mark(const Layout& numbers);
  // Logs the state of ascending hashes without rows. After std::bad_alloc the save cannot be completed.
  void log(std::span<const std::uint64_t> hashes);
  std::size_t logged_bytes() const noexcept;
  void copy_to(AdmissionSnapshot& copy);  // ends the logging
  void release() noexcept;

 private:
  void watch() noexcept;

  const AdmissionConfig* admission_;
  Slot slot_;
  std::unique_ptr<OccurrenceCounter> counter_;  // created with the first waiting key
  std::optional<Bloom> bloom_;
  std::unique_ptr<AdmissionSnapshot::Changes> changes_;  // null unless a save is in progress
};

}  // namespace shoal

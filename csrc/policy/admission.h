// AdmissionFilter: decides which keys of one slot get a row, and remembers those that wait (policy/lifecycle.h has the rules).
//
//   AdmissionConfig        what the admission filters of a table's slots have in common: the rule, layouts and sizes
//   AdmissionFilter   of one slot: nothing, OccurrenceCounter or a Bloom
//
// Keys are asked about one after the other in hash order, whatever a batch is cut into, so results do not depend on
// threads. First make_room, which may run out of memory and changes nothing then; ask takes none.
//
// A save under way: from mark() on, whoever asks about keys or forgets them has keep() keep what is known of them first.
// When the save comes by, copy_to() copies all under the slot's lock and release() ends the keeping; AdmissionSnapshot puts the two
// together at leisure.
//
//   coin   a key's j-th sighting in the table's push number `step` is hashed from (seed, step, hash, j): no state
//
// Threads: none of its own; the slot's owner locks. AdmissionConfig is immutable.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "policy/bloom.h"
#include "policy/lifecycle.h"
#include "policy/occurrence_counter.h"
#include "table/pre_image_log.h"

namespace shoal {

// When a push is made: the table's clock, and the number of the push.
struct PushTime {
  std::uint32_t clock = 0;
  std::uint64_t step = 0;
};

class AdmissionConfig {
 public:
  // A table with room for fewer waiting keys than it has slots: std::invalid_argument.
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

// What a slot's admission filter remembered when a save began.
class AdmissionSnapshot {
 public:
  explicit AdmissionSnapshot(const AdmissionConfig& config) : waiting_(config.counter_layout(), Slot{0}) {}

  // As AdmissionFilter::save() would have then.
  void save(std::vector<std::byte>& bytes);
  // Memory for what could not be kept ran out.
  bool lost() const noexcept { return changes_ != nullptr && changes_->lost; }

 private:
  friend class AdmissionFilter;
  struct Changes {
    Changes(const Layout& numbers, Slot slot)
        : candidates(numbers, slot, OccurrenceCounter::kRowBytes),
          bloom{.lines = {}, .changed = PreImageLog(numbers, slot, kCacheLine)} {}
    PreImageLog candidates;
    Bloom::Before bloom;
    bool lost = false;
  };

  SlotTable waiting_;
  const Bloom* bloom_ = nullptr;
  Region lines_;
  bool has_waiting_ = false;
  std::unique_ptr<Changes> changes_;
};

class AdmissionFilter {
 public:
  static constexpr std::size_t kAny = ~std::size_t{0};

  AdmissionFilter(const AdmissionConfig& config, Slot slot);

  // Keys that wait, as far as that is known one by one.
  std::size_t waiting() const noexcept { return counter_ ? counter_->size() : 0; }
  std::size_t bytes() const noexcept;

  // What `more` keys may need that were never asked about. A Bloom filter takes what it takes; others no more than `bytes`
  // in all, and forget keys where that is not enough.
  void make_room(std::size_t more, std::size_t bytes = kAny);
  // What bytes() is at least after it.
  std::size_t least_bytes() const noexcept;
  void prefetch(std::uint64_t hash) const noexcept;
  // `count` sightings of a key without a row: whether it gets one.
  bool ask(std::uint64_t hash, std::uint32_t count, const PushTime& now) noexcept;
  // A key got a row without being asked about.
  void forget(std::uint64_t hash) noexcept;

  // Forgets what has waited too long. Returns how many keys went, where they are counted.
  std::size_t sweep(std::uint32_t clock);
  void clear() noexcept;

  // What is to be kept of it; nothing, where there is nothing. restore() takes what was saved of a slot of any cut and
  // picks what belongs to this one; bytes that no doorkeeper of the table can have saved: std::invalid_argument, nothing
  // changed.
  void save(std::vector<std::byte>& bytes) const;
  void restore(Slots cut, Slot slot, std::span<const std::byte> bytes);

  // For a save; see above. The layout is a PreImageLog's, and outlives the save.
  void mark(const Layout& numbers);
  // Of ascending hashes, none of which has a row. std::bad_alloc: the save cannot go on.
  void keep(std::span<const std::uint64_t> hashes);
  std::size_t kept_bytes() const noexcept;
  void copy_to(AdmissionSnapshot& copy);  // ends the keeping
  void release() noexcept;

 private:
  void watch() noexcept;

  const AdmissionConfig* admission_;
  Slot slot_;
  std::unique_ptr<OccurrenceCounter> counter_;  // from the first key that waits
  std::optional<Bloom> bloom_;
  std::unique_ptr<AdmissionSnapshot::Changes> changes_;  // where a save is under way
};

}  // namespace shoal

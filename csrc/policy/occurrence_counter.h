// OccurrenceCounter: how often each key that waits for its row in one slot was sighted. Exact.
//
//   row of a small SlotTable   [ count u32 | clock u32 of the last sighting ]      16 bytes a place, four in a line
//
// Keys are asked about one after the other, in hash order, and what one of them changes the next one sees; so results
// do not depend on how a batch is cut up. Where there is no place for one more, the eighth that was sighted longest ago
// is forgotten, of equal clocks the smallest hashes.
//
// Threads: none of its own; the slot's owner locks.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "policy/lifecycle.h"
#include "table/pre_image_log.h"
#include "table/slot_table.h"

namespace shoal {

class OccurrenceCounter {
 public:
  static constexpr std::size_t kRowBytes = 2 * sizeof(std::uint32_t);

  // `most`: how many may wait; 0: as many as come. The layout is of kRowBytes and outlives this.
  OccurrenceCounter(const Layout& layout, Slot slot, Chunks& chunks, std::uint32_t n, std::uint32_t within,
                    std::size_t most)
      : table_(layout, slot, chunks), n_(n), within_(within), most_(most) {}

  std::size_t size() const noexcept { return table_.size(); }
  std::size_t bytes() const noexcept { return table_.bytes(); }

  // Place for `more`, as far as `most` and `bytes` allow: before ask.
  void make_room(std::size_t more, std::size_t bytes);
  // `count` sightings of a key without a row. Whether it gets one; it waits no more then.
  bool ask(std::uint64_t hash, std::uint32_t count, std::uint32_t now) noexcept;
  // Forgets a key, which has got a row some other way.
  void forget(std::uint64_t hash) noexcept { table_.erase(hash); }
  void prefetch(std::uint64_t hash) const noexcept { table_.prefetch(hash); }

  // Forgets what has waited too long, and gives memory back. Returns how many went.
  std::size_t sweep(std::uint32_t now);

  // All of them in hash order: hashes, then counts, then clocks.
  void save(std::vector<std::byte>& bytes) const;
  static bool fits(std::span<const std::byte> bytes) noexcept { return bytes.size() % kSavedBytes == 0; }
  static constexpr std::size_t kSavedBytes = sizeof(std::uint64_t) + kRowBytes;  // each
  // One of those that were saved: the caller has made room.
  void restore(std::uint64_t hash, std::uint32_t count, std::uint32_t clock) noexcept;

  // While a save is under way (policy/admission.h): before keys are asked about or forgotten by the caller, it has keep()
  // keep what is known of them; keys that are forgotten beside are kept here, and `lost` is set where memory for that ran
  // out. Null: no save is under way.
  void watch(PreImageLog* pre_images, bool* lost) noexcept {
    pre_images_ = pre_images;
    lost_ = lost;
  }
  void keep(std::span<const std::uint64_t> hashes);
  const SlotTable& table() const noexcept { return table_; }
  // As save() does, of a copy of the table, with what was kept laid over it.
  static void save(const SlotTable& copy, const PreImageLog& pre_images, std::vector<std::byte>& bytes);

 private:
  bool is_stale(const std::byte* row, std::uint32_t now) const noexcept;
  void forget_oldest() noexcept;
  void keep_victims(std::span<const std::uint64_t> hashes) noexcept;

  SlotTable table_;
  std::uint32_t n_;
  std::uint32_t within_;
  std::size_t most_;
  std::size_t place_ = most_;  // for so many, while memory is short
  PreImageLog* pre_images_ = nullptr;
  bool* lost_ = nullptr;
};

}  // namespace shoal

// OccurrenceCounter: exact occurrence counts of the keys of one slot that wait for a row, in a hash table.
//
//   row of a small SlotTable   [ count u32 | clock u32 of the last one ]   16 bytes a cell, four in a line
//
// Keys are processed one after the other in hash order, so results do not depend on how a batch is divided.
// When the table is full, the eighth of the keys with the oldest clocks is discarded; of equal clocks, the
// smallest hashes.
//
// Threads: not synchronized; the slot's owner locks.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/byte_stream.h"
#include "policy/lifecycle.h"
#include "table/pre_image_log.h"
#include "table/slot_table.h"

namespace shoal {

class OccurrenceCounter {
 public:
  static constexpr std::size_t kRowBytes = 2 * sizeof(std::uint32_t);

  // `most` limits the number of waiting keys. `layout` has rows of kRowBytes and must outlive this object.
  OccurrenceCounter(const Layout& layout, Slot slot, Chunks& chunks, std::uint32_t n, std::uint32_t within,
                    std::size_t most)
      : table_(layout, slot, chunks), n_(n), within_(within), most_(most) {}

  std::size_t size() const noexcept { return table_.size(); }
  std::size_t bytes() const noexcept { return table_.bytes(); }

  // Makes room for `more` keys within `most` keys and `bytes` bytes. Call it before ask().
  void make_room(std::size_t more, std::size_t bytes);
  // Counts `count` occurrences of a key without a row. Returns true, and removes the key, if it gets a row.
  bool ask(std::uint64_t hash, std::uint32_t count, std::uint32_t now) noexcept;
  // Removes a key that got a row without ask().
  void forget(std::uint64_t hash) noexcept { table_.erase(hash); }
  void prefetch(std::uint64_t hash) const noexcept { table_.prefetch(hash); }

  // Removes keys that have waited too long and returns memory. Returns the number of removed keys.
  std::size_t sweep(std::uint32_t now);

  // Writes all keys in hash order: hashes, then counts, then clocks.
  void save(std::vector<std::byte>& bytes) const;
  static bool fits(std::span<const std::byte> bytes) noexcept { return bytes.size() % kSavedBytes == 0; }
  static constexpr std::size_t kSavedBytes = sizeof(std::uint64_t) + kRowBytes;  // per key
  // Restores one saved key. Requires make_room().
  void restore(std::uint64_t hash, std::uint32_t count, std::uint32_t clock) noexcept;

  // Into an empty counter: u64 buckets of the table | u64 keys | what save() writes. Both are equal
  // afterwards, and decide alike.
  void restore_all(ByteReader& in, Slots slots, Slot slot);

  // During a save (policy/admission.h) the caller must call log() before keys are asked about or forgotten.
  // Keys discarded by this class are logged here; `lost` is set if memory for that runs out. Null ends it.
  void watch(PreImageLog* pre_images, bool* lost) noexcept {
    pre_images_ = pre_images;
    lost_ = lost;
  }
  void log(std::span<const std::uint64_t> hashes);
  const SlotTable& table() const noexcept { return table_; }
  // As save(), of a copy of the table overlaid with the logged entries.
  static void save(const SlotTable& copy, const PreImageLog& pre_images, std::vector<std::byte>& bytes);

 private:
  bool is_stale(const std::byte* row, std::uint32_t now) const noexcept;
  void forget_oldest() noexcept;
  void log_victims(std::span<const std::uint64_t> hashes) noexcept;

  SlotTable table_;
  std::uint32_t n_;
  std::uint32_t within_;
  std::size_t most_;
  std::size_t place_ = most_;  // the present limit: below most_ if memory is short
  PreImageLog* pre_images_ = nullptr;
  bool* lost_ = nullptr;
};

}  // namespace shoal

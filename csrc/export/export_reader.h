// ExportReader: the rows of an exported table, in files that somebody else has mapped.
//
// Idea. A table is layers: a whole export, and deltas upon it, the newest last. A layer has one section a slot. A lookup asks
// the newest layer first, and those probe_older_layers it only for the keys that it does not have: in blocks, so that the lines of
// many keys are under visitor at a time. Nothing is copied: sections are read where they are mapped, so that processes share them.
//
// Invariants
//   I1  nothing outside of the bytes of a section is read, whatever stands in them.
//   I2  an answer for a key depends on the newest layer that has it, and on nothing else; one that no layer has, or that the
//       newest one calls removed, reads its initial row.
//
// Threads: add() before anything else, by one thread; then any number of readers. The bytes must outlive it.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/mix.h"
#include "base/threads.h"
#include "export/index_probe.h"
#include "export/row_format.h"
#include "export/section_writer.h"
#include "optim/init.h"

namespace shoal {

class ExportReader {
 public:
  ExportReader(const RowFormat& form, const Init& init, Slots slots);

  // A layer above all others, of slots that are empty yet.
  void add_layer();
  // A section of the newest layer, once a slot. std::invalid_argument: bytes and shape do not go together.
  void add(Slot slot, const SectionShape& shape, std::span<const std::byte> bytes);

  const RowFormat& form() const noexcept { return form_; }
  Slots slots() const noexcept { return slots_; }
  std::size_t layers() const noexcept { return layers_.size(); }

  // What to probe up: keys, or hashes of keys.
  enum class KeyKind : std::uint8_t { kKey, kHash };

  // dim weights for each key, in any order, repeated or not.
  void pull(std::span<const std::uint64_t> keys, KeyKind by, std::span<float> weights, Pool& pool) const;
  // 1 for each key that has a row.
  void contains(std::span<const std::uint64_t> keys, KeyKind by, std::span<std::uint8_t> there,
                Pool& pool) const;

  // The rows of a slot, all layers together, in ascending order of hash. std::invalid_argument: the section's hashes do not
  // ascend; it is damaged.
  void read_slot(Slot slot, std::vector<std::uint64_t>& hashes, std::vector<float>& weights) const;

  // A section of rows, as a layer of this table takes it.
  PackedSection pack(Slot slot, std::span<const std::uint64_t> hashes, std::span<const float> weights) const {
    return shoal::pack(form_, init_, slots_, slot, hashes, weights);
  }

  // Some of a slot's hashes: those whose places, hash << slots.bits(), are from first to last.
  struct HashRange {
    std::uint64_t first;
    std::uint64_t last;
  };
  static constexpr std::array<HashRange, 1> kAll{{{0, ~std::uint64_t{0}}}};

  // What of these rows, all that a slot has now, is not what this table reads: changed and new rows, and rows of NaN for
  // keys that have no row any more. A row has changed if its numbers, rounded as these are, would be others. Only of the
  // hashes `within` stretches that ascend, where the rows lie too: nothing else is looked at.
  void difference(Slot slot, std::span<const std::uint64_t> hashes, std::span<const float> weights,
                  std::vector<std::uint64_t>& changed, std::vector<float>& rows,
                  std::span<const HashRange> within = kAll) const;

 private:
  struct Layer {
    // ScalarRow of each a slot.
    std::vector<SlotIndexView> indexes;
    std::vector<RowArrayView> row_arrays;
    std::vector<Section> sections;
    std::size_t width = 0;  // of their hashes; 0 where they differ
    bool empty = true;

    LayerView view() const noexcept { return {indexes.data(), row_arrays.data(), sections.data()}; }
  };

  static Section empty_section() noexcept;
  void probe_older_layers(Run& run, std::span<const std::uint16_t> open, Run& scratch) const noexcept;
  float scale_of(const std::byte* row) const noexcept;
  bool is_missing(const std::byte* row) const noexcept { return row == nullptr || form_.is_removed(row); }
  template <class Visitor>
  void for_each_run(std::span<const std::uint64_t> keys, KeyKind by, Pool& pool,
                    const Visitor& visitor) const;
  template <class Use>
  void for_each_run_of_rows(std::span<const std::uint64_t> keys, KeyKind by, Pool& pool,
                            const Use& use) const;
  void pull_scalars(std::span<const std::uint64_t> keys, KeyKind by, std::span<float> weights,
                    Pool& pool) const;

  // A row of a slot while its layers are put together.
  struct Entry {
    std::uint64_t hash;
    const std::byte* row;
  };
  void entries(Slot slot, std::span<const HashRange> within, std::vector<Entry>& all) const;
  void entries_of(const Section& section, Slot slot, std::span<const HashRange> within,
                  std::vector<Entry>& all) const;

  RowFormat form_;
  Init init_;
  Slots slots_;
  IndexProbe probe_;
  std::vector<Layer> layers_;
};

}  // namespace shoal

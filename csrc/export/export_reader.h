// ExportReader: lookups in the rows of an exported table, whose files the caller has mapped.
//
// Algorithm. A log-structured read: the table is a stack of layers, a full export and the deltas on top of
// it, the newest last; a layer has one immutable section per slot. A lookup probes the newest layer, and the
// older ones only for the keys that it does not have, a block of keys at a time. Within a layer, keys pass
// through a software pipeline in runs (export/index_probe.h), so that many cache misses overlap. Nothing is
// copied: sections are read in the mapped files, which processes share.
//
// Invariants
//   I1  No byte outside a section is read, whatever its bytes are.
//   I2  The answer for a key depends on the newest layer that has it, and on nothing else. A key that no
//       layer has, or that the newest such layer marks as removed, reads its initial row.
//
// Threads: add_layer() and add() first, by one thread; then any number of readers. The mapped bytes must
// outlive the reader.

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

  // Adds a layer on top of the others; all its slots are empty.
  void add_layer();
  // Adds a section to the newest layer, at most one per slot. std::invalid_argument if the bytes do not have
  // this shape.
  void add(Slot slot, const SectionShape& shape, std::span<const std::byte> bytes);

  const RowFormat& form() const noexcept { return form_; }
  Slots slots() const noexcept { return slots_; }
  std::size_t layers() const noexcept { return layers_.size(); }

  // The input of a lookup: keys, or hashes of keys.
  enum class KeyKind : std::uint8_t { kKey, kHash };

  // Writes dim weights for each key. Keys may come in any order, with duplicates.
  void pull(std::span<const std::uint64_t> keys, KeyKind by, std::span<float> weights,
            ThreadPool& pool) const;
  // Writes 1 for each key that has a row, else 0.
  void contains(std::span<const std::uint64_t> keys, KeyKind by, std::span<std::uint8_t> there,
                ThreadPool& pool) const;

  // The rows of a slot, merged over all layers, in ascending order of hash. std::invalid_argument if a
  // section's hashes do not ascend: it is damaged.
  void read_slot(Slot slot, std::vector<std::uint64_t>& hashes, std::vector<float>& weights) const;

  // Encodes rows as a section that a layer of this table accepts.
  PackedSection pack(Slot slot, std::span<const std::uint64_t> hashes, std::span<const float> weights) const {
    return shoal::pack(form_, init_, slots_, slot, hashes, weights);
  }

  // A range of a slot's hashes: those for which hash << slots.bits() is in [first, last].
  struct HashRange {
    std::uint64_t first;
    std::uint64_t last;
  };
  static constexpr std::array<HashRange, 1> kAll{{{0, ~std::uint64_t{0}}}};

  // The difference between this table and the given rows, which are all rows that the slot has now: changed
  // rows, new rows, and a row of NaN for each key that no longer has a row. A row has changed if it would be
  // stored differently. Restricted to hashes `within` ascending ranges; all given rows must lie in them.
  void difference(Slot slot, std::span<const std::uint64_t> hashes, std::span<const float> weights,
                  std::vector<std::uint64_t>& changed, std::vector<float>& rows,
                  std::span<const HashRange> within = kAll) const;

 private:
  struct Layer {
    // One element per slot.
    std::vector<SlotIndexView> indexes;
    std::vector<RowArrayView> row_arrays;
    std::vector<Section> sections;
    std::size_t width = 0;  // bytes per hash in all sections; 0 if they differ
    bool empty = true;

    LayerView view() const noexcept { return {indexes.data(), row_arrays.data(), sections.data()}; }
  };

  static Section empty_section() noexcept;
  float scale_of(const std::byte* row) const noexcept;
  bool is_missing(const std::byte* row) const noexcept {
    return row == probe_.no_row() || form_.is_removed(row);
  }

  // Keys that are looked up in several layers.
  struct Block {
    static constexpr std::size_t kMaxSize = 1024;

    std::array<std::uint64_t, kMaxSize> hashes;
    std::array<const std::byte*, kMaxSize> rows;
    // Hashes that no layer has had so far, and their positions in the block.
    std::size_t open = 0;
    std::array<std::uint64_t, kMaxSize> open_hashes;
    std::array<std::uint16_t, kMaxSize> positions;

    // Adds an open hash, if `is_open`; without a branch.
    void add(std::uint64_t hash, std::uint16_t position, bool is_open) noexcept {
      open_hashes[open] = hash;
      positions[open] = position;
      open += is_open ? 1U : 0U;
    }
  };

  template <class Load, class Stages>
  void pipeline(const Layer& layer, std::size_t runs, const Load& load, const Stages& stages) const;
  template <class Load, class Use>
  void find_rows(const Layer& layer, std::size_t runs, const Load& load, const Use& use) const;
  template <class Use>
  void find_in_older_layers(Block& block, const Use& use) const;
  template <class Use>
  static void for_each_part(std::size_t keys, ThreadPool& pool, const Use& use);
  template <class Use>
  void for_each_rows(std::span<const std::uint64_t> keys, KeyKind by, ThreadPool& pool, const Use& use) const;
  void pull_scalars(std::span<const std::uint64_t> keys, KeyKind by, std::span<float> weights,
                    ThreadPool& pool) const;

  // A row of a slot while its layers are merged.
  struct Entry {
    std::uint64_t hash;
    const std::byte* row;
  };
  void entries(Slot slot, std::span<const HashRange> within, std::vector<Entry>& found) const;
  void entries_of(const Section& section, Slot slot, std::span<const HashRange> within,
                  std::vector<Entry>& found) const;

  RowFormat form_;
  Init init_;
  Slots slots_;
  IndexProbe probe_;
  std::vector<Layer> layers_;
};

}  // namespace shoal

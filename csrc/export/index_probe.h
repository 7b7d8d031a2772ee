// IndexProbe: finds hashes in the lines of one layer, a run of them at a time.
//
// Algorithm. Batched hash probing with software prefetching (group prefetching): the memory accesses of one run are in flight
// while another run is processed.
//
//   prepare          computes each hash's home line, where its probe sequence begins; reads nothing
//   probe            reads the homes and prefetches those of the next run, and the wide rows that it finds
//   probe_scalars    the same where a row is one weight: also reads the weight
//   resolve          finds the few hashes that may be displaced to a line after their home
//
//   index.prepare(layer, a);   a.prefetch();                   // the first lines of the first run
//   index.prepare(layer, b);   a.set_next_lines(b.homes());    // no gap between runs
//   index.probe(width, a);     index.resolve(width, a);
//   for (const std::byte* row : a.rows) ...                    // null for a hash that is absent
//
// Lookups in large tables are bound by address translation rather than by cache lines or instructions; the prefetch
// distance (Run::kAhead) hides it.
//
// No branch depends on a hash: whether it is present, and in which lane, is unpredictable. The rare exceptions (two hashes of
// a line with equal low bits, a hash with the low bits of an empty line) are detected once per run, which is then read again
// by exact comparison.
//
// Threads: immutable; a run belongs to one thread.

#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/memory.h"
#include "base/mix.h"
#include "export/index_line.h"
#include "export/row_format.h"

namespace shoal {

// A slot's home lines: all that most lookups need. Small enough that those of all slots stay in the L1 cache.
struct SlotIndexView {
  const std::byte* lines;
  std::uint32_t homes;
  std::uint32_t width;  // bytes per stored hash
};

// A slot's wide rows.
struct RowArrayView {
  const std::byte* rows;
  std::uint64_t count;
};

// The mapped section of one slot.
struct Section {
  const std::byte* lines;  // the wide rows follow them
  std::uint32_t homes;
  std::uint32_t count;  // of lines
  std::uint32_t rows_count;
  std::uint32_t reach;
  std::uint32_t width;

  const std::byte* rows() const noexcept { return lines + std::size_t{count} * kCacheLine; }
};

// The sections of a layer, by slot.
struct LayerView {
  const SlotIndexView* indexes;
  const RowArrayView* row_arrays;
  const Section* sections;
};

// A block of hashes that is being looked up: few enough that the lines of two runs stay in the L1 and L2 caches.
struct Run {
  static constexpr std::size_t kMaxSize = 256;
  static constexpr std::size_t kAhead = 128;

  std::size_t size = 0;
  std::size_t unresolved_count = 0;
  std::size_t missing_count = 0;
  LayerView layer{};
  std::array<std::uint64_t, kMaxSize> hashes;
  std::array<const std::byte*, kMaxSize + kAhead>
      lines;  // homes; after them, the lines that are prefetched while the homes are read
  std::array<const std::byte*, kMaxSize> rows;
  std::array<std::uint16_t, kMaxSize + 1> unresolved;  // hashes that may be displaced from their homes
  std::array<std::uint16_t, kMaxSize + 1>
      missing;  // after probe_scalars(): hashes without a weight in their homes

  // The prefetch distance in hashes; half as far for wide rows, which need lines of their own.
  static constexpr std::size_t ahead(bool inline_rows) noexcept { return inline_rows ? kAhead : kAhead / 2; }
  // Prefetches the first lines.
  void prefetch() const noexcept;
  std::span<const std::byte* const> homes() const noexcept { return {lines.data(), size}; }
  // Sets the lines to prefetch towards the end of this run: the homes of the next one, if any.
  void set_next_lines(std::span<const std::byte* const> next) noexcept;
};

class IndexProbe {
 public:
  static constexpr std::size_t kWidths = LineFormat::kMaxDim - LineFormat::kMinRowBytes + 1;
  struct Kernels {
    void (*probe)(const IndexProbe&, Run&) noexcept;
    void (*resolve)(const IndexProbe&, Run&) noexcept;
    // Null if a row is more than one weight.
    void (*probe_scalars)(const IndexProbe&, Run&, float* weights) noexcept;
    void (*resolve_scalars)(const IndexProbe&, Run&, float* weights) noexcept;
  };
  using KernelTable = std::array<Kernels, kWidths + 1>;

  // Uses intrinsics or their portable equivalent, as the row format does.
  IndexProbe(const RowFormat& form, Slots slots) noexcept;

  const LineFormat& form_of(const Section& section) const noexcept {
    return forms_[section.width - LineFormat::kMinRowBytes];
  }
  // The row in a lane; null if a damaged line names a row beyond the last.
  const std::byte* row_of(const Section& section, const std::byte* line, unsigned lane) const noexcept;

  // Requires run.hashes and run.size.
  void prepare(const LayerView& layer, Run& run) const noexcept;
  // `width`: bytes per hash in all sections; 0 if they differ.
  void probe(std::size_t width, Run& run) const noexcept { kernels_[kernel_index(width)].probe(*this, run); }
  // The same for rows of one weight, which are read too. The hashes in run.missing have a NaN in `weights` before
  // resolve_scalars() and may have one after it: they are `absent`, or their rows are marked as removed.
  void probe_scalars(std::size_t width, Run& run, float* weights) const noexcept {
    kernels_[kernel_index(width)].probe_scalars(*this, run, weights);
  }
  void resolve_scalars(std::size_t width, Run& run, float* weights) const noexcept {
    kernels_[kernel_index(width)].resolve_scalars(*this, run, weights);
  }
  static bool absent(float weight) noexcept { return std::bit_cast<std::uint32_t>(weight) == kAbsent; }
  void resolve(std::size_t width, Run& run) const noexcept {
    kernels_[kernel_index(width)].resolve(*this, run);
  }

 private:
  friend struct ProbeKernels;
  static constexpr std::uint32_t kAbsent = 0xffffffffU;

  static std::size_t kernel_index(std::size_t width) noexcept {
    return width == 0 ? kWidths : width - LineFormat::kMinRowBytes;
  }

  const Section& section_of(const Run& run, std::uint64_t hash) const noexcept {
    return run.layer.sections[index_of(slots_.of(hash))];
  }

  std::array<LineFormat, kWidths> forms_;  // by width
  RowFormat form_;
  Slots slots_;
  std::size_t lines_of_row_;  // that are prefetched
  KernelTable kernels_;       // by width
};

}  // namespace shoal

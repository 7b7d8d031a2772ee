// IndexProbe: finds hashes in the lines of one layer, a run of them at a time (group prefetching).
//
//   run    r         r - kStage   r - 2 kStage   r - 3 kStage
//          prepare   probe        resolve        use the rows
//
//   prepare         computes each hash's home line; reads nothing
//   probe           reads the homes, and prefetches the homes of a later run, the rows that are found, and
//                   the lines after the homes of those that may be displaced; probe_scalars also reads the
//                   weight
//   resolve         finds the few hashes that are displaced to a line after their home, and prefetches their
//                   rows
//
// Threads: immutable; a run belongs to one thread.

#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/memory.h"
#include "base/mix.h"
#include "export/index_line.h"
#include "export/row_format.h"

namespace shoal {

// A slot's lines: all that most lookups need to find a hash. Small enough that those of all slots stay in the
// L1 cache.
struct SlotIndexView {
  const std::byte* lines;
  std::uint32_t homes;
  std::uint32_t count;  // of lines

  // The line after `line`; the last one is its own.
  const std::byte* next(const std::byte* line) const noexcept {
    const std::byte* const last = lines + (std::size_t{count} - 1) * kCacheLine;
    return line < last ? line + kCacheLine : last;
  }
};

// A slot's wide rows, and the width of its hashes.
struct RowArrayView {
  const std::byte* rows;
  std::uint32_t count;
  std::uint32_t width;  // bytes per stored hash
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

// A block of hashes that is being looked up.
struct ProbeRun {
  static constexpr std::size_t kMaxSize = 32;  // a bit of a mask for each
  static constexpr std::size_t kStage = 2;     // runs from one stage to the next
  static constexpr std::size_t kRing = 8;      // runs in flight

  std::size_t size = 0;
  std::uint32_t unresolved = 0;  // after probe(): bit i: hash i may be displaced from its home
  std::uint32_t absent = 0;      // after resolve(): bit i: the layer does not have hash i
  LayerView layer{};
  alignas(kCacheLine) std::array<std::uint64_t, kMaxSize> hashes;
  std::array<const std::byte*, kMaxSize> lines;  // homes; those of an incomplete run repeat the first one
  std::array<const std::byte*, kMaxSize> rows;

  bool is_absent(std::size_t i) const noexcept { return ((absent >> i) & 1U) != 0; }
  // The number of runs of so many hashes.
  static constexpr std::size_t count(std::size_t hashes) noexcept {
    return (hashes + kMaxSize - 1) / kMaxSize;
  }
};

class IndexProbe {
 public:
  static constexpr std::size_t kWidths = LineFormat::kMaxDim - LineFormat::kMinRowBytes + 1;
  struct Kernels {
    void (*probe)(const IndexProbe&, ProbeRun&, const ProbeRun& later) noexcept;
    void (*resolve)(const IndexProbe&, ProbeRun&) noexcept;
    // Null if a row is more than one weight.
    void (*probe_scalars)(const IndexProbe&, ProbeRun&, const ProbeRun& later, float* weights) noexcept;
    void (*resolve_scalars)(const IndexProbe&, ProbeRun&, float* weights) noexcept;
  };
  using KernelTable = std::array<Kernels, kWidths + 1>;
  // probe(), and widens the rows of a run that is `ready`; returns a mask of those that are marked as
  // removed. Faster than one after the other, because the second needs no memory while the first waits for
  // it.
  using Widen = std::uint32_t (*)(const IndexProbe&, ProbeRun& run, const ProbeRun& later,
                                  const ProbeRun& ready, float* weights) noexcept;

  // Uses intrinsics or their portable equivalent, as the row format does.
  // `no_row` is what a hash without a row gets.
  IndexProbe(const RowFormat& form, Slots slots, std::span<const std::byte> no_row);
  IndexProbe(const IndexProbe&) = delete;  // views point to its no_row()
  IndexProbe(IndexProbe&&) = default;
  IndexProbe& operator=(IndexProbe&&) = delete;
  ~IndexProbe() = default;

  const LineFormat& form_of(const Section& section) const noexcept {
    return forms_[section.width - LineFormat::kMinRowBytes];
  }
  // The row in a lane; null if a damaged line names a row beyond the last.
  const std::byte* row_of(const Section& section, const std::byte* line, unsigned lane) const noexcept;

  // A row like the others, so that the loops need not treat a hash without a row in another way.
  const std::byte* no_row() const noexcept { return no_row_.data(); }

  // Requires run.hashes and run.size, at least 1. `prefetches`: the homes, which no earlier run prefetches.
  template <bool prefetches>
  void prepare(const LayerView& layer, ProbeRun& run) const noexcept {
    const unsigned bits = slots_.bits();
    run.layer = layer;
    for (std::size_t i = 0; i < run.size; ++i) {
      const std::uint64_t hash = run.hashes[i];
      const SlotIndexView& at = layer.indexes[hash >> (64U - bits)];
      const std::byte* const line = at.lines + scale(hash << bits, at.homes) * kCacheLine;
      if constexpr (prefetches) {
        __builtin_prefetch(line);
      }
      run.lines[i] = line;
    }
    std::fill(run.lines.begin() + static_cast<std::ptrdiff_t>(run.size), run.lines.end(), run.lines[0]);
  }
  // `width`: bytes per hash in all sections; 0 if they differ. Prefetches the homes of a `later` run, which
  // has been prepared; `run` itself if there is none.
  void probe(std::size_t width, ProbeRun& run, const ProbeRun& later) const noexcept {
    kernels_[kernel_index(width)].probe(*this, run, later);
  }
  // Null except for 6 bytes per hash, as in tables of 1e6 to 1e8 rows, and the usual dims.
  Widen widens(std::size_t width) const noexcept;
  // The same for rows of one weight, which are read too. The weight of an `absent` hash, and of a removed
  // row, is a NaN.
  void probe_scalars(std::size_t width, ProbeRun& run, const ProbeRun& later, float* weights) const noexcept {
    kernels_[kernel_index(width)].probe_scalars(*this, run, later, weights);
  }
  void resolve_scalars(std::size_t width, ProbeRun& run, float* weights) const noexcept {
    kernels_[kernel_index(width)].resolve_scalars(*this, run, weights);
  }
  static bool absent(float weight) noexcept { return std::bit_cast<std::uint32_t>(weight) == kAbsent; }
  // Afterwards run.rows are the rows of the layer. A hash that the layer does not have gets no_row().
  void resolve(std::size_t width, ProbeRun& run) const noexcept {
    kernels_[kernel_index(width)].resolve(*this, run);
  }

 private:
  friend struct ProbeKernels;
  static constexpr std::uint32_t kAbsent = 0xffffffffU;

  static std::size_t kernel_index(std::size_t width) noexcept {
    return width == 0 ? kWidths : width - LineFormat::kMinRowBytes;
  }

  const Section& section_of(const ProbeRun& run, std::uint64_t hash) const noexcept {
    return run.layer.sections[index_of(slots_.of(hash))];
  }

  std::array<LineFormat, kWidths> forms_;  // by width
  RowFormat form_;
  Slots slots_;
  std::size_t lines_of_row_;  // that are prefetched
  std::vector<std::byte> no_row_;
  KernelTable kernels_;  // by width
  Widen widen_;
};

}  // namespace shoal

// IndexProbe: hashes found in the lines of one layer, a run of them at a time, so that memory answers one run while another is
// worked on.
//
//   prepare      each hash's home, the line where its search begins (export/index_line.h); nothing is read yet
//   probe     reads the homes, asks for those of the run behind it meanwhile, and for the wide rows that it finds
//   probe_scalars     the same where a row is one weight: reads that, too
//   resolve   the few hashes that may stand behind their homes
//
//   probe.prepare(layer, a);   a.prefetch();                 // the first lines of the first run
//   probe.prepare(layer, b);   a.set_next_lines(b.homes());   // so that there is no gap between runs
//   probe.probe(width, a);   probe.resolve(width, a);
//   for (const std::byte* row : a.rows) ...           // null for a hash that is not there
//
// What is waited for is the translation of addresses, more than lines or instructions: with 5 ns of work beside each, random
// lines of 8 MB came at 156 M/s though none was in a cache, of 142 MB at 109, of 1 GB at 69 when asked for 64 ahead and at
// 84 when 128 ahead (huge pages; a virtual machine). Into which cache they are asked for made no difference.
//
// No branch depends on a hash: whether it is there, and which lane it is in, cannot be guessed. What hardly ever is (two
// hashes of a line with the same low bits, a hash whose low bits are those of an empty line) is noticed once a run, which
// is then read again, with care.
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

// Where a slot's homes are: all that most lookups need. Those of a table stay in the nearest cache.
struct SlotIndexView {
  const std::byte* lines;
  std::uint32_t homes;
  std::uint32_t width;  // bytes of a hash there
};

// Where a slot's wide rows are.
struct RowArrayView {
  const std::byte* rows;
  std::uint64_t count;
};

// The rows of one slot, where they are mapped.
struct Section {
  const std::byte* lines;  // wide rows stand behind them
  std::uint32_t homes;
  std::uint32_t count;  // of lines
  std::uint32_t rows_count;
  std::uint32_t reach;
  std::uint32_t width;

  const std::byte* rows() const noexcept { return lines + std::size_t{count} * kCacheLine; }
};

// What a layer has of all slots.
struct LayerView {
  const SlotIndexView* indexes;
  const RowArrayView* row_arrays;
  const Section* sections;
};

// Some hashes under way: few enough that the lines of two runs stay in the nearest caches.
struct Run {
  static constexpr std::size_t kMaxSize = 256;
  static constexpr std::size_t kAhead = 128;

  std::size_t size = 0;
  std::size_t unresolved_count = 0;
  std::size_t missing_count = 0;
  LayerView layer{};
  std::array<std::uint64_t, kMaxSize> hashes;
  std::array<const std::byte*, kMaxSize + kAhead>
      lines;  // homes; behind them, what is asked for when they are read
  std::array<const std::byte*, kMaxSize> rows;
  std::array<std::uint16_t, kMaxSize + 1> unresolved;  // hashes that may stand behind their homes
  std::array<std::uint16_t, kMaxSize + 1>
      missing;  // after probe_scalars(): hashes without a weight in their homes

  // How many hashes ahead lines are asked for; wide rows are lines, too.
  static constexpr std::size_t ahead(bool inline_rows) noexcept { return inline_rows ? kAhead : kAhead / 2; }
  // Asks for its first lines.
  void prefetch() const noexcept;
  std::span<const std::byte* const> homes() const noexcept { return {lines.data(), size}; }
  // The homes that will be read after its own, if any.
  void set_next_lines(std::span<const std::byte* const> next) noexcept;
};

class IndexProbe {
 public:
  static constexpr std::size_t kWidths = LineFormat::kWidest - LineFormat::kNarrowest + 1;
  struct Kernels {
    void (*probe)(const IndexProbe&, Run&) noexcept;
    void (*resolve)(const IndexProbe&, Run&) noexcept;
    // Null where a row is more than a weight.
    void (*probe_scalars)(const IndexProbe&, Run&, float* weights) noexcept;
    void (*resolve_scalars)(const IndexProbe&, Run&, float* weights) noexcept;
  };
  using KernelTable = std::array<Kernels, kWidths + 1>;

  // KeyKind AVX2 or its portable twin, as the rows are read.
  IndexProbe(const RowFormat& form, Slots slots) noexcept;

  const LineFormat& form_of(const Section& section) const noexcept {
    return forms_[section.width - LineFormat::kNarrowest];
  }
  // The row in a lane; null where a damaged line names one beyond the last.
  const std::byte* row_of(const Section& section, const std::byte* line, unsigned lane) const noexcept;

  // run.hashes and run.size are given.
  void prepare(const LayerView& layer, Run& run) const noexcept;
  // `width`: of all the sections' hashes; 0 where they differ.
  void probe(std::size_t width, Run& run) const noexcept { kernels_[kernel_index(width)].probe(*this, run); }
  // The same for rows of one weight, which are read, too. Of those in run.missing `weights` has a NaN, before resolve_scalars()
  // and maybe behind it: either they are `absent`, or their rows say `removed`.
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
    return width == 0 ? kWidths : width - LineFormat::kNarrowest;
  }

  const Section& section_of(const Run& run, std::uint64_t hash) const noexcept {
    return run.layer.sections[index_of(slots_.of(hash))];
  }

  std::array<LineFormat, kWidths> forms_;  // by width
  RowFormat form_;
  Slots slots_;
  std::size_t lines_of_row_;  // that are asked for
  KernelTable kernels_;       // by width
};

}  // namespace shoal

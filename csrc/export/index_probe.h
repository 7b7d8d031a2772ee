// Look: hashes found in the lines of one layer, a run of them at a time, so that memory answers one run while another is
// worked on.
//
//   aim      each hash's home, the line where its search begins (export/index_line.h); nothing is read yet
//   look     reads the homes, asks for those of the run behind it meanwhile, and for the wide rows that it finds
//   ones     the same where a row is one weight: reads that, too
//   settle   the few hashes that may stand behind their homes
//
//   look.aim(ground, a);   a.fetch();                 // the first lines of the first run
//   look.aim(ground, b);   a.go_on_with(b.homes());   // so that there is no gap between runs
//   look.look(width, a);   look.settle(width, a);
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
struct Homestead {
  const std::byte* lines;
  std::uint32_t homes;
  std::uint32_t width;  // bytes of a hash there
};

// Where a slot's wide rows are.
struct Shelf {
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
struct Ground {
  const Homestead* homesteads;
  const Shelf* shelves;
  const Section* sections;
};

// Some hashes under way: few enough that the lines of two runs stay in the nearest caches.
struct Run {
  static constexpr std::size_t kMost = 256;
  static constexpr std::size_t kAhead = 128;

  std::size_t size = 0;
  std::size_t open_count = 0;
  std::size_t missing_count = 0;
  Ground ground{};
  std::array<std::uint64_t, kMost> hashes;
  std::array<const std::byte*, kMost + kAhead>
      lines;  // homes; behind them, what is asked for when they are read
  std::array<const std::byte*, kMost> rows;
  std::array<std::uint16_t, kMost + 1> open;     // hashes that may stand behind their homes
  std::array<std::uint16_t, kMost + 1> missing;  // after ones(): hashes without a weight in their homes

  // How many hashes ahead lines are asked for; wide rows are lines, too.
  static constexpr std::size_t ahead(bool rows_inside) noexcept { return rows_inside ? kAhead : kAhead / 2; }
  // Asks for its first lines.
  void fetch() const noexcept;
  std::span<const std::byte* const> homes() const noexcept { return {lines.data(), size}; }
  // The homes that will be read after its own, if any.
  void go_on_with(std::span<const std::byte* const> next) noexcept;
};

class Look {
 public:
  static constexpr std::size_t kWidths = LineForm::kWidest - LineForm::kNarrowest + 1;
  struct Steps {
    void (*look)(const Look&, Run&) noexcept;
    void (*settle)(const Look&, Run&) noexcept;
    // Null where a row is more than a weight.
    void (*ones)(const Look&, Run&, float* weights) noexcept;
    void (*settle_ones)(const Look&, Run&, float* weights) noexcept;
  };
  using Ways = std::array<Steps, kWidths + 1>;

  // By AVX2 or its portable twin, as the rows are read.
  Look(const RowForm& form, Slots slots) noexcept;

  const LineForm& form_of(const Section& section) const noexcept {
    return forms_[section.width - LineForm::kNarrowest];
  }
  // The row in a lane; null where a damaged line names one beyond the last.
  const std::byte* row_of(const Section& section, const std::byte* line, unsigned lane) const noexcept;

  // run.hashes and run.size are given.
  void aim(const Ground& ground, Run& run) const noexcept;
  // `width`: of all the sections' hashes; 0 where they differ.
  void look(std::size_t width, Run& run) const noexcept { ways_[way_of(width)].look(*this, run); }
  // The same for rows of one weight, which are read, too. Of those in run.missing `weights` has a NaN, before settle_ones()
  // and maybe behind it: either they are `absent`, or their rows say `removed`.
  void ones(std::size_t width, Run& run, float* weights) const noexcept {
    ways_[way_of(width)].ones(*this, run, weights);
  }
  void settle_ones(std::size_t width, Run& run, float* weights) const noexcept {
    ways_[way_of(width)].settle_ones(*this, run, weights);
  }
  static bool absent(float weight) noexcept { return std::bit_cast<std::uint32_t>(weight) == kAbsent; }
  void settle(std::size_t width, Run& run) const noexcept { ways_[way_of(width)].settle(*this, run); }

 private:
  friend struct LookSteps;
  static constexpr std::uint32_t kAbsent = 0xffffffffU;

  static std::size_t way_of(std::size_t width) noexcept {
    return width == 0 ? kWidths : width - LineForm::kNarrowest;
  }

  const Section& section_of(const Run& run, std::uint64_t hash) const noexcept {
    return run.ground.sections[index_of(slots_.of(hash))];
  }

  std::array<LineForm, kWidths> forms_;  // by width
  RowForm form_;
  Slots slots_;
  std::size_t lines_of_row_;  // that are asked for
  Ways ways_;                 // by width
};

}  // namespace shoal

// LineScan: where the cells of the next lines of text end, found 64 bytes at a time (Langdale and Lemire,
// "Parsing Gigabytes of JSON per Second", VLDB Journal, 2019: the first stage).
//
//   text           1 \t 5 \t \n 0 \n ...
//   stops          1, 3, 4, 6, ...       offset of the separator or newline that ends each cell
//   first_stop     0, 3, 4               the cells of line i end at stops[first_stop[i]] and on
//   lines          2
//
// Invariants
//   I1  first_stop has lines + 1 entries, from 0 on, and ascends strictly; text[stops[first_stop[i + 1] - 1]]
//       is the newline of line i.
//   I2  stops ascend strictly and are below kBytes. Entries from first_stop[lines] on have no meaning.
//   I3  A line that does not end within the first kBytes bytes is not listed.
//
// Threads: each scan belongs to one.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace shoal {

struct LineScan {
  static constexpr std::size_t kBytes = 8192;  // the arrays and the text stay in the L1 cache
  static constexpr std::size_t kSlack = 32;    // numbers that are written at once

  std::size_t lines;
  std::array<std::uint16_t, kBytes + 1> first_stop;
  std::array<std::uint16_t, kBytes + kSlack> stops;
};

// Scans the first kBytes bytes of the text, or all of it; reads nothing beyond its end.
void scan_lines(const std::uint8_t* text, std::size_t size, std::uint8_t separator, LineScan& scan) noexcept;

using LineScanner = void (*)(std::span<const std::uint8_t> text, std::uint8_t separator,
                             LineScan& scan) noexcept;

// The scanners that this machine can run, the fastest first, then the portable one, then null: all give the
// same results.
using LineScanners = std::array<LineScanner, 4>;
LineScanners line_scanners() noexcept;

}  // namespace shoal

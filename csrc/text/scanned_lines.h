// ScannedLines: the cells of the next lines, which base/line_scan.h finds 64 bytes at a time.
//
// A parser takes the usual lines from here. Lines that are long, at the end of the block or in any way
// unusual are read byte by byte.
//
// Invariants
//   I1  next_ is where the line numbered line_ of the scan begins, if line_ < scan_.lines.
//   I2  A scan is made where a line begins, and only if the line there has not been scanned.
//
// Threads: belongs to one parse, on whose stack it is: 32 KiB.

#pragma once

#include <cstddef>
#include <cstdint>

#include "base/line_scan.h"
#include "text/bytes.h"

namespace shoal::text {

class ScannedLines {
 public:
  explicit ScannedLines(std::uint8_t separator) noexcept : separator_(separator) { scan_.lines = 0; }

  // The number of cells of the line at p, whose ends are text() + stops[0 to n - 1]; 0 if it is not to be
  // read here. The eight bytes from the beginning of each cell may be read.
  std::size_t cells_at(Cursor p, Cursor end, const std::uint16_t*& stops) noexcept {
    while (next_ < p && line_ < scan_.lines) {  // blank lines are not read here
      ++line_;
      next_ = text_ + scan_.stops[scan_.first_stop[line_] - std::size_t{1}] + 1;
    }
    if (next_ != p || line_ == scan_.lines) {
      scan_lines(p, static_cast<std::size_t>(end - p), separator_, scan_);
      text_ = p;
      line_ = 0;
      if (scan_.lines == 0) {
        return 0;
      }
      size_ = scan_.stops[scan_.first_stop[scan_.lines] - std::size_t{1}] + std::size_t{1};
    }
    const std::size_t first = scan_.first_stop[line_];
    const std::size_t count = scan_.first_stop[line_ + 1] - first;
    stops = scan_.stops.data() + first;
    next_ = text_ + stops[count - 1] + 1;
    ++line_;
    return end - next_ >= 7 ? count : 0;
  }

  Cursor text() const noexcept { return text_; }         // where the scan begins
  std::size_t size() const noexcept { return size_; }    // of the lines of the scan
  Cursor newline() const noexcept { return next_ - 1; }  // of the line last asked for
  bool is_first() const noexcept { return line_ == 1; }  // whether that is the first line of a scan

 private:
  LineScan scan_;
  Cursor text_ = nullptr;
  Cursor next_ = nullptr;
  std::size_t size_ = 0;
  std::size_t line_ = 0;
  std::uint8_t separator_;
};

}  // namespace shoal::text

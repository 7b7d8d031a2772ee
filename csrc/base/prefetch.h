// PrefetchCursor: lines that will be read soon, to be asked for one by one while something else is done.
//
// Why not all at once: a core keeps some dozens of lines under way and drops a request beyond them, and whoever reads
// that line then waits for it whole. Reading 64 lines of 200 MB with 6 ns of work on each ran at 43 M lines/s when all
// 64 were asked for first, and at 96 M/s when one was asked for at a time between the work on two others.
//
// Why into the second level: a line on its way to the first takes one of its two dozen buffers, which every miss of the
// work needs too. The second level has more, and is fourteen cycles away: pulls of random rows take three quarters of
// the time so (16.6 -> 12.5 ns a key of a table of 1e7, one thread).
//
//   lines   single ones, asked for by one()
//   rows    of some lines each, null where there is none: row() asks for all lines of the next, and a row of 64 bytes that
//           begins at a line is one

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/memory.h"
#include "base/simd.h"

namespace shoal {

SHOAL_INLINE void prefetch(const std::byte* line) noexcept { __builtin_prefetch(line, 0, 2); }

class PrefetchCursor {
 public:
  PrefetchCursor() = default;
  PrefetchCursor(std::byte* const* lines, std::size_t count) noexcept : next_(lines), end_(lines + count) {}

  SHOAL_INLINE void next() noexcept {
    if (next_ != end_) {
      prefetch(*next_++);
    }
  }
  // Behind the lines; the first `bytes` of each row.
  void append_rows(std::span<std::byte* const> rows, std::size_t bytes) noexcept {
    row_ = rows.data();
    rows_end_ = rows.data() + rows.size();
    row_bytes_ = std::min(bytes, kMaxBytes);
  }
  SHOAL_INLINE void next_row() noexcept {
    if (row_ == rows_end_) {
      return;
    }
    const std::byte* const begin = *row_++;
    if (begin == nullptr) [[unlikely]] {
      return;
    }
    const std::byte* line = begin - reinterpret_cast<std::uintptr_t>(begin) % kCacheLine;
    for (; line < begin + row_bytes_; line += kCacheLine) {
      prefetch(line);
    }
  }
  void drain() noexcept {
    while (next_ != end_) {
      prefetch(*next_++);
    }
    while (row_ != rows_end_) {
      next_row();
    }
  }

 private:
  // Beyond it the machine's own prefetcher has seen the pattern.
  static constexpr std::size_t kMaxBytes = 8 * kCacheLine;

  std::byte* const* next_ = nullptr;
  std::byte* const* end_ = nullptr;
  std::byte* const* row_ = nullptr;
  std::byte* const* rows_end_ = nullptr;
  std::size_t row_bytes_ = 0;
};

}  // namespace shoal

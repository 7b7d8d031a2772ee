// Target: the arrays that lines of text are parsed into. Stop: how far a parse came.
//
// A parse_*(block, start, target, skip, ...) appends the lines of block[start:] as rows from target.row on.
// The block is whole lines: its last byte is a newline. The caller owns the arrays. A parse stops early, at
// the beginning of a line, if the next line may not fit; the caller enlarges the arrays or removes the rows,
// and calls again with start = end. A line is appended wholly or not at all.
//
//   labels    one per row, 0 or 1; the number of a class if classes > 0
//   weights   one per row, or empty if the format has none
//   indptr    row r has keys[indptr[r]] to keys[indptr[r + 1] - 1]; values, fields and spans likewise
//   values    or empty if every value is 1
//   fields    the field of each feature, or empty if not requested
//   spans     two per feature, the offsets of its text in the block; or empty if not requested
//   ends      two per row: the byte behind its line, and the lines that this parse has skipped before it
//
// Invariants
//   I1  indptr has one entry more than labels; weights and ends are as long as labels, values, fields and
//       spans as keys, or empty; indptr[row] == nnz. The caller sees to it.
//   I2  Bytes are read in the block only.
//   I3  Rows are written below labels.size(), features below keys.size().
//   I4  On return indptr[row] == nnz; a line begins, or the block ends, at Stop::end.
//
// Threads: a Target belongs to one thread at a time. No parse has state outside of its arguments.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "text/bytes.h"
#include "text/fault.h"

namespace shoal::text {

struct Target {
  std::span<float> labels;
  std::span<float> weights;
  std::span<std::int64_t> indptr;
  std::span<std::uint64_t> keys;
  std::span<float> values;
  std::span<std::uint64_t> fields;
  std::span<std::int64_t> spans;
  std::span<std::int64_t> ends;
  bool labelled = true;      // whether lines have labels and weights; if not, labels become NaN and weights 1
  std::int64_t classes = 0;  // labels are their numbers; 0: labels are 0/1 or -1/+1
  std::size_t row = 0;       // rows in use
  std::size_t nnz = 0;       // features in use; while a line is read, its own included
};

struct Stop {
  std::size_t end = 0;         // the first byte that was not consumed
  std::size_t lines = 0;       // consumed, blank and skipped ones included
  std::size_t skipped = 0;     // malformed lines that were left out, if `skip`
  Fault fault = Fault::kGood;  // of the line at `end`, if not `skip`
  std::size_t at = 0;          // the byte of the fault
};

}  // namespace shoal::text

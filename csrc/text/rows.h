// The loop over lines, and what it stores of them: shared by the parsers of all formats.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include "base/check.h"
#include "text/numbers.h"
#include "text/target.h"

namespace shoal::text {

// Where the block of a parse begins and ends.
struct Block {
  Cursor begin;
  Cursor end;
};

// Reads lines by read_line(Cursor& p) until the block ends, the arrays are full, or a line is malformed and
// `skip` is false. read_line appends the label of one line, its weight if there is one, and its features;
// `p` advances from the line's first byte to its newline, or to the byte at fault.
template <class ReadLine>
Stop walk(Block block, std::size_t start, Target& out, bool skip, ReadLine read_line) noexcept {
  SHOAL_DCHECK(block.begin == block.end || block.end[-1] == '\n');
  SHOAL_DCHECK(block.begin + start <= block.end && out.indptr.size() == out.labels.size() + 1);
  Stop stop;
  Cursor p = block.begin + start;
  while (p < block.end && out.row < out.labels.size()) {
    const Cursor line = p;
    const Fault fault = read_line(p);
    if (fault == Fault::kGood) {
      if (!out.labelled) {
        out.labels[out.row] = std::numeric_limits<float>::quiet_NaN();
        if (!out.weights.empty()) {
          out.weights[out.row] = 1.0F;
        }
      }
      out.ends[2 * out.row] = p + 1 - block.begin;
      out.ends[2 * out.row + 1] = static_cast<std::int64_t>(stop.skipped);
      ++out.row;
      out.indptr[out.row] = static_cast<std::int64_t>(out.nnz);
    } else if (fault != Fault::kBlank) {
      out.nnz = static_cast<std::size_t>(out.indptr[out.row]);
      if (fault == Fault::kNoRoom || !skip) {
        stop.at = static_cast<std::size_t>(p - block.begin);
        stop.fault = fault == Fault::kNoRoom ? Fault::kGood : fault;
        p = line;
        break;
      }
      p = newline(p, block.end);
      ++stop.skipped;
    }
    ++p;
    ++stop.lines;
  }
  stop.end = static_cast<std::size_t>(p - block.begin);
  return stop;
}

inline Block block_of(std::span<const std::uint8_t> block) noexcept {
  return {block.data(), block.data() + block.size()};
}

// Whether fields or spans are requested: one test per feature if not.
inline bool has_origins(const Target& out) noexcept { return !out.fields.empty() || !out.spans.empty(); }

// Stores the field of a feature and the offsets of its text, if requested.
inline void put_origin(Target& out, Cursor block, std::size_t feature, std::uint64_t field, Cursor begin,
                       Cursor end) noexcept {
  if (!out.fields.empty()) {
    out.fields[feature] = field;
  }
  if (!out.spans.empty()) {
    out.spans[2 * feature] = begin - block;
    out.spans[2 * feature + 1] = end - block;
  }
}

// Stores a number that is 0 or -1 (becomes 0) or 1; or, of several classes, the number of one.
inline Fault put_label(float y, Target& out) noexcept {
  if (out.classes > 0) {
    if (!(y >= 0.0F && y < static_cast<float>(out.classes) &&
          y == static_cast<float>(static_cast<std::int64_t>(y)))) {
      return Fault::kLabelClass;
    }
    out.labels[out.row] = y;
    return Fault::kGood;
  }
  if (y != 1.0F && y != 0.0F && y != -1.0F) {
    return Fault::kLabelRange;
  }
  out.labels[out.row] = y == 1.0F ? 1.0F : 0.0F;
  return Fault::kGood;
}

// The fault of a label by that of its number.
inline Fault label_fault(Fault fault, const Target& out) noexcept {
  if (fault == Fault::kValueText) {
    return Fault::kLabelText;
  }
  return out.classes == 0 ? Fault::kLabelRange : Fault::kLabelClass;
}

// Stores the label of the current row; `cursor` advances only past a valid one.
inline Fault read_label(Cursor& cursor, Cursor end, Target& out) noexcept {
  Cursor p = cursor;
  float y = 0.0F;
  Fault fault = read_number(p, end, y);
  if (fault != Fault::kGood) {
    return label_fault(fault, out);
  }
  if (!ends_token(*p)) {
    return Fault::kLabelText;
  }
  fault = put_label(y, out);
  if (fault == Fault::kGood) {
    cursor = p;
  }
  return fault;
}

}  // namespace shoal::text

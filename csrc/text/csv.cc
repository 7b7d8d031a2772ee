#include "text/csv.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/mix_block.h"
#include "base/simd.h"
#include "text/numbers.h"
#include "text/rows.h"
#include "text/scanned_lines.h"
#include "text/token_key.h"

namespace shoal::text {

namespace {

constexpr std::uint8_t kQuote = '"';
constexpr std::array<std::uint8_t, 8> kMissingItem = {0, 'm', 'i', 's', 's', 'i', 'n', 'g'};  // of a list

using Columns = std::span<const CsvColumn>;

// What a parse knows and keeps.
struct Parse {
  Block block;
  const CsvColumns& columns;
  Target& out;
  std::uint8_t* unquoted;
  bool is_scanned;  // no column is a list or a vector
  bool is_spelled;  // whether the lines of the scan hold a point or a sign: cell.h, S1
  ScannedLines lines;
};

struct Cell {
  Cursor begin;
  std::size_t size;
  Cursor readable;  // bytes up to here may be read
};

// ---- lines that are read cell by cell --------------------------------------------------------------------

// One cell, up to its separator or newline.
inline Fault read_cell(const Parse& parse, Cursor& cursor, Cell& cell) noexcept {
  const Cursor end = parse.block.end;
  const std::uint8_t separator = parse.columns.separator;
  Cursor p = cursor;
  if (*p != kQuote) {
    const Cursor stop = byte_or_newline(p, end, separator);
    cell = {p, static_cast<std::size_t>(stop - p), end};
    if (*stop == '\n' && cell.size > 0 && stop[-1] == '\r') {
      --cell.size;
    }
    cursor = stop;
    return Fault::kGood;
  }
  ++p;
  const Cursor begin = p;
  std::uint8_t* to = parse.unquoted;
  Cursor stop;
  while (true) {
    stop = byte_or_newline(p, end, kQuote);
    if (*stop == '\n') {
      return Fault::kQuoteOpen;
    }
    if (stop[1] != kQuote) {
      break;
    }
    to = std::copy(p, stop + 1, to);  // with one of the two quotes
    p = stop + 2;
  }
  if (p != begin) {
    to = std::copy(p, stop, to);
    cell = {parse.unquoted, static_cast<std::size_t>(to - parse.unquoted), to};
  } else {
    cell = {begin, static_cast<std::size_t>(stop - begin), end};
  }
  ++stop;
  cursor = stop;
  if (*stop == '\r' && stop[1] == '\n') {
    ++stop;
  }
  if (*stop != separator && *stop != '\n') {
    return Fault::kQuoteClosed;
  }
  cursor = stop;
  return Fault::kGood;
}

inline bool is_missing(const Parse& parse, const Cell& cell) noexcept {
  return parse.columns.missing.contains(cell.begin, cell.size);
}

inline Fault read_number_in(const Cell& cell, float& out) noexcept {
  return read_cell_number(cell.begin, cell.size, cell.readable, out);
}

Fault read_label_in(const Parse& parse, const Cell& cell) noexcept {
  Target& out = parse.out;
  if (parse.columns.positive) {
    CellRoom room;
    const CellText text = respelled(cell.begin, cell.size, cell.readable, room);
    const std::string& positive = *parse.columns.positive;
    const bool is = text.size == positive.size() && std::memcmp(text.begin, positive.data(), text.size) == 0;
    out.labels[out.row] = is ? 1.0F : 0.0F;
    return Fault::kGood;
  }
  float y = 0.0F;
  const Fault fault = read_number_in(cell, y);
  return fault != Fault::kGood ? label_fault(fault, out) : put_label(y, out);
}

// Stores the cell from `begin` to `end`: the label, the weight, a feature, or nothing.
Fault put_cell(const Parse& parse, const CsvColumn& column, const Cell& cell, Cursor begin,
               Cursor end) noexcept {
  Target& out = parse.out;
  const bool is_head = column.kind == CellKind::kLabel || column.kind == CellKind::kWeight;
  if (!out.labelled && is_head) {
    return Fault::kGood;
  }
  if (is_missing(parse, cell)) {
    return is_head ? Fault::kCellMissing : Fault::kGood;
  }
  if (column.kind == CellKind::kLabel) {
    return read_label_in(parse, cell);
  }
  float value = 1.0F;
  if (column.kind == CellKind::kWeight) {
    if (read_number_in(cell, value) != Fault::kGood || value < 0.0F) {
      return Fault::kImportance;
    }
    out.weights[out.row] = value;
    return Fault::kGood;
  }
  if (column.kind == CellKind::kNumeric) {
    const Fault fault = read_number_in(cell, value);
    if (fault != Fault::kGood) {
      return fault;
    }
    out.keys[out.nnz] = scramble(column.seed);  // of the empty text
  } else {
    out.keys[out.nnz] = cell_key(column.seed, cell.begin, cell.size, cell.readable);
  }
  if (!out.values.empty()) {
    out.values[out.nnz] = value;
  }
  if (has_origins(out)) {
    // An unquoted copy is not in the block: the span is then the cell's with its quotes.
    const bool copied = cell.begin == parse.unquoted;
    put_origin(out, parse.block.begin, out.nnz, column.field, copied ? begin : cell.begin,
               copied ? end : cell.begin + cell.size);
  }
  ++out.nnz;
  return Fault::kGood;
}

// The first such byte; `end` if there is none.
inline Cursor find(Cursor p, Cursor end, std::uint8_t byte) noexcept {
  const void* const found = std::memchr(p, byte, static_cast<std::size_t>(end - p));
  return found == nullptr ? end : static_cast<Cursor>(found);
}

// Stores a feature for each item of the cell from `begin` to `end`; one that is missing keeps its place. At a
// fault, `begin` is that of the item.
Fault put_list(const Parse& parse, std::size_t columns, const CsvColumn& column, Cell cell, Cursor& begin,
               Cursor end) noexcept {
  Target& out = parse.out;
  const bool copied = cell.readable == parse.unquoted + cell.size;
  const bool is_vector = column.kind == CellKind::kVector;
  if (is_missing(parse, cell) || (is_vector && cell.size == 0)) {
    return Fault::kGood;
  }
  if (copied && is_vector) {
    parse.unquoted[cell.size] = '\n';  // it ends the last number
    ++cell.readable;
  }
  Cursor p = cell.begin;
  const Cursor stop = cell.begin + cell.size;
  while (p <= stop) {
    const Cursor behind = find(p, stop, parse.columns.list_separator);
    const Cell item{p, static_cast<std::size_t>(behind - p), cell.readable};
    if (out.keys.size() - out.nnz < columns) {  // leaves room for the other columns of the line
      return Fault::kNoRoom;
    }
    const bool nameless = item.size == 0 || is_missing(parse, item);
    float value = 1.0F;
    if (is_vector) {
      value = 0.0F;
      const Fault fault = nameless ? Fault::kGood : read_number_in(item, value);
      if (fault != Fault::kGood) {
        if (!copied) {
          begin = p;
        }
        return fault;
      }
      out.keys[out.nnz] = scramble(column.seed);  // of the empty text
    } else if (nameless) {
      out.keys[out.nnz] = token_key(column.seed, kMissingItem.data(), kMissingItem.size(),
                                    kMissingItem.data() + kMissingItem.size());
    } else {
      out.keys[out.nnz] = cell_key(column.seed, item.begin, item.size, item.readable);
    }
    if (!out.values.empty()) {
      out.values[out.nnz] = value;
    }
    if (has_origins(out)) {
      const Cursor last = nameless ? p : behind;
      put_origin(out, parse.block.begin, out.nnz, column.field, copied ? begin : p, copied ? end : last);
    }
    ++out.nnz;
    p = behind + 1;
  }
  return Fault::kGood;
}

// The cells of a line, as many as there are columns.
Fault read_row(const Parse& parse, Columns columns, Cursor& cursor) noexcept {
  Cursor p = cursor;
  if (is_blank_line(p)) {
    cursor += *p == '\n' ? 0 : 1;
    return Fault::kBlank;
  }
  if (parse.out.keys.size() - parse.out.nnz < columns.size()) {
    return Fault::kNoRoom;
  }
  Cell cell;
  std::size_t column = 0;
  while (true) {
    cursor = p;
    Fault fault = read_cell(parse, p, cell);
    if (fault == Fault::kQuoteClosed) {
      cursor = p;
    }
    if (fault == Fault::kGood) {
      const CsvColumn& known = columns[column];
      const Cursor behind = *p == '\n' && p > cursor && p[-1] == '\r' ? p - 1 : p;
      if (known.kind >= CellKind::kList) {
        fault = put_list(parse, columns.size(), known, cell, cursor, behind);
      } else if (known.kind != CellKind::kPassedOver) {
        fault = put_cell(parse, known, cell, cursor, behind);
      }
    }
    if (fault != Fault::kGood) {
      return fault;
    }
    ++column;
    if (*p == '\n' || column == columns.size()) {
      break;
    }
    ++p;
  }
  cursor = p;
  return *p == '\n' && column == columns.size() ? Fault::kGood : Fault::kCells;
}

// ---- lines whose cells have been found -------------------------------------------------------------------

// The number in a cell, NaN if there is none. An empty cell holds 0.
inline float plain_number(Cursor p, std::size_t size, Cursor end) noexcept {
  std::uint32_t v = 0;
  if (size <= 4 && read_small_integer(p, size + 1, v)) {
    return static_cast<float>(static_cast<std::int32_t>(v));
  }
  float number = 0.0F;
  const Fault fault = read_cell_number(p, size, end, number);
  return fault == Fault::kGood ? number : std::numeric_limits<float>::quiet_NaN();
}

// Reads a line of as many cells as there are columns; false, and out.nnz is as before, if one is not as
// usual.
//
// A missing cell stores a feature too, over which the next one is stored: a branch would often be
// mispredicted.
bool read_scanned_row(const Parse& parse, Columns columns, Cursor p, const std::uint16_t* stops) noexcept {
  Target& out = parse.out;
  const Cursor end = parse.block.end;
  const MissingTexts& missing = parse.columns.missing;
  const bool keeps_empty = !missing.has_empty();
  const bool origins = has_origins(out);
  const bool is_spelled = parse.is_spelled;
  std::uint64_t* const keys = out.keys.data() + out.nnz;
  float* const values = out.values.empty() ? nullptr : out.values.data() + out.nnz;
  const Cursor text = parse.lines.text();
  const CsvColumn* const last = columns.data() + columns.size() - 1;
  std::size_t count = 0;
  for (const CsvColumn& column : columns) {
    const Cursor begin = p;
    const Cursor stop = text + *stops++;
    auto size = static_cast<std::size_t>(stop - begin);
    p = stop + 1;
    if (&column == last && size > 0 && stop[-1] == '\r') {
      --size;
    }
    if (*begin == kQuote) {
      return false;
    }
    if (column.kind == CellKind::kPassedOver) {
      continue;
    }
    if (column.kind == CellKind::kLabel || column.kind == CellKind::kWeight) {
      if (put_cell(parse, column, {begin, size, end}, begin, begin + size) != Fault::kGood) {
        return false;
      }
      continue;
    }
    bool kept = (size > 0) | keeps_empty;  // without a branch, as below
    const std::uint8_t first = missing.beginning_with(*begin);
    if ((first & MissingTexts::kMissing) != 0) [[unlikely]] {
      kept = !missing.contains(begin, size);
    }
    float value = 1.0F;
    if (column.kind == CellKind::kNumeric) {
      value = plain_number(begin, size, end);
      const bool is_none = std::isnan(value);
      if (kept & (is_none | (size == 0))) [[unlikely]] {
        return false;
      }
      keys[count] = column.seed;
    } else if (((size >= 19) | ((first & MissingTexts::kOdd) != 0)) ||
               (is_spelled && may_be_respelled(begin, size))) [[unlikely]] {
      keys[count] = unscrambled_cell_key(column.seed, begin, size, end);
    } else {
      keys[count] = unscrambled_separated(column.seed, begin, size + 1, end);
    }
    if (values != nullptr) {
      values[count] = value;
    }
    if (origins) {
      put_origin(out, parse.block.begin, out.nnz + count, column.field, begin, begin + size);
    }
    count += kept ? 1 : 0;
  }
  scramble_block(keys, count);
  out.nnz += count;
  return true;
}

// Reads a line by the ends of its cells: false if it is to be read in the other way.
bool read_scanned(Parse& parse, Cursor p) noexcept {
  const CsvColumns& columns = parse.columns;
  if (!parse.is_scanned || is_blank_line(p) || parse.out.keys.size() - parse.out.nnz < columns.all.size()) {
    return false;
  }
  const std::uint16_t* stops = nullptr;
  const std::size_t cells = parse.lines.cells_at(p, parse.block.end, stops);
  if (parse.lines.is_first()) {
    const std::size_t size = parse.lines.size();
    const auto holds = [&](char byte) { return std::memchr(p, byte, size) != nullptr; };
    parse.is_spelled = holds('.') || holds('+') || holds('-');
  }
  if (cells == columns.all.size()) {
    return read_scanned_row(parse, columns.all, p, stops);
  }
  if (cells != 0 && cells == columns.unlabelled.size()) {
    return read_scanned_row(parse, columns.unlabelled, p, stops);
  }
  return false;
}

// ---- a line ----------------------------------------------------------------------------------------------

inline Fault read_line(Parse& parse, Cursor& cursor) noexcept {
  const CsvColumns& columns = parse.columns;
  const Cursor line = cursor;
  if (read_scanned(parse, line)) {
    cursor = parse.lines.newline();
    return Fault::kGood;
  }
  const Fault fault = read_row(parse, columns.all, cursor);
  if (columns.unlabelled.empty() || fault == Fault::kGood || fault == Fault::kBlank ||
      fault == Fault::kNoRoom) {
    return fault;
  }
  // The number of cells decides whether there is a label: no line is valid both ways.
  const Cursor at = cursor;
  cursor = line;
  parse.out.nnz = static_cast<std::size_t>(parse.out.indptr[parse.out.row]);
  const Fault without = read_row(parse, columns.unlabelled, cursor);
  if (without == Fault::kGood || without == Fault::kNoRoom) {
    return without;
  }
  cursor = at;
  return fault;
}

bool has_several(const std::vector<CsvColumn>& columns) noexcept {
  return std::any_of(columns.begin(), columns.end(),
                     [](const CsvColumn& column) { return column.kind >= CellKind::kList; });
}

}  // namespace

Stop parse_csv(std::span<const std::uint8_t> text, std::size_t start, Target& out, bool skip,
               const CsvColumns& columns, std::span<std::uint8_t> scratch) noexcept {
  Parse parse{.block = block_of(text),
              .columns = columns,
              .out = out,
              .unquoted = scratch.data(),
              .is_scanned = !has_several(columns.all),
              .is_spelled = false,
              .lines = ScannedLines(columns.separator)};
  return walk(parse.block, start, out, skip, [&](Cursor& cursor) { return read_line(parse, cursor); });
}

}  // namespace shoal::text

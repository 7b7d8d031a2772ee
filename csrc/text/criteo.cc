#include "text/criteo.h"

#include <array>
#include <charconv>

#include "base/mix_block.h"
#include "text/numbers.h"
#include "text/rows.h"
#include "text/scanned_lines.h"
#include "text/token_key.h"

namespace shoal::text {

namespace {

constexpr std::size_t kIntegers = CriteoTables::kIntegers;
constexpr std::size_t kColumns = CriteoTables::kIntegers + CriteoTables::kCategories;
constexpr std::uint8_t kTab = '\t';

// What a parse knows: the tables, and the seed of each column's field.
struct ColumnSeeds {
  explicit ColumnSeeds(const CriteoTables& tables) noexcept
      : floors(tables.floors.data()),
        cells(tables.cells.data()),
        small(tables.small.data()),
        numbers(tables.numbers.data()),
        buckets(tables.floors.size() - 1) {
    for (std::size_t column = 0; column < kColumns; ++column) {
      seeds[column] = field_seed(column + 1);
    }
  }

  std::array<std::uint64_t, kColumns> seeds;
  const std::uint64_t* floors;
  const std::uint16_t* cells;
  const std::uint8_t* small;
  const std::uint64_t* numbers;
  std::size_t buckets;
};

// The key of "SP-<magnitude>".
std::uint64_t negative_key(std::uint64_t seed, std::uint64_t magnitude) noexcept {
  std::array<char, 24> text = {'S', 'P', '-'};
  char* const stop = std::to_chars(text.data() + 3, text.data() + text.size(), magnitude).ptr;
  const auto* const begin = reinterpret_cast<Cursor>(text.data());
  return token_key(seed, begin, static_cast<std::size_t>(stop - text.data()), begin + text.size());
}

inline std::uint64_t integer_key(const ColumnSeeds& columns, std::size_t column, std::int64_t v) noexcept {
  if (v < 0) {
    return negative_key(columns.seeds[column], static_cast<std::uint64_t>(-v));
  }
  const auto magnitude = static_cast<std::uint64_t>(v);
  std::size_t bucket = columns.cells[criteo_cell(magnitude)];
  while (columns.floors[bucket + 1] <= magnitude) {
    ++bucket;
  }
  return columns.numbers[column * columns.buckets + bucket];
}

// ---- lines that are read byte by byte --------------------------------------------------------------------

// The fault at a byte that is not the tab that is expected.
inline Fault fault_at(Cursor p) noexcept {
  return *p == '\n' || *p == '\r' ? Fault::kColumns : Fault::kIntegerText;
}

// The columns of a line, each behind a tab; in a line without a label the first column has no tab. out.nnz
// changes only if the line is valid.
Fault read_columns(Block block, Cursor& cursor, Target& out, const ColumnSeeds& columns,
                   bool behind_label) noexcept {
  const Cursor end = block.end;
  const bool origins = has_origins(out);
  Cursor p = cursor;
  std::size_t nnz = out.nnz;
  const auto put = [&](std::uint64_t key, std::size_t column, Cursor begin, Cursor stop) {
    out.keys[nnz] = key;
    if (origins) {
      put_origin(out, block.begin, nnz, column + 1, begin, stop);
    }
    ++nnz;
  };
  for (std::size_t column = 0; column < kIntegers; ++column) {
    cursor = p;
    if (column > 0 || behind_label) {
      if (*p != kTab) {
        return column == 0 ? Fault::kColumns : fault_at(p);
      }
      ++p;
    }
    if (*p == kTab) {
      continue;
    }
    cursor = p;
    std::int64_t v = 0;
    const Fault fault = read_integer(p, end, v);
    if (fault != Fault::kGood) {
      return *p == '\n' || *p == '\r' ? Fault::kColumns : fault;
    }
    put(integer_key(columns, column, v), column, cursor, p);
  }
  for (std::size_t column = kIntegers; column < kColumns; ++column) {
    if (*p != kTab) {
      cursor = p;
      return fault_at(p);
    }
    ++p;
    const Cursor stop = byte_or_newline(p, end, kTab);
    auto size = static_cast<std::size_t>(stop - p);
    if (*stop == '\n' && size > 0 && stop[-1] == '\r') {
      --size;
    }
    if (size > 0) {
      put(token_key(columns.seeds[column], p, size, end), column, p, p + size);
    }
    p = stop;
  }
  cursor = p;
  if (*p != '\n') {
    return Fault::kColumns;
  }
  out.nnz = nnz;
  return Fault::kGood;
}

// ---- lines whose cells have been found -------------------------------------------------------------------

// Stores the key of an integer that is not up to four digits; false if the cell does not hold one.
bool read_large_integer(Cursor p, Cursor stop, Cursor end, const ColumnSeeds& columns, std::size_t column,
                        std::uint64_t& key) noexcept {
  std::int64_t v = 0;
  if (read_integer(p, end, v) != Fault::kGood || p != stop) {
    return false;
  }
  key = integer_key(columns, column, v);
  return true;
}

// Stores the keys of 13 cells and their number; false if one is malformed.
//
// The first cell begins behind text[before]. A cell without text stores a key too, over which the next one is
// stored: a branch would often be mispredicted.
inline bool read_integers(Cursor text, std::ptrdiff_t before, const std::uint16_t* stops, Cursor end,
                          const ColumnSeeds& columns, std::uint64_t* keys, std::size_t& count) noexcept {
  const std::uint64_t* numbers = columns.numbers;
  const std::uint8_t* const small = columns.small;
  const std::size_t buckets = columns.buckets;
  std::size_t n = 0;
  ++text;
  for (std::size_t column = 0; column < kIntegers; ++column) {
    const auto size = static_cast<std::size_t>(stops[column] - before);  // with the tab
    std::uint32_t v = 0;
    if (size > 5 || !read_small_integer(text + before, size, v)) [[unlikely]] {
      if (!read_large_integer(text + before, text + stops[column] - 1, end, columns, column, keys[n])) {
        return false;
      }
    } else {
      keys[n] = numbers[small[v]];
    }
    n += size > 1 ? 1 : 0;
    numbers += buckets;
    before = stops[column];
  }
  count = n;
  return true;
}

// Stores the keys of 26 cells; returns their number. The parameters are those of read_integers.
inline std::size_t read_categories(Cursor text, std::ptrdiff_t before, const std::uint16_t* stops, Cursor end,
                                   const ColumnSeeds& columns, std::uint64_t* keys) noexcept {
  constexpr std::size_t kLast = CriteoTables::kCategories - 1;
  const std::uint64_t* const seeds = columns.seeds.data() + kIntegers;
  std::size_t count = 0;
  ++text;
  for (std::size_t i = 0; i < kLast; ++i) {
    const auto size = static_cast<std::size_t>(stops[i] - before);  // with the tab
    keys[count] = unscrambled_separated(seeds[i], text + before, size, end);
    count += size > 1 ? 1 : 0;
    before = stops[i];
  }
  auto size = static_cast<std::size_t>(stops[kLast] - before);
  if (size > 1 && text[stops[kLast] - 2] == '\r') {
    --size;
  }
  keys[count] = unscrambled_separated(seeds[kLast], text + before, size, end);
  count += size > 1 ? 1 : 0;
  scramble_block(keys, count);
  return count;
}

// Stores the origins of the features of 39 cells.
void put_origins(Block block, Cursor text, std::ptrdiff_t before, const std::uint16_t* stops,
                 Target& out) noexcept {
  std::size_t feature = out.nnz;
  for (std::size_t column = 0; column < kColumns; ++column) {
    auto size = static_cast<std::size_t>(stops[column] - before - 1);
    if (column == kColumns - 1 && size > 0 && text[stops[column] - 1] == '\r') {
      --size;
    }
    if (size > 0) {
      const Cursor begin = text + before + 1;
      put_origin(out, block.begin, feature, column + 1, begin, begin + size);
      ++feature;
    }
    before = stops[column];
  }
}

// Reads the 39 cells behind text[before]; false, and out.nnz is as before, if one is malformed.
bool read_scanned_columns(Block block, Cursor text, std::ptrdiff_t before, const std::uint16_t* stops,
                          Target& out, const ColumnSeeds& columns) noexcept {
  std::uint64_t* const keys = out.keys.data() + out.nnz;
  std::size_t integers = 0;
  if (!read_integers(text, before, stops, block.end, columns, keys, integers)) {
    return false;
  }
  const std::size_t categories =
      read_categories(text, stops[kIntegers - 1], stops + kIntegers, block.end, columns, keys + integers);
  if (has_origins(out)) {
    put_origins(block, text, before, stops, out);
  }
  out.nnz += integers + categories;
  return true;
}

// ---- a line ----------------------------------------------------------------------------------------------

inline Fault read_line(Block block, Cursor& cursor, Target& out, const ColumnSeeds& columns,
                       ScannedLines& lines) noexcept {
  const Cursor p = cursor;
  if (is_blank_line(p)) {
    cursor += *p == '\n' ? 0 : 1;
    return Fault::kBlank;
  }
  if (out.keys.size() - out.nnz < kColumns) {
    return Fault::kNoRoom;
  }
  const std::uint16_t* stops = nullptr;
  const std::size_t cells = lines.cells_at(p, block.end, stops);
  if (out.labelled) {
    if (out.classes == 0 && (*p == '0' || *p == '1') && p[1] == kTab) {
      out.labels[out.row] = static_cast<float>(*p - '0');
      ++cursor;
    } else if (const Fault fault = read_label(cursor, block.end, out); fault != Fault::kGood) {
      return fault;
    }
    if (cells == kColumns + 1 && cursor == lines.text() + stops[0] &&
        read_scanned_columns(block, lines.text(), stops[0], stops + 1, out, columns)) {
      cursor = lines.newline();
      return Fault::kGood;
    }
    return read_columns(block, cursor, out, columns, true);
  }
  if ((cells == kColumns + 1 &&
       read_scanned_columns(block, lines.text(), stops[0], stops + 1, out, columns)) ||
      (cells == kColumns &&
       read_scanned_columns(block, lines.text(), p - lines.text() - 1, stops, out, columns))) {
    cursor = lines.newline();
    return Fault::kGood;
  }
  // The number of tabs decides whether there is a label: no line is valid both ways.
  cursor = byte_or_newline(p, block.end, kTab);
  const Fault fault = read_columns(block, cursor, out, columns, true);
  if (fault == Fault::kGood) {
    return Fault::kGood;
  }
  const Cursor at = cursor;
  cursor = p;
  if (read_columns(block, cursor, out, columns, false) == Fault::kGood) {
    return Fault::kGood;
  }
  cursor = at;
  return fault;
}

}  // namespace

Stop parse_criteo(std::span<const std::uint8_t> text, std::size_t start, Target& out, bool skip,
                  const CriteoTables& tables) noexcept {
  const Block block = block_of(text);
  const ColumnSeeds columns(tables);
  ScannedLines lines(kTab);
  return walk(block, start, out, skip,
              [&](Cursor& cursor) { return read_line(block, cursor, out, columns, lines); });
}

}  // namespace shoal::text

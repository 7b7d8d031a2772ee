#include "text/vw.h"

#include <limits>

#include "text/numbers.h"
#include "text/rows.h"
#include "text/token_key.h"

namespace shoal::text {

namespace {

constexpr bool ends_name(std::uint8_t c) noexcept { return is_blank(c) || c == ':' || c == '|' || c == '\n'; }

inline Cursor name_end(Cursor p) noexcept {
  while (!ends_name(*p)) {
    ++p;
  }
  return p;
}

// The number behind a colon, up to the end of the word.
inline Fault read_value(Cursor& cursor, Cursor end, float& out) noexcept {
  ++cursor;
  const Fault fault = read_number(cursor, end, out);
  if (fault == Fault::kGood && (*cursor == ':' || !ends_name(*cursor))) {
    return Fault::kValueText;
  }
  return fault;
}

// A number before the features, behind which a blank or the end of the line stands.
inline bool read_word(Cursor& cursor, Cursor end, float& out) noexcept {
  return read_number(cursor, end, out) == Fault::kGood && (is_blank(*cursor) || *cursor == '\n');
}

// The text before the first bar, at which `cursor` ends: label, importance and tag.
inline Fault read_head(Cursor& cursor, Cursor end, Target& out) noexcept {
  Cursor p = cursor;
  if (!out.labelled) {
    bool words = false;
    for (; *p != '|' && *p != '\n'; ++p) {
      words |= !is_blank(*p);
    }
    cursor = p;
    return *p == '|' ? Fault::kGood : words ? Fault::kBarMissing : Fault::kBlank;
  }
  int words = 0;
  float weight = 1.0F;
  while (true) {
    while (is_blank(*p)) {
      ++p;
    }
    cursor = p;
    if (*p == '\n') {
      return words != 0 ? Fault::kBarMissing : Fault::kBlank;
    }
    if (*p == '|') {
      break;
    }
    // A word that touches the bar or begins with a quote is a tag.
    const Cursor word = p;
    while (!is_blank(*p) && *p != '|' && *p != '\n') {
      ++p;
    }
    if (*p == '|' || *word == '\'') {
      while (is_blank(*p)) {
        ++p;
      }
      if (*p != '|') {
        cursor = p;
        return Fault::kBarMissing;
      }
      break;
    }
    ++words;
    p = word;
    if (words == 1) {
      const Fault fault = read_label(p, end, out);
      if (fault != Fault::kGood) {
        return fault;
      }
      if (*p == '#') {  // it does not begin a comment here
        return Fault::kLabelText;
      }
    } else if (words == 2) {
      if (!read_word(p, end, weight) || weight < 0.0F) {
        return Fault::kImportance;
      }
    } else {
      float initial = 0.0F;
      if (!read_word(p, end, initial) || initial != 0.0F || words > 3) {
        return Fault::kInitial;
      }
    }
  }
  cursor = p;
  if (words == 0) {
    return Fault::kLabelMissing;
  }
  out.weights[out.row] = weight;
  return Fault::kGood;
}

inline Fault read_line(Block block, Cursor& cursor, Target& out, std::uint64_t root) noexcept {
  const Cursor end = block.end;
  Fault fault = read_head(cursor, end, out);
  if (fault != Fault::kGood) {
    return fault;
  }
  const bool origins = has_origins(out);
  Cursor p = cursor;
  while (*p == '|') {
    ++p;
    const Cursor space = p;
    p = name_end(p);
    const std::uint64_t field = token_key(root, space, static_cast<std::size_t>(p - space), end);
    const std::uint64_t seed = field_seed(field);
    float scale = 1.0F;
    if (*p == ':') {
      fault = read_value(p, end, scale);
      if (fault != Fault::kGood) {
        cursor = p;
        return fault;
      }
    }
    while (true) {
      while (is_blank(*p)) {
        ++p;
      }
      if (*p == '|' || *p == '\n') {
        break;
      }
      cursor = p;
      const Cursor name = p;
      p = name_end(p);
      const auto size = static_cast<std::size_t>(p - name);
      float value = 1.0F;
      if (*p == ':') {
        fault = read_value(p, end, value);
        if (fault != Fault::kGood) {
          cursor = p;
          return fault;
        }
      }
      value *= scale;
      constexpr float kMost = std::numeric_limits<float>::max();
      if (!(value >= -kMost && value <= kMost)) {
        return Fault::kValueRange;
      }
      if (out.nnz == out.keys.size()) {
        return Fault::kNoRoom;
      }
      out.keys[out.nnz] = token_key(seed, name, size, end);
      out.values[out.nnz] = value;
      if (origins) {
        put_origin(out, block.begin, out.nnz, field, name, name + size);
      }
      ++out.nnz;
    }
  }
  cursor = p;
  return Fault::kGood;
}

}  // namespace

Stop parse_vw(std::span<const std::uint8_t> text, std::size_t start, Target& out, bool skip) noexcept {
  const Block block = block_of(text);
  const std::uint64_t root = field_seed(0);  // of the names of namespaces
  return walk(block, start, out, skip, [&](Cursor& cursor) { return read_line(block, cursor, out, root); });
}

}  // namespace shoal::text

#include "text/libsvm.h"

#include "text/numbers.h"
#include "text/rows.h"

namespace shoal::text {

namespace {

// The features of one line, from the end of its label to its newline, at which `cursor` ends. Inlined into
// the loop over lines it has too few registers, and takes 1.08 of the time.
template <bool kFielded>
[[gnu::noinline]] Fault read_pairs(Block block, Cursor& cursor, Target& out) noexcept {
  constexpr Fault kMalformed = kFielded ? Fault::kFieldText : Fault::kKeyText;
  const Cursor end = block.end;
  Cursor p = cursor;
  const bool origins = has_origins(out);
  std::size_t nnz = out.nnz;
  Fault fault = Fault::kGood;
  while (true) {
    while (is_blank(*p)) {
      ++p;
    }
    if (!is_digit(*p)) {
      if (*p == '\n') {
        break;
      }
      if (*p == '#') {
        p = newline(p, end);
        break;
      }
      if (!kFielded && end - p > 4 && p[0] == 'q' && p[1] == 'i' && p[2] == 'd' && p[3] == ':') {
        cursor = p;
        p += 4;
        std::uint64_t query = 0;
        fault = read_key(p, end, query);
        if (fault == Fault::kGood && !ends_token(*p)) {
          fault = Fault::kKeyText;
        }
        if (fault != Fault::kGood) {
          return fault;
        }
        continue;
      }
      fault = kMalformed;
      break;
    }
    cursor = p;
    std::uint64_t field = 0;
    if constexpr (kFielded) {
      fault = read_key(p, end, field);
      if (fault == Fault::kGood && *p != ':') {
        fault = Fault::kFieldText;
      }
      if (fault != Fault::kGood) {
        break;
      }
      ++p;
    }
    std::uint64_t key = 0;
    fault = read_key(p, end, key);
    if (fault != Fault::kGood) {
      fault = fault == Fault::kKeyText ? kMalformed : fault;
      break;
    }
    if (*p != ':') {
      fault = ends_token(*p) ? Fault::kValueMissing : kMalformed;
      break;
    }
    ++p;
    float value = 1.0F;
    if (*p == '1' && ends_token(p[1])) {
      ++p;
    } else {
      fault = read_number(p, end, value);
      if (fault != Fault::kGood) {
        break;
      }
      if (!ends_token(*p)) {
        fault = Fault::kValueText;
        break;
      }
    }
    if (nnz == out.keys.size()) {
      fault = Fault::kNoRoom;
      break;
    }
    out.keys[nnz] = key;
    out.values[nnz] = value;
    if (origins) {
      Cursor colon = p;
      while (*colon != ':') {
        --colon;
      }
      put_origin(out, block.begin, nnz, field, cursor, colon);
    }
    ++nnz;
  }
  cursor = p;
  out.nnz = nnz;
  return fault;
}

// Skips the first word unless it is a feature, which has a colon.
inline void pass_over_label(Cursor& cursor) noexcept {
  Cursor p = cursor;
  while (!ends_token(*p) && *p != ':') {
    ++p;
  }
  if (*p != ':') {
    cursor = p;
  }
}

template <bool kFielded>
Stop parse(std::span<const std::uint8_t> text, std::size_t start, Target& out, bool skip) noexcept {
  const Block block = block_of(text);
  return walk(block, start, out, skip, [&](Cursor& cursor) {
    while (is_blank(*cursor)) {
      ++cursor;
    }
    if (*cursor == '\n' || *cursor == '#') {
      cursor = newline(cursor, block.end);
      return Fault::kBlank;
    }
    if (!out.labelled) {
      pass_over_label(cursor);
    } else if (const Fault fault = read_label(cursor, block.end, out); fault != Fault::kGood) {
      return fault;
    }
    return read_pairs<kFielded>(block, cursor, out);
  });
}

}  // namespace

Stop parse_libsvm(std::span<const std::uint8_t> block, std::size_t start, Target& out, bool skip) noexcept {
  return parse<false>(block, start, out, skip);
}

Stop parse_libffm(std::span<const std::uint8_t> block, std::size_t start, Target& out, bool skip) noexcept {
  return parse<true>(block, start, out, skip);
}

}  // namespace shoal::text

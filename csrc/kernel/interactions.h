// Interactions: appends the pairwise products of features of two fields (crossed features).
//
//   row         a | b c | d          features of the fields 1 | 2 | 3, in any order, any number in each
//   pairs       (1, 2), (3, 3)
//   result      a b c d | a*b a*c    the features, then each pair's; (3, 3) pairs the features of one field
//
// The key of a pair is interaction_key(first, second), in the order of the named fields; within one field the
// lesser key is the first, so the order in the row does not matter. The value is the product, clamped to the
// range of float32.
//
// Threads: an Interactions is scratch memory of one caller at a time.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "base/mix.h"

namespace shoal {

// Rows (CSR) whose features have fields. No values: each is 1.
struct FieldedRows {
  std::span<const std::int64_t> indptr;
  std::span<const std::uint64_t> keys;
  std::span<const float> values;
  std::span<const std::uint64_t> fields;
};

// A fixed 64-bit hash of two keys: that of the token of eight bytes `second` in the field `first`
// (docs/readers.md).
constexpr std::uint64_t interaction_key(std::uint64_t first, std::uint64_t second) noexcept {
  constexpr std::uint64_t kStep = 0x9e3779b97f4a7c15U;
  return mix(((mix(first) + 8 * kStep) ^ second) - kStep);
}

class Interactions {
 public:
  static constexpr std::uint64_t kMax = std::uint64_t{1} << 32U;  // features of one batch

  // Fields in pairs. Throws if their number is odd.
  explicit Interactions(std::span<const std::uint64_t> pairs);

  // Writes the end of each row with its original and new features. Throws unless the arrays match, or if
  // there would be more than kMax features.
  void count(const FieldedRows& rows, std::span<std::int64_t> indptr);

  // Writes the features of the rows of the last count. `values` is empty if they are not requested.
  void write(const FieldedRows& rows, std::span<std::uint64_t> keys, std::span<float> values);

  // Writes the positions of the two features that each new feature of the last count is made of, in the order
  // in which write() has the new ones.
  void write_parents(const FieldedRows& rows, std::span<std::uint64_t> first,
                     std::span<std::uint64_t> second);

 private:
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};

  std::uint32_t find(std::uint64_t field) const noexcept;
  // Calls own(i) for the features of each row and then pair(i, j) for its new ones.
  template <class Own, class Pair>
  void each(const FieldedRows& rows, const Own& own, const Pair& pair);

  std::vector<std::uint64_t> fields_;                           // distinct fields
  std::vector<std::pair<std::uint32_t, std::uint32_t>> pairs_;  // indexes into fields_
  std::vector<std::uint32_t> cells_;                            // open addressing: into fields_, or kNone
  std::vector<std::vector<std::size_t>> positions_;  // positions of one row's features, for each of fields_
  unsigned shift_ = 0;
};

}  // namespace shoal

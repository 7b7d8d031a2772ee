#include "kernel/examples.h"

#include <functional>
#include <limits>
#include <string>

#include "base/check.h"
#include "base/simd.h"

namespace shoal {

namespace {

SHOAL_CLONES std::uint32_t greatest(std::span<const std::uint32_t> numbers) noexcept {
  std::uint32_t most = 0;
  for (const std::uint32_t number : numbers) {
    most = std::max(most, number);
  }
  return most;
}

}  // namespace

void check_examples(const Examples& examples, std::size_t keys) {
  const auto& [indptr, columns, values, bias, below] = examples;
  const auto entries = [&examples] { return std::to_string(examples.columns.size()); };
  SHOAL_CHECK(!indptr.empty() && indptr.front() == 0, "indptr must begin with 0");
  const auto fall = std::adjacent_find(indptr.begin(), indptr.end(), std::greater<>());
  SHOAL_CHECK(fall == indptr.end(), "indptr falls at position " + std::to_string(fall - indptr.begin() + 1) +
                                        ": from " + std::to_string(*fall) + " to " +
                                        std::to_string(*(fall + 1)));
  SHOAL_CHECK(
      static_cast<std::uint64_t>(indptr.back()) == columns.size(),
      "indptr must end with the number of entries, " + entries() + ", got " + std::to_string(indptr.back()));
  SHOAL_CHECK(values.empty() || values.size() == columns.size(),
              "values must have one number for each of the " + entries() + " entries, got " +
                  std::to_string(values.size()));
  SHOAL_CHECK(columns.empty() || below <= keys || greatest(columns) < keys,
              "an entry is unique key " + std::to_string(greatest(columns)) + ", but there are only " +
                  std::to_string(keys));
  SHOAL_CHECK(!bias || *bias < keys, "the bias is unique key " + std::to_string(*bias) +
                                         ", but there are only " + std::to_string(keys));
}

void write_ends(const KeyedRows& matrix, std::span<const std::int64_t> rows, std::span<std::int64_t> indptr) {
  const auto count = static_cast<std::int64_t>(matrix.indptr.size()) - 1;
  std::int64_t end = 0;
  indptr[0] = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    SHOAL_CHECK(rows[i] >= 0 && rows[i] < count,
                "there is no row " + std::to_string(rows[i]) + " of " + std::to_string(count));
    const auto row = static_cast<std::size_t>(rows[i]);
    const std::int64_t first = matrix.indptr[row];
    const std::int64_t last = matrix.indptr[row + 1];
    SHOAL_CHECK(first >= 0 && first <= last && static_cast<std::uint64_t>(last) <= matrix.keys.size() &&
                    matrix.keys.size() == matrix.values.size(),
                "row " + std::to_string(row) + " is from " + std::to_string(first) + " to " +
                    std::to_string(last) + ", of " + std::to_string(matrix.keys.size()) + " keys and " +
                    std::to_string(matrix.values.size()) + " values");
    end += last - first;
    indptr[i + 1] = end;
  }
}

void gather_rows(const KeyedRows& matrix, std::span<const std::int64_t> rows, std::span<std::uint64_t> keys,
                 std::span<float> values) noexcept {
  std::size_t at = 0;
  for (const std::int64_t row : rows) {
    const auto first = static_cast<std::size_t>(matrix.indptr[static_cast<std::size_t>(row)]);
    const auto count = static_cast<std::size_t>(matrix.indptr[static_cast<std::size_t>(row) + 1]) - first;
    std::copy_n(matrix.keys.data() + first, count, keys.data() + at);
    std::copy_n(matrix.values.data() + first, count, values.data() + at);
    at += count;
  }
}

void check_sizes(std::size_t got, std::size_t examples, const char* name) {
  SHOAL_CHECK(got == examples, std::string(name) + " must have one number for each of the " +
                                   std::to_string(examples) + " examples, got " + std::to_string(got));
}

std::span<const std::uint32_t> owners_of(const Examples& examples, Buffer<std::uint32_t>& buffer,
                                         ThreadPool& pool) {
  SHOAL_CHECK(examples.size() <= std::numeric_limits<std::uint32_t>::max(),
              "a batch has fewer than 2^32 examples, got " + std::to_string(examples.size()));
  const auto owners = buffer.claim(examples.columns.size());
  each_piece(examples, pool, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      std::fill(owners.begin() + examples.indptr[i], owners.begin() + examples.indptr[i + 1],
                static_cast<std::uint32_t>(i));
    }
  });
  return owners;
}

}  // namespace shoal

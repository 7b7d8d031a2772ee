#include "kernel/fm.h"

#include <algorithm>
#include <cstdint>
#include <string>

#include "base/check.h"
#include "base/simd.h"

namespace shoal {

namespace {

void check_rows(std::size_t got, std::size_t rows, std::size_t dim, const char* name, const char* of) {
  SHOAL_CHECK(got == rows * dim, std::string(name) + " must have " + std::to_string(dim) +
                                     " numbers for each of the " + std::to_string(rows) + " " + of +
                                     ", got " + std::to_string(got));
}

// Columns are processed in strips of a width known at compile time: their sums stay in registers.
constexpr std::size_t kMaxDim = 16;

struct Walk {
  const std::uint32_t* columns;
  const float* values;  // null: each is 1
  const float* factors;
  std::size_t dim;
};

// The interactions of the entries from `begin` to `end` in the columns [left, left + width).
template <std::size_t width>
SHOAL_INLINE double interactions(const Walk& walk, std::size_t begin, std::size_t end, std::size_t left,
                                 double* sums) noexcept {
  double s[width] = {};
  double pairs[width] = {};
  for (std::size_t e = begin; e < end; ++e) {
    const float* const v = walk.factors + walk.columns[e] * walk.dim + left;
    const double x = walk.values == nullptr ? 1.0 : static_cast<double>(walk.values[e]);
    for (std::size_t d = 0; d < width; ++d) {
      const double term = static_cast<double>(v[d]) * x;
      pairs[d] += s[d] * term;
      s[d] += term;
    }
  }
  double total = 0.0;
  for (std::size_t d = 0; d < width; ++d) {
    sums[left + d] = s[d];
    total += pairs[d];
  }
  return total;
}

// Adds the interactions of each example to its margin.
SHOAL_CLONES void add_interactions(const Walk& walk, const std::int64_t* indptr, std::size_t first,
                                   std::size_t last, double* margins, double* sums) noexcept {
  for (std::size_t i = first; i < last; ++i) {
    const auto begin = static_cast<std::size_t>(indptr[i]);
    const auto end = static_cast<std::size_t>(indptr[i + 1]);
    double* const to = sums + i * walk.dim;
    double total = 0.0;
    std::size_t left = 0;
    for (; left + kMaxDim <= walk.dim; left += kMaxDim) {
      total += interactions<kMaxDim>(walk, begin, end, left, to);
    }
    for (; left + 4 <= walk.dim; left += 4) {
      total += interactions<4>(walk, begin, end, left, to);
    }
    for (; left < walk.dim; ++left) {
      total += interactions<1>(walk, begin, end, left, to);
    }
    margins[i] += total;
  }
}

struct GradientInput {
  const std::uint32_t* order;
  const std::uint32_t* owners;  // of each entry: its example
  const float* values;          // null: each is 1
  const double* slopes;
  const double* sums;
  std::size_t entries;
  std::size_t dim;
};

// The gradient of one key's factors v in the columns [left, left + width); its positions are `begin` to
// `end`.
template <std::size_t width>
SHOAL_INLINE void add_up(const GradientInput& input, std::size_t begin, std::size_t end, std::size_t left,
                         const float* v, float* out) noexcept {
  double g[width] = {};
  for (std::size_t j = begin; j < end; ++j) {
    const std::size_t e = input.order[j];
    if (e >= input.entries) {
      continue;  // the position of a bias key
    }
    const std::size_t i = input.owners[e];
    const double* const s = input.sums + i * input.dim + left;
    const double x = input.values == nullptr ? 1.0 : static_cast<double>(input.values[e]);
    const double scale = input.slopes[i] * x;
    for (std::size_t d = 0; d < width; ++d) {
      g[d] += scale * (s[d] - static_cast<double>(v[left + d]) * x);
    }
  }
  for (std::size_t d = 0; d < width; ++d) {
    out[left + d] = static_cast<float>(g[d]);
  }
}

SHOAL_CLONES void gradients_of(const GradientInput& input, const std::uint32_t* group_offsets,
                               const float* factors, std::size_t first, std::size_t last,
                               float* out) noexcept {
  for (std::size_t u = first; u < last; ++u) {
    const float* const v = factors + u * input.dim;
    float* const to = out + u * input.dim;
    std::size_t left = 0;
    for (; left + kMaxDim <= input.dim; left += kMaxDim) {
      add_up<kMaxDim>(input, group_offsets[u], group_offsets[u + 1], left, v, to);
    }
    for (; left + 4 <= input.dim; left += 4) {
      add_up<4>(input, group_offsets[u], group_offsets[u + 1], left, v, to);
    }
    for (; left < input.dim; ++left) {
      add_up<1>(input, group_offsets[u], group_offsets[u + 1], left, v, to);
    }
  }
}

const float* values_of(const Examples& examples) noexcept {
  return examples.values.empty() ? nullptr : examples.values.data();
}

}  // namespace

void fm_margins(const Examples& examples, std::span<const float> weights, std::span<const float> factors,
                std::size_t dim, std::span<double> out, std::span<double> sums, ThreadPool& pool) {
  SHOAL_CHECK(dim > 0, "dim must be 1 or more");
  check_rows(factors.size(), weights.size(), dim, "factors", "unique keys");
  check_rows(sums.size(), examples.size(), dim, "sums", "examples");
  margins(examples, weights, out, pool);
  const Walk walk{examples.columns.data(), values_of(examples), factors.data(), dim};
  each_piece(
      examples, pool,
      [&](std::size_t begin, std::size_t end) {
        add_interactions(walk, examples.indptr.data(), begin, end, out.data(), sums.data());
      },
      dim);
}

void fm_gradient(const Examples& examples, std::span<const float> factors, std::size_t dim,
                 std::span<const double> sums, std::span<const double> slopes, Occurrences occurrences,
                 std::span<float> out, ThreadPool& pool, GradientScratch& scratch) {
  SHOAL_CHECK(dim > 0, "dim must be 1 or more");
  const std::span<const std::uint32_t> order = occurrences.order;
  const std::span<const std::uint32_t> group_offsets = occurrences.group_offsets;
  SHOAL_CHECK(!group_offsets.empty() && order.size() == group_offsets.back() &&
                  order.size() >= examples.columns.size(),
              "occurrences of another batch");
  const std::size_t keys = group_offsets.size() - 1;
  const std::size_t entries = examples.columns.size();
  check_examples(examples, keys);
  check_rows(factors.size(), keys, dim, "factors", "unique keys");
  check_rows(out.size(), keys, dim, "gradient", "unique keys");
  check_rows(sums.size(), examples.size(), dim, "sums", "examples");
  check_sizes(slopes.size(), examples.size(), "slopes");
  const auto owners = owners_of(examples, scratch.owners, pool);
  const GradientInput input{
      order.data(), owners.data(), values_of(examples), slopes.data(), sums.data(), entries, dim};
  each_run_of_keys(occurrences, dim, pool, [&](std::size_t begin, std::size_t end) {
    gradients_of(input, group_offsets.data(), factors.data(), begin, end, out.data());
  });
}

}  // namespace shoal

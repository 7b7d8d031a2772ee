// Each unique key has a row of dim floats; an example (examples.h) is a bag i, its entries e are keys with
// values x_e; g_i is the gradient of the bag.
//
//          bag                     divisor D_i     gradient of row v     gradient of value x_e
//   sum    (sum of x_e v_e) / D_i  1               sum of x_e g_i / D_i  <v_e, g_i>
//   mean   as a sum                sum of x_e      as of a sum           <v_e - y_i, g_i> / D_i
//   sqrtn  as a sum                root of the     as of a sum           <v_e - x_e / D_i y_i, g_i> / D_i
//                                  sum of x_e^2
//   max    greatest of x_e v_ed    -               sum of won x_e g_id   sum of won v_ed g_id
//
// The sums of a bag y_i are over its entries, those of a gradient over the entries of the row, *won* ones
// over the (i, d) that these have won. These are TensorFlow's combiners: without values D_i is the number of
// entries, or its root. A bag without entries gives zeros, and so does one whose divisor is 0, with gradients
// of 0. Of equal products, as float32, the first wins, as in torch; a NaN wins if it is the first entry, and
// a later one never wins.

#include "kernel/pooling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "base/check.h"
#include "base/simd.h"

namespace shoal {

namespace {

// Columns are processed in strips of a width known at compile time: their sums stay in registers.
constexpr std::size_t kMaxDim = 16;
// Rows and gradients are read in random order: the prefetch distance, in entries.
constexpr std::size_t kAhead = 8;

bool is_divided(Pooling pooling) noexcept { return pooling == Pooling::kMean || pooling == Pooling::kSqrtn; }

// What the sum of a bag is divided by; where that would be 0, infinity, which makes a 0 of every number.
double divisor_of(Pooling pooling, const float* values, std::size_t begin, std::size_t end) noexcept {
  if (!is_divided(pooling)) {
    return 1.0;
  }
  const bool root = pooling == Pooling::kSqrtn;
  auto sum = static_cast<double>(end - begin);
  if (values != nullptr) {
    sum = 0.0;
    for (std::size_t e = begin; e < end; ++e) {
      const auto x = static_cast<double>(values[e]);
      sum += root ? x * x : x;
    }
  }
  return sum == 0.0 ? std::numeric_limits<double>::infinity() : (root ? std::sqrt(sum) : sum);
}

template <class Strip>
SHOAL_INLINE void by_strips(std::size_t dim, const Strip& strip) noexcept {
  std::size_t left = 0;
  for (; left + kMaxDim <= dim; left += kMaxDim) {
    strip.template operator()<kMaxDim>(left);
  }
  for (; left + 4 <= dim; left += 4) {
    strip.template operator()<4>(left);
  }
  for (; left < dim; ++left) {
    strip.template operator()<1>(left);
  }
}

struct Bags {
  const std::int64_t* indptr;
  const std::uint32_t* columns;
  const float* values;  // null: each is 1
  std::size_t entries;
  const float* rows;
  std::size_t dim;

  SHOAL_INLINE const float* row(std::size_t e) const noexcept { return rows + columns[e] * dim; }
  SHOAL_INLINE float value(std::size_t e) const noexcept { return values == nullptr ? 1.0F : values[e]; }
  SHOAL_INLINE void fetch(std::size_t e, std::size_t left) const noexcept {
    if (e + kAhead < entries) {
      __builtin_prefetch(row(e + kAhead) + left);
    }
  }
};

template <std::size_t width, bool valued>
SHOAL_INLINE void add_entries(const Bags& bags, std::size_t begin, std::size_t end, std::size_t left,
                              double divisor, float* out) noexcept {
  double sums[width] = {};
  for (std::size_t e = begin; e < end; ++e) {
    bags.fetch(e, left);
    const float* const v = bags.row(e) + left;
    const double x = valued ? static_cast<double>(bags.values[e]) : 1.0;
    for (std::size_t d = 0; d < width; ++d) {
      sums[d] += valued ? static_cast<double>(v[d]) * x : static_cast<double>(v[d]);
    }
  }
  for (std::size_t d = 0; d < width; ++d) {
    out[left + d] = static_cast<float>(divisor == 1.0 ? sums[d] : sums[d] / divisor);
  }
}

template <bool valued>
SHOAL_INLINE void add_bags(const Bags& bags, Pooling pooling, std::size_t first, std::size_t last,
                           float* out) noexcept {
  for (std::size_t i = first; i < last; ++i) {
    const auto begin = static_cast<std::size_t>(bags.indptr[i]);
    const auto end = static_cast<std::size_t>(bags.indptr[i + 1]);
    const double divisor = divisor_of(pooling, valued ? bags.values : nullptr, begin, end);
    by_strips(bags.dim, [&]<std::size_t width>(std::size_t left) SHOAL_ALWAYS {
      add_entries<width, valued>(bags, begin, end, left, divisor, out + i * bags.dim);
    });
  }
}

SHOAL_CLONES void add_valued_bags(const Bags& bags, Pooling pooling, std::size_t first, std::size_t last,
                                  float* out) noexcept {
  add_bags<true>(bags, pooling, first, last, out);
}

SHOAL_CLONES void add_plain_bags(const Bags& bags, Pooling pooling, std::size_t first, std::size_t last,
                                 float* out) noexcept {
  add_bags<false>(bags, pooling, first, last, out);
}

template <std::size_t width, bool valued>
SHOAL_INLINE void greatest_of(const Bags& bags, std::size_t begin, std::size_t end, std::size_t left,
                              float* out, std::uint32_t* winners) noexcept {
  float most[width] = {};
  std::uint32_t winner[width];
  std::fill_n(winner, width, kNoWinner);
  if (begin < end) {
    for (std::size_t d = 0; d < width; ++d) {
      most[d] = valued ? bags.row(begin)[left + d] * bags.values[begin] : bags.row(begin)[left + d];
    }
    std::fill_n(winner, width, static_cast<std::uint32_t>(begin));
  }
  for (std::size_t e = begin + 1; e < end; ++e) {
    bags.fetch(e, left);
    const float* const v = bags.row(e) + left;
    const float x = valued ? bags.values[e] : 1.0F;
    for (std::size_t d = 0; d < width; ++d) {
      const float product = valued ? v[d] * x : v[d];
      winner[d] = product > most[d] ? static_cast<std::uint32_t>(e) : winner[d];
      most[d] = product > most[d] ? product : most[d];
    }
  }
  std::copy_n(most, width, out + left);
  std::copy_n(winner, width, winners + left);
}

template <bool valued>
SHOAL_INLINE void greatest_of_all(const Bags& bags, std::size_t first, std::size_t last, float* out,
                                  std::uint32_t* winners) noexcept {
  for (std::size_t i = first; i < last; ++i) {
    by_strips(bags.dim, [&]<std::size_t width>(std::size_t left) SHOAL_ALWAYS {
      greatest_of<width, valued>(bags, static_cast<std::size_t>(bags.indptr[i]),
                                 static_cast<std::size_t>(bags.indptr[i + 1]), left, out + i * bags.dim,
                                 winners + i * bags.dim);
    });
  }
}

SHOAL_CLONES void greatest_of_plain_bags(const Bags& bags, std::size_t first, std::size_t last, float* out,
                                         std::uint32_t* winners) noexcept {
  greatest_of_all<false>(bags, first, last, out, winners);
}

SHOAL_CLONES void greatest_of_valued_bags(const Bags& bags, std::size_t first, std::size_t last, float* out,
                                          std::uint32_t* winners) noexcept {
  greatest_of_all<true>(bags, first, last, out, winners);
}

struct GradientInput {
  const std::uint32_t* order;
  const std::uint32_t* group_offsets;
  std::size_t positions;
  const std::uint32_t* owners;   // of each entry: its bag
  const double* divisors;        // of each bag; null: each is 1
  const float* values;           // null: each is 1
  const std::uint32_t* winners;  // null: no max
  const float* grads;
  std::size_t dim;

  SHOAL_INLINE const float* grad(std::size_t e) const noexcept { return grads + owners[e] * dim; }
  SHOAL_INLINE void fetch(std::size_t j, std::size_t left) const noexcept {
    if (j + kAhead < positions) {
      __builtin_prefetch(grad(order[j + kAhead]) + left);
    }
  }
  // The factor of the gradient of the entry's bag.
  SHOAL_INLINE double scale(std::size_t e) const noexcept {
    const double x = values == nullptr ? 1.0 : static_cast<double>(values[e]);
    return divisors == nullptr ? x : x / divisors[owners[e]];
  }
};

enum class Contribution : std::uint8_t { kPlain, kScaled, kWon };

template <std::size_t width, Contribution contribution>
SHOAL_INLINE void add_gradients(const GradientInput& input, std::size_t begin, std::size_t end,
                                std::size_t left, float* out) noexcept {
  double sums[width] = {};
  for (std::size_t j = begin; j < end; ++j) {
    input.fetch(j, left);
    const std::uint32_t e = input.order[j];
    const float* const g = input.grad(e) + left;
    if constexpr (contribution == Contribution::kPlain) {
      for (std::size_t d = 0; d < width; ++d) {
        sums[d] += static_cast<double>(g[d]);
      }
    } else if constexpr (contribution == Contribution::kScaled) {
      const double scale = input.scale(e);
      for (std::size_t d = 0; d < width; ++d) {
        sums[d] += static_cast<double>(g[d]) * scale;
      }
    } else {
      const std::uint32_t* const winners = input.winners + input.owners[e] * input.dim + left;
      const double scale = input.scale(e);
      for (std::size_t d = 0; d < width; ++d) {
        sums[d] += winners[d] == e ? static_cast<double>(g[d]) * scale : 0.0;
      }
    }
  }
  for (std::size_t d = 0; d < width; ++d) {
    out[left + d] = static_cast<float>(sums[d]);
  }
}

template <Contribution contribution>
SHOAL_INLINE void add_keys(const GradientInput& input, std::size_t first, std::size_t last,
                           float* out) noexcept {
  for (std::size_t u = first; u < last; ++u) {
    by_strips(input.dim, [&]<std::size_t width>(std::size_t left) SHOAL_ALWAYS {
      add_gradients<width, contribution>(input, input.group_offsets[u], input.group_offsets[u + 1], left,
                                         out + u * input.dim);
    });
  }
}

SHOAL_CLONES void add_plain_keys(const GradientInput& input, std::size_t first, std::size_t last,
                                 float* out) noexcept {
  add_keys<Contribution::kPlain>(input, first, last, out);
}

SHOAL_CLONES void add_scaled_keys(const GradientInput& input, std::size_t first, std::size_t last,
                                  float* out) noexcept {
  add_keys<Contribution::kScaled>(input, first, last, out);
}

SHOAL_CLONES void add_won_keys(const GradientInput& input, std::size_t first, std::size_t last,
                               float* out) noexcept {
  add_keys<Contribution::kWon>(input, first, last, out);
}

// The gradients of the values in the bags from `first` to `last`: products <v_e, g_i> in float64 from front
// to back, of the columns that e has won where there are winners.
void multiply(const Bags& bags, Pooling pooling, const float* grads, const std::uint32_t* winners,
              std::size_t first, std::size_t last, float* out) noexcept {
  for (std::size_t i = first; i < last; ++i) {
    const float* const g = grads + i * bags.dim;
    const auto begin = static_cast<std::size_t>(bags.indptr[i]);
    const auto end = static_cast<std::size_t>(bags.indptr[i + 1]);
    const auto product = [&](std::size_t e) noexcept {
      const float* const v = bags.row(e);
      double sum = 0.0;
      for (std::size_t d = 0; d < bags.dim; ++d) {
        const bool counts = winners == nullptr || winners[i * bags.dim + d] == e;
        sum += counts ? static_cast<double>(v[d]) * static_cast<double>(g[d]) : 0.0;
      }
      return sum;
    };
    if (!is_divided(pooling)) {
      for (std::size_t e = begin; e < end; ++e) {
        bags.fetch(e, 0);
        out[e] = static_cast<float>(product(e));
      }
      continue;
    }
    double of_bag = 0.0;  // <y_i, g_i>
    const double divisor = divisor_of(pooling, bags.values, begin, end);
    for (std::size_t e = begin; e < end; ++e) {
      bags.fetch(e, 0);
      of_bag += product(e) * static_cast<double>(bags.value(e)) / divisor;
    }
    for (std::size_t e = begin; e < end; ++e) {
      const double slope = pooling == Pooling::kMean ? 1.0 : static_cast<double>(bags.value(e)) / divisor;
      out[e] = static_cast<float>((product(e) - of_bag * slope) / divisor);
    }
  }
}

void check_rows(std::size_t got, std::size_t rows, std::size_t dim, const char* name, const char* of) {
  SHOAL_CHECK(got == rows * dim, std::string(name) + " must have " + std::to_string(dim) +
                                     " numbers for each of the " + std::to_string(rows) + " " + of +
                                     ", got " + std::to_string(got));
}

// The number of unique keys; throws unless all indexes are in range.
std::size_t check_bags(const Examples& bags, std::size_t rows, std::size_t dim) {
  SHOAL_CHECK(dim > 0, "dim must be 1 or more");
  SHOAL_CHECK(rows % dim == 0, "rows must have " + std::to_string(dim) + " numbers each, got " +
                                   std::to_string(rows) + " in all");
  SHOAL_CHECK(!bags.bias, "a bag has no bias");
  check_examples(bags, rows / dim);
  return rows / dim;
}

Bags bags_of(const Examples& bags, const float* rows, std::size_t dim) noexcept {
  return {bags.indptr.data(),
          bags.columns.data(),
          bags.values.empty() ? nullptr : bags.values.data(),
          bags.columns.size(),
          rows,
          dim};
}

void check_pooling(Pooling pooling, const Examples& bags, std::span<const std::uint32_t> winners,
                   std::size_t dim) {
  check_rows(winners.size(), pooling == Pooling::kMax ? bags.size() : 0, dim, "winners", "bags");
  SHOAL_CHECK(bags.columns.size() < kNoWinner,
              "a batch has fewer than 2^32 - 1 entries, got " + std::to_string(bags.columns.size()));
}

}  // namespace

void pool_rows(Pooling pooling, const Examples& bags, std::span<const float> rows, std::size_t dim,
               std::span<float> out, std::span<std::uint32_t> winners, ThreadPool& pool) {
  check_bags(bags, rows.size(), dim);
  check_pooling(pooling, bags, winners, dim);
  check_rows(out.size(), bags.size(), dim, "out", "bags");
  const Bags views = bags_of(bags, rows.data(), dim);
  each_piece(
      bags, pool,
      [&](std::size_t begin, std::size_t end) {
        if (pooling == Pooling::kMax) {
          const auto greatest = views.values == nullptr ? greatest_of_plain_bags : greatest_of_valued_bags;
          greatest(views, begin, end, out.data(), winners.data());
        } else {
          const auto add = views.values == nullptr ? add_plain_bags : add_valued_bags;
          add(views, pooling, begin, end, out.data());
        }
      },
      dim);
}

void pool_gradient(Pooling pooling, const Examples& bags, std::span<const float> grads,
                   std::span<const std::uint32_t> winners, std::size_t dim, Occurrences occurrences,
                   std::span<float> out, ThreadPool& pool, GradientScratch& scratch) {
  const std::size_t keys = check_bags(bags, out.size(), dim);
  check_pooling(pooling, bags, winners, dim);
  check_rows(grads.size(), bags.size(), dim, "grads", "bags");
  SHOAL_CHECK(occurrences.group_offsets.size() == keys + 1 &&
                  occurrences.order.size() == bags.columns.size() &&
                  occurrences.group_offsets.back() == occurrences.order.size(),
              "occurrences of another batch");
  const auto owners = owners_of(bags, scratch.owners, pool);
  const float* const values = bags.values.empty() ? nullptr : bags.values.data();
  const bool divided = is_divided(pooling);
  const auto divisors = scratch.numbers.claim(divided ? bags.size() : 0);
  for (std::size_t i = 0; i < divisors.size(); ++i) {
    divisors[i] = divisor_of(pooling, values, begin_of(bags, i), begin_of(bags, i + 1));
  }
  const GradientInput input{occurrences.order.data(),
                            occurrences.group_offsets.data(),
                            occurrences.order.size(),
                            owners.data(),
                            divided ? divisors.data() : nullptr,
                            values,
                            pooling == Pooling::kMax ? winners.data() : nullptr,
                            grads.data(),
                            dim};
  each_run_of_keys(occurrences, dim, pool, [&](std::size_t begin, std::size_t end) {
    if (pooling == Pooling::kMax) {
      add_won_keys(input, begin, end, out.data());
    } else if (divided || values != nullptr) {
      add_scaled_keys(input, begin, end, out.data());
    } else {
      add_plain_keys(input, begin, end, out.data());
    }
  });
}

void pool_values_gradient(Pooling pooling, const Examples& bags, std::span<const float> rows,
                          std::span<const float> grads, std::span<const std::uint32_t> winners,
                          std::size_t dim, std::span<float> out, ThreadPool& pool) {
  check_bags(bags, rows.size(), dim);
  check_pooling(pooling, bags, winners, dim);
  check_rows(grads.size(), bags.size(), dim, "grads", "bags");
  check_rows(out.size(), bags.columns.size(), 1, "out", "entries");
  const Bags views = bags_of(bags, rows.data(), dim);
  each_piece(
      bags, pool,
      [&](std::size_t begin, std::size_t end) {
        multiply(views, pooling, grads.data(), pooling == Pooling::kMax ? winners.data() : nullptr, begin,
                 end, out.data());
      },
      dim);
}

}  // namespace shoal

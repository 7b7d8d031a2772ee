// The factorization machine's kernel compared with its equations, written out over all pairs.

#include "kernel/fm.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <vector>

#include "base/threads.h"
#include "check.h"
#include "random_batch.h"

namespace shoal::fm_test {

namespace {

constexpr std::size_t kDims[] = {1, 2, 3, 4, 7, 8, 16, 17, 40};

long double product(const Batch& batch, const std::vector<float>& factors, std::size_t dim, std::size_t e,
                    std::size_t d) {
  return static_cast<long double>(factors[batch.columns[e] * dim + d]) *
         static_cast<long double>(value_of(batch, e));
}

struct Result {
  std::vector<double> margins;
  std::vector<double> sums;
};

Result margins_of(const Batch& batch, const std::vector<float>& weights, const std::vector<float>& factors,
                  std::size_t dim, ThreadPool& pool) {
  Result result{std::vector<double>(batch.size(), -1.0), std::vector<double>(batch.size() * dim, -1.0)};
  fm_margins(batch.examples(), weights, factors, dim, result.margins, result.sums, pool);
  return result;
}

std::vector<float> gradient_of(const Batch& batch, const std::vector<float>& factors, std::size_t dim,
                               const std::vector<double>& sums, const std::vector<double>& slopes,
                               ThreadPool& pool) {
  GradientScratch scratch;
  std::vector<float> out(batch.keys * dim, 7.0F);
  fm_gradient(batch.examples(), factors, dim, sums, slopes, batch.occurrences(), out, pool, scratch);
  return out;
}

std::vector<double> random_slopes(std::size_t n, std::uint64_t seed) {
  const auto floats = random_floats(n, seed);
  return {floats.begin(), floats.end()};
}

}  // namespace

TEST_OF_ONE_THREAD(margins_add_the_inner_product_of_every_pair_to_those_of_logistic_regression) {
  for (const Batch& batch : defined_batches()) {
    const std::size_t dim = kDims[batch.columns.size() % std::size(kDims)];
    const auto weights = random_floats(batch.keys, 2);
    const auto factors = random_floats(batch.keys * dim, 3);
    const Result got = margins_of(batch, weights, factors, dim, *pools()[0]);
    std::vector<double> linear(batch.size());
    margins(batch.examples(), weights, linear, *pools()[0]);
    for (std::size_t i = 0; i < batch.size(); ++i) {
      auto want = static_cast<long double>(linear[i]);
      long double size = std::abs(want);
      const auto begin = static_cast<std::size_t>(batch.indptr[i]);
      const auto end = static_cast<std::size_t>(batch.indptr[i + 1]);
      for (std::size_t d = 0; d < dim; ++d) {
        for (std::size_t e = begin; e < end; ++e) {
          for (std::size_t f = e + 1; f < end; ++f) {
            const long double pair = product(batch, factors, dim, e, d) * product(batch, factors, dim, f, d);
            want += pair;
            size += std::abs(pair);
          }
        }
      }
      CHECK_NEAR(static_cast<long double>(got.margins[i]), want, 60 * 0x1p-53L * size);
    }
  }
}

TEST_OF_ONE_THREAD(the_gradient_adds_slope_times_value_times_what_the_other_entries_sum_to) {
  for (const Batch& batch : defined_batches()) {
    const std::size_t dim = kDims[(batch.columns.size() + 1) % std::size(kDims)];
    const auto factors = random_floats(batch.keys * dim, 3);
    const auto slopes = random_slopes(batch.size(), 5);
    const Result at = margins_of(batch, random_floats(batch.keys, 2), factors, dim, *pools()[0]);
    const auto got = gradient_of(batch, factors, dim, at.sums, slopes, *pools()[0]);
    std::vector<long double> want(batch.keys * dim), size(batch.keys * dim);
    for (std::size_t i = 0; i < batch.size(); ++i) {
      const auto begin = static_cast<std::size_t>(batch.indptr[i]);
      const auto end = static_cast<std::size_t>(batch.indptr[i + 1]);
      for (std::size_t d = 0; d < dim; ++d) {
        for (std::size_t e = begin; e < end; ++e) {
          long double others = 0;
          long double others_size = 0;
          for (std::size_t f = begin; f < end; ++f) {
            if (f != e) {
              others += product(batch, factors, dim, f, d);
            }
            others_size += std::abs(product(batch, factors, dim, f, d));
          }
          const long double scale =
              static_cast<long double>(slopes[i]) * static_cast<long double>(value_of(batch, e));
          want[batch.columns[e] * dim + d] += scale * others;
          size[batch.columns[e] * dim + d] += std::abs(scale) * others_size;
        }
      }
    }
    for (std::size_t k = 0; k < want.size(); ++k) {
      CHECK_NEAR(static_cast<long double>(got[k]), want[k],
                 0x1p-24L * std::abs(want[k]) + 0x1p-40L * size[k]);
    }
  }
}

TEST(the_bits_are_the_same_for_every_number_of_threads) {
  for (const Batch& batch : batches()) {
    for (const std::size_t dim : {std::size_t{3}, std::size_t{8}, std::size_t{21}}) {
      const auto weights = random_floats(batch.keys, 2);
      const auto factors = random_floats(batch.keys * dim, 3);
      const auto slopes = random_slopes(batch.size(), 5);
      const Result first = margins_of(batch, weights, factors, dim, *pools()[0]);
      const auto gradient = gradient_of(batch, factors, dim, first.sums, slopes, *pools()[0]);
      for (ThreadPool* pool : pools()) {
        const Result again = margins_of(batch, weights, factors, dim, *pool);
        CHECK(same_bits(first.margins, again.margins));
        CHECK(same_bits(first.sums, again.sums));
        CHECK(same_bits(gradient, gradient_of(batch, factors, dim, again.sums, slopes, *pool)));
      }
    }
  }
}

TEST_OF_ONE_THREAD(a_column_of_factors_does_not_feel_how_many_others_there_are) {
  const Batch batch = random_batch(400, 9, 50, true, Bias::kAlone, 3);
  const std::size_t wide = 23;
  const auto factors = random_floats(batch.keys * wide, 3);
  const auto weights = random_floats(batch.keys, 2);
  const auto slopes = random_slopes(batch.size(), 5);
  const Result at = margins_of(batch, weights, factors, wide, *pools()[0]);
  const auto gradient = gradient_of(batch, factors, wide, at.sums, slopes, *pools()[0]);
  for (std::size_t d = 0; d < wide; ++d) {
    std::vector<float> column(batch.keys), part(batch.keys);
    for (std::size_t u = 0; u < batch.keys; ++u) {
      column[u] = factors[u * wide + d];
      part[u] = gradient[u * wide + d];
    }
    const Result alone = margins_of(batch, weights, column, 1, *pools()[0]);
    CHECK(same_bits(part, gradient_of(batch, column, 1, alone.sums, slopes, *pools()[0])));
  }
}

TEST_OF_ONE_THREAD(the_gradient_of_the_factors_is_the_derivative_of_the_weighted_loss) {
  const std::size_t dim = 5;
  const Batch batch = random_batch(50, 5, 20, true, Bias::kAlone, 9);
  const auto labels = random_labels(50, 9);
  auto scale = random_floats(50, 4);
  std::for_each(scale.begin(), scale.end(), [](float& v) { v = std::abs(v); });
  const auto weights = random_floats(batch.keys, 9);
  auto factors = random_floats(batch.keys * dim, 8);
  ThreadPool& pool = *pools()[0];
  std::vector<double> slopes(50);
  const Result at = margins_of(batch, weights, factors, dim, pool);
  losses(at.margins, labels, scale, slopes, pool);
  const auto got = gradient_of(batch, factors, dim, at.sums, slopes, pool);
  for (std::size_t k = 0; k < factors.size(); ++k) {
    const float v = factors[k];
    const float step = 0x1p-14F;
    double loss[2];
    for (const int side : {0, 1}) {
      factors[k] = side == 0 ? v - step : v + step;
      loss[side] = losses(margins_of(batch, weights, factors, dim, pool).margins, labels, scale, pool) /
                   (2.0 * static_cast<double>(step));
    }
    factors[k] = v;
    CHECK_NEAR(static_cast<double>(got[k]), loss[1] - loss[0],
               1e-2 * (1.0 + std::abs(static_cast<double>(got[k]))));
  }
}

TEST_OF_ONE_THREAD(an_example_of_one_feature_has_no_interaction_and_its_factors_no_gradient_to_the_bit) {
  Batch batch;
  batch.columns = {0, 1, 2};
  batch.values = {0.1F, 3e-7F, 1234.567F};
  batch.indptr = {0, 1, 2, 3};
  batch.bias = 3;
  batch.index(4);
  const auto weights = random_floats(4, 1);
  const auto factors = random_floats(4 * 8, 2);
  const Result at = margins_of(batch, weights, factors, 8, *pools()[0]);
  std::vector<double> linear(3);
  margins(batch.examples(), weights, linear, *pools()[0]);
  CHECK(same_bits(at.margins, linear));
  for (const float g : gradient_of(batch, factors, 8, at.sums, {0.3, -0.7, 1e9}, *pools()[0])) {
    CHECK_EQ(g, 0.0F);
  }
}

TEST_OF_ONE_THREAD(a_key_that_an_example_has_twice_interacts_with_itself) {
  Batch batch;
  batch.columns = {0, 0};
  batch.values = {2.0F, 3.0F};
  batch.indptr = {0, 2};
  batch.index(1);
  const std::vector<float> factors{0.5F, -1.0F};
  const Result at = margins_of(batch, {0.0F}, factors, 2, *pools()[0]);
  CHECK_EQ(at.margins[0], (0.25 + 1.0) * 6.0);
  const auto g = gradient_of(batch, factors, 2, at.sums, {1.0}, *pools()[0]);
  CHECK_EQ(g[0], 0.5F * 12.0F);  // d(6 v^2) = 12 v
  CHECK_EQ(g[1], -1.0F * 12.0F);
}

TEST_OF_ONE_THREAD(arrays_that_do_not_fit_together_are_refused_before_anything_is_written) {
  const Batch batch = random_batch(40, 9, 50, true, Bias::kAlone, 1);
  const std::size_t dim = 3;
  const auto weights = random_floats(batch.keys, 1);
  const auto factors = random_floats(batch.keys * dim, 2);
  std::vector<double> a(40, 7.0), sums(40 * dim, 7.0), slopes(40);
  std::vector<float> out(batch.keys * dim, 7.0F);
  ThreadPool& pool = *pools()[1];
  GradientScratch scratch;
  const Examples good = batch.examples();
  const auto fewer = [](auto& numbers) { return std::span(numbers).first(numbers.size() - 1); };
  CHECK_THROWS(fm_margins(good, weights, factors, 0, a, sums, pool), "dim must be 1 or more");
  CHECK_THROWS(fm_margins(good, weights, fewer(factors), dim, a, sums, pool), "factors must have 3 numbers");
  CHECK_THROWS(fm_margins(good, weights, factors, dim, a, fewer(sums), pool), "sums must have 3 numbers");
  CHECK_THROWS(fm_margins(good, weights, factors, dim, fewer(a), sums, pool), "margins must have one");
  CHECK_THROWS(fm_margins({good.indptr.first(40), good.columns, good.values, good.bias}, weights, factors,
                          dim, fewer(a), std::span(sums).first(39 * dim), pool),
               "indptr must end");
  const Occurrences there = batch.occurrences();
  const auto refuses = [&](std::size_t d, std::span<const float> v, std::span<const double> s,
                           std::span<const double> slope, Occurrences where, std::span<float> to,
                           const char* part) {
    CHECK_THROWS(fm_gradient(good, v, d, s, slope, where, to, pool, scratch), part);
  };
  refuses(0, factors, sums, slopes, there, out, "dim must be 1 or more");
  refuses(dim, fewer(factors), sums, slopes, there, out, "factors must have 3 numbers");
  refuses(dim, factors, fewer(sums), slopes, there, out, "sums must have 3 numbers");
  refuses(dim, factors, sums, fewer(slopes), there, out, "slopes must have one");
  refuses(dim, factors, sums, slopes, there, fewer(out), "gradient must have 3 numbers");
  refuses(dim, factors, sums, slopes, {}, out, "occurrences of another batch");
  refuses(dim, factors, sums, slopes, {there.order, fewer(batch.group_offsets)}, out,
          "occurrences of another batch");
  refuses(dim, factors, sums, slopes, {there.order.first(10), there.group_offsets}, out,
          "occurrences of another batch");
  CHECK(a == std::vector<double>(40, 7.0));
  CHECK(sums == std::vector<double>(40 * dim, 7.0));
  CHECK(out == std::vector<float>(batch.keys * dim, 7.0F));
}

}  // namespace shoal::fm_test

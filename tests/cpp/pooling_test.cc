// The pooling of bags compared with its definition, entry by entry.

#include "kernel/pooling.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "check.h"
#include "random_batch.h"

namespace shoal::pooling_test {

namespace {

constexpr std::size_t kDims[] = {1, 2, 3, 4, 7, 16, 17, 40};
constexpr Pooling kPoolings[] = {Pooling::kSum, Pooling::kMean, Pooling::kSqrtn, Pooling::kMax};

// Batches without a bias.
std::vector<Batch> bags_of(std::vector<Batch> some) {
  std::vector<Batch> all;
  for (Batch& batch : some) {
    if (!batch.bias) {
      all.push_back(std::move(batch));
    }
  }
  return all;
}

struct Pooled {
  std::vector<float> rows;
  std::vector<std::uint32_t> winners;
};

Pooled pooled(Pooling pooling, const Batch& batch, const std::vector<float>& rows, std::size_t dim,
              ThreadPool& pool) {
  Pooled result{std::vector<float>(batch.size() * dim, 7.0F),
                std::vector<std::uint32_t>(pooling == Pooling::kMax ? batch.size() * dim : 0, 5)};
  pool_rows(pooling, batch.examples(), rows, dim, result.rows, result.winners, pool);
  return result;
}

std::vector<float> gradient_of(Pooling pooling, const Batch& batch, const std::vector<float>& grads,
                               const std::vector<std::uint32_t>& winners, std::size_t dim, ThreadPool& pool) {
  GradientScratch scratch;
  std::vector<float> out(batch.keys * dim, 7.0F);
  pool_gradient(pooling, batch.examples(), grads, winners, dim, batch.occurrences(), out, pool, scratch);
  return out;
}

// The sum of a bag is divided by this; 0: it has no entries, or they cancel.
double divisor_of(Pooling pooling, const Batch& batch, std::size_t i) {
  double sum = 0;
  for (auto e = static_cast<std::size_t>(batch.indptr[i]); e < static_cast<std::size_t>(batch.indptr[i + 1]);
       ++e) {
    const auto x = static_cast<double>(value_of(batch, e));
    sum += pooling == Pooling::kSqrtn ? x * x : x;
  }
  return pooling == Pooling::kSqrtn ? std::sqrt(sum) : (pooling == Pooling::kMean ? sum : 1.0);
}

float product_of(const Batch& batch, const std::vector<float>& rows, std::size_t dim, std::size_t e,
                 std::size_t d) {
  return rows[batch.columns[e] * dim + d] * value_of(batch, e);
}

// The contribution of entry e of bag i to column d, and its share of the gradient.
double share(Pooling pooling, const Batch& batch, const std::vector<std::uint32_t>& winners, std::size_t dim,
             std::size_t i, std::size_t e, std::size_t d) {
  if (pooling == Pooling::kMax) {
    return winners[i * dim + d] == e ? static_cast<double>(value_of(batch, e)) : 0.0;
  }
  const double divisor = divisor_of(pooling, batch, i);
  return divisor == 0.0 ? 0.0 : static_cast<double>(value_of(batch, e)) / divisor;
}

bool near(float got, double want, double size) {
  return std::abs(static_cast<double>(got) - want) <= 1e-6 * (size + 1e-3);
}

}  // namespace

TEST_OF_ONE_THREAD(a_bag_is_the_sum_the_mean_or_the_greatest_of_its_weighted_rows) {
  for (const Pooling pooling : kPoolings) {
    for (const Batch& batch : bags_of(defined_batches())) {
      const std::size_t dim = kDims[batch.columns.size() % std::size(kDims)];
      const auto rows = random_floats(batch.keys * dim, 3);
      const auto [out, winners] = pooled(pooling, batch, rows, dim, *pools()[1]);
      for (std::size_t i = 0; i < batch.size(); ++i) {
        for (std::size_t d = 0; d < dim; ++d) {
          double sum = 0;
          double size = 0;
          std::uint32_t winner = kNoWinner;
          for (auto e = static_cast<std::size_t>(batch.indptr[i]);
               e < static_cast<std::size_t>(batch.indptr[i + 1]); ++e) {
            const float v = rows[batch.columns[e] * dim + d];
            if (winner == kNoWinner ||
                product_of(batch, rows, dim, e, d) > product_of(batch, rows, dim, winner, d)) {
              winner = static_cast<std::uint32_t>(e);
            }
            if (pooling != Pooling::kMax) {
              const double term = static_cast<double>(v) * share(pooling, batch, {}, dim, i, e, d);
              sum += term;
              size += std::abs(term);
            }
          }
          if (pooling == Pooling::kMax) {
            CHECK(winners[i * dim + d] == winner);
            CHECK(out[i * dim + d] == (winner == kNoWinner ? 0.0F : product_of(batch, rows, dim, winner, d)));
          } else {
            CHECK(near(out[i * dim + d], sum, size));
          }
        }
      }
    }
  }
}

TEST_OF_ONE_THREAD(the_gradient_of_a_key_is_the_sum_over_its_places) {
  for (const Pooling pooling : kPoolings) {
    for (const Batch& batch : bags_of(defined_batches())) {
      const std::size_t dim = kDims[batch.columns.size() % std::size(kDims)];
      const auto rows = random_floats(batch.keys * dim, 3);
      const auto grads = random_floats(batch.size() * dim, 4);
      const auto winners = pooled(pooling, batch, rows, dim, *pools()[0]).winners;
      const auto got = gradient_of(pooling, batch, grads, winners, dim, *pools().back());
      std::vector<double> want(batch.keys * dim, 0.0);
      std::vector<double> size(batch.keys * dim, 0.0);
      for (std::size_t i = 0; i < batch.size(); ++i) {
        for (auto e = static_cast<std::size_t>(batch.indptr[i]);
             e < static_cast<std::size_t>(batch.indptr[i + 1]); ++e) {
          for (std::size_t d = 0; d < dim; ++d) {
            const double term =
                share(pooling, batch, winners, dim, i, e, d) * static_cast<double>(grads[i * dim + d]);
            want[batch.columns[e] * dim + d] += term;
            size[batch.columns[e] * dim + d] += std::abs(term);
          }
        }
      }
      for (std::size_t k = 0; k < want.size(); ++k) {
        CHECK(near(got[k], want[k], size[k]));
      }
    }
  }
}

// By differences of the pooled rows in float64: the derivative of <y_i, g_i> by x_e.
TEST_OF_ONE_THREAD(the_gradient_of_a_value_is_that_of_its_bag) {
  constexpr double kStep = 1e-5;
  for (const Pooling pooling : kPoolings) {
    for (const Batch& batch : bags_of(defined_batches())) {
      const std::size_t dim = kDims[batch.columns.size() % std::size(kDims)];
      const auto rows = random_floats(batch.keys * dim, 3);
      const auto grads = random_floats(batch.size() * dim, 4);
      const auto winners = pooled(pooling, batch, rows, dim, *pools()[0]).winners;
      std::vector<float> out(batch.columns.size(), 7.0F);
      pool_values_gradient(pooling, batch.examples(), rows, grads, winners, dim, out, *pools()[1]);
      for (std::size_t i = 0; i < batch.size(); ++i) {
        const auto begin = static_cast<std::size_t>(batch.indptr[i]);
        const auto end = static_cast<std::size_t>(batch.indptr[i + 1]);
        std::vector<double> products(end - begin, 0.0);  // <v_e, g_i>, of what e has won
        double size = 0;
        for (std::size_t e = begin; e < end; ++e) {
          for (std::size_t d = 0; d < dim; ++d) {
            if (pooling != Pooling::kMax || winners[i * dim + d] == e) {
              const double term = static_cast<double>(rows[batch.columns[e] * dim + d]) *
                                  static_cast<double>(grads[i * dim + d]);
              products[e - begin] += term;
              size += std::abs(term);
            }
          }
        }
        const auto loss = [&](std::size_t bumped, double by) {
          double sum = 0;
          double divisor = 0;
          for (std::size_t e = begin; e < end; ++e) {
            const double x = static_cast<double>(value_of(batch, e)) + (e == bumped ? by : 0.0);
            sum += x * products[e - begin];
            divisor += pooling == Pooling::kSqrtn ? x * x : x;
          }
          return sum / (pooling == Pooling::kSqrtn ? std::sqrt(divisor)
                                                   : (pooling == Pooling::kMean ? divisor : 1.0));
        };
        const double divisor = divisor_of(pooling, batch, i);
        if (std::abs(divisor) < 1) {
          continue;  // differences are of no use near a pole; the next test has a divisor of 0
        }
        for (std::size_t e = begin; e < end; ++e) {
          const double want = (loss(e, kStep) - loss(e, -kStep)) / (2 * kStep);
          CHECK(std::abs(static_cast<double>(out[e]) - want) <= 1e-5 * (size + std::abs(want) + 1e-3));
        }
      }
    }
  }
}

TEST_OF_ONE_THREAD(a_bag_whose_divisor_is_0_gives_zeros) {
  Batch batch;
  batch.columns = {0, 1};
  batch.indptr = {0, 2};
  batch.index(2);
  const std::vector<float> rows{2.0F, 3.0F};
  for (const Pooling pooling : {Pooling::kMean, Pooling::kSqrtn}) {
    batch.values = pooling == Pooling::kMean ? std::vector{1.0F, -1.0F} : std::vector{0.0F, 0.0F};
    CHECK(pooled(pooling, batch, rows, 1, *pools()[0]).rows[0] == 0.0F);
    CHECK(gradient_of(pooling, batch, {1.0F}, {}, 1, *pools()[0]) == std::vector<float>(2, 0.0F));
    std::vector<float> out(2, 7.0F);
    pool_values_gradient(pooling, batch.examples(), rows, std::vector{1.0F}, {}, 1, out, *pools()[0]);
    CHECK(out == std::vector<float>(2, 0.0F));
  }
}

TEST(pooling_has_the_same_bits_in_any_number_of_threads) {
  for (const Pooling pooling : kPoolings) {
    for (const Batch& batch : bags_of(batches())) {
      const std::size_t dim = 16;
      const auto rows = random_floats(batch.keys * dim, 3);
      const auto grads = random_floats(batch.size() * dim, 4);
      const auto first = pooled(pooling, batch, rows, dim, *pools()[0]);
      const auto first_gradient = gradient_of(pooling, batch, grads, first.winners, dim, *pools()[0]);
      std::vector<float> first_values(batch.columns.size());
      pool_values_gradient(pooling, batch.examples(), rows, grads, first.winners, dim, first_values,
                           *pools()[0]);
      for (ThreadPool* pool : pools()) {
        const auto again = pooled(pooling, batch, rows, dim, *pool);
        CHECK(same_bits(first.rows, again.rows));
        CHECK(first.winners == again.winners);
        CHECK(same_bits(first_gradient, gradient_of(pooling, batch, grads, first.winners, dim, *pool)));
        std::vector<float> values(batch.columns.size());
        pool_values_gradient(pooling, batch.examples(), rows, grads, first.winners, dim, values, *pool);
        CHECK(same_bits(first_values, values));
      }
    }
  }
}

TEST_OF_ONE_THREAD(a_nan_is_the_greatest_only_where_it_comes_first) {
  Batch batch;
  batch.columns = {0, 1, 1, 0};
  batch.indptr = {0, 2, 4};
  batch.index(2);
  const std::vector<float> rows{std::numeric_limits<float>::quiet_NaN(), 1.0F};
  const auto [out, winners] = pooled(Pooling::kMax, batch, rows, 1, *pools()[0]);
  CHECK(std::isnan(out[0]) && winners[0] == 0);
  CHECK(out[1] == 1.0F && winners[1] == 2);
}

TEST_OF_ONE_THREAD(pooling_refuses_what_does_not_fit_together) {
  const Batch plain = random_batch(7, 4, 3, false, Bias::kNone, 1);
  const Batch biased = random_batch(7, 4, 3, false, Bias::kAlone, 1);
  ThreadPool& pool = *pools()[0];
  const auto rows = random_floats(8, 3);
  std::vector<float> out(14);
  std::vector<std::uint32_t> winners(14);
  const auto refuses = [&](Pooling pooling, const Batch& batch, std::size_t dim, std::size_t numbers,
                           std::size_t given, std::size_t room, const char* says) {
    CHECK_THROWS(pool_rows(pooling, batch.examples(), std::span(rows).first(numbers), dim,
                           std::span(out).first(room), std::span(winners).first(given), pool),
                 says);
  };
  refuses(Pooling::kSum, plain, 0, 6, 0, 14, "dim must be 1 or more");
  refuses(Pooling::kSum, plain, 2, 5, 0, 14, "rows must have 2 numbers each, got 5 in all");
  refuses(Pooling::kSum, plain, 2, 4, 0, 14, "there are only 2");
  refuses(Pooling::kSum, plain, 2, 6, 0, 12, "out must have 2 numbers for each of the 7 bags, got 12");
  refuses(Pooling::kSum, plain, 2, 6, 14, 14, "winners must have 2 numbers for each of the 0 bags, got 14");
  refuses(Pooling::kMax, plain, 2, 6, 0, 14, "winners must have 2 numbers for each of the 7 bags, got 0");
  refuses(Pooling::kSum, biased, 2, 8, 0, 14, "a bag has no bias");
}

}  // namespace shoal::pooling_test

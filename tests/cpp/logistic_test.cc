// The logistic kernel compared with a plain implementation of the equations.

#include "kernel/logistic.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <random>
#include <span>
#include <vector>

#include "base/threads.h"
#include "check.h"
#include "random_batch.h"

namespace shoal::logistic_test {

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

}  // namespace

TEST(margins_are_the_sums_of_weight_times_value) {
  for (const Batch& batch : batches()) {
    const auto weights = random_floats(batch.keys, 2);
    std::vector<std::vector<double>> results;
    for (ThreadPool* pool : pools()) {
      std::vector<double> out(batch.size(), -1.0);
      margins(batch.examples(), weights, out, *pool);
      results.push_back(out);
      CHECK(same_bits(results[0], out));
    }
    for (std::size_t i = 0; i < batch.size(); ++i) {
      long double sum = batch.bias ? static_cast<long double>(weights[*batch.bias]) : 0.0L;
      long double size = std::abs(sum);
      for (auto e = static_cast<std::size_t>(batch.indptr[i]);
           e < static_cast<std::size_t>(batch.indptr[i + 1]); ++e) {
        const auto term = static_cast<long double>(weights[batch.columns[e]]) *
                          static_cast<long double>(value_of(batch, e));
        sum += term;
        size += std::abs(term);
      }
      CHECK_NEAR(static_cast<long double>(results[0][i]), sum, 40 * 0x1p-53L * size);
    }
  }
}

TEST(losses_and_slopes_have_the_values_of_the_reference) {
  std::vector<double> slopes(3);
  const std::vector<double> a{2.0, 0.0, -2.0};
  const double sum = losses(a, std::vector<float>{1, 0, 0}, {}, slopes, *pools()[0]);
  CHECK_NEAR(slopes[0], -0.11920292202211755, 1e-16);
  CHECK_NEAR(slopes[1], 0.5, 0.0);
  CHECK_NEAR(slopes[2], 0.11920292202211755, 1e-16);
  CHECK_NEAR(sum, 2 * 0.12692801104297249 + 0.6931471805599453, 1e-15);
}

TEST(losses_and_slopes_equal_the_equations_at_every_margin) {
  for (double a = -800.0; a <= 800.0; a += 0.37) {
    for (const float y : {0.0F, 1.0F}) {
      std::vector<double> slope(1);
      const std::vector<double> margin{a};
      const double loss = losses(margin, std::vector<float>{y}, {}, slope, *pools()[0]);
      const auto wide = static_cast<long double>(a);
      const long double want_loss =
          std::max(wide, 0.0L) - wide * static_cast<long double>(y) + std::log1p(std::exp(-std::abs(wide)));
      const long double p = 1.0L / (1.0L + std::exp(-wide));
      const long double want_slope = y == 0.0F ? p : -1.0L / (1.0L + std::exp(wide));
      CHECK_NEAR(static_cast<long double>(loss), want_loss, 4 * 0x1p-53L * want_loss + 1e-320L);
      CHECK_NEAR(static_cast<long double>(slope[0]), want_slope,
                 4 * 0x1p-53L * std::abs(want_slope) + 1e-320L);
      CHECK_EQ(loss, losses(margin, std::vector<float>{y}, {}, *pools()[0]));
      std::vector<double> out(1);
      probabilities(margin, out, *pools()[0]);
      CHECK_NEAR(static_cast<long double>(out[0]), p, 4 * 0x1p-53L * p + 1e-320L);
    }
  }
}

TEST(a_hopeless_margin_has_a_finite_slope_and_an_infinite_one_is_right_or_infinitely_wrong) {
  std::vector<double> slopes(4);
  CHECK_EQ(losses(std::vector<double>{kInf, -kInf}, std::vector<float>{1, 0}, {}, std::span(slopes).first(2),
                  *pools()[0]),
           0.0);
  CHECK_EQ(slopes[0], 0.0);
  CHECK_EQ(slopes[1], 0.0);
  CHECK_EQ(losses(std::vector<double>{1e300, -1e300}, std::vector<float>{0, 1}, {},
                  std::span(slopes).first(2), *pools()[0]),
           2e300);
  CHECK_EQ(slopes[0], 1.0);
  CHECK_EQ(slopes[1], -1.0);
  CHECK_EQ(losses(std::vector<double>{kInf}, std::vector<float>{0}, {}, *pools()[0]), kInf);
}

TEST(example_weights_multiply_losses_and_slopes) {
  std::vector<double> slopes(2);
  const std::vector<double> a{2.0, -1.0};
  const std::vector<float> labels{1, 0}, weights{10.0F, 0.5F};
  const double sum = losses(a, labels, weights, slopes, *pools()[0]);
  std::vector<double> plain(2);
  losses(a, labels, {}, plain, *pools()[0]);
  CHECK_EQ(slopes[0], 10.0 * plain[0]);
  CHECK_EQ(slopes[1], 0.5 * plain[1]);
  CHECK_NEAR(sum, 10 * 0.12692801104297249 + 0.5 * 0.31326168751822286, 1e-14);
}

TEST(example_weights_that_are_negative_or_not_finite_are_refused_before_anything_is_written) {
  const std::vector<double> a{2.0, -1.0};
  for (const float wrong : {-1.0F, std::nanf(""), std::numeric_limits<float>::infinity()}) {
    std::vector<double> slopes(2, 7.0);
    const std::vector<float> labels{1, 0}, weights{1.0F, wrong};
    CHECK_THROWS(losses(a, labels, weights, slopes, *pools()[0]), "at position 1");
    CHECK_EQ(slopes[0], 7.0);
    CHECK_EQ(slopes[1], 7.0);
  }
}

TEST(losses_are_added_in_one_order_for_every_number_of_threads) {
  for (const std::size_t n : {0U, 1U, 1023U, 1024U, 1025U, 16'384U, 16'385U, 50'000U}) {
    std::mt19937_64 random(n);
    std::vector<double> a(n);
    for (auto& margin : a) {
      margin =
          std::ldexp(static_cast<double>(random() % 2001) - 1000.0, static_cast<int>(random() % 20) - 12);
    }
    const auto labels = random_labels(n, n);
    auto weights = random_floats(n, n);
    for (auto& weight : weights) {
      weight = std::abs(weight);
    }
    double want = 0.0;  // blocks first
    for (std::size_t begin = 0; begin < n; begin += kLossBlock) {
      double sum = 0.0;
      for (std::size_t i = begin; i < std::min(n, begin + kLossBlock); ++i) {
        sum += losses(std::span(a).subspan(i, 1), std::span(labels).subspan(i, 1),
                      std::span(weights).subspan(i, 1), *pools()[0]);
      }
      want += sum;
    }
    std::vector<double> first;
    for (ThreadPool* pool : pools()) {
      std::vector<double> slopes(n, 7.0);
      CHECK_EQ(losses(a, labels, weights, slopes, *pool), want);
      CHECK_EQ(losses(a, labels, weights, *pool), want);
      first = first.empty() ? slopes : first;
      CHECK(same_bits(first, slopes));
    }
  }
}

TEST(probabilities_are_the_same_for_every_number_of_threads) {
  std::vector<double> a(10'000), first;
  for (std::size_t i = 0; i < a.size(); ++i) {
    a[i] = static_cast<double>(i) / 100.0 - 50.0;
  }
  for (ThreadPool* pool : pools()) {
    std::vector<double> out(a.size());
    probabilities(a, out, *pool);
    first = first.empty() ? out : first;
    CHECK(same_bits(first, out));
    CHECK(std::is_sorted(out.begin(), out.end()));
  }
}

namespace {

// The examples once more.
Batch twice(Batch batch) {
  const std::size_t n = batch.size();
  for (std::size_t i = 0; i < n; ++i) {
    batch.indptr.push_back(batch.indptr[n] + batch.indptr[i + 1]);
  }
  const std::vector<std::uint32_t> columns = batch.columns;
  const std::vector<float> values = batch.values;
  batch.columns.insert(batch.columns.end(), columns.begin(), columns.end());
  batch.values.insert(batch.values.end(), values.begin(), values.end());
  batch.index(batch.keys);
  return batch;
}

}  // namespace

TEST(
    a_gradient_adds_slope_times_value_in_order_of_occurrence_with_the_same_bits_for_every_number_of_threads) {
  GradientScratch scratch;
  for (const Batch& half : batches()) {
    const Batch batch = twice(half);
    std::mt19937_64 random(3);
    // Opposite slopes of very different sizes: what remains of each sum is its rounding errors, so that any
    // other order gives other bits.
    std::vector<double> slopes(batch.size());
    for (std::size_t i = 0; i < half.size(); ++i) {
      slopes[i] = std::ldexp(static_cast<double>(random() >> 11U), -static_cast<int>(random() % 60));
      slopes[i + half.size()] = -slopes[i];
    }
    std::vector<double> sums(batch.keys);
    for (std::size_t i = 0; i < batch.size(); ++i) {
      for (auto e = static_cast<std::size_t>(batch.indptr[i]);
           e < static_cast<std::size_t>(batch.indptr[i + 1]); ++e) {
        sums[batch.columns[e]] += slopes[i] * static_cast<double>(value_of(batch, e));
      }
      if (batch.bias) {
        sums[*batch.bias] += slopes[i];
      }
    }
    const std::vector<float> want(sums.begin(), sums.end());
    for (ThreadPool* pool : pools()) {
      std::vector<float> out(batch.keys, 7.0F);
      gradient(batch.examples(), slopes, batch.occurrences(), out, *pool, scratch);
      CHECK(same_bits(out, want));
    }
  }
}

TEST(a_key_without_entries_has_no_gradient_though_the_batch_names_it) {
  Batch batch = random_batch(3000, 39, 20'000, false, Bias::kAlone, 11);
  const std::size_t appended = *batch.bias;
  batch.bias.reset();
  const Batch larger = random_batch(4000, 39, 20'000, false, Bias::kNone, 12);
  GradientScratch scratch;
  for (ThreadPool* pool : pools()) {
    std::vector<float> out(larger.keys, 7.0F);
    const std::vector<double> ones(larger.size(), 1.0);
    gradient(larger.examples(), ones, larger.occurrences(), out, *pool,
             scratch);  // leaves numbers in the scratch memory
    out.assign(batch.keys, 7.0F);
    gradient(batch.examples(), std::vector<double>(batch.size(), 1.0), batch.occurrences(), out, *pool,
             scratch);
    CHECK_EQ(out[appended], 0.0F);
  }
}

TEST(the_gradient_is_the_derivative_of_the_loss) {
  const Batch batch = random_batch(50, 5, 20, true, Bias::kAlone, 9);
  const auto labels = random_labels(50, 9);
  auto weights = random_floats(batch.keys, 9);
  ThreadPool& pool = *pools()[0];
  std::vector<double> a(50), slopes(50);
  std::vector<float> out(batch.keys);
  GradientScratch scratch;
  margins(batch.examples(), weights, a, pool);
  losses(a, labels, {}, slopes, pool);
  gradient(batch.examples(), slopes, batch.occurrences(), out, pool, scratch);
  for (std::size_t u = 0; u < batch.keys; ++u) {
    const float w = weights[u];
    const float step = 0x1p-14F;
    double loss[2];
    for (const int side : {0, 1}) {
      weights[u] = side == 0 ? w - step : w + step;
      margins(batch.examples(), weights, a, pool);
      loss[side] = losses(a, labels, {}, pool) / (2.0 * static_cast<double>(step));
    }
    weights[u] = w;
    CHECK_NEAR(static_cast<double>(out[u]), loss[1] - loss[0],
               1e-3 * (1.0 + std::abs(static_cast<double>(out[u]))));
  }
}

TEST(examples_that_do_not_fit_together_are_refused_before_anything_is_written) {
  const std::vector<std::uint32_t> columns{0, 1, 2};
  const std::vector<float> values{1, 1, 1}, weights(3), short_weights(2);
  ThreadPool& pool = *pools()[0];
  GradientScratch scratch;
  const auto refuses = [&](const Examples& examples, std::span<const float> w, const char* part) {
    std::vector<double> out(examples.size(), 7.0);
    CHECK_THROWS(margins(examples, w, out, pool), part);
    CHECK(out == std::vector<double>(examples.size(), 7.0));
    std::vector<float> sums(w.size(), 7.0F);
    CHECK_THROWS(gradient(examples, out, {}, sums, pool, scratch), part);
    CHECK(sums == std::vector<float>(w.size(), 7.0F));
  };
  const std::vector<std::int64_t> good{0, 2, 3}, empty, late{1, 2, 3}, falling{0, 3, 2, 3},
      negative{0, -1, 3}, shorter{0, 2}, longer{0, 2, 4};
  refuses({empty, columns, values, {}}, weights, "indptr must begin with 0");
  refuses({late, columns, values, {}}, weights, "indptr must begin with 0");
  refuses({falling, columns, values, {}}, weights, "indptr falls at position 2: from 3 to 2");
  refuses({negative, columns, values, {}}, weights, "indptr falls at position 1: from 0 to -1");
  refuses({shorter, columns, values, {}}, weights, "indptr must end with the number of entries, 3, got 2");
  refuses({longer, columns, values, {}}, weights, "indptr must end with the number of entries, 3, got 4");
  refuses({good, columns, std::span(values).first(2), {}}, weights, "3 entries, got 2");
  refuses({good, columns, values, {}}, short_weights, "an entry is unique key 2, but there are only 2");
  refuses({good, columns, values, 3}, weights, "the bias is unique key 3, but there are only 3");
}

TEST(arrays_of_another_length_than_the_examples_are_refused) {
  const Batch batch = random_batch(5, 3, 4, false, Bias::kNone, 1);
  std::vector<double> five(5), four(4);
  std::vector<float> labels(5), out(batch.keys);
  ThreadPool& pool = *pools()[0];
  GradientScratch scratch;
  CHECK_THROWS(margins(batch.examples(), out, four, pool),
               "margins must have one number for each of the 5 examples, got 4");
  CHECK_THROWS(losses(five, std::span(labels).first(3), {}, five, pool), "labels");
  CHECK_THROWS(losses(five, labels, std::span(labels).first(3), five, pool), "example weights");
  CHECK_THROWS(losses(five, labels, {}, four, pool), "slopes");
  CHECK_THROWS(probabilities(five, four, pool), "probabilities");
  CHECK_THROWS(gradient(batch.examples(), four, batch.occurrences(), out, pool, scratch), "slopes");
}

TEST(occurrences_of_another_batch_are_refused_before_anything_is_written) {
  const Batch batch =
      random_batch(4000, 39, 50, false, Bias::kNone, 1);  // enough for three threads to read them
  const std::vector<double> slopes(batch.size(), 1.0);
  std::vector<float> out(batch.keys, 7.0F);
  GradientScratch scratch;
  const std::span order(batch.order);
  const std::span group_offsets(batch.group_offsets);
  for (const Occurrences& bad :
       {Occurrences{}, Occurrences{order, group_offsets.first(group_offsets.size() - 1)},
        Occurrences{order.first(10), group_offsets}}) {
    CHECK_THROWS(gradient(batch.examples(), slopes, bad, out, *pools().back(), scratch), "occurrences");
    CHECK(out == std::vector<float>(batch.keys, 7.0F));
  }
}

TEST(a_label_that_is_neither_0_nor_1_is_refused_with_its_position) {
  std::vector<double> a(3), slopes(3, 7.0);
  for (const float bad : {-1.0F, 0.5F, 2.0F, std::numeric_limits<float>::quiet_NaN()}) {
    CHECK_THROWS(losses(a, std::vector<float>{0, 1, bad}, {}, slopes, *pools()[0]), "at position 2");
  }
  CHECK(slopes == std::vector<double>(3, 7.0));
}

}  // namespace shoal::logistic_test

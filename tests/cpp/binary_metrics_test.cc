// The metrics of binary predictions compared with a plain implementation of their definitions, in long
// double.

#include "kernel/binary_metrics.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <random>
#include <span>
#include <vector>

#include "base/threads.h"
#include "check.h"
#include "random_batch.h"

namespace shoal::binary_metrics_test {

namespace {

constexpr double kLimit = 16.0;
constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

struct Input {
  std::vector<double> margins;
  std::vector<float> labels;
  std::vector<float> weights;
};

Input input(std::size_t n, bool weighted) {
  std::mt19937_64 random(n + (weighted ? 1 : 0));
  std::normal_distribution<double> normal(0.0, 1.0);
  Input made;
  for (std::size_t i = 0; i < n; ++i) {
    const double widths[] = {1e-9, 0.1, 4.0, 30.0, 900.0};
    made.margins.push_back(normal(random) * widths[random() % 5]);
    made.labels.push_back(random() % 3 == 0 ? 1.0F : 0.0F);
    if (weighted) {
      made.weights.push_back(random() % 4 == 0 ? 0.0F : static_cast<float>(random() % 1000) / 77.0F);
    }
  }
  return made;
}

template <class Count>
std::vector<Count> plain_counts(const Input& from, std::size_t bins) {
  std::vector<Count> counts(2 * bins);
  for (std::size_t i = 0; i < from.margins.size(); ++i) {
    const double place =
        (std::clamp(from.margins[i], -kLimit, kLimit) + kLimit) * (static_cast<double>(bins) / (2 * kLimit));
    const std::size_t bin = std::min(static_cast<std::size_t>(place), bins - 1);
    const double weight = from.weights.empty() ? 1.0 : static_cast<double>(from.weights[i]);
    counts[bin + (from.labels[i] == 1.0F ? bins : 0)] += static_cast<Count>(weight);
  }
  return counts;
}

bool close(double found, long double expected) {
  return std::abs(static_cast<long double>(found) - expected) <= 4e-15L * std::abs(expected);
}

bool same(const BinaryMetrics& a, const BinaryMetrics& b) {
  const auto bits = [](double x) { return std::bit_cast<std::uint64_t>(x); };
  return bits(a.loss) == bits(b.loss) && bits(a.probability) == bits(b.probability) &&
         bits(a.weight) == bits(b.weight) && bits(a.positive) == bits(b.positive) && a.first == b.first &&
         a.last == b.last;
}

template <class Count>
void compare(const Input& from, std::size_t bins) {
  long double loss = 0.0L;
  long double probability = 0.0L;
  long double weight = 0.0L;
  long double positive = 0.0L;
  for (std::size_t i = 0; i < from.margins.size(); ++i) {
    const auto a = static_cast<long double>(from.margins[i]);
    const long double w = from.weights.empty() ? 1.0L : static_cast<long double>(from.weights[i]);
    const bool one = from.labels[i] == 1.0F;
    loss += w * (std::max(one ? -a : a, 0.0L) + std::log1p(std::exp(-std::abs(a))));
    probability += w / (1.0L + std::exp(-a));
    weight += w;
    positive += one ? w : 0.0L;
  }
  const auto counts = plain_counts<Count>(from, bins);
  std::optional<BinaryMetrics> first;
  for (ThreadPool* pool : pools()) {
    std::vector<Count> found(2 * bins, Count{3});  // it adds
    const auto metrics =
        count_margins(from.margins, from.labels, from.weights, kLimit, std::span(found), *pool);
    CHECK(metrics.has_value());
    for (std::size_t k = 0; k < found.size(); ++k) {
      CHECK(std::abs(static_cast<double>(found[k] - Count{3} - counts[k])) <=
            1e-12 * static_cast<double>(counts[k] + Count{3}));
    }
    CHECK(close(metrics->loss, loss));
    CHECK(close(metrics->probability, probability));
    CHECK(close(metrics->weight, weight));
    CHECK(close(metrics->positive, positive));
    first = first ? first : metrics;
    CHECK(same(*first, *metrics));
    if (pool == pools()[0]) {  // one thread adds in the order of the examples, as does count_bins
      std::vector<Count> again(2 * bins, Count{3});
      const std::vector<double> labels(from.labels.begin(), from.labels.end());
      const std::vector<double> weights(from.weights.begin(), from.weights.end());
      const BinRange range = count_bins(from.margins, labels, weights, kLimit, std::span(again));
      CHECK(again == found);
      CHECK(range.first == metrics->first && range.last == metrics->last);
    }
    for (std::size_t k = 0; k < bins; ++k) {
      if (counts[k] + counts[bins + k] != Count{0}) {
        CHECK(metrics->first <= k && k <= metrics->last);
      }
    }
  }
}

}  // namespace

TEST(metrics_of_margins_are_those_of_their_definitions) {
  for (const std::size_t n : {1U, 3U, 1023U, 1024U, 1029U, 70'000U, 300'001U}) {
    for (const std::size_t bins : {2U, 1U << 10U, 1U << 16U}) {
      compare<std::int64_t>(input(n, false), bins);
      compare<double>(input(n, false), bins);
      compare<double>(input(n, true), bins);
    }
  }
}

TEST(the_loss_and_probability_of_one_example_are_accurate_for_every_margin) {
  std::mt19937_64 random(3);
  ThreadPool pool(1);
  std::vector<double> counts(4);
  const auto check = [&](double a) {
    for (const float y : {0.0F, 1.0F}) {
      const auto found =
          count_margins(std::span(&a, 1), std::span(&y, 1), {}, kLimit, std::span(counts), pool);
      CHECK(found.has_value());
      const auto exact = static_cast<long double>(a);
      const long double tail = std::log1p(std::exp(-std::abs(exact)));
      const long double loss = std::max(y == 1.0F ? -exact : exact, 0.0L) + tail;
      CHECK(std::abs(static_cast<long double>(found->loss) - loss) <= 2e-15L * loss + 1e-307L);
      const long double p = 1.0L / (1.0L + std::exp(-exact));
      CHECK(std::abs(static_cast<long double>(found->probability) - p) <= 2e-15L * p + 1e-307L);
    }
  };
  for (const double a : {0.0, -0.0, 1e-300, 1e-17, 0.34657359, 0.34657360, 15.99999, 16.0, 36.7, 37.0, 707.9,
                         708.0, 708.1, 745.0, 746.0, 1e5, 1e300}) {
    check(a);
    check(-a);
  }
  for (int i = 0; i < 20'000; ++i) {
    check(std::uniform_real_distribution<double>(-45.0, 45.0)(random));
    check(std::uniform_real_distribution<double>(-709.0, 709.0)(random));
  }
}

TEST(infinite_margins_count_where_their_loss_is_finite) {
  ThreadPool pool(1);
  std::vector<std::int64_t> counts(8);
  const std::vector<double> margins{-kInf, kInf};
  const std::vector<float> labels{0.0F, 1.0F};
  const auto found = count_margins(margins, labels, {}, kLimit, std::span(counts), pool);
  CHECK(found.has_value() && found->loss < 1e-300 && found->first == 0 && found->last == 3);
  CHECK(std::abs(found->probability - 1.0) < 1e-15);
  CHECK((counts == std::vector<std::int64_t>{1, 0, 0, 0, 0, 0, 0, 1}));
}

TEST(nothing_is_counted_of_margins_without_a_finite_loss) {
  for (ThreadPool* pool : pools()) {
    for (const double odd : {kNaN, -kNaN, kInf}) {
      auto from = input(70'000, true);
      from.margins[69'999] = odd;
      from.labels[69'999] = 0.0F;
      std::vector<double> weighted(1U << 11U);
      CHECK(!count_margins(from.margins, from.labels, from.weights, kLimit, std::span(weighted), *pool));
      CHECK(std::ranges::all_of(weighted, [](double x) { return x == 0.0; }));
      std::vector<std::int64_t> counts(1U << 11U);
      CHECK(!count_margins(from.margins, from.labels, {}, kLimit, std::span(counts), *pool));
      CHECK(std::ranges::all_of(counts, [](std::int64_t x) { return x == 0; }));
    }
  }
}

TEST(labelled_margins_count_in_the_bins_of_count_bins_or_not_at_all) {
  const auto from = input(9000, false);
  const std::vector<double> labels(from.labels.begin(), from.labels.end());
  std::vector<std::int64_t> expected(64);
  const BinRange range = count_bins(from.margins, labels, {}, kLimit, std::span(expected));
  for (const std::size_t threads : {1U, 3U}) {
    ThreadPool pool(threads);
    std::vector<std::int64_t> counts(64);
    const auto found = count_labelled(from.margins, from.labels, kLimit, std::span(counts), pool);
    CHECK(found.has_value());
    CHECK(counts == expected);
    CHECK(found->bins.first == range.first && found->bins.last == range.last);
    CHECK_EQ(found->positive, static_cast<std::size_t>(std::count(labels.begin(), labels.end(), 1.0)));
    auto wrong = from;
    wrong.labels[8999] = 0.5F;
    CHECK(!count_labelled(wrong.margins, wrong.labels, kLimit, std::span(counts), pool));
    wrong = from;
    wrong.margins[8999] = std::numeric_limits<double>::quiet_NaN();
    CHECK(!count_labelled(wrong.margins, wrong.labels, kLimit, std::span(counts), pool));
    CHECK(counts == expected);
  }
}

TEST(pairs_are_counted_as_by_comparing_every_two_examples) {
  const std::vector<std::int64_t> positive{0, 3, 0, 2, 5, 0};
  const std::vector<std::int64_t> negative{4, 1, 0, 2, 0, 7};
  OrderedPairs expected{0, 0, 0};
  for (std::size_t i = 0; i < positive.size(); ++i) {
    for (std::size_t j = 0; j < negative.size(); ++j) {
      const std::int64_t pairs = positive[i] * negative[j];
      expected.count += pairs;
      expected.won += i > j ? pairs : 0;
      expected.tied += i == j ? pairs : 0;
    }
  }
  const OrderedPairs found = ordered_pairs(positive, negative);
  CHECK(found.count == expected.count && found.won == expected.won && found.tied == expected.tied);
  CHECK_EQ(ordered_pairs({}, {}).count, 0);
}

TEST(margins_with_wrong_labels_weights_or_histograms_are_refused) {
  ThreadPool pool(1);
  auto from = input(5, true);
  const auto refused = [&](std::size_t numbers, const char* why) {
    std::vector<double> counts(numbers);
    CHECK_THROWS(count_margins(from.margins, from.labels, from.weights, kLimit, std::span(counts), pool),
                 why);
  };
  for (const std::size_t numbers : {0U, 2U, 6U, 9U}) {
    refused(numbers, "histogram");
  }
  from.labels[4] = 0.5F;
  refused(8, "labels must be 0 or 1");
  from.labels[4] = std::numeric_limits<float>::quiet_NaN();
  refused(8, "labels must be 0 or 1");
  from.labels[4] = 1.0F;
  for (const float weight :
       {-1.0F, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    from.weights[3] = weight;
    refused(8, "example weights must be");
  }
  from.weights.pop_back();
  refused(8, "example weights must be");
  std::vector<std::int64_t> counts(8);
  CHECK_THROWS(count_margins(from.margins, from.labels, from.weights, kLimit, std::span(counts), pool),
               "without weights");
}

}  // namespace shoal::binary_metrics_test

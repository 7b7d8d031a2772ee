// Examples by feature compared with a plain implementation of the equations.

#include "kernel/by_feature.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "base/threads.h"
#include "check.h"
#include "random_batch.h"

namespace shoal::by_feature_test {

namespace {

using Keys = ExamplesByFeature::Keys;

// Those of the other kernels' tests, and one of several ranges.
std::vector<Batch> cases() {
  std::vector<Batch> all = batches();
  all.push_back(random_batch(100'000, 6, 50, true, Bias::kAlsoAnEntry, 5));
  all.push_back(random_batch(70'000, 4, 90, false, Bias::kNone, 6));
  return all;
}

struct Labelled {
  std::vector<float> labels;
  std::vector<float> weights;  // some are 0
};

Labelled labelled(const Batch& batch, bool weighted) {
  std::mt19937_64 random(7);
  Labelled made;
  for (std::size_t i = 0; i < batch.size(); ++i) {
    made.labels.push_back(static_cast<float>(random() % 2));
    if (weighted) {
      made.weights.push_back(static_cast<float>(random() % 4) / 2.0F);
    }
  }
  return made;
}

// Calls work(example, key, value) for all entries, the biases too.
template <class Work>
void each_entry(const Batch& batch, const Work& work) {
  for (std::size_t i = 0; i < batch.size(); ++i) {
    for (auto e = static_cast<std::size_t>(batch.indptr[i]);
         e < static_cast<std::size_t>(batch.indptr[i + 1]); ++e) {
      work(i, batch.columns[e], static_cast<double>(value_of(batch, e)));
    }
    if (batch.bias) {
      work(i, *batch.bias, 1.0);
    }
  }
}

// About a third of the keys.
std::vector<std::uint32_t> some_keys(std::size_t keys, std::mt19937_64& random) {
  std::vector<std::uint32_t> chosen;
  for (std::uint32_t k = 0; k < keys; ++k) {
    if (random() % 3 == 0) {
      chosen.push_back(k);
    }
  }
  return chosen;
}

double slope(double a, float label, double weight) {
  return label == 1.0F ? -weight / (1.0 + std::exp(a)) : weight / (1.0 + std::exp(-a));
}

}  // namespace

TEST(margins_and_gradients_follow_the_weights) {
  for (const Batch& batch : cases()) {
    for (const bool weighted : {false, true}) {
      const Labelled given = labelled(batch, weighted);
      std::vector<std::vector<double>> margins;
      std::vector<std::vector<float>> gradients;
      for (ThreadPool* pool : pools()) {
        std::mt19937_64 random(11);
        std::normal_distribution<double> normal(0.0, 2.0);
        ExamplesByFeature examples(batch.examples(), batch.keys, given.labels, given.weights, *pool);
        std::vector<double> w(batch.keys, 0.0);
        std::vector<double> moved(batch.keys, 0.0);  // by how much in all
        std::vector<float> found;
        for (int turn = 0; turn < 4; ++turn) {
          const auto chosen = some_keys(batch.keys, random);
          std::vector<double> deltas;
          for (const std::uint32_t k : chosen) {
            deltas.push_back(random() % 4 == 0 ? 0.0 : normal(random));
            w[k] += deltas.back();
            moved[k] += std::abs(deltas.back());
          }
          examples.add(chosen, deltas, *pool);
          if (turn % 2 == 1) {  // few examples change: those of one key
            const std::vector<std::uint32_t> one{static_cast<std::uint32_t>(random() % batch.keys)};
            const std::vector<double> delta{normal(random)};
            w[one[0]] += delta[0];
            moved[one[0]] += std::abs(delta[0]);
            examples.add(one, delta, *pool);
          }
          const auto asked = some_keys(batch.keys, random);
          std::vector<float> out(asked.size(), -1.0F);
          examples.gradient(asked, out, *pool);
          found.insert(found.end(), out.begin(), out.end());
          if (pool != pools()[0] || turn < 3) {
            continue;
          }
          std::vector<double> wanted(batch.size(), 0.0);
          std::vector<double> sizes(batch.size(), 0.0);
          each_entry(batch, [&](std::size_t i, std::uint32_t k, double v) {
            wanted[i] += w[k] * v;
            sizes[i] += std::abs(moved[k] * v);
          });
          std::vector<double> margin(batch.size(), -1.0);
          examples.margins(margin, *pool);
          for (std::size_t i = 0; i < batch.size(); ++i) {
            CHECK_NEAR(margin[i], wanted[i], 1e-13 * (sizes[i] + 1.0));
          }
          std::vector<double> sums(batch.keys, 0.0);
          std::vector<double> parts(batch.keys, 0.0);
          each_entry(batch, [&](std::size_t i, std::uint32_t k, double v) {
            const double weight = weighted ? static_cast<double>(given.weights[i]) : 1.0;
            sums[k] += slope(wanted[i], given.labels[i], weight) * v;
            parts[k] += std::abs(weight * v);
          });
          for (std::size_t j = 0; j < asked.size(); ++j) {
            CHECK_NEAR(static_cast<double>(out[j]), sums[asked[j]],
                       1e-7 * std::abs(sums[asked[j]]) + 9.2e-8 * parts[asked[j]] + 1e-12);
          }
        }
        margins.emplace_back(batch.size(), -1.0);
        examples.margins(margins.back(), *pool);
        gradients.push_back(found);
        CHECK(same_bits(margins[0], margins.back()));
        CHECK(same_bits(gradients[0], gradients.back()));
      }
    }
  }
}

TEST(slopes_are_accurate_for_margins_of_any_size) {
  // One example a key, of value 1: the gradient is the slope, and the margin the weight.
  const std::vector<double> margins{0.0,  -0.0, 1e-300, 1e-9, -1e-9, 0.3,   -0.7,   5.0,
                                    -5.0, 36.0, -36.0,  37.5, -100., 700.0, -700.0, -707.9};
  for (const float label : {0.0F, 1.0F}) {
    for (const double a : margins) {
      const std::vector<std::int64_t> indptr{0, 1};
      const std::vector<std::uint32_t> column{0};
      const std::vector<float> labels{label};
      ExamplesByFeature examples({.indptr = indptr, .columns = column, .values = {}, .bias = {}}, 1, labels,
                                 {}, *pools()[0]);
      const std::vector<double> delta{a};
      examples.add(column, delta, *pools()[0]);
      std::vector<float> out(1);
      examples.gradient(column, out, *pools()[0]);
      const double wanted = slope(a, label, 1.0);
      CHECK_NEAR(static_cast<double>(out[0]), wanted,
                 (1.2e-7 + 6e-8 * std::abs(a)) * std::abs(wanted) + 2e-38);
    }
  }
  // Beyond what e^x can be.
  const std::vector<std::int64_t> indptr{0, 1, 2};
  const std::vector<std::uint32_t> columns{0, 1};
  ExamplesByFeature examples({.indptr = indptr, .columns = columns, .values = {}, .bias = {}}, 2,
                             std::vector<float>{0, 0}, {}, *pools()[0]);
  examples.add(columns, std::vector<double>{1e30, -1e30}, *pools()[0]);
  std::vector<float> out(2);
  examples.gradient(columns, out, *pools()[0]);
  CHECK_EQ(out[0], 1.0F);
  CHECK(out[1] >= 0.0F && out[1] < 2e-38F);
}

TEST(bounds_are_those_of_the_formula) {
  for (const Batch& batch : cases()) {
    const Labelled given = labelled(batch, true);
    const std::size_t third = batch.keys / 3;
    const Keys own{third, 2 * third};
    const std::vector<std::vector<Keys>> choices{{own}, {{0, third}, own}, {{0, batch.keys}}, {}};
    for (const auto& near : choices) {
      std::vector<double> sizes(batch.size(), 0.0);
      each_entry(batch, [&](std::size_t i, std::uint32_t k, double v) {
        for (const auto& [from, to] : near) {
          sizes[i] += k >= from && k < to ? std::abs(v) : 0.0;
        }
      });
      std::vector<double> wanted(batch.keys, 0.0);
      each_entry(batch, [&](std::size_t i, std::uint32_t k, double v) {
        wanted[k] += 0.25 * static_cast<double>(given.weights[i]) * std::abs(v) * sizes[i];
      });
      std::vector<std::vector<float>> results;
      for (ThreadPool* pool : pools()) {
        ExamplesByFeature examples(batch.examples(), batch.keys, given.labels, given.weights, *pool);
        std::vector<float> out(third, -1.0F);
        for (int turn = 0; turn < 2; ++turn) {  // the first call leaves nothing to the second
          examples.bounds(own, near, out, *pool);
          results.push_back(out);
          CHECK(same_bits(results[0], out));
        }
      }
      for (std::size_t j = 0; j < third; ++j) {
        CHECK_NEAR(static_cast<double>(results[0][j]), wanted[third + j], 1e-7 * wanted[third + j]);
      }
    }
  }
}

TEST(arguments_that_do_not_match_are_refused) {
  const std::vector<std::int64_t> indptr{0, 2};
  const std::vector<std::uint32_t> columns{0, 1};
  const std::vector<float> labels{1};
  ThreadPool& pool = *pools()[0];
  const Examples some{.indptr = indptr, .columns = columns, .values = {}, .bias = {}};
  CHECK_THROWS(ExamplesByFeature(some, 1, labels, {}, pool), "there are only 1");
  CHECK_THROWS(ExamplesByFeature(some, 2, std::vector<float>{2}, {}, pool), "labels must be 0 or 1");
  CHECK_THROWS(ExamplesByFeature(some, 2, labels, std::vector<float>{-1}, pool),
               "must be finite and not negative");
  ExamplesByFeature examples(some, 2, labels, {}, pool);
  std::vector<float> out(2);
  CHECK_THROWS(examples.gradient(std::vector<std::uint32_t>{1, 0}, out, pool), "must ascend");
  CHECK_THROWS(examples.gradient(std::vector<std::uint32_t>{0, 2}, out, pool), "no unique key 2");
  CHECK_THROWS(examples.gradient(std::vector<std::uint32_t>{0}, out, pool),
               "one number for each of the 1 keys");
  CHECK_THROWS(examples.add(columns, std::vector<double>{1.0}, pool), "got 1");
  CHECK_THROWS(examples.bounds({1, 3}, {}, out, pool), "no run from 1 to 3");
  const std::vector<Keys> beyond{{0, 3}};
  CHECK_THROWS(examples.bounds({0, 2}, beyond, out, pool), "no run from 0 to 3");
}

}  // namespace shoal::by_feature_test

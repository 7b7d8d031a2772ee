// Each rule compared with its equations in float64, for one row; clipping and initial rows.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <type_traits>
#include <variant>
#include <vector>

#include "base/mix.h"
#include "base/noise.h"
#include "check.h"
#include "optim/clip.h"
#include "optim/init.h"
#include "optim/optimizer.h"

namespace shoal::rules_test {
namespace {

using Params = std::map<std::string, double>;
using Numbers = std::vector<double>;

// The state of one row: weights, other columns, the row's own number.
struct Row {
  explicit Row(std::size_t dim) : w(dim), a(dim), b(dim) {}
  Numbers w;
  Numbers a;
  Numbers b;
  double own = 0;
};

using Equations = std::function<void(Row&, const Numbers& g, double t)>;

// Thirty steps of three rows: their weights, columns and numbers stay near the equations'. Row 1's gradient
// is zero now and then.
void check_rule(const std::string& name, const Params& params, double n0, const Equations& equations) {
  const Optimizer optimizer(name, params);
  constexpr std::size_t kRows = 3;
  for (const std::size_t dim : {1UL, 3UL, 8UL, 9UL, 21UL}) {
    std::mt19937 random(static_cast<unsigned>(dim));
    std::uniform_real_distribution<float> uniform(-2.0F, 2.0F);
    std::vector<float> grads(kRows * dim), first(kRows * dim), second(kRows * dim), third(kRows * dim);
    std::vector<float> own(kRows), weights(kRows * dim);
    std::vector<std::uint32_t> noise(kRows * dim);
    Block block{.rows = kRows,
                .dim = dim,
                .grads = grads.data(),
                .columns = {first.data(), second.data(), third.data()},
                .row_state = own.data(),
                .noise = noise.data(),
                .step = 0};
    std::vector<Row> rows(kRows, Row(dim));
    for (std::size_t e = 0; e < kRows * dim; ++e) {
      first[e] = uniform(random);
      rows[e / dim].w[e % dim] = static_cast<double>(first[e]);
      rows[e / dim].a[e % dim] = n0;
    }
    std::visit([&](const auto& rule) { rule.start(block); }, optimizer.rule());
    for (std::uint64_t t = 1; t <= 30; ++t) {
      block.step = t;
      for (std::size_t e = 0; e < kRows * dim; ++e) {
        grads[e] = e / dim == 1 && t % 3 == 0 ? 0.0F : uniform(random);
        noise[e] = static_cast<std::uint32_t>(random());
      }
      for (std::size_t r = 0; r < kRows; ++r) {
        const auto begin = grads.begin() + static_cast<std::ptrdiff_t>(r * dim);
        equations(rows[r], Numbers(begin, begin + static_cast<std::ptrdiff_t>(dim)), static_cast<double>(t));
      }
      std::visit(
          [&](const auto& rule) {
            rule.step(block);
            if constexpr (std::remove_cvref_t<decltype(rule)>::kDerivesWeights) {
              rule.read(block, weights.data());
            } else {
              weights = first;
            }
          },
          optimizer.rule());
      const auto near = [](float got, double want) {
        CHECK_NEAR(static_cast<double>(got), want, 2e-5 * (1 + std::abs(want)));
      };
      for (std::size_t e = 0; e < kRows * dim; ++e) {
        near(weights[e], rows[e / dim].w[e % dim]);
        if (optimizer.columns().size() > 1) {
          near(second[e], rows[e / dim].a[e % dim]);
        }
        if (optimizer.columns().size() > 2) {
          near(third[e], rows[e / dim].b[e % dim]);
        }
      }
      for (std::size_t r = 0; r < kRows && !optimizer.row_state().empty(); ++r) {
        near(own[r], rows[r].own);
      }
    }
  }
}

TEST(sgd_follows_its_equation) {
  check_rule("SGD", {{"lr", 0.1}, {"weight_decay", 0.2}}, 0, [](Row& row, const Numbers& g, double) {
    for (std::size_t e = 0; e < g.size(); ++e) {
      row.w[e] -= 0.1 * (g[e] + 0.2 * row.w[e]);
    }
  });
}

TEST(momentum_follows_its_equations_plain_and_nesterov) {
  for (const bool nesterov : {false, true}) {
    check_rule("Momentum", {{"lr", 0.05}, {"mu", 0.7}, {"nesterov", nesterov ? 1 : 0}, {"weight_decay", 0.1}},
               0, [=](Row& row, const Numbers& g, double) {
                 for (std::size_t e = 0; e < g.size(); ++e) {
                   const double slope = g[e] + 0.1 * row.w[e];
                   row.a[e] = 0.7 * row.a[e] + slope;
                   row.w[e] -= 0.05 * (nesterov ? slope + 0.7 * row.a[e] : row.a[e]);
                 }
               });
  }
}

TEST(adagrad_follows_its_equations) {
  check_rule("Adagrad", {{"lr", 0.1}, {"eps", 0.3}, {"n0", 0.2}, {"weight_decay", 0.1}}, 0.2,
             [](Row& row, const Numbers& g, double) {
               for (std::size_t e = 0; e < g.size(); ++e) {
                 const double slope = g[e] + 0.1 * row.w[e];
                 row.a[e] += slope * slope;
                 row.w[e] -= 0.1 * slope / (std::sqrt(row.a[e]) + 0.3);
               }
             });
}

TEST(row_wise_adagrad_follows_its_equations_with_either_decay) {
  for (const bool decoupled : {false, true}) {
    check_rule("RowWiseAdagrad",
               {{"lr", 0.1}, {"eps", 0.3}, {"weight_decay", 0.2}, {"decoupled", decoupled ? 1 : 0}}, 0,
               [=](Row& row, const Numbers& g, double) {
                 double squares = 0;
                 for (std::size_t e = 0; e < g.size(); ++e) {
                   const double h = g[e] + (decoupled ? 0 : 0.2 * row.w[e]);
                   squares += h * h;
                 }
                 row.own += squares / static_cast<double>(g.size());
                 const double k = 0.1 / (std::sqrt(row.own) + 0.3);
                 const double kept = 1 - (decoupled ? 0.1 : k) * 0.2;
                 for (std::size_t e = 0; e < g.size(); ++e) {
                   row.w[e] = kept * row.w[e] - k * g[e];
                 }
               });
  }
}

TEST(adam_follows_its_equations_with_either_count_and_either_decay) {
  for (const char* const name : {"Adam", "AdamW"}) {
    for (const bool per_row : {false, true}) {
      const bool decoupled = std::string(name) == "AdamW";
      check_rule(name,
                 {{"lr", 0.05},
                  {"b1", 0.8},
                  {"b2", 0.95},
                  {"eps", 0.1},
                  {"weight_decay", 0.2},
                  {"per_row_step", per_row ? 1 : 0}},
                 0, [=](Row& row, const Numbers& g, double t) {
                   row.own +=
                       1;  // the table's steps and the row's are the same here: every step has every row
                   const double rate = 0.05 * std::sqrt(1 - std::pow(0.95, t)) / (1 - std::pow(0.8, t));
                   for (std::size_t e = 0; e < g.size(); ++e) {
                     const double slope = g[e] + (decoupled ? 0 : 0.2 * row.w[e]);
                     row.a[e] = 0.8 * row.a[e] + 0.2 * slope;
                     row.b[e] = 0.95 * row.b[e] + 0.05 * slope * slope;
                     row.w[e] *= decoupled ? 1 - 0.05 * 0.2 : 1;
                     row.w[e] -= rate * row.a[e] / (std::sqrt(row.b[e]) + 0.1);
                   }
                 });
    }
  }
}

// z is kept in `b` here: the columns are z and n, and n is compared.
void ftrl_row(Row& row, const Numbers& g, double l1, double l21) {
  const double alpha = 0.2, beta = 0.7, l2 = 0.3;
  const std::size_t dim = g.size();
  const double threshold = l21 * std::sqrt(static_cast<double>(dim));
  if (row.own == 0) {  // z such that the first weights are read
    double squares = 0;
    for (std::size_t e = 0; e < dim; ++e) {
      row.b[e] = row.w[e] * ((beta + std::sqrt(row.a[e])) / alpha + l2);
      squares += row.b[e] * row.b[e];
    }
    for (double& z : row.b) {
      z = -z * (1 + threshold / std::sqrt(squares)) - std::copysign(l1, z);
    }
    row.own = 1;
  }
  for (std::size_t e = 0; e < dim; ++e) {
    const double next = row.a[e] + g[e] * g[e];
    row.b[e] += g[e] - (std::sqrt(next) - std::sqrt(row.a[e])) / alpha * row.w[e];
    row.a[e] = next;
  }
  Numbers s(dim);
  double squares = 0;
  for (std::size_t e = 0; e < dim; ++e) {
    s[e] = std::clamp(row.b[e], -l1, l1) - row.b[e];
    squares += s[e] * s[e];
  }
  const double norm = std::sqrt(squares);
  for (std::size_t e = 0; e < dim; ++e) {
    row.w[e] =
        norm <= threshold ? 0 : s[e] * (1 - threshold / norm) / ((beta + std::sqrt(row.a[e])) / alpha + l2);
  }
}

TEST(ftrl_follows_its_equations) {
  for (const double l1 : {0.0, 0.5, 3.0}) {
    check_rule("FTRL", {{"alpha", 0.2}, {"beta", 0.7}, {"l1", l1}, {"l2", 0.3}, {"n0", 0.4}}, 0.4,
               [=](Row& row, const Numbers& g, double) { ftrl_row(row, g, l1, 0); });
  }
}

TEST(group_ftrl_follows_its_equations) {
  for (const double l21 : {0.0, 0.5, 3.0}) {
    check_rule("GroupFTRL",
               {{"alpha", 0.2}, {"beta", 0.7}, {"l1", 0.4}, {"l2", 0.3}, {"l21", l21}, {"n0", 0.4}}, 0.4,
               [=](Row& row, const Numbers& g, double) { ftrl_row(row, g, 0.4, l21); });
  }
}

TEST(accumulators_are_rounded_with_the_bits_of_their_element_and_column) {
  // Numbers so large that every sum needs rounding; the result equals accumulate() exactly.
  constexpr std::size_t kDim = 3;
  std::mt19937 random(8);
  const Optimizer ftrl("FTRL", {{"alpha", 0.1}, {"beta", 1}, {"l1", 0}, {"l2", 0}, {"n0", 0}});
  const Optimizer adagrad("Adagrad", {{"lr", 0.1}, {"eps", 0}, {"n0", 0}, {"weight_decay", 0}});
  const Optimizer row_wise("RowWiseAdagrad",
                           {{"lr", 0.1}, {"eps", 0}, {"weight_decay", 0}, {"decoupled", 0}});
  for (int draw = 0; draw < 200; ++draw) {
    std::array<float, 2 * kDim> g{}, first{}, second{}, third{}, w{};
    std::array<float, 2> own{4e6F, 5e6F};
    std::array<std::uint32_t, 2 * kDim> noise{};
    for (std::size_t e = 0; e < 2 * kDim; ++e) {
      g[e] = std::uniform_real_distribution<float>(-0.9F, 0.9F)(random);
      noise[e] = static_cast<std::uint32_t>(random());
    }
    const Block block{.rows = 2,
                      .dim = kDim,
                      .grads = g.data(),
                      .columns = {first.data(), second.data(), third.data()},
                      .row_state = own.data(),
                      .noise = noise.data(),
                      .step = 1};
    const auto grow = [&](float n, std::size_t e) {
      return accumulate(n, static_cast<double>(g[e]) * static_cast<double>(g[e]), noise[e], 1);
    };
    first.fill(3e6F);
    second.fill(4e6F);
    const auto& rule = std::get<Ftrl>(ftrl.rule());
    rule.read(block, w.data());
    rule.step(block);
    for (std::size_t e = 0; e < 2 * kDim; ++e) {
      const float n = grow(4e6F, e);
      const float sigma =
          n == 4e6F ? 0.0F : (n - 4e6F) * rule.inverse_alpha / (std::sqrt(n) + std::sqrt(4e6F));
      const double change =
          static_cast<double>(g[e]) - static_cast<double>(sigma) * static_cast<double>(w[e]);
      CHECK_EQ(second[e], n);
      CHECK_EQ(first[e], accumulate(3e6F, change, noise[e], 0));
    }
    second.fill(4e6F);
    std::get<Adagrad>(adagrad.rule()).step(block);
    for (std::size_t e = 0; e < 2 * kDim; ++e) {
      CHECK_EQ(second[e], grow(4e6F, e));
    }
    const std::array<float, 2> before = own;
    std::get<RowWiseAdagrad>(row_wise.rule()).step(block);
    for (std::size_t r = 0; r < 2; ++r) {
      std::array<double, kDim> squares{};
      for (std::size_t e = 0; e < kDim; ++e) {
        squares[e] = static_cast<double>(g[r * kDim + e]) * static_cast<double>(g[r * kDim + e]);
      }
      CHECK_EQ(own[r], accumulate(before[r], (squares[0] + squares[2] + squares[1]) / 3, noise[r * kDim], 1));
    }
  }
}

TEST(clipping_cuts_elements_first_and_scales_rows_that_are_too_long) {
  std::vector<float> g{3, -4, 0.5F, -0.25F, 0, 0, 30, -40};
  Block block{};
  block.rows = 4;
  block.dim = 2;
  block.grads = g.data();
  CHECK(!Clip{}.active());
  Clip{}.apply(block);
  CHECK(g == std::vector<float>({3, -4, 0.5F, -0.25F, 0, 0, 30, -40}));
  const Clip by_norm{.norm = 5};
  CHECK(by_norm.active());
  by_norm.apply(block);
  CHECK(g == std::vector<float>({3, -4, 0.5F, -0.25F, 0, 0, 3, -4}));
  const Clip by_value{.value = 3};
  CHECK(by_value.active());
  by_value.apply(block);
  CHECK(g == std::vector<float>({3, -3, 0.5F, -0.25F, 0, 0, 3, -3}));
  g = {30, -40, 0.75F, 0, 0, 0, 0, -1};
  Clip{.value = 1, .norm = 0.5}.apply(block);
  const float half_root = 0.5F / std::sqrt(2.0F);
  CHECK_NEAR(g[0], half_root, 1e-7);
  CHECK_NEAR(g[1], -half_root, 1e-7);
  CHECK(std::vector<float>(g.begin() + 2, g.end()) == std::vector<float>({0.5F, 0, 0, 0, 0, -0.5F}));
}

std::vector<float> initial(const char* name, double parameter, std::uint64_t seed, std::uint64_t hash,
                           std::size_t dim) {
  std::vector<float> weights(dim, 7.0F);
  Init(name, parameter, seed).fill(hash, dim, weights.data());
  return weights;
}

TEST(initial_rows_are_what_their_name_says) {
  CHECK(initial("Zeros", 3, 1, 5, 3) == std::vector<float>(3, 0.0F));
  CHECK(initial("Constant", -0.25, 1, 5, 3) == std::vector<float>(3, -0.25F));
  CHECK(Init("Zeros", 0, 0).same_for_all() && Init("Constant", 1, 0).same_for_all());
  CHECK(!Init("Uniform", 1, 0).same_for_all() && !Init("Normal", 1, 0).same_for_all());
  constexpr std::size_t kDraws = 100'000;
  const double error = 5 / std::sqrt(static_cast<double>(kDraws));
  for (const char* const name : {"Uniform", "Normal"}) {
    const std::vector<float> w = initial(name, 0.5, 7, 11, kDraws);
    double sum = 0;
    double squares = 0;
    for (const float x : w) {
      sum += static_cast<double>(x);
      squares += static_cast<double>(x) * static_cast<double>(x);
    }
    const double variance = *name == 'U' ? 0.25 / 3 : 0.25;
    CHECK_NEAR(sum / kDraws, 0.0, error * std::sqrt(variance));
    CHECK_NEAR(squares / kDraws / variance, 1.0, error * std::sqrt(2.0));
    const auto [least, greatest] = std::minmax_element(w.begin(), w.end());
    CHECK(*name == 'N' || (*least >= -0.5F && *greatest < 0.5F));
    CHECK(*least < -0.49F && *greatest > 0.49F);
  }
}

TEST(initial_rows_depend_on_the_seed_the_key_and_the_element_each_by_itself) {
  for (const char* const name : {"Uniform", "Normal"}) {
    const std::vector<float> w = initial(name, 1, 7, 11, 64);
    CHECK(w == initial(name, 1, 7, 11, 64));
    const std::vector<float> others[] = {
        initial(name, 1, 8, 11, 64),
        initial(name, 1, 7, 12, 64),
        initial(name, 1, 8, 11U ^ 7U ^ 8U, 64),  // a seed is not a shift of the keys
        std::vector<float>(w.begin() + 1, w.end()),
    };
    for (const auto& other : others) {
      for (std::size_t e = 0; e < other.size(); ++e) {
        CHECK(w[e] != other[e]);
      }
    }
  }
}

TEST(the_most_extreme_normal_weights_are_finite) {
  // Keys made so that their first element's bits are all zeros and all ones: 2^-53 from either end.
  for (const std::uint64_t bits : {std::uint64_t{0}, ~std::uint64_t{0}}) {
    const float w = initial("Normal", 1, 7, unmix(unmix(bits)) ^ mix(7), 1)[0];
    CHECK_NEAR(std::abs(w), 8.2095F, 1e-3);
    CHECK_EQ(std::signbit(w), bits == 0);
  }
}

TEST(parameters_at_their_bounds_are_taken_and_beyond_them_refused) {
  const auto adam = [](const char* name, double value) {
    Params params{{"lr", 0.1}, {"b1", 0.9},         {"b2", 0.9},
                  {"eps", 0},  {"weight_decay", 0}, {"per_row_step", 0}};
    params[name] = value;
    return Optimizer("Adam", params);
  };
  const double inf = std::numeric_limits<double>::infinity();
  for (const char* const name : {"b1", "b2"}) {
    adam(name, 0);
    adam(name, 0.999999);
    CHECK_THROWS(adam(name, 1.0), std::string("0 <= ") + name + " < 1, got 1");
    CHECK_THROWS(adam(name, -0.1), std::string("0 <= ") + name + " < 1");
  }
  for (const char* const name : {"eps", "weight_decay"}) {
    adam(name, 0);
    CHECK_THROWS(adam(name, -1e-30), std::string(name) + " >= 0");
  }
  adam("lr", 1e-30);
  CHECK_THROWS(adam("lr", 0), "lr > 0");
  for (const double bad : {1e39, -1e39, inf, -inf, std::nan("")}) {
    CHECK_THROWS(adam("lr", bad), "finite float32 for lr");
  }
}

}  // namespace
}  // namespace shoal::rules_test

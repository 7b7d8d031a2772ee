// Rules compared with plain float64, vectorized loops with single rows, and sums that must not stall.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <variant>
#include <vector>

#include "base/noise.h"
#include "check.h"
#include "optim/init.h"
#include "optim/optimizer.h"

namespace shoal::optim_test {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || defined(SHOAL_CHECKED)
constexpr std::uint64_t kFewer = 20;  // checked builds are slow, and find nothing more in more steps
#else
constexpr std::uint64_t kFewer = 1;
#endif

Optimizer ftrl(double l1 = 0) {
  return {"FTRL", {{"alpha", 0.1}, {"beta", 1.0}, {"l1", l1}, {"l2", 0.0}, {"n0", 0.0}}};
}
Optimizer group_ftrl(double l1, double l21) {
  return {"GroupFTRL", {{"alpha", 0.1}, {"beta", 1.0}, {"l1", l1}, {"l2", 0.5}, {"l21", l21}, {"n0", 0.1}}};
}
Optimizer adagrad() {
  return {"Adagrad", {{"lr", 0.01}, {"eps", 1e-10}, {"n0", 0.0}, {"weight_decay", 0.0}}};
}
Optimizer rowwise() {
  return {"RowWiseAdagrad", {{"lr", 0.01}, {"eps", 1e-8}, {"weight_decay", 0.01}, {"decoupled", 0.0}}};
}
Optimizer adam() {
  return {"AdamW",
          {{"lr", 0.01},
           {"b1", 0.9},
           {"b2", 0.999},
           {"eps", 1e-8},
           {"weight_decay", 0.1},
           {"per_row_step", 1.0}}};
}

// The columns of some rows, which a Block points into.
struct Columns {
  Columns(std::size_t rows, std::size_t dim)
      : rows_(rows), dim_(dim), values(4 * rows * dim + rows), noise(rows * dim) {}

  Block block(std::uint64_t step) {
    float* const at = values.data();
    const std::size_t n = rows_ * dim_;
    return {.rows = rows_,
            .dim = dim_,
            .grads = at,
            .columns = {at + n, at + 2 * n, at + 3 * n},
            .row_state = at + 4 * n,
            .noise = noise.data(),
            .step = step};
  }
  void draw_noise(std::uint64_t seed, std::uint64_t step) {
    for (std::size_t r = 0; r < rows_; ++r) {
      const std::uint32_t row = row_noise(step_noise(seed, step), mix(r));
      for (std::size_t e = 0; e < dim_; ++e) {
        noise[r * dim_ + e] = element_noise(row, static_cast<std::uint32_t>(e));
      }
    }
  }

  std::size_t rows_;
  std::size_t dim_;
  std::vector<float> values;
  std::vector<std::uint32_t> noise;
};

void step(const Optimizer& optimizer, const Block& block) {
  std::visit([&](const auto& rule) { rule.step(block); }, optimizer.rule());
}
void start(const Optimizer& optimizer, const Block& block) {
  std::visit([&](const auto& rule) { rule.start(block); }, optimizer.rule());
}

TEST(many_rows_at_once_give_the_bits_of_one_row_at_a_time) {
  std::mt19937 random(1);
  std::uniform_real_distribution<float> uniform(-2.0F, 2.0F);
  for (const Optimizer& optimizer : {ftrl(0.1), group_ftrl(0.1, 0.2), adagrad(), rowwise(), adam()}) {
    for (const std::size_t rows : {1UL, 3UL, 7UL, 8UL, 63UL, 64UL, 65UL}) {
      for (const std::size_t dim : {1UL, 5UL, 16UL}) {
        Columns many(rows, dim);
        Columns one(1, dim);
        const Block all = many.block(3);
        for (float& value : many.values) {
          value = uniform(random);
        }
        start(optimizer, all);
        many.draw_noise(7, 3);
        const Columns before = many;
        step(optimizer, all);
        for (std::size_t r = 0; r < rows; ++r) {
          const Block single = one.block(3);
          const auto copy_row = [&](std::size_t column) {
            std::copy_n(before.values.data() + (column * rows + r) * dim, dim,
                        one.values.data() + column * dim);
          };
          for (std::size_t column = 0; column < 4; ++column) {
            copy_row(column);
          }
          *single.row_state = before.values[4 * rows * dim + r];
          std::copy_n(before.noise.data() + r * dim, dim, one.noise.data());
          step(optimizer, single);
          for (std::size_t k = 0; k < optimizer.columns().size(); ++k) {
            CHECK_EQ(std::memcmp(single.columns[k], all.columns[k] + r * dim, dim * sizeof(float)), 0);
          }
          if (!optimizer.row_state().empty()) {
            CHECK_EQ(*single.row_state, all.row_state[r]);
          }
        }
      }
    }
  }
}

// A row as stored in a table: column after column, then its own number.
std::vector<float> row_of(const Optimizer& optimizer, const Block& block, std::size_t r) {
  std::vector<float> row;
  for (std::size_t k = 0; k < optimizer.columns().size(); ++k) {
    row.insert(row.end(), block.columns[k] + r * block.dim, block.columns[k] + (r + 1) * block.dim);
  }
  if (!optimizer.row_state().empty()) {
    row.push_back(block.row_state[r]);
  }
  return row;
}

// Of eleven rows one has a gradient of zeros, two one that is not finite, two a number that is not: all of
// these stay. One has a gradient whose square is too large for a float, which only some rules mind.
TEST(rows_stepped_in_place_get_the_bits_of_a_block_and_stay_whole_where_they_must) {
  constexpr std::size_t kRows = 11;
  constexpr float kInfinite = std::numeric_limits<float>::infinity();
  std::mt19937 random(2);
  std::uniform_real_distribution<float> uniform(-2.0F, 2.0F);
  const Optimizer sgd("SGD", {{"lr", 0.1}, {"weight_decay", 0.1}});
  const Optimizer momentum("Momentum", {{"lr", 0.1}, {"mu", 0.9}, {"nesterov", 1.0}, {"weight_decay", 0.1}});
  const Optimizer plain_adam("Adam", {{"lr", 0.01},
                                      {"b1", 0.9},
                                      {"b2", 0.999},
                                      {"eps", 1e-8},
                                      {"weight_decay", 0.1},
                                      {"per_row_step", 0.0}});
  for (const Optimizer& optimizer :
       {sgd, momentum, adagrad(), rowwise(), ftrl(0.1), group_ftrl(0.1, 0.2), adam(), plain_adam}) {
    for (const std::size_t dim : {8UL, 9UL, 16UL, 17UL, 31UL, 32UL, 64UL, 100UL}) {
      Columns many(kRows, dim);
      for (float& value : many.values) {
        value = uniform(random);
      }
      const Block block = many.block(3);
      start(optimizer, block);
      many.draw_noise(7, 3);
      std::fill_n(block.grads + 2 * dim, dim, -0.0F);
      block.grads[4 * dim - 1] = kInfinite;
      block.grads[5 * dim - 2] = std::numeric_limits<float>::quiet_NaN();
      block.columns[0][6 * dim] = -kInfinite;
      block.columns[optimizer.columns().size() - 1][8 * dim - 1] = kInfinite;
      block.grads[9 * dim + 1] = 3e38F;
      constexpr std::array<bool, kRows> kStays{0, 0, 1, 1, 1, 0, 1, 1, 0, 1, 0};
      std::vector<std::vector<float>> rows;
      for (std::size_t r = 0; r < kRows; ++r) {
        rows.push_back(row_of(optimizer, block, r));
      }
      const std::vector<std::vector<float>> before = rows;
      std::vector<std::byte*> pointers;
      std::vector<std::uint64_t> hashes;
      for (std::size_t r = 0; r < kRows; ++r) {
        pointers.push_back(reinterpret_cast<std::byte*>(rows[r].data()));
        hashes.push_back(mix(r));
      }
      std::vector<float> scratch(rows[0].size());
      PrefetchCursor none;
      const std::size_t dropped = std::visit(
          [&](const auto& rule) -> std::size_t {
            if constexpr (requires(const InPlace& given) { rule.step(given); }) {
              return rule.step(InPlace{.rows = pointers,
                                       .dim = dim,
                                       .grads = block.grads,
                                       .hashes = hashes.data(),
                                       .noise = step_noise(7, 3),
                                       .step = 3,
                                       .scratch = scratch.data(),
                                       .ahead = &none});
            } else {
              return 0;
            }
          },
          optimizer.rule());
      step(optimizer, block);
      std::size_t stayed = 0;
      for (std::size_t r = 0; r < kRows; ++r) {
        const std::vector<float> stepped = row_of(optimizer, block, r);
        const bool finite =
            std::all_of(stepped.begin(), stepped.end(), [](float x) { return std::isfinite(x); }) &&
            std::all_of(block.grads + r * dim, block.grads + (r + 1) * dim,
                        [](float x) { return std::isfinite(x); });
        if (r != 9) {
          CHECK_EQ(!finite || r == 2, kStays[r]);
        }
        stayed += finite ? 0 : 1;
        const std::vector<float>& wanted = finite && r != 2 ? stepped : before[r];
        CHECK_EQ(std::memcmp(rows[r].data(), wanted.data(), wanted.size() * sizeof(float)), 0);
      }
      CHECK_EQ(dropped, stayed);
    }
  }
}

// n (or m) of rows that get +g and -g in turn, compared with steps * g^2.
void check_does_not_stall(const Optimizer& optimizer, bool of_row, std::uint64_t steps) {
  constexpr std::array<float, 4> kGrads{0.5F, 0.3F, 0.1F, 0.01F};
  Columns columns(kGrads.size(), 1);
  for (std::uint64_t t = 1; t <= steps; ++t) {
    const Block block = columns.block(t);
    for (std::size_t r = 0; r < kGrads.size(); ++r) {
      block.grads[r] = t % 2 == 0 ? kGrads[r] : -kGrads[r];
    }
    columns.draw_noise(1, t);
    step(optimizer, block);
  }
  const Block block = columns.block(0);
  for (std::size_t r = 0; r < kGrads.size(); ++r) {
    const double exact =
        static_cast<double>(kGrads[r]) * static_cast<double>(kGrads[r]) * static_cast<double>(steps);
    const auto reached = static_cast<double>(of_row ? block.row_state[r] : block.columns[1][r]);
    CHECK_NEAR(reached / exact, 1.0, 0.01);
  }
}

TEST(the_accumulator_of_ftrl_grows_through_4e7_steps) {
  check_does_not_stall(ftrl(), false, 40'000'000 / kFewer);
}
TEST(the_accumulator_of_adagrad_grows_through_4e7_steps) {
  check_does_not_stall(adagrad(), false, 40'000'000 / kFewer);
}
TEST(the_row_wise_accumulator_grows_through_4e7_steps) {
  check_does_not_stall(rowwise(), true, 40'000'000 / kFewer);
}

TEST(nearest_rounding_would_stall_where_these_do_not) {
  float n = 0x1p22F;  // the defect that the tests above detect: the plain sum stalls
  const float before = n;
  for (int i = 0; i < 1000; ++i) {
    n += 0.5F * 0.5F;
  }
  CHECK_EQ(n, before);
  std::uint32_t moved = 0;
  for (std::uint64_t t = 1; t <= 1000; ++t) {
    moved += accumulate(before, 0.25, row_noise(step_noise(1, t), 5), 1) != before ? 1U : 0U;
  }
  CHECK_NEAR(static_cast<double>(moved), 500,
             80);  // the grid is 0.5 there, so every other step moves, and which one depends on the step
}

TEST(z_of_a_bias_key_keeps_its_weight_at_large_n) {
  // A key in every example, its weight near the planted one. At the end z is 1e5, where rounding to nearest
  // would have moved the weight by several thousandths; the random walk of stochastic rounding is below 2e-4.
  const double planted = -1.384;
  const Optimizer optimizer = ftrl();
  Columns columns(1, 1);
  std::mt19937_64 random(9);
  std::uniform_real_distribution<double> uniform(0, 1);
  double z = 0;
  double n = 0;
  float w = 0;
  for (std::uint64_t t = 1; t <= 4'000'000 / kFewer; ++t) {
    const Block block = columns.block(t);
    std::get<Ftrl>(optimizer.rule()).read(block, &w);
    const double y = uniform(random) < 1 / (1 + std::exp(-planted)) ? 1.0 : 0.0;
    const auto g = static_cast<float>(4 * (1 / (1 + std::exp(-static_cast<double>(w))) - y));
    columns.draw_noise(2, t);
    *block.grads = g;
    const double weight = n == 0 && z == 0 ? 0 : -z / ((1 + std::sqrt(n)) / 0.1);
    const double next = n + static_cast<double>(g) * static_cast<double>(g);
    z += static_cast<double>(g) - (std::sqrt(next) - std::sqrt(n)) / 0.1 * weight;
    n = next;
    step(optimizer, block);
  }
  std::get<Ftrl>(optimizer.rule()).read(columns.block(0), &w);
  CHECK_NEAR(w, -z / ((1 + std::sqrt(n)) / 0.1), 1e-3);
}

TEST(weights_that_are_written_are_read_back) {
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  for (const Optimizer& optimizer : {ftrl(0.3), group_ftrl(0.3, 0.7), group_ftrl(0, 0)}) {
    Columns columns(4, 6);
    const Block block = columns.block(0);
    std::vector<float> given(block.size());
    std::vector<float> got(block.size());
    for (std::size_t e = 0; e < block.size(); ++e) {
      given[e] = e % 5 == 0 ? 0.0F : normal(random);
      block.columns[1][e] = 0.7F;  // equal across a row, for which the group rule is exact
    }
    std::visit(
        [&](const auto& rule) {
          if constexpr (std::remove_cvref_t<decltype(rule)>::kDerivesWeights) {
            rule.write(block, given.data());
            rule.read(block, got.data());
          }
        },
        optimizer.rule());
    for (std::size_t e = 0; e < block.size(); ++e) {
      CHECK_NEAR(got[e], given[e], 1e-5);
    }
  }
}

TEST(group_ftrl_without_a_group_penalty_is_ftrl_bit_for_bit) {
  const Optimizer group("GroupFTRL",
                        {{"alpha", 0.1}, {"beta", 1.0}, {"l1", 0.2}, {"l2", 0.5}, {"l21", 0.0}, {"n0", 0}});
  const Optimizer plain("FTRL", {{"alpha", 0.1}, {"beta", 1.0}, {"l1", 0.2}, {"l2", 0.5}, {"n0", 0}});
  Columns a(8, 3);
  Columns b(8, 3);
  std::mt19937 random(6);
  std::normal_distribution<float> normal;
  for (std::uint64_t t = 1; t <= 200; ++t) {
    for (std::size_t e = 0; e < 24; ++e) {
      a.values[e] = b.values[e] = normal(random);
    }
    a.draw_noise(3, t);
    b.draw_noise(3, t);
    step(group, a.block(t));
    step(plain, b.block(t));
    CHECK(a.values == b.values);
  }
}

TEST(what_is_wrong_with_a_description_is_named) {
  CHECK_THROWS(Optimizer("Ftrl", {}), "no optimizer Ftrl");
  CHECK_THROWS(Optimizer("SGD", {{"lr", 0.0}, {"weight_decay", 0.0}}), "SGD needs lr > 0");
  CHECK_THROWS(Optimizer("SGD", {{"lr", 0.1}}), "weight_decay");
  CHECK_THROWS(Optimizer("SGD", {{"lr", 0.1}, {"weight_decay", 0.0}, {"mu", 0.9}}), "no parameter mu");
  CHECK_THROWS(Optimizer("SGD", {{"lr", NAN}, {"weight_decay", 0.0}}), "finite");
  CHECK_THROWS(Optimizer("SGD", {{"lr", 0.1}, {"weight_decay", 0.0}, {"clip_norm", -1.0}}), "clip_norm");
  CHECK_THROWS(Init("Ones", 0, 0), "no initializer Ones");
  CHECK_THROWS(Init("Uniform", -1, 0), "size >= 0");
}

TEST(the_normal_quantile_is_right_to_many_digits) {
  CHECK_NEAR(normal_quantile(0.5), 0.0, 1e-16);
  CHECK_NEAR(normal_quantile(0.975), 1.959963984540054, 1e-14);
  CHECK_NEAR(normal_quantile(1e-10), -6.361340902404056, 1e-13);
  CHECK_NEAR(normal_quantile(0.0013498980316301035), -3.0, 1e-14);
  for (const double p : {1e-15, 1e-5, 0.01, 0.074, 0.076, 0.3}) {
    CHECK_NEAR(0.5 * std::erfc(-normal_quantile(p) / std::sqrt(2.0)) / p, 1.0, 1e-12);
  }
}

}  // namespace
}  // namespace shoal::optim_test

#include "cache/local_steps.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>

#include "base/check.h"
#include "base/noise.h"

namespace shoal {

namespace {

constexpr std::uint64_t kSeed = 0x6c6f63616c;  // of the rounding noise: another than any table's

}  // namespace

bool LocalSteps::suits(const Optimizer& optimizer, std::size_t dim) noexcept {
  const std::size_t columns = optimizer.columns().size();
  return optimizer.adds_up() && dim <= (Rows::kMaxDim - 1) / columns;
}

LocalSteps::LocalSteps(std::size_t dim, Optimizer optimizer)
    : optimizer_(std::move(optimizer)), rows_(dim, Dtype::kFloat32, optimizer_) {
  SHOAL_CHECK(suits(optimizer_, dim), "a worker makes no steps of " + optimizer_.name() + " with dim " +
                                          std::to_string(dim) + " in copies of rows");
}

Block LocalSteps::block(std::size_t rows) {
  const std::size_t elements = rows * rows_.dim();
  scratch_.resize(elements * rows_.columns() + rows);
  Block block{.rows = rows, .dim = rows_.dim()};
  for (std::size_t k = 0; k < rows_.columns(); ++k) {
    block.columns[k] = scratch_.data() + k * elements;
  }
  block.row_state = scratch_.data() + rows_.columns() * elements;
  return block;
}

void LocalSteps::weights(std::span<std::byte* const> rows, float* weights) {
  PrefetchCursor none;
  if (!optimizer_.derives_weights()) {
    return rows_.read_weights(rows, weights, none);
  }
  const Block some = block(rows.size());
  rows_.gather(rows, some, none);
  std::visit(
      [&](const auto& rule) {
        if constexpr (std::remove_cvref_t<decltype(rule)>::kDerivesWeights) {
          rule.read(some, weights);
        }
      },
      optimizer_.rule());
}

std::size_t LocalSteps::step(std::span<std::byte* const> rows, std::span<const std::uint64_t> hashes,
                             const float* grads) {
  const std::size_t dim = rows_.dim();
  if (optimizer_.clip().active()) {
    grads_.assign(grads, grads + rows.size() * dim);
    optimizer_.clip().apply({.rows = rows.size(), .dim = dim, .grads = grads_.data()});
    // A gradient that is not finite stays so, and its row too.
    for (std::size_t i = 0; i < grads_.size(); ++i) {
      grads_[i] = std::isfinite(grads[i]) ? grads_[i] : grads[i];
    }
    grads = grads_.data();
  }
  scratch_.resize(std::max(scratch_.size(), rows_.floats()));
  PrefetchCursor none;
  const std::uint64_t number = ++steps_;
  return std::visit(
      [&](const auto& rule) -> std::size_t {
        if constexpr (requires { rule.kAddsUp; }) {
          return rule.step(InPlace{.rows = rows,
                                   .dim = dim,
                                   .grads = grads,
                                   .hashes = hashes.data(),
                                   .noise = step_noise(kSeed, number),
                                   .step = number,
                                   .scratch = scratch_.data(),
                                   .ahead = &none});
        } else {
          return 0;  // never: refused by the constructor
        }
      },
      optimizer_.rule());
}

}  // namespace shoal

#include "cache/local_steps.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>

#include "base/check.h"
#include "base/noise.h"
#include "optim/row_flags.h"

namespace shoal {

bool LocalSteps::suits(const Optimizer& optimizer, std::size_t dim) noexcept {
  const std::size_t columns = optimizer.columns().size();
  return optimizer.adds_up() && dim <= (Rows::kMaxDim - 1) / columns;
}

LocalSteps::LocalSteps(std::size_t dim, Optimizer optimizer)
    : optimizer_(std::move(optimizer)),
      rows_(dim, Dtype::kFloat32, optimizer_),
      scratch_(kBlock * rows_.floats()),
      grads_(kBlock * dim),
      noise_(kBlock * dim) {
  SHOAL_CHECK(suits(optimizer_, dim), "a worker makes no steps of " + optimizer_.name() + " with dim " +
                                          std::to_string(dim) + " in copies of rows");
}

Block LocalSteps::block(std::size_t rows) noexcept {
  Block block{.rows = rows, .dim = rows_.dim(), .grads = grads_.data()};
  for (std::size_t k = 0; k < rows_.columns(); ++k) {
    block.columns[k] = scratch_.data() + k * kBlock * rows_.dim();
  }
  block.row_state = scratch_.data() + rows_.columns() * kBlock * rows_.dim();
  block.noise = noise_.data();
  return block;
}

void LocalSteps::weights(std::span<std::byte* const> rows, float* weights) {
  PrefetchCursor none;
  if (!optimizer_.derives_weights()) {
    return rows_.read_weights(rows, weights, none);
  }
  std::visit(
      [&](const auto& rule) {
        if constexpr (std::remove_cvref_t<decltype(rule)>::kDerivesWeights) {
          for (std::size_t r = 0; r < rows.size(); r += kBlock) {
            const Block part = block(std::min(kBlock, rows.size() - r));
            rows_.gather(rows.subspan(r, part.rows), part, none);
            rule.read(part, weights + r * part.dim);
          }
        }
      },
      optimizer_.rule());
}

std::size_t LocalSteps::step(std::span<std::byte* const> rows, std::span<const std::uint64_t> hashes,
                             const float* grads) {
  ++steps_;
  std::size_t dropped = 0;
  for (std::size_t r = 0; r < rows.size(); r += kBlock) {
    const std::size_t count = std::min(kBlock, rows.size() - r);
    dropped += step_block(rows.subspan(r, count), hashes.subspan(r, count), grads + r * rows_.dim());
  }
  return dropped;
}

std::size_t LocalSteps::step_block(std::span<std::byte* const> rows, std::span<const std::uint64_t> hashes,
                                   const float* grads) {
  Block block = this->block(rows.size());
  const bool in_place = block.dim >= InPlace::kMinDim;
  if (!in_place || optimizer_.clip().active()) {
    std::copy_n(grads, block.size(), block.grads);
  }
  if (optimizer_.clip().active()) {
    optimizer_.clip().apply(block);
    // A gradient that is not finite stays so, and its row too.
    for (std::size_t i = 0; i < block.size(); ++i) {
      block.grads[i] = std::isfinite(grads[i]) ? block.grads[i] : grads[i];
    }
    grads = block.grads;
  }
  block.step = steps_;
  const std::uint64_t noise = step_noise(kSeed, block.step);
  PrefetchCursor none;
  return std::visit(
      [&](const auto& rule) -> std::size_t {
        if constexpr (requires { rule.kAddsUp; }) {
          if (in_place) {
            return rule.step(InPlace{.rows = rows,
                                     .dim = block.dim,
                                     .grads = grads,
                                     .hashes = hashes.data(),
                                     .noise = noise,
                                     .step = block.step,
                                     .scratch = scratch_.data(),
                                     .ahead = &none});
          }
          fill_noise(hashes, block.dim, noise, noise_.data());
          rows_.gather(rows, block, none);
          mark_moving(block.grads, block.rows, block.dim, moves_.data());
          std::fill_n(finite_.data(), block.rows, 1U);
          mark_finite(block.grads, block.rows, block.dim, finite_.data());
          rule.step(block);
          return rows_.scatter_finite(block, moves_.data(), finite_.data(), rows, none);
        } else {
          return 0;  // never: refused by the constructor
        }
      },
      optimizer_.rule());
}

}  // namespace shoal

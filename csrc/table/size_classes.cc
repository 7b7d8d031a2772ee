#include "table/size_classes.h"

#include <algorithm>
#include <cmath>

#include "base/memory.h"

namespace shoal {

namespace {

constexpr double kLarge = 4096;
constexpr double kGrowth = 1.125;
constexpr double kSmallGrowth = 1.5;

// The highest load by bucket width. At four cells a hit then reads 1.22 lines.
double highest_load(std::size_t cells) noexcept {
  switch (cells) {
    case 2:
      return 0.78;
    case 3:
      return 0.84;
    default:
      return 0.87;
  }
}

}  // namespace

SizeClasses::SizeClasses(const Layout& layout, Slot slot) noexcept
    : load_limit_(highest_load(layout.cells)),
      // Multiples of the golden ratio are spread evenly for any run of slot numbers.
      phase_(static_cast<double>(index_of(slot) * 0x9e3779b9U) * 0x1p-32) {}

std::size_t SizeClasses::rows_above(std::size_t rows) const noexcept {
  const double ratio = static_cast<double>(rows) < kLarge ? kSmallGrowth : kGrowth;
  const double exponent = std::ceil(std::log(static_cast<double>(rows) / kLarge) / std::log(ratio) - phase_);
  return static_cast<std::size_t>(kLarge * std::pow(ratio, exponent + phase_)) + 1;
}

std::size_t SizeClasses::buckets_for(std::size_t rows, std::size_t cells) const noexcept {
  const auto needed = static_cast<std::size_t>(static_cast<double>(rows + 1) / load_limit_) + 1;
  return Region::rounded((needed + cells - 1) / cells * kCacheLine) / kCacheLine;
}

std::size_t SizeClasses::limit_of(std::size_t buckets, std::size_t cells) const noexcept {
  const std::size_t total_cells = buckets * cells;
  return buckets == 0 ? 0
                      : std::min(total_cells - 1,
                                 static_cast<std::size_t>(static_cast<double>(total_cells) * load_limit_));
}

}  // namespace shoal

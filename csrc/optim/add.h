// Add: counters. A row is whole numbers of 64 bits, and a step adds what is pushed.
//
//   n += amount   modulo 2^64, in two's complement: neither order nor grouping of the additions matters
//
// An int64 takes two floats of the engine, lower half first, which are copied and never calculated with
// (base/int64_pairs.h). So dim is even, no number is checked for being finite, and none is rounded. This is
// the only rule of such rows.

#pragma once

#include <array>
#include <string_view>

#include "base/params.h"
#include "optim/block.h"
#include "optim/in_place.h"

namespace shoal {

struct Add {
  static constexpr std::string_view kName = "Add";
  static constexpr std::array<std::string_view, 1> kColumns{"w"};
  static constexpr bool kDerivesWeights = false;

  explicit Add(Params& /*params*/) {}

  std::string_view row_state() const noexcept { return {}; }
  void start(const Block& /*block*/) const noexcept {}
  void step(const Block& block) const noexcept;
  std::size_t step(const InPlace& rows) const noexcept;
};

}  // namespace shoal

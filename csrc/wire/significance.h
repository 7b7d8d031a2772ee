// The significance filter: small gradients are sent rarely and large, so that their mean is right.
//
// Idea. Most rows of a batch have gradients that hardly matter, and cost as much to send as the others. A row whose largest
// |g| is m < threshold t is sent with probability m / t, as g * (t / m), and otherwise not: its expectation is g, and the
// zeros that it leaves are dropped on the way (wire/values.h). Rows at t and above are sent as they are.
//
//   the price   a row adds at most t * m - m * m of variance to its largest element, t^2 / 4 at worst; Significance adds up
//               what was really added
//
// The chance is a function of (seed, number of the call, hash) alone: a call that is cut otherwise and sent again is the
// same call.
//
// Threads: pure functions.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace shoal {

struct Significance {
  std::uint64_t rows = 0;
  std::uint64_t dropped = 0;  // rows that became zeros
  std::uint64_t raised = 0;   // rows that were sent larger than they are
  double squared = 0;         // sum of (sent - given)^2
};

// One row of `dim` values for each hash, into `out`, which may be `values`. Rows that are not finite, or all zero, stay.
// Throws std::invalid_argument where sizes do not fit or the threshold is not a finite number >= 0.
void filter_significant(std::span<const float> values, std::span<const std::uint64_t> hashes, std::size_t dim,
                        double threshold, std::uint64_t seed, std::uint64_t call, std::span<float> out,
                        Significance& counts);

}  // namespace shoal

// The significance filter: small gradients are sent rarely and scaled up, so that their expectation is exact.
//
// Algorithm. Unbiased gradient sparsification by importance sampling (Wangni et al., NeurIPS 2018), by row. A
// row whose largest |g| is m < threshold t is sent with probability m / t, as g * (t / m), and is otherwise
// zeroed: its expectation is g, and the zeros are dropped by the encoding (wire/values.h). Others are
// unchanged. bench/cluster.md, "Logistic regression on a cluster", has the gain.
//
//   variance   a row adds at most t * m - m * m to that of its largest element, t^2 / 4 at worst;
//              Significance sums what was actually added
//
// The decision depends on (seed, number of the call, hash) alone: a call that is split differently and sent
// again makes the same decisions.
//
// Threads: pure functions.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace shoal {

struct Significance {
  std::uint64_t rows = 0;
  std::uint64_t dropped = 0;  // rows that were zeroed
  std::uint64_t raised = 0;   // rows that were scaled up
  double squared = 0;         // sum of (sent - original)^2
};

// Filters one row of `dim` values for each hash into `out`, which may be `values`. Rows that are all zero or
// not finite are unchanged. Throws std::invalid_argument if sizes do not match or the threshold is not a
// finite number >= 0.
void filter_significant(std::span<const float> values, std::span<const std::uint64_t> hashes, std::size_t dim,
                        double threshold, std::uint64_t seed, std::uint64_t call, std::span<float> out,
                        Significance& counts);

}  // namespace shoal

// What the metrics of binary predictions are made of, counted for many examples at a time: see
// shoal.metrics.Accumulator.
//
// Algorithm. p and the loss of an example as in logistic.h; its margin's bin is one of 2^bits equally wide
// ones on [-limit, limit), what lies outside counts in the first or the last one. A pass of all threads
// computes losses, probabilities and bins, a loop of the caller adds the bins to the histogram.
//
// Arithmetic. float64, with e^x and log1p of this file, which a compiler vectorizes: losses and probabilities
// are within 2e-15 of the exact ones, relatively. Sums are made in blocks of kMetricsBlock examples, four
// interleaved ones in each; the data alone determine the order, so the bits depend neither on the number of
// threads nor on the instruction set.
//
// Threads: no state; the pool shares the work.

#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "base/threads.h"

namespace shoal {

inline constexpr std::size_t kMetricsBlock = 1024;
inline constexpr unsigned kMostHistogramBits = 24;

struct BinaryMetrics {
  double loss;          // sum, by weight
  double probability;   // of label 1: sum, by weight
  double weight;        // sum
  double positive;      // sum of the weights of label 1
  std::uint32_t first;  // and last bin of a new example
  std::uint32_t last;
};

// Adds the weight of each example to its bin: `counts` has 2^bits numbers for label 0, then as many for label
// 1. Labels are 0 or
// 1. Weights are finite and not negative, one for each example; empty: each is 1. If a margin is NaN, or
// the sum of the losses is not finite, nothing is counted, and
// there is no result.
std::optional<BinaryMetrics> count_margins(std::span<const double> margins, std::span<const float> labels,
                                           std::span<const float> weights, double limit,
                                           std::span<std::int64_t> counts, ThreadPool& pool);
std::optional<BinaryMetrics> count_margins(std::span<const double> margins, std::span<const float> labels,
                                           std::span<const float> weights, double limit,
                                           std::span<double> counts, ThreadPool& pool);

struct BinRange {
  std::uint32_t first;
  std::uint32_t last;
};

// Adds the weight of each example to its bin, in their order, and returns the least and the greatest of these
// bins. Labels are 0 or 1, no margin is NaN, there is at least one example; weights as above. With integers
// there are no weights.
BinRange count_bins(std::span<const double> margins, std::span<const double> labels,
                    std::span<const double> weights, double limit, std::span<std::int64_t> counts);
BinRange count_bins(std::span<const double> margins, std::span<const double> labels,
                    std::span<const double> weights, double limit, std::span<double> counts);

struct LabelledBins {
  BinRange bins;
  std::size_t positive;  // examples of label 1
};

// count_bins() of at least one example without weights. If a label is neither 0 nor 1, or a margin is NaN,
// nothing is counted, and there is no result.
std::optional<LabelledBins> count_labelled(std::span<const double> margins, std::span<const float> labels,
                                           double limit, std::span<std::int64_t> counts, ThreadPool& pool);

// What an AUC is made of, of the positive and negative examples in ascending groups of equal score: the pairs
// of one of each, those in which the positive is in a higher group, and those in one group. Exact below 2^31.
struct OrderedPairs {
  std::int64_t count;
  std::int64_t won;
  std::int64_t tied;
};
OrderedPairs ordered_pairs(std::span<const std::int64_t> positive, std::span<const std::int64_t> negative);

}  // namespace shoal

#include "kernel/binary_metrics.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/buffer.h"
#include "base/check.h"
#include "base/simd.h"
#include "kernel/logistic.h"

namespace shoal {

namespace {

constexpr std::size_t kBlocksPerPart = 16;

// e^x for -708 <= x <= 0: x = n ln 2 + r, |r| <= ln 2 / 2; e^r by its series up to r^13; then n is added to
// the exponent. (Cody and Waite, Software Manual for the Elementary Functions, 1980.)
SHOAL_INLINE double exponential(double x) noexcept {
  constexpr double kShift = 0x1.8p52;  // the sum's low bits are the integer
  constexpr double kLn2High = 0x1.62e42feep-1;
  constexpr double kLn2Low = 0x1.a39ef35793c76p-33;
  const double shifted = x * 0x1.71547652b82fep+0 + kShift;
  const double n = shifted - kShift;
  const double r = (x - n * kLn2High) - n * kLn2Low;
  double sum = 1.0 / 6227020800.0;
  sum = sum * r + 1.0 / 479001600.0;
  sum = sum * r + 1.0 / 39916800.0;
  sum = sum * r + 1.0 / 3628800.0;
  sum = sum * r + 1.0 / 362880.0;
  sum = sum * r + 1.0 / 40320.0;
  sum = sum * r + 1.0 / 5040.0;
  sum = sum * r + 1.0 / 720.0;
  sum = sum * r + 1.0 / 120.0;
  sum = sum * r + 1.0 / 24.0;
  sum = sum * r + 1.0 / 6.0;
  sum = sum * r + 0.5;
  sum = sum * r + 1.0;
  sum = sum * r + 1.0;
  return std::bit_cast<double>(std::bit_cast<std::uint64_t>(sum) +
                               (std::bit_cast<std::uint64_t>(shifted) << 52U));
}

// log(1 + e) for 0 <= e <= 1: 2 atanh(s), s = e / (2 + e) <= 1/3, by its series up to s^31.
SHOAL_INLINE double log_of_one_plus(double e) noexcept {
  const double s = e / (2.0 + e);
  const double z = s * s;
  double sum = 1.0 / 31.0;
  sum = sum * z + 1.0 / 29.0;
  sum = sum * z + 1.0 / 27.0;
  sum = sum * z + 1.0 / 25.0;
  sum = sum * z + 1.0 / 23.0;
  sum = sum * z + 1.0 / 21.0;
  sum = sum * z + 1.0 / 19.0;
  sum = sum * z + 1.0 / 17.0;
  sum = sum * z + 1.0 / 15.0;
  sum = sum * z + 1.0 / 13.0;
  sum = sum * z + 1.0 / 11.0;
  sum = sum * z + 1.0 / 9.0;
  sum = sum * z + 1.0 / 7.0;
  sum = sum * z + 1.0 / 5.0;
  sum = sum * z + 1.0 / 3.0;
  return 2.0 * (s + s * (z * sum));
}

// A block of examples.
struct Block {
  std::size_t size;
  const double* margins;
  const float* labels;
  const float* weights;   // or null
  std::uint32_t* places;  // in the histogram
};

// Four additions are in flight at a time.
template <class Number>
SHOAL_INLINE double sum_of(std::size_t n, const Number& number) noexcept {
  double a = 0.0;
  double b = 0.0;
  double c = 0.0;
  double d = 0.0;
  std::size_t i = 0;
  for (; i + 4 <= n; i += 4) {
    a += number(i);
    b += number(i + 1);
    c += number(i + 2);
    d += number(i + 3);
  }
  for (; i < n; ++i) {
    a += number(i);
  }
  return (a + b) + (c + d);
}

// Of margins that are NaN the first one. `end` rounded down is the last bin.
SHOAL_INLINE std::uint32_t bin_of(double margin, double limit, double scale, double end) noexcept {
  const double place = std::min(std::max(0.0, (margin + limit) * scale), end);
  return static_cast<std::uint32_t>(static_cast<std::int32_t>(place));
}

SHOAL_CLONES BinaryMetrics metrics_of(const Block& block, double limit, std::size_t bins) noexcept {
  double losses[kMetricsBlock];
  double probabilities[kMetricsBlock];
  const std::size_t n = block.size;
  const double scale = static_cast<double>(bins) / (2.0 * limit);
  const double end = static_cast<double>(bins) - 0.5;
  const auto classes = static_cast<std::uint32_t>(bins);
  std::uint32_t first = classes;
  std::uint32_t last = 0;
  std::uint32_t positive = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const double a = block.margins[i];
    const double e = exponential(std::max(-std::abs(a), -708.0));
    const double near = 1.0 / (1.0 + e);
    // max(a, 0) - a y is |a| if the sign of a is wrong and 0 if it is right.
    losses[i] = std::max(a * (1.0 - 2.0 * static_cast<double>(block.labels[i])), 0.0) + log_of_one_plus(e);
    probabilities[i] = a >= 0.0 ? near : e * near;
  }
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint32_t bin = bin_of(block.margins[i], limit, scale, end);
    const std::uint32_t is_positive = block.labels[i] == 1.0F ? 1U : 0U;
    first = std::min(first, bin);
    last = std::max(last, bin);
    positive += is_positive;
    block.places[i] = bin + is_positive * classes;
  }
  const float* const w = block.weights;
  if (w == nullptr) {
    return {sum_of(n, [&](std::size_t i) SHOAL_ALWAYS { return losses[i]; }),
            sum_of(n, [&](std::size_t i) SHOAL_ALWAYS { return probabilities[i]; }),
            static_cast<double>(n),
            static_cast<double>(positive),
            first,
            last};
  }
  const auto weight = [&](std::size_t i) SHOAL_ALWAYS { return static_cast<double>(w[i]); };
  return {
      sum_of(n, [&](std::size_t i) SHOAL_ALWAYS { return weight(i) * losses[i]; }),
      sum_of(n, [&](std::size_t i) SHOAL_ALWAYS { return weight(i) * probabilities[i]; }),
      sum_of(n, weight),
      sum_of(n, [&](std::size_t i) SHOAL_ALWAYS { return weight(i) * static_cast<double>(block.labels[i]); }),
      first,
      last};
}

std::size_t bins_of(std::size_t counts) {
  const std::size_t bins = counts / 2;
  SHOAL_CHECK(bins >= 2 && std::has_single_bit(bins) && bins <= std::size_t{1} << kMostHistogramBits &&
                  counts == 2 * bins,
              "a histogram has 2^1 to 2^24 bins for each class, got " + std::to_string(counts) + " numbers");
  return bins;
}

// Weights are added in the order of the examples.
void add_to(std::span<double> counts, std::span<const std::uint32_t> places, std::span<const float> weights,
            ThreadPool& /*pool*/) {
  for (std::size_t i = 0; i < places.size(); ++i) {
    counts[places[i]] += weights.empty() ? 1.0 : static_cast<double>(weights[i]);
  }
}

// Integers are added in any order: each part counts into a histogram of its own.
void add_to(std::span<std::int64_t> counts, std::span<const std::uint32_t> places,
            std::span<const float> /*weights*/, ThreadPool& pool) {
  const Partition partition{places.size(), parts_for(places.size(), counts.size(), pool.threads())};
  std::vector<Buffer<std::uint32_t>> histograms(partition.parts);
  pool.run(partition.parts, [&](std::size_t p) {
    Buffer<std::uint32_t> histogram(counts.size());
    std::fill(histogram.begin(), histogram.end(), 0U);
    for (std::size_t i = partition.begin(p); i < partition.begin(p + 1); ++i) {
      ++histogram[places[i]];
    }
    histograms[p] = std::move(histogram);
  });
  for (const Buffer<std::uint32_t>& histogram : histograms) {
    for (std::size_t k = 0; k < counts.size(); ++k) {
      counts[k] += std::int64_t{histogram[k]};
    }
  }
}

template <class Count>
std::optional<BinaryMetrics> count(std::span<const double> margins, std::span<const float> labels,
                                   std::span<const float> weights, double limit, std::span<Count> counts,
                                   ThreadPool& pool) {
  const std::size_t n = margins.size();
  check_labels(labels, weights, n);
  const std::size_t bins = bins_of(counts.size());
  const std::size_t blocks = (n + kMetricsBlock - 1) / kMetricsBlock;
  Buffer<std::uint32_t> places(n);
  std::vector<BinaryMetrics> found(blocks);
  pool.run((blocks + kBlocksPerPart - 1) / kBlocksPerPart, [&](std::size_t part) {
    for (std::size_t b = part * kBlocksPerPart; b < std::min(blocks, (part + 1) * kBlocksPerPart); ++b) {
      const std::size_t begin = b * kMetricsBlock;
      found[b] = metrics_of(
          {std::min(n, begin + kMetricsBlock) - begin, margins.data() + begin, labels.data() + begin,
           weights.empty() ? nullptr : weights.data() + begin, places.data() + begin},
          limit, bins);
    }
  });
  BinaryMetrics total{0.0, 0.0, 0.0, 0.0, static_cast<std::uint32_t>(bins), 0};
  for (const BinaryMetrics& part_sums : found) {
    total = {total.loss + part_sums.loss,
             total.probability + part_sums.probability,
             total.weight + part_sums.weight,
             total.positive + part_sums.positive,
             std::min(total.first, part_sums.first),
             std::max(total.last, part_sums.last)};
  }
  if (!std::isfinite(total.loss)) {
    return std::nullopt;
  }
  add_to(counts, std::span<const std::uint32_t>(places.data(), n), weights, pool);
  return total;
}

template <class Label, class Count>
BinRange add_bins(std::span<const double> margins, std::span<const Label> labels,
                  std::span<const double> weights, double limit, std::span<Count> counts) {
  const std::size_t n = margins.size();
  SHOAL_CHECK(n != 0 && labels.size() == n && (weights.empty() || weights.size() == n),
              "labels and weights must have one number for each of " + std::to_string(n) + " examples");
  const std::size_t bins = bins_of(counts.size());
  const double scale = static_cast<double>(bins) / (2.0 * limit);
  const double end = static_cast<double>(bins) - 0.5;
  BinRange range{static_cast<std::uint32_t>(bins), 0};
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint32_t bin = bin_of(margins[i], limit, scale, end);
    range = {std::min(range.first, bin), std::max(range.last, bin)};
    Count& count = counts[bin + (labels[i] == Label{1} ? bins : 0)];
    count += weights.empty() ? Count{1} : static_cast<Count>(weights[i]);
  }
  return range;
}

}  // namespace

BinRange count_bins(std::span<const double> margins, std::span<const double> labels,
                    std::span<const double> weights, double limit, std::span<std::int64_t> counts) {
  SHOAL_CHECK(weights.empty(), "a histogram of integers counts examples without weights");
  return add_bins(margins, labels, weights, limit, counts);
}

BinRange count_bins(std::span<const double> margins, std::span<const double> labels,
                    std::span<const double> weights, double limit, std::span<double> counts) {
  return add_bins(margins, labels, weights, limit, counts);
}

std::optional<BinaryMetrics> count_margins(std::span<const double> margins, std::span<const float> labels,
                                           std::span<const float> weights, double limit,
                                           std::span<std::int64_t> counts, ThreadPool& pool) {
  SHOAL_CHECK(weights.empty(), "a histogram of integers counts examples without weights");
  return count(margins, labels, weights, limit, counts, pool);
}

std::optional<BinaryMetrics> count_margins(std::span<const double> margins, std::span<const float> labels,
                                           std::span<const float> weights, double limit,
                                           std::span<double> counts, ThreadPool& pool) {
  return count(margins, labels, weights, limit, counts, pool);
}

std::optional<LabelledBins> count_labelled(std::span<const double> margins, std::span<const float> labels,
                                           double limit, std::span<std::int64_t> counts, ThreadPool& pool) {
  const std::size_t n = margins.size();
  SHOAL_CHECK(n != 0 && labels.size() == n,
              "labels must have one number for each of " + std::to_string(n) + " examples");
  const std::size_t bins = bins_of(counts.size());
  const double scale = static_cast<double>(bins) / (2.0 * limit);
  const double end = static_cast<double>(bins) - 0.5;
  const Partition partition{n, parts_for(n, kMetricsBlock, pool.threads())};
  struct Found {
    BinRange bins;
    std::size_t positive;
    std::size_t wrong;
  };
  std::vector<Found> found(partition.parts);
  Buffer<std::uint32_t> places(n);
  pool.run(partition.parts, [&](std::size_t part) {
    Found counted{{static_cast<std::uint32_t>(bins), 0}, 0, 0};
    for (std::size_t i = partition.begin(part); i < partition.begin(part + 1); ++i) {
      const bool is_positive = labels[i] == 1.0F;
      const std::uint32_t bin = bin_of(margins[i], limit, scale, end);
      counted.bins = {std::min(counted.bins.first, bin), std::max(counted.bins.last, bin)};
      counted.positive += is_positive ? 1U : 0U;
      counted.wrong += (!is_positive && labels[i] != 0.0F) || std::isnan(margins[i]) ? 1U : 0U;
      places[i] = bin + (is_positive ? static_cast<std::uint32_t>(bins) : 0U);
    }
    found[part] = counted;
  });
  Found total = found.front();
  for (const Found& part_found : std::span(found).subspan(1)) {
    total = {
        {std::min(total.bins.first, part_found.bins.first), std::max(total.bins.last, part_found.bins.last)},
        total.positive + part_found.positive,
        total.wrong + part_found.wrong};
  }
  if (total.wrong != 0) {
    return std::nullopt;
  }
  pool.run(partition.parts, [&](std::size_t part) {
    for (std::size_t i = partition.begin(part); i < partition.begin(part + 1); ++i) {
      if (partition.parts == 1) {
        ++counts[places[i]];
      } else {  // in any order: whole numbers
        std::atomic_ref(counts[places[i]]).fetch_add(1, std::memory_order_relaxed);
      }
    }
  });
  return LabelledBins{total.bins, total.positive};
}

OrderedPairs ordered_pairs(std::span<const std::int64_t> positive, std::span<const std::int64_t> negative) {
  SHOAL_CHECK(positive.size() == negative.size(), "there are as many groups of positives as of negatives");
  OrderedPairs pairs{0, 0, 0};
  std::int64_t positives = 0;
  std::int64_t below = 0;
  for (std::size_t i = 0; i < positive.size(); ++i) {
    positives += positive[i];
    pairs.won += positive[i] * below;
    pairs.tied += positive[i] * negative[i];
    below += negative[i];
  }
  pairs.count = positives * below;
  return pairs;
}

}  // namespace shoal

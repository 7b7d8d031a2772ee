#include "kernel/logistic.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <string>

#include "base/check.h"
#include "base/mix.h"

namespace shoal {

namespace {

constexpr std::size_t kBlocks = 16;  // loss blocks that are summed on the stack at a time

// Entry e multiplied by the number of its key.
template <bool ones>
double product(const Examples& examples, const float* weights, std::size_t e) noexcept {
  const auto weight = static_cast<double>(weights[examples.columns[e]]);
  return ones ? weight : weight * static_cast<double>(examples.values[e]);
}

// Entry e of an example with this slope.
template <bool ones>
double share(const Examples& examples, double slope, std::size_t e) noexcept {
  return ones ? slope : slope * static_cast<double>(examples.values[e]);
}

// Entry k of an example is added to sum k % 4: four additions are in flight at a time.
template <bool ones>
void margins_of(const Examples& examples, const float* weights, std::size_t begin, std::size_t end,
                double* out) noexcept {
  const double bias = examples.bias ? static_cast<double>(weights[*examples.bias]) : 0.0;
  for (std::size_t i = begin; i < end; ++i) {
    double sums[4] = {};
    std::size_t e = begin_of(examples, i);
    const std::size_t last = begin_of(examples, i + 1);
    for (; e + 4 <= last; e += 4) {
      for (std::size_t k = 0; k < 4; ++k) {
        sums[k] += product<ones>(examples, weights, e + k);
      }
    }
    for (std::size_t k = 0; e < last; ++k, ++e) {
      sums[k] += product<ones>(examples, weights, e);
    }
    out[i] = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + bias;
  }
}

// Adds each entry to the sum of its key, front to back: the definition of the gradient.
template <bool ones>
void scatter(const Examples& examples, const double* slopes, double* sums) noexcept {
  for (std::size_t i = 0; i < examples.size(); ++i) {
    const std::size_t last = begin_of(examples, i + 1);
    for (std::size_t e = begin_of(examples, i); e < last; ++e) {
      sums[examples.columns[e]] += share<ones>(examples, slopes[i], e);
    }
    if (examples.bias) {
      sums[*examples.bias] += slopes[i];
    }
  }
}

template <bool ones>
void shares_of(const Examples& examples, const double* slopes, std::size_t begin, std::size_t end,
               double* shares) noexcept {
  for (std::size_t i = begin; i < end; ++i) {
    const std::size_t last = begin_of(examples, i + 1);
    for (std::size_t e = begin_of(examples, i); e < last; ++e) {
      shares[e] = share<ones>(examples, slopes[i], e);
    }
  }
}

// The bias's sum in the order of scatter: of each example any entries with the same key, then its slope.
template <class Share>
double bias_sum(const Examples& examples, std::span<const double> slopes, Occurrences occurrences,
                const Share& share_of) noexcept {
  const std::size_t bias = *examples.bias;
  std::size_t j = occurrences.group_offsets[bias];
  const std::size_t last = occurrences.group_offsets[bias + 1];
  double sum = 0.0;
  for (std::size_t i = 0; i < examples.size(); ++i) {
    for (; j < last && occurrences.order[j] < begin_of(examples, i + 1); ++j) {
      sum += share_of(occurrences.order[j]);
    }
    sum += slopes[i];
  }
  return sum;
}

// Adds the shares of each key's entries in the order of scatter.
template <class Share>
void sum_shares(const Examples& examples, std::span<const double> slopes, Occurrences occurrences,
                const Share& share_of, std::span<float> out, ThreadPool& pool) {
  const std::span<const std::uint32_t> order = occurrences.order;
  const std::span<const std::uint32_t> group_offsets = occurrences.group_offsets;
  const std::size_t entries = examples.columns.size();
  SHOAL_CHECK(group_offsets.size() == out.size() + 1 && order.size() >= entries,
              "occurrences of another batch");
  each_run_of_keys(occurrences, 1, pool, [&](std::size_t first, std::size_t end) {
    for (std::size_t u = first; u < end; ++u) {
      double sum = 0.0;
      for (std::size_t j = group_offsets[u]; j < group_offsets[u + 1]; ++j) {
        sum += order[j] < entries ? share_of(order[j]) : 0.0;
      }
      out[u] = static_cast<float>(sum);
    }
  });
  if (examples.bias) {
    out[*examples.bias] = static_cast<float>(bias_sum(examples, slopes, occurrences, share_of));
  }
}

// The number of entries that every example has; 0: not all have as many.
std::size_t common_length(const Examples& examples) noexcept {
  const std::size_t length = examples.size() == 0 ? 0 : examples.columns.size() / examples.size();
  std::size_t differing = 0;
  for (std::size_t i = 0; i <= examples.size(); ++i) {
    differing += begin_of(examples, i) != i * length ? 1U : 0U;
  }
  return differing == 0 ? length : 0;
}

// As std::find_if, by a loop without branches: as a rule there is none.
template <class Test>
std::span<const float>::iterator find(std::span<const float> numbers, const Test& test) {
  const std::size_t found =
      std::transform_reduce(numbers.begin(), numbers.end(), std::size_t{0}, std::plus<>{},
                            [&](float x) { return std::size_t{test(x) ? 1U : 0U}; });
  return found == 0 ? numbers.end() : std::find_if(numbers.begin(), numbers.end(), test);
}

}  // namespace

void margins(const Examples& examples, std::span<const float> weights, std::span<double> out,
             ThreadPool& pool) {
  check_examples(examples, weights.size());
  check_sizes(out.size(), examples.size(), "margins");
  each_piece(examples, pool, [&](std::size_t begin, std::size_t end) {
    (examples.values.empty() ? margins_of<true> : margins_of<false>)(examples, weights.data(), begin, end,
                                                                     out.data());
  });
}

void check_labels(std::span<const float> labels, std::span<const float> weights, std::size_t examples) {
  check_sizes(labels.size(), examples, "labels");
  SHOAL_CHECK(weights.empty() || weights.size() == examples,
              "example weights must be one for each of the " + std::to_string(examples) + " examples, got " +
                  std::to_string(weights.size()));
  const auto is_odd = [](float y) { return y != 0.0F && y != 1.0F; };
  const auto is_wrong = [](float w) { return !(w >= 0.0F && w <= std::numeric_limits<float>::max()); };
  const auto odd = find(labels, is_odd);
  SHOAL_CHECK(odd == labels.end(), "labels must be 0 or 1, got " + std::to_string(*odd) + " at position " +
                                       std::to_string(odd - labels.begin()));
  const auto wrong = find(weights, is_wrong);
  SHOAL_CHECK(wrong == weights.end(), "example weights must be finite and not negative, got " +
                                          std::to_string(*wrong) + " at position " +
                                          std::to_string(wrong - weights.begin()));
}

namespace {

// e^-|a| is in (0, 1]: nothing below overflows or cancels.
struct Point {
  double p;     // the probability of label 1
  double q;     // that of label 0, accurate where 1 - p is not
  double tail;  // log1p(e^-|a|): the loss minus (max(a, 0) - a y)
};

Point point(double a) noexcept {
  const double e = std::exp(-std::abs(a));
  const double near = 1.0 / (1.0 + e);
  const double far = e / (1.0 + e);
  return {a >= 0.0 ? near : far, a >= 0.0 ? far : near, std::log1p(e)};
}

template <bool sloped>
double losses_of(std::span<const double> margins, std::span<const float> labels,
                 std::span<const float> weights, std::span<double> slopes, ThreadPool& pool) {
  const std::size_t n = margins.size();
  check_labels(labels, weights, n);
  if (sloped) {
    check_sizes(slopes.size(), n, "slopes");
  }
  const std::size_t blocks = (n + kLossBlock - 1) / kLossBlock;
  double total = 0.0;
  for (std::size_t first = 0; first < blocks; first += kBlocks) {
    const std::size_t count = std::min(kBlocks, blocks - first);
    double sums[kBlocks] = {};
    pool.run(count, [&](std::size_t b) {
      const std::size_t begin = (first + b) * kLossBlock;
      const std::size_t end = std::min(n, begin + kLossBlock);
      double sum = 0.0;
      for (std::size_t i = begin; i < end; ++i) {
        const double a = margins[i];
        const bool is_positive = labels[i] == 1.0F;
        const double weight = weights.empty() ? 1.0 : static_cast<double>(weights[i]);
        const Point at = point(a);
        // max(a, 0) - a y is |a| if the sign of a is wrong and 0 if it is right.
        sum += weight * (std::max(is_positive ? -a : a, 0.0) + at.tail);
        if (sloped) {
          slopes[i] = weight * (is_positive ? -at.q : at.p);
        }
      }
      sums[b] = sum;
    });
    for (std::size_t b = 0; b < count; ++b) {
      total += sums[b];
    }
  }
  return total;
}

}  // namespace

double losses(std::span<const double> margins, std::span<const float> labels, std::span<const float> weights,
              std::span<double> slopes, ThreadPool& pool) {
  return losses_of<true>(margins, labels, weights, slopes, pool);
}

double losses(std::span<const double> margins, std::span<const float> labels, std::span<const float> weights,
              ThreadPool& pool) {
  return losses_of<false>(margins, labels, weights, {}, pool);
}

void probabilities(std::span<const double> margins, std::span<double> out, ThreadPool& pool) {
  check_sizes(out.size(), margins.size(), "probabilities");
  const Partition partition{margins.size(), parts_for(margins.size(), kLossBlock, pool.threads())};
  pool.run(partition.parts, [&](std::size_t p) {
    for (std::size_t i = partition.begin(p); i < partition.begin(p + 1); ++i) {
      const double e = std::exp(-std::abs(margins[i]));
      out[i] = (margins[i] >= 0.0 ? 1.0 : e) / (1.0 + e);
    }
  });
}

void gradient(const Examples& examples, std::span<const double> slopes, Occurrences occurrences,
              std::span<float> out, ThreadPool& pool, GradientScratch& scratch) {
  check_examples(examples, out.size());
  check_sizes(slopes.size(), examples.size(), "slopes");
  const std::size_t entries = examples.columns.size();
  const bool ones = examples.values.empty();
  if (parts_for(entries, kMinEntries, pool.threads()) <= 2) {
    const auto sums = scratch.numbers.claim(out.size());
    std::fill(sums.begin(), sums.end(), 0.0);
    (ones ? scatter<true> : scatter<false>)(examples, slopes.data(), sums.data());
    std::transform(sums.begin(), sums.end(), out.begin(), [](double sum) { return static_cast<float>(sum); });
  } else if (const std::size_t length = ones ? common_length(examples) : 0; length > 1) {
    // An entry / length by a multiplication, exact below 2^32 (Lemire, Kaser, Kurz: Faster remainder by
    // direct computation, 2019).
    const std::uint64_t inverse = ~std::uint64_t{0} / length + 1;
    const auto share_of = [&slopes, inverse](std::uint32_t entry) { return slopes[scale(inverse, entry)]; };
    sum_shares(examples, slopes, occurrences, share_of, out, pool);
  } else {
    const auto shares = scratch.numbers.claim(entries);
    each_piece(examples, pool, [&](std::size_t begin, std::size_t end) {
      (ones ? shares_of<true> : shares_of<false>)(examples, slopes.data(), begin, end, shares.data());
    });
    sum_shares(
        examples, slopes, occurrences, [shares](std::uint32_t entry) { return shares[entry]; }, out, pool);
  }
}

}  // namespace shoal

#include "kernel/by_feature.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <string>

#include "base/check.h"
#include "base/simd.h"
#include "kernel/logistic.h"

namespace shoal {

namespace {

constexpr std::size_t kRangeExamples = 8192;  // whose states take 192 KiB
constexpr std::size_t kMostRanges = 512;
constexpr std::size_t kEntriesPerStart = 2;  // at least, so that the starts take less than the entries
constexpr std::size_t kChunk = 256;          // examples whose slopes are computed at a time

// The fewest ranges that are as small as wanted, unless their starts would take more memory than the entries.
std::size_t ranges_for(std::size_t examples, std::size_t entries, std::size_t keys) noexcept {
  const std::size_t wanted = (examples + kRangeExamples - 1) / kRangeExamples;
  const std::size_t affordable = entries / (kEntriesPerStart * (keys + 1));
  return std::max<std::size_t>(1, std::min({wanted, affordable, kMostRanges}));
}

// e^x for |x| <= 708: x = n ln 2 + r, |r| <= ln 2 / 2; e^r by its series up to r^13, within half a unit of the last place before
// rounding; then n is added to the exponent. (Cody and Waite, Software Manual for the Elementary Functions, 1980.)
SHOAL_INLINE double exponential(double x) noexcept {
  constexpr double kShift = 0x1.8p52;  // the sum's low bits are the integer
  constexpr double kLn2High = 0x1.62e42fefa0000p-1;
  constexpr double kLn2Low = 0x1.cf79abc9e3b39p-40;
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

// Changed examples, whose slopes are computed at a time.
template <class State>
struct Chunk {
  std::size_t size = 0;
  std::array<State*, kChunk> examples;
  std::array<double, kChunk> margins;
  std::array<double, kChunk> weights;  // negative for label 1
  std::array<double, kChunk> slopes;
};

// w / (1 + e^-a) for label 0, -w / (1 + e^a) for label 1.
SHOAL_CLONES void slopes_of(std::size_t size, double* margins, double* weights, double* slopes) noexcept {
  for (std::size_t i = 0; i < size; ++i) {
    const double z = -std::copysign(1.0, weights[i]) * margins[i];
    const double bounded = z < -708.0 ? -708.0 : (z > 708.0 ? 708.0 : z);
    slopes[i] = weights[i] / (1.0 + exponential(bounded));
  }
}

template <class State>
void follow(Chunk<State>& chunk) noexcept {
  slopes_of(chunk.size, chunk.margins.data(), chunk.weights.data(), chunk.slopes.data());
  for (std::size_t c = 0; c < chunk.size;
       ++c) {  // of an example that is there twice, the last is of both additions
    chunk.examples[c]->slope = chunk.slopes[c];
  }
  chunk.size = 0;
}

double value_at(const float* values, std::size_t e) noexcept {
  return values == nullptr ? 1.0 : static_cast<double>(values[e]);
}

}  // namespace

ExamplesByFeature::ExamplesByFeature(const Examples& examples, std::size_t keys,
                                     std::span<const float> labels, std::span<const float> weights,
                                     ThreadPool& pool)
    : size_(examples.size()),
      keys_(keys),
      partition_{size_, ranges_for(size_, examples.columns.size(), keys)},
      states_(size_) {
  check_examples(examples, keys);
  check_labels(labels, weights, size_);
  const std::size_t entries = examples.columns.size() + (examples.bias ? size_ : 0);
  SHOAL_CHECK(entries <= std::numeric_limits<std::uint32_t>::max(),
              "a solver holds fewer than 2^32 features of examples, got " + std::to_string(entries));
  examples_ = Buffer<std::uint32_t>(entries);
  values_ = Buffer<float>(examples.values.empty() ? 0 : entries);
  bases_ = Buffer<std::uint64_t>(ranges() + 1);
  starts_ = Buffer<std::uint32_t>(ranges() * (keys + 1));
  for (std::size_t i = 0; i < size_; ++i) {
    const float weight = weights.empty() ? 1.0F : weights[i];
    const float given = labels[i] == 1.0F ? -weight : weight;
    states_[i] = {.margin = 0.0, .slope = static_cast<double>(given) / 2.0, .weight = given};
  }
  for (std::size_t r = 0; r <= ranges(); ++r) {
    const std::size_t first = partition_.begin(r);
    bases_[r] = begin_of(examples, first) + (examples.bias ? first : 0);
  }
  pool.run(ranges(), [&](std::size_t r) { fill(examples, r); });
}

// A counting sort: starts[k + 1] is the number of entries of k, then where they begin, and in the end where they end.
void ExamplesByFeature::fill(const Examples& examples, std::size_t range) noexcept {
  const std::size_t begin = partition_.begin(range);
  const std::size_t end = partition_.begin(range + 1);
  std::uint32_t* const starts = starts_.data() + range * (keys_ + 1);
  std::fill_n(starts, keys_ + 1, 0U);
  const std::size_t first = begin_of(examples, begin);
  const std::size_t last = begin_of(examples, end);
  for (std::size_t e = first; e < last; ++e) {
    ++starts[examples.columns[e] + 1];
  }
  if (examples.bias) {
    starts[*examples.bias + 1] += static_cast<std::uint32_t>(end - begin);
  }
  std::uint32_t before = 0;
  for (std::size_t k = 0; k < keys_; ++k) {
    const std::uint32_t count = starts[k + 1];
    starts[k + 1] = before;
    before += count;
  }
  std::uint32_t* const to = examples_.data() + bases_[range];
  float* const values = values_.size() == 0 ? nullptr : values_.data() + bases_[range];
  const auto put = [&](std::size_t i, std::uint32_t k, float value) {
    const std::uint32_t at = starts[k + 1]++;
    to[at] = static_cast<std::uint32_t>(i);
    if (values != nullptr) {
      values[at] = value;
    }
  };
  for (std::size_t i = begin; i < end; ++i) {
    for (std::size_t e = begin_of(examples, i); e < begin_of(examples, i + 1); ++e) {
      put(i, examples.columns[e], values == nullptr ? 1.0F : examples.values[e]);
    }
    if (examples.bias) {
      put(i, *examples.bias, 1.0F);
    }
  }
}

ExamplesByFeature::Entries ExamplesByFeature::entries(std::size_t range, std::size_t from,
                                                      std::size_t to) const noexcept {
  const std::uint32_t* const starts = starts_.data() + range * (keys_ + 1);
  const std::size_t first = bases_[range] + starts[from];
  return {examples_.data() + first, values_.size() == 0 ? nullptr : values_.data() + first,
          starts[to] - starts[from]};
}

void ExamplesByFeature::check_keys(std::span<const std::uint32_t> keys, std::size_t numbers) const {
  SHOAL_CHECK(keys.size() == numbers, "there must be one number for each of the " +
                                          std::to_string(keys.size()) + " keys, got " +
                                          std::to_string(numbers));
  const auto fall = std::adjacent_find(keys.begin(), keys.end(), std::greater_equal<>());
  SHOAL_CHECK(fall == keys.end(),
              "keys must ascend, but " + std::to_string(*fall) + " is before " + std::to_string(*(fall + 1)));
  SHOAL_CHECK(keys.empty() || keys.back() < keys_, "there is no unique key " + std::to_string(keys.back()) +
                                                       ": there are only " + std::to_string(keys_));
}

void ExamplesByFeature::add(std::span<const std::uint32_t> keys, std::span<const double> deltas,
                            ThreadPool& pool) {
  check_keys(keys, deltas.size());
  pool.run(ranges(), [&](std::size_t r) {
    Chunk<State> chunk;
    for (std::size_t j = 0; j < keys.size(); ++j) {
      if (deltas[j] == 0.0) {
        continue;
      }
      const Entries of_key = entries(r, keys[j], keys[j] + std::size_t{1});
      for (std::size_t e = 0; e < of_key.size; ++e) {
        State& state = states_[of_key.examples[e]];
        state.margin += deltas[j] * value_at(of_key.values, e);
        chunk.examples[chunk.size] = &state;
        chunk.margins[chunk.size] = state.margin;
        chunk.weights[chunk.size] = static_cast<double>(state.weight);
        if (++chunk.size == kChunk) {
          follow(chunk);
        }
      }
    }
    follow(chunk);
  });
}

void ExamplesByFeature::margins(std::span<double> out) const {
  check_sizes(out.size(), size_, "margins");
  std::transform(states_.begin(), states_.end(), out.begin(),
                 [](const State& state) { return state.margin; });
}

template <class Part>
void ExamplesByFeature::add_up(std::span<float> out, ThreadPool& pool, const Part& part) {
  const std::size_t count = out.size();
  const std::span<double> partials = partials_.claim(ranges() * count);
  pool.run(ranges(), [&](std::size_t r) { part(r, partials.data() + r * count); });
  for (std::size_t j = 0; j < count; ++j) {
    double sum = 0.0;
    for (std::size_t r = 0; r < ranges(); ++r) {
      sum += partials[r * count + j];
    }
    out[j] = static_cast<float>(sum);
  }
}

void ExamplesByFeature::gradient(std::span<const std::uint32_t> keys, std::span<float> out,
                                 ThreadPool& pool) {
  check_keys(keys, out.size());
  add_up(out, pool, [&](std::size_t r, double* partials) {
    for (std::size_t j = 0; j < keys.size(); ++j) {
      const Entries of_key = entries(r, keys[j], keys[j] + std::size_t{1});
      double sums[4] = {};  // four additions are in flight at a time
      for (std::size_t e = 0; e < of_key.size; ++e) {
        sums[e % 4] += states_[of_key.examples[e]].slope * value_at(of_key.values, e);
      }
      partials[j] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    }
  });
}

void ExamplesByFeature::bounds(Keys own, std::span<const Keys> near, std::span<float> out, ThreadPool& pool) {
  constexpr double kSlope = 0.25;  // the greatest of the logistic function
  const auto check = [&](Keys run) {
    SHOAL_CHECK(run.first <= run.second && run.second <= keys_,
                "there are " + std::to_string(keys_) + " unique keys: there is no run from " +
                    std::to_string(run.first) + " to " + std::to_string(run.second));
  };
  check(own);
  std::for_each(near.begin(), near.end(), check);
  SHOAL_CHECK(out.size() == own.second - own.first,
              "there must be one bound for each key, got " + std::to_string(out.size()));
  if (near_.size() != size_) {
    near_ = Buffer<double>(size_);
    std::fill(near_.begin(), near_.end(), 0.0);
  }
  const auto each_near = [&](std::size_t r, const auto& work) {
    for (const auto& [from, to] : near) {
      const Entries some = entries(r, from, to);
      for (std::size_t e = 0; e < some.size; ++e) {
        work(some.examples[e], std::abs(value_at(some.values, e)));
      }
    }
  };
  add_up(out, pool, [&](std::size_t r, double* partials) {
    each_near(r, [&](std::size_t i, double size) { near_[i] += size; });
    for (std::size_t k = own.first; k < own.second; ++k) {
      const Entries of_key = entries(r, k, k + 1);
      double sum = 0.0;
      for (std::size_t e = 0; e < of_key.size; ++e) {
        const std::size_t i = of_key.examples[e];
        sum += kSlope * std::abs(static_cast<double>(states_[i].weight)) *
               std::abs(value_at(of_key.values, e)) * near_[i];
      }
      partials[k - own.first] = sum;
    }
    each_near(r, [&](std::size_t i, double /*size*/) { near_[i] = 0.0; });
  });
}

}  // namespace shoal

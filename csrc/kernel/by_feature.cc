// The examples are cut into ranges whose states stay in a core's cache; within a range the entries are sorted
// by key, then by example. Each call goes through all ranges, so that threads share no example, and adds up
// what the ranges give in their order: the bits depend on the data and the order of the calls, not on the
// number of threads.
//
//   range r   entries base(r) to base(r + 1); those of key k are base(r) + starts[r][k] to base(r) +
//             starts[r][k + 1]
//
// Margins and slopes follow the weights late: what `add` has been told is done range by range by the call
// after it, which then finds the state of the range in the cache. Slopes are computed for the examples that
// have changed, or for the whole range where these are many: 1 / (1 + e^-z) with e^x by a polynomial, without
// branches. They are float32: of weight 1 and margin a, each is within 1e-7 of the exact one, and within a
// relative 1.2e-7 + 6e-8 |a|. The entries of a key in a range are few, so those of the keys that come next
// are prefetched, and so is the state of a range that has many of them.

#include "kernel/by_feature.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <type_traits>

#include "base/check.h"
#include "base/memory.h"
#include "base/prefetch.h"
#include "base/simd.h"
#include "kernel/logistic.h"

namespace shoal {

namespace {

constexpr std::size_t kRangeExamples = 32768;  // whose margins and slopes take 384 KiB
constexpr std::size_t kMostRanges = 512;
constexpr std::size_t kEntriesPerStart = 2;  // at least, so that the starts take less than the entries
constexpr std::size_t kChunk = 256;          // examples whose slopes are computed at a time
constexpr std::size_t kStartsAhead = 24;     // keys whose starts are prefetched
constexpr std::size_t kEntriesAhead = 12;    // keys whose first entries are prefetched; entries, in the sort
// With one changed margin for so many examples of a range, computing all its slopes takes less than finding
// those that changed, and most of the lines of its state are read.
constexpr std::size_t kSparse = 8;

// The fewest ranges that are as small as wanted, unless their starts would take more memory than the entries.
std::size_t ranges_for(std::size_t examples, std::size_t entries, std::size_t keys) noexcept {
  const std::size_t wanted = (examples + kRangeExamples - 1) / kRangeExamples;
  const std::size_t affordable = entries / (kEntriesPerStart * (keys + 1));
  return std::max<std::size_t>(1, std::min({wanted, affordable, kMostRanges}));
}

// e^x for |x| <= 87, within a relative 2e-7: x = n ln 2 + r, |r| <= ln 2 / 2; e^r by its series up to r^7;
// then n is added to the exponent. (Cody and Waite, Software Manual for the Elementary Functions, 1980.)
SHOAL_INLINE float exponential(float x) noexcept {
  constexpr float kShift = 0x1.8p23F;  // the sum's low bits are the integer
  constexpr float kLn2High = 0x1.62e4p-1F;
  constexpr float kLn2Low = 0x1.7f7d1cp-20F;
  const float shifted = x * 0x1.715476p+0F + kShift;
  const float n = shifted - kShift;
  const float r = (x - n * kLn2High) - n * kLn2Low;
  float sum = 1.0F / 5040.0F;
  sum = sum * r + 1.0F / 720.0F;
  sum = sum * r + 1.0F / 120.0F;
  sum = sum * r + 1.0F / 24.0F;
  sum = sum * r + 1.0F / 6.0F;
  sum = sum * r + 0.5F;
  sum = sum * r + 1.0F;
  sum = sum * r + 1.0F;
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(sum) +
                              (std::bit_cast<std::uint32_t>(shifted) << 23U));
}

// 1 / (1 + e^-a) for label 0, -1 / (1 + e^a) for label 1, times the weight where there are weights. The sign
// of a slope before gives the label.
SHOAL_CLONES void slopes_of(std::size_t size, const double* margins, const float* weights,
                            float* slopes) noexcept {
  constexpr std::uint32_t kSign = 0x80000000U;
  for (std::size_t i = 0; i < size; ++i) {
    const std::uint32_t sign = std::bit_cast<std::uint32_t>(slopes[i]) & kSign;
    const auto margin = std::bit_cast<std::uint32_t>(static_cast<float>(margins[i]));
    const auto z = std::bit_cast<float>(margin ^ sign ^ kSign);
    // With conditions instead, GCC divides once for each branch, under masks.
    const float bounded = std::min(std::max(z, -87.0F), 87.0F);
    const float slope = 1.0F / (1.0F + exponential(bounded));
    slopes[i] = std::bit_cast<float>(std::bit_cast<std::uint32_t>(slope) | sign);
  }
  if (weights != nullptr) {
    for (std::size_t i = 0; i < size; ++i) {
      slopes[i] *= weights[i];
    }
  }
}

// Some examples, whose slopes are computed at a time.
struct Chunk {
  std::size_t size = 0;
  std::array<std::uint32_t, kChunk> examples;
  std::array<double, kChunk> margins;
  std::array<float, kChunk> weights;
  std::array<float, kChunk> slopes;

  void follow(const double* all_margins, const float* all_weights, float* all_slopes) noexcept {
    for (std::size_t c = 0; c < size; ++c) {
      margins[c] = all_margins[examples[c]];
      slopes[c] = all_slopes[examples[c]];
      weights[c] = all_weights == nullptr ? 1.0F : all_weights[examples[c]];
    }
    slopes_of(size, margins.data(), all_weights == nullptr ? nullptr : weights.data(), slopes.data());
    for (std::size_t c = 0; c < size; ++c) {
      all_slopes[examples[c]] = slopes[c];
    }
    size = 0;
  }
};

std::size_t example_of(std::uint32_t entry) noexcept { return entry; }
double value_of(std::uint32_t /*entry*/) noexcept { return 1.0; }
template <class Entry>
std::size_t example_of(const Entry& entry) noexcept {
  return entry.example;
}
template <class Entry>
double value_of(const Entry& entry) noexcept {
  return static_cast<double>(entry.value);
}

}  // namespace

ExamplesByFeature::ExamplesByFeature(const Examples& examples, std::size_t keys,
                                     std::span<const float> labels, std::span<const float> weights,
                                     ThreadPool& pool)
    : size_(examples.size()),
      keys_(keys),
      partition_{size_, ranges_for(size_, examples.columns.size(), keys)},
      margins_(size_),
      slopes_(size_),
      weights_(weights.size()) {
  check_examples(examples, keys);
  check_labels(labels, weights, size_);
  const std::size_t entries = examples.columns.size() + (examples.bias ? size_ : 0);
  SHOAL_CHECK(entries <= std::numeric_limits<std::uint32_t>::max(),
              "a solver holds fewer than 2^32 features of examples, got " + std::to_string(entries));
  examples_ = Buffer<std::uint32_t>(examples.values.empty() ? entries : 0);
  entries_ = Buffer<Entry>(examples.values.empty() ? 0 : entries);
  bases_ = Buffer<std::uint64_t>(ranges() + 1);
  starts_ = Buffer<std::uint32_t>(ranges() * (keys + 1));
  for (std::size_t i = 0; i < size_; ++i) {
    const float weight = weights.empty() ? 1.0F : weights[i];
    margins_[i] = 0.0;
    slopes_[i] = (labels[i] == 1.0F ? -weight : weight) / 2.0F;
  }
  std::copy(weights.begin(), weights.end(), weights_.begin());
  for (std::size_t r = 0; r <= ranges(); ++r) {
    const std::size_t first = partition_.begin(r);
    bases_[r] = begin_of(examples, first) + (examples.bias ? first : 0);
  }
  with_entries(
      [&](auto* to) { pool.run(ranges(), [&](std::size_t r) { fill(examples, r, to + bases_[r]); }); });
}

template <class Work>
void ExamplesByFeature::with_entries(const Work& work) {
  if (entries_.size() != 0) {
    work(entries_.data());
  } else {
    work(examples_.data());
  }
}

template <class Number>
void ExamplesByFeature::prefetch_state(const Number* numbers, std::size_t range,
                                       std::span<const std::uint32_t> keys) const noexcept {
  const std::size_t begin = partition_.begin(range);
  const std::size_t end = partition_.begin(range + 1);
  const std::uint32_t* const starts = starts_.data() + range * (keys_ + 1);
  if (keys.empty() || starts[keys.back() + std::size_t{1}] - starts[keys.front()] < (end - begin) / kSparse) {
    return;
  }
  for (std::size_t i = begin; i < end; i += kCacheLine / sizeof(Number)) {
    prefetch(reinterpret_cast<const std::byte*>(numbers + i));
  }
}

template <class Item, class Work>
void ExamplesByFeature::each_key(const Item* entries, std::size_t range, std::span<const std::uint32_t> keys,
                                 const Work& work) const {
  const Item* const first = entries + bases_[range];
  const std::uint32_t* const starts = starts_.data() + range * (keys_ + 1);
  for (std::size_t j = 0; j < keys.size(); ++j) {
    if (j + kStartsAhead < keys.size()) {
      __builtin_prefetch(starts + keys[j + kStartsAhead]);
    }
    if (j + kEntriesAhead < keys.size()) {
      __builtin_prefetch(first + starts[keys[j + kEntriesAhead]]);
    }
    work(j, first + starts[keys[j]], first + starts[keys[j] + std::size_t{1}]);
  }
}

// A counting sort: starts[k + 1] is the number of entries of k, then where they begin, and in the end where
// they end.
template <class Item>
void ExamplesByFeature::fill(const Examples& examples, std::size_t range, Item* to) noexcept {
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
  const auto put = [&](std::size_t i, std::uint32_t k, [[maybe_unused]] float value) {
    if constexpr (std::is_same_v<Item, Entry>) {
      to[starts[k + 1]++] = {static_cast<std::uint32_t>(i), value};
    } else {
      to[starts[k + 1]++] = static_cast<std::uint32_t>(i);
    }
  };
  for (std::size_t i = begin; i < end; ++i) {
    for (std::size_t e = begin_of(examples, i); e < begin_of(examples, i + 1); ++e) {
      if (e + kEntriesAhead < last) {
        __builtin_prefetch(to + starts[examples.columns[e + kEntriesAhead] + 1], 1);
      }
      put(i, examples.columns[e], examples.values.empty() ? 1.0F : examples.values[e]);
    }
    if (examples.bias) {
      put(i, *examples.bias, 1.0F);
    }
  }
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
  follow(pool);
  const std::span<std::uint32_t> moved = moved_.claim(keys.size());
  const std::span<double> moves = moves_.claim(keys.size());
  for (std::size_t j = 0; j < keys.size(); ++j) {
    moved[moved_count_] = keys[j];
    moves[moved_count_] = deltas[j];
    moved_count_ += deltas[j] != 0.0 ? 1U : 0U;
  }
}

void ExamplesByFeature::follow(ThreadPool& pool) {
  if (moved_count_ == 0) {
    return;
  }
  with_entries(
      [&](const auto* entries) { pool.run(ranges(), [&](std::size_t r) { follow_in(entries, r); }); });
  moved_count_ = 0;
}

template <class Item>
void ExamplesByFeature::follow_in(const Item* entries, std::size_t range) noexcept {
  const std::span<const std::uint32_t> moved{moved_.data(), moved_count_};
  if (moved.empty()) {
    return;
  }
  const std::size_t begin = partition_.begin(range);
  const std::size_t size = partition_.begin(range + 1) - begin;
  const float* const weights = weights_.size() == 0 ? nullptr : weights_.data();
  prefetch_state(margins_.data(), range, moved);
  std::size_t changed = 0;
  each_key(entries, range, moved, [&](std::size_t j, const auto* entry, const auto* end) {
    changed += static_cast<std::size_t>(end - entry);
    for (const double move = moves_[j]; entry != end; ++entry) {
      margins_[example_of(*entry)] += move * value_of(*entry);
    }
  });
  if (changed >= size / kSparse) {
    slopes_of(size, margins_.data() + begin, weights == nullptr ? nullptr : weights + begin,
              slopes_.data() + begin);
    return;
  }
  Chunk chunk;
  each_key(entries, range, moved, [&](std::size_t /*j*/, const auto* entry, const auto* end) {
    for (; entry != end; ++entry) {
      chunk.examples[chunk.size++] = static_cast<std::uint32_t>(example_of(*entry));
      if (chunk.size == kChunk) {
        chunk.follow(margins_.data(), weights, slopes_.data());
      }
    }
  });
  chunk.follow(margins_.data(), weights, slopes_.data());
}

void ExamplesByFeature::margins(std::span<double> out, ThreadPool& pool) {
  check_sizes(out.size(), size_, "margins");
  follow(pool);
  std::copy(margins_.begin(), margins_.end(), out.begin());
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
  with_entries([&](const auto* entries) {
    add_up(out, pool, [&](std::size_t r, double* partials) {
      follow_in(entries, r);
      prefetch_state(slopes_.data(), r, keys);
      each_key(entries, r, keys, [&](std::size_t j, const auto* entry, const auto* end) {
        const auto term = [&](std::ptrdiff_t k) {
          return static_cast<double>(slopes_[example_of(entry[k])]) * value_of(entry[k]);
        };
        double a = 0.0;  // four additions are in flight at a time
        double b = 0.0;
        double c = 0.0;
        double d = 0.0;
        for (; end - entry >= 4; entry += 4) {
          a += term(0);
          b += term(1);
          c += term(2);
          d += term(3);
        }
        for (; entry != end; ++entry) {
          a += term(0);
        }
        partials[j] = (a + b) + (c + d);
      });
    });
  });
  moved_count_ = 0;
}

void ExamplesByFeature::bounds(Keys keys, std::span<const Keys> near, std::span<float> out,
                               ThreadPool& pool) {
  constexpr double kSlope = 0.25;  // the greatest of the logistic function
  const auto check = [&](Keys run) {
    SHOAL_CHECK(run.first <= run.second && run.second <= keys_,
                "there are " + std::to_string(keys_) + " unique keys: there is no run from " +
                    std::to_string(run.first) + " to " + std::to_string(run.second));
  };
  check(keys);
  std::for_each(near.begin(), near.end(), check);
  SHOAL_CHECK(out.size() == keys.second - keys.first,
              "there must be one bound for each key, got " + std::to_string(out.size()));
  if (near_.size() != size_) {
    near_ = Buffer<double>(size_);
    std::fill(near_.begin(), near_.end(), 0.0);
  }
  const float* const weights = weights_.size() == 0 ? nullptr : weights_.data();
  with_entries([&](const auto* entries) {
    const auto each_near = [&](std::size_t r, const auto& work) {
      for (const auto& [from, to] : near) {
        const std::uint32_t* const starts = starts_.data() + r * (keys_ + 1);
        std::for_each(entries + bases_[r] + starts[from], entries + bases_[r] + starts[to],
                      [&](const auto& entry) { work(example_of(entry), std::abs(value_of(entry))); });
      }
    };
    add_up(out, pool, [&](std::size_t r, double* partials) {
      const std::uint32_t* const starts = starts_.data() + r * (keys_ + 1);
      each_near(r, [&](std::size_t i, double size) { near_[i] += size; });
      for (std::size_t k = keys.first; k < keys.second; ++k) {
        double sum = 0.0;
        std::for_each(entries + bases_[r] + starts[k], entries + bases_[r] + starts[k + 1],
                      [&](const auto& entry) {
                        const std::size_t i = example_of(entry);
                        const double weight = weights == nullptr ? 1.0 : static_cast<double>(weights[i]);
                        sum += kSlope * weight * std::abs(value_of(entry)) * near_[i];
                      });
        partials[k - keys.first] = sum;
      }
      each_near(r, [&](std::size_t i, double /*size*/) { near_[i] = 0.0; });
    });
  });
}

}  // namespace shoal

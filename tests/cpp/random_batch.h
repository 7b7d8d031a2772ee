// Random batches of awkward shapes, with the order and group_offsets of a KeyBatch, for the tests of the
// kernels.
//
// Threads: pools() are made once and shared; everything else is the caller's.

#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <optional>
#include <random>
#include <span>
#include <type_traits>
#include <vector>

#include "base/threads.h"
#include "check.h"
#include "kernel/examples.h"

namespace shoal {

inline std::vector<ThreadPool*> pools() {
  static ThreadPool one(1), two(2), three(3), eight(8);
  if (check::kIsSanitized) {
    return {&one, &three};
  }
  return {&one, &two, &three, &eight};
}

// A batch over `keys` unique keys, each of which some entry names; order and group_offsets as a KeyBatch has
// them.
struct Batch {
  std::vector<std::int64_t> indptr{0};
  std::vector<std::uint32_t> columns;
  std::vector<float> values;
  std::optional<std::uint32_t> bias;
  std::vector<std::uint32_t> order;
  std::vector<std::uint32_t> group_offsets;
  std::size_t keys = 0;

  Examples examples() const { return {indptr, columns, values, bias}; }
  Occurrences occurrences() const { return {order, group_offsets}; }
  std::size_t size() const { return indptr.size() - 1; }

  // With a bias, its key is appended to the keys: one more position.
  void index(std::size_t unique) {
    keys = unique;
    std::vector<std::uint32_t> all = columns;
    if (bias) {
      all.push_back(*bias);
    }
    order.resize(all.size());
    std::iota(order.begin(), order.end(), 0U);
    std::stable_sort(order.begin(), order.end(),
                     [&](std::uint32_t a, std::uint32_t b) { return all[a] < all[b]; });
    group_offsets.assign(unique + 1, 0);
    for (const std::uint32_t column : all) {
      ++group_offsets[column + 1];
    }
    std::partial_sum(group_offsets.begin(), group_offsets.end(), group_offsets.begin());
  }
};

enum class Bias { kNone, kAlone, kAlsoAnEntry };

// Examples have up to `longest` entries, or as many if they are even.
inline Batch random_batch(std::size_t examples, std::size_t longest, std::size_t keys, bool valued, Bias bias,
                          std::uint64_t seed, bool even = false) {
  std::mt19937_64 random(seed);
  Batch batch;
  for (std::size_t i = 0; i < examples; ++i) {
    for (std::size_t k = even ? longest : random() % (longest + 1); k > 0; --k) {
      batch.columns.push_back(static_cast<std::uint32_t>(random() % keys >> (random() % 4U)));
      if (valued) {
        batch.values.push_back(
            std::ldexp(static_cast<float>(random() % 2001) - 1000.0F, static_cast<int>(random() % 20) - 15));
      }
    }
    batch.indptr.push_back(static_cast<std::int64_t>(batch.columns.size()));
  }
  if (bias == Bias::kAlone) {
    batch.bias = static_cast<std::uint32_t>(keys++);
  } else if (bias == Bias::kAlsoAnEntry) {
    batch.bias = 0;
  }
  batch.index(keys);
  return batch;
}

inline std::vector<float> random_floats(std::size_t n, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<float> numbers(n);
  for (auto& number : numbers) {
    number = static_cast<float>(random() % 2001) / 1000.0F - 1.0F;
  }
  return numbers;
}

inline std::vector<float> random_labels(std::size_t n, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<float> labels(n);
  for (auto& label : labels) {
    label = random() % 4 == 0 ? 1.0F : 0.0F;
  }
  return labels;
}

inline float value_of(const Batch& batch, std::size_t e) {
  return batch.values.empty() ? 1.0F : batch.values[e];
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  using Bits = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>;
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](T x, T y) { return std::bit_cast<Bits>(x) == std::bit_cast<Bits>(y); });
}

inline std::vector<Batch> batches() {
  std::vector<Batch> all;
  std::uint64_t seed = 1;
  for (const bool valued : {false, true}) {
    for (const Bias bias : {Bias::kNone, Bias::kAlone, Bias::kAlsoAnEntry}) {
      const bool all_sizes =
          !check::kIsSanitized || (valued ? bias == Bias::kAlsoAnEntry : bias == Bias::kNone);
      for (const auto& [examples, longest, keys] : {std::array<std::size_t, 3>{0, 1, 3},
                                                    {1, 0, 1},
                                                    {1, 39, 100},
                                                    {7, 4, 3},
                                                    {385, 9, 50},
                                                    {3000, 39, 20'000},
                                                    {4000, 30, 5}}) {
        if (examples < 1000 || all_sizes) {
          all.push_back(random_batch(examples, longest, keys, valued, bias, seed++));
        }
      }
      for (const std::size_t length : {1U, 2U, 39U}) {
        if (all_sizes) {
          all.push_back(random_batch((check::kIsSanitized ? 40'000 : 70'000) / length, length, 500, valued,
                                     bias, seed++, true));
        }
      }
    }
  }
  return all;
}

// Those that are compared with a slow definition, which takes most of the time of a sanitizer: it has seen the short
// ones then, and sees the long ones where numbers of threads are compared.
inline std::vector<Batch> defined_batches() {
  std::vector<Batch> all = batches();
  std::erase_if(all, [](const Batch& batch) { return check::kIsSanitized && batch.columns.size() > 10'000; });
  return all;
}

}  // namespace shoal

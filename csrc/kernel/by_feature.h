// ExamplesByFeature: the examples of a logistic regression sorted by feature (CSC), for solvers that change a
// few weights at a time. Keeps the margins up to date, and computes gradients and bounds of their curvature.
//
//   add       margin of i += delta of k x value of (k, i)       for each entry of the changed keys k
//   gradient  g_k = sum over the entries of k of slope x value; slope as in kernel/logistic.h
//   bounds    u_k = sum over k's entries of 1/4 weight |value| near, near = sum of |value| of near keys
//
// Invariants
//   I1  Margins are X w in float64, w the sum of all deltas but the last `add`'s, rounded at each addition.
//   I2  Slopes are those of the margins; their signs are those of the labels.
//
// Threads: one caller at a time; the pool shares the ranges. Memory: 8 bytes an entry, 4 without values; 12
// an example, 16 with weights; 4 a key and range.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include "base/buffer.h"
#include "base/threads.h"
#include "kernel/examples.h"

namespace shoal {

class ExamplesByFeature {
 public:
  using Keys = std::pair<std::size_t, std::size_t>;  // of the unique keys: from, to

  // `keys` is the number of unique keys. Labels are 0 or 1; weights are finite and not negative, or empty:
  // each is 1. All weights of the model are 0.
  ExamplesByFeature(const Examples& examples, std::size_t keys, std::span<const float> labels,
                    std::span<const float> weights, ThreadPool& pool);

  std::size_t size() const noexcept { return size_; }
  std::size_t keys() const noexcept { return keys_; }
  void margins(std::span<double> out, ThreadPool& pool);

  // Adds to the weights of `keys`, which ascend strictly. The next call of gradient(), margins() or add()
  // does the work.
  void add(std::span<const std::uint32_t> keys, std::span<const double> deltas, ThreadPool& pool);

  // The gradient of each of `keys`.
  void gradient(std::span<const std::uint32_t> keys, std::span<float> out, ThreadPool& pool);

  // The bound of each key of `own`, which are those of `out`, over the keys of `near`, which do not overlap.
  void bounds(Keys keys, std::span<const Keys> near, std::span<float> out, ThreadPool& pool);

 private:
  struct Entry {
    std::uint32_t example;
    float value;
  };

  std::size_t ranges() const noexcept { return partition_.parts; }
  template <class Work>  // calls work(entries), of type Entry, or of type std::uint32_t if each value is 1
  void with_entries(const Work& work);
  // Prefetches the numbers of a range's examples if the entries of the keys, and of those between them, are
  // many.
  template <class Number>
  void prefetch_state(const Number* numbers, std::size_t range,
                      std::span<const std::uint32_t> keys) const noexcept;
  void follow(ThreadPool& pool);  // brings the margins and slopes of all ranges up to date
  template <class Item>
  void follow_in(const Item* entries, std::size_t range) noexcept;
  template <class Item,
            class Work>  // calls work(j, first, end) for the entries of each of `keys` in the range
  void each_key(const Item* entries, std::size_t range, std::span<const std::uint32_t> keys,
                const Work& work) const;
  template <class Item>
  void fill(const Examples& examples, std::size_t range, Item* to) noexcept;
  void check_keys(std::span<const std::uint32_t> keys, std::size_t numbers) const;
  template <class Part>  // calls part(range, numbers of the range), and adds up the numbers
  void add_up(std::span<float> out, ThreadPool& pool, const Part& part);

  std::size_t size_;
  std::size_t keys_;
  Partition partition_;  // of the examples, into ranges
  Buffer<double> margins_;
  Buffer<float>
      slopes_;  // not negative for label 0, not positive for label 1: the sign of a zero is the label's too
  Buffer<float> weights_;           // empty: each is 1
  Buffer<Entry> entries_;           // empty: each value is 1
  Buffer<std::uint32_t> examples_;  // then of each entry
  Buffer<std::uint64_t> bases_;     // ranges + 1
  Buffer<std::uint32_t> starts_;    // ranges x (keys + 1)
  Buffer<double> near_;             // sums of a call of bounds(), 0 otherwise
  Buffer<double> partials_;         // of a call, as the next two
  Buffer<std::uint32_t> moved_;     // keys of the last add, which margins and slopes have yet to follow
  Buffer<double> moves_;            // of each
  std::size_t moved_count_ = 0;
};

}  // namespace shoal

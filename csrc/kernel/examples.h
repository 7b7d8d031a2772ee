// Examples: one batch as the kernels see it, sparse rows (CSR) whose columns are the unique keys of a KeyBatch.
//
//   example i   entries indptr[i] to indptr[i + 1], then the bias, if there is one
//   entry e     unique key columns[e], values[e] (1 where there are no values)
//
// A kernel calls check_examples() first: after it no index of the examples leaves its array.
//
// Threads: spans of memory that nobody writes meanwhile. each_piece shares neighbouring examples among a pool,
// each_run_of_keys neighbouring keys.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "base/buffer.h"
#include "base/threads.h"

namespace shoal {

// Example i has the entries from indptr[i] to indptr[i + 1]; entry e is the unique key columns[e], with values[e].
struct Examples {
  std::span<const std::int64_t> indptr;    // examples + 1: from 0 to the number of entries, never falls
  std::span<const std::uint32_t> columns;  // one for each entry: a KeyBatch's inverse
  std::span<const float> values;           // one for each entry, or empty: each is 1
  std::optional<std::uint32_t>
      bias;  // the unique key of the bias: the last entry of every example, with value 1

  std::size_t size() const noexcept { return indptr.empty() ? 0 : indptr.size() - 1; }
};

// A KeyBatch's order and firsts: where each unique key occurs. Places beyond the last entry, such as that of a bias key
// appended to the batch's keys, are passed over.
struct Occurrences {
  std::span<const std::uint32_t> order;
  std::span<const std::uint32_t> group_offsets;
};

// Throws unless the arrays fit together and each entry is one of so many unique keys.
void check_examples(const Examples& examples, std::size_t keys);

// Throws unless there is one number for each example; `name` is what they are.
void check_sizes(std::size_t got, std::size_t examples, const char* name);

inline std::size_t begin_of(const Examples& examples, std::size_t i) noexcept {
  return static_cast<std::size_t>(examples.indptr[i]);
}

inline constexpr std::size_t kMinEntries = 16384;  // entries of one number each that are worth a thread

// Calls work(begin, end) for neighbouring examples, in as many parts as the entries are worth, at `numbers` numbers
// each.
template <class Work>
void each_piece(const Examples& examples, ThreadPool& pool, const Work& work, std::size_t numbers = 1) {
  const Partition partition{
      examples.size(),
      std::min(examples.size(), parts_for(examples.columns.size() * numbers, kMinEntries, pool.threads()))};
  pool.run(partition.parts, [&](std::size_t p) { work(partition.begin(p), partition.begin(p + 1)); });
}

// Calls work(begin, end) for neighbouring keys, in pieces of as many places, cut where a key begins: keys differ, places
// cost the same. A key is never divided.
template <class Work>
void each_run_of_keys(Occurrences occurrences, std::size_t numbers, ThreadPool& pool, const Work& work) {
  const std::span<const std::uint32_t> order = occurrences.order;
  const std::span<const std::uint32_t> group_offsets = occurrences.group_offsets;
  const std::size_t keys = group_offsets.size() - 1;
  const std::size_t parts =
      parts_for(order.size() * numbers, kMinEntries, pool.threads() == 1 ? 1 : 4 * pool.threads());
  const Partition partition{order.size(), parts};
  const auto key_at = [&](std::size_t p) {
    const auto place = static_cast<std::uint32_t>(partition.begin(p));
    return p == parts ? keys
                      : static_cast<std::size_t>(
                            std::lower_bound(group_offsets.begin(), group_offsets.end() - 1, place) -
                            group_offsets.begin());
  };
  pool.run(parts, [&](std::size_t p) { work(key_at(p), key_at(p + 1)); });
}

// The example of each entry, in memory of `buffer`. Fewer than 2^32 examples.
std::span<const std::uint32_t> owners_of(const Examples& examples, Buffer<std::uint32_t>& buffer,
                                         ThreadPool& pool);

}  // namespace shoal

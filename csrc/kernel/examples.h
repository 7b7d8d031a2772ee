// Examples: one batch for the kernels: sparse rows (CSR) whose columns are the unique keys of a KeyBatch.
//
//   example i   entries indptr[i] to indptr[i + 1], then the bias, if there is one
//   entry e     unique key columns[e], values[e] (1 if there are no values)
//
// A kernel calls check_examples() first; afterwards every index of the examples is in range.
//
// Threads: views of memory that does not change during a call. each_piece divides the examples among the
// threads of a pool, each_run_of_keys the unique keys.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>

#include "base/buffer.h"
#include "base/threads.h"

namespace shoal {

// Example i has the entries from indptr[i] to indptr[i + 1]; entry e is the unique key columns[e], with
// values[e].
struct Examples {
  std::span<const std::int64_t> indptr;    // examples + 1: ascends from 0 to the number of entries
  std::span<const std::uint32_t> columns;  // one for each entry: a KeyBatch's inverse
  std::span<const float> values;           // one for each entry, or empty: each is 1
  std::optional<std::uint32_t>
      bias;  // the unique key of the bias: the last entry of every example, with value 1
  std::size_t below = std::numeric_limits<std::size_t>::max();  // the columns are, as the caller knows

  std::size_t size() const noexcept { return indptr.empty() ? 0 : indptr.size() - 1; }
};

// The order and group_offsets of a KeyBatch: where each unique key occurs. Positions beyond the last entry,
// such as that of a bias key appended to the batch's keys, are skipped.
struct Occurrences {
  std::span<const std::uint32_t> order;
  std::span<const std::uint32_t> group_offsets;
};

// Rows of a matrix (CSR) of keys and values.
struct KeyedRows {
  std::span<const std::int64_t> indptr;  // ascends, from any number, in the range of the entries
  std::span<const std::uint64_t> keys;
  std::span<const float> values;
};

// Writes where each of some rows, one after the other, begins, and the end of the last one. Throws unless
// there are such rows.
void write_ends(const KeyedRows& matrix, std::span<const std::int64_t> rows, std::span<std::int64_t> indptr);
// Writes their entries.
void gather_rows(const KeyedRows& matrix, std::span<const std::int64_t> rows, std::span<std::uint64_t> keys,
                 std::span<float> values) noexcept;

// Throws unless the arrays match and each column is less than `keys`.
void check_examples(const Examples& examples, std::size_t keys);

// Throws unless there is one number for each example; `name` is what the numbers are.
void check_sizes(std::size_t got, std::size_t examples, const char* name);

inline std::size_t begin_of(const Examples& examples, std::size_t i) noexcept {
  return static_cast<std::size_t>(examples.indptr[i]);
}

inline constexpr std::size_t kMinEntries = 16384;  // entries of one number each per thread, at least

// Calls work(begin, end) for ranges of examples, in as many parts as the number of entries justifies, at
// `numbers` numbers each.
template <class Work>
void each_piece(const Examples& examples, ThreadPool& pool, const Work& work, std::size_t numbers = 1) {
  const Partition partition{
      examples.size(),
      std::min(examples.size(), parts_for(examples.columns.size() * numbers, kMinEntries, pool.threads()))};
  pool.run(partition.parts, [&](std::size_t p) { work(partition.begin(p), partition.begin(p + 1)); });
}

// Calls work(begin, end) for ranges of keys with about as many entries each: the cost of a key is that of its
// entries. A key is never divided.
template <class Work>
void each_run_of_keys(Occurrences occurrences, std::size_t numbers, ThreadPool& pool, const Work& work) {
  const std::span<const std::uint32_t> order = occurrences.order;
  const std::span<const std::uint32_t> group_offsets = occurrences.group_offsets;
  const std::size_t keys = group_offsets.size() - 1;
  const std::size_t parts =
      parts_for(order.size() * numbers, kMinEntries, pool.threads() == 1 ? 1 : 4 * pool.threads());
  const Partition partition{order.size(), parts};
  const auto key_at = [&](std::size_t p) {
    const auto position = static_cast<std::uint32_t>(partition.begin(p));
    return p == parts ? keys
                      : static_cast<std::size_t>(
                            std::lower_bound(group_offsets.begin(), group_offsets.end() - 1, position) -
                            group_offsets.begin());
  };
  pool.run(parts, [&](std::size_t p) { work(key_at(p), key_at(p + 1)); });
}

// The example of each entry, in memory of `buffer`. Requires fewer than 2^32 examples.
std::span<const std::uint32_t> owners_of(const Examples& examples, Buffer<std::uint32_t>& buffer,
                                         ThreadPool& pool);

}  // namespace shoal

#include "batch/summed_batch.h"

#include <string>

#include "base/check.h"
#include "batch/key_batch.h"
#include "batch/sum.h"

namespace shoal {

using hash_order::Position;

SummedBatch::SummedBatch(std::span<const std::uint64_t> keys, std::span<const float> rows, std::size_t dim,
                         Slots slots, ThreadPool& pool, KeyBatchScratch& scratch, bool counting,
                         Elements elements)
    : slots_(slots), dim_(dim) {
  const std::size_t n = keys.size();
  SHOAL_CHECK(n <= KeyBatch::kMaxKeys,
              "a batch holds at most 2^32 - 1 keys, got " + std::to_string(n) + ": split it");
  SHOAL_CHECK(dim > 0 && rows.size() == n * dim, "grads must be keys x dim: " + std::to_string(n) + " x " +
                                                     std::to_string(dim) + ", got " +
                                                     std::to_string(rows.size()) + " numbers");
  check_pairs(dim, elements);
  memory_ = Buffer<std::uint64_t>(n + slots.count() + 1);
  hashes_ = memory_.data();
  offsets_ = hashes_ + n;
  Position* const positions = scratch.positions.claim(n).data();
  const hash_order::Source source(keys, {}, false);
  if (dim == 1 && !counting) {
    sums_ = Buffer<float>(n);
    size_ = hash_order::sort(source, slots, pool, scratch, hashes_, offsets_, positions, [&] {
      return [&, sum = 0.0](std::size_t j, std::size_t u, bool fresh) mutable {
        constexpr std::size_t kAhead = 16;  // rows are read in random order: prefetch them
        if (j + kAhead < n) {
          __builtin_prefetch(rows.data() + positions[j + kAhead]);
        }
        const auto row = static_cast<double>(rows[positions[j]]);
        sum = fresh ? row : sum + row;
        sums_[u] = static_cast<float>(sum);
      };
    });
    return;
  }
  const std::span<Position> group_offsets = scratch.group_offsets.claim(n + 1);
  group_offsets[0] = 0;
  size_ = hash_order::sort(source, slots, pool, scratch, hashes_, offsets_, positions, [&] {
    return [&](std::size_t j, std::size_t u, bool /*fresh*/) {
      group_offsets[u + 1] = static_cast<Position>(j + 1);
    };
  });
  sums_ = Buffer<float>(size_ * dim);
  if (counting) {
    counts_ = Buffer<std::uint32_t>(size_);
    for (std::size_t u = 0; u < size_; ++u) {
      counts_[u] = group_offsets[u + 1] - group_offsets[u];
    }
  }
  const auto row_of = [&](Position position) { return rows.data() + position * dim; };
  const std::span<const Position> order{positions, n};
  const std::span<float> sums{sums_.data(), sums_.size()};
  if (elements == Elements::kInt64Pairs) {
    sum_rows(order, group_offsets.first(size_ + 1), dim, row_of, sums, pool, Integers());
  } else {
    sum_rows(order, group_offsets.first(size_ + 1), dim, row_of, sums, pool);
  }
}

}  // namespace shoal

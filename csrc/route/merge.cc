#include "route/merge.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "base/check.h"
#include "route/sum.h"

namespace shoal {

namespace {

void check(std::span<const SortedList> lists, std::size_t dim, bool counted) {
  SHOAL_CHECK(dim > 0, "dim must be at least 1");
  std::size_t total = 0;
  for (std::size_t k = 0; k < lists.size(); ++k) {
    const SortedList& list = lists[k];
    const std::string name = "list " + std::to_string(k);
    const std::size_t n = list.hashes.size();
    total += n;
    SHOAL_CHECK(list.grads.size() == n * dim,
                name + " has " + std::to_string(n) + " hashes of dim " + std::to_string(dim) + " but " +
                    std::to_string(list.grads.size()) + " numbers of gradients");
    SHOAL_CHECK(list.counts.size() == (counted ? n : 0),
                name + " has " + std::to_string(n) + " hashes but " + std::to_string(list.counts.size()) +
                    " counts: counts must come with every list or with none");
    const auto bad = std::adjacent_find(list.hashes.begin(), list.hashes.end(), std::greater_equal<>());
    SHOAL_CHECK(bad == list.hashes.end(), name + " does not ascend strictly: at position " +
                                              std::to_string(bad - list.hashes.begin() + 1) + " hash " +
                                              std::to_string(*(bad + 1)) + " follows " +
                                              std::to_string(*bad));
  }
  SHOAL_CHECK(total <= KeyBatch::kMostKeys, "a merge takes at most 2^32 - 1 hashes, got " +
                                                std::to_string(total) + ": merge fewer slots at a time");
}

}  // namespace

Merged merge(std::span<const SortedList> lists, std::size_t dim, Pool& pool, KeyBatchScratch& scratch,
             std::size_t divisor) {
  SHOAL_CHECK(divisor > 0, "a mean of nobody: the divisor must be at least 1");
  // The first list that has hashes decides.
  const auto filled =
      std::find_if(lists.begin(), lists.end(), [](const SortedList& l) { return !l.hashes.empty(); });
  const bool counted = filled != lists.end() && !filled->counts.empty();
  check(lists, dim, counted);
  std::size_t total = 0;
  for (const SortedList& list : lists) {
    total += list.hashes.size();
  }
  Buffer<std::uint64_t> all(total);
  Buffer<const float*> rows(total);
  Buffer<std::uint32_t> counts(total);
  std::size_t at = 0;
  for (const SortedList& list : lists) {
    std::copy(list.hashes.begin(), list.hashes.end(), all.begin() + at);
    std::copy(list.counts.begin(), list.counts.end(), counts.begin() + at);
    for (std::size_t i = 0; i < list.hashes.size(); ++i) {
      rows[at + i] = list.grads.data() + i * dim;
    }
    at += list.hashes.size();
  }
  const KeyBatch batch = KeyBatch::of_hashes({all.data(), total}, Slots(Slots::kFewest), pool, scratch);
  Merged merged;
  merged.hashes = Buffer<std::uint64_t>(batch.size());
  std::copy(batch.hashes().begin(), batch.hashes().end(), merged.hashes.begin());
  merged.grads = Buffer<float>(batch.size() * dim);
  const auto row_of = [&](std::uint32_t place) { return rows[place]; };
  const std::span<float> sums(merged.grads.data(), merged.grads.size());
  if (divisor == 1) {
    sum_rows(batch.order(), batch.firsts(), dim, row_of, sums, pool);
  } else {
    sum_rows(batch.order(), batch.firsts(), dim, row_of, sums, pool, Divided{static_cast<double>(divisor)});
  }
  if (counted) {
    merged.counts = Buffer<std::uint32_t>(batch.size());
    for (std::size_t u = 0; u < batch.size(); ++u) {
      std::uint64_t sum = 0;
      for (std::size_t j = batch.firsts()[u]; j < batch.firsts()[u + 1]; ++j) {
        sum += counts[batch.order()[j]];
      }
      merged.counts[u] = static_cast<std::uint32_t>(std::min<std::uint64_t>(sum, 0xffffffffU));
    }
  }
  return merged;
}

}  // namespace shoal

// Concatenates and sorts stably. Each list comes from a KeyBatch: its hashes ascend strictly. The
// concatenated lists, sorted by (hash, position), have the rows of one hash in list order (the workers'
// ranks), so merging is building a KeyBatch of hashes. Large lists are merged piece by piece of the hash
// space, so that the working memory stays in the cache.

#include "batch/merge.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "base/check.h"
#include "batch/sum.h"

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
  SHOAL_CHECK(total <= KeyBatch::kMaxKeys, "a merge takes at most 2^32 - 1 hashes, got " +
                                               std::to_string(total) + ": merge fewer slots at a time");
}

}  // namespace

std::size_t merge(std::span<const SortedList> lists, std::size_t dim, ThreadPool& pool, MergeScratch& scratch,
                  const MergeOutput& out, std::size_t divisor, Elements elements) {
  constexpr std::size_t kPiece = 8192;  // rows
  SHOAL_CHECK(divisor > 0, "the divisor of a mean must be at least 1");
  SHOAL_CHECK(divisor == 1 || elements == Elements::kFloat32, "integers have no mean");
  check_pairs(dim, elements);
  // The first list that has hashes determines whether all of them have counts.
  const auto filled =
      std::find_if(lists.begin(), lists.end(), [](const SortedList& l) { return !l.hashes.empty(); });
  const bool counted = filled != lists.end() && !filled->counts.empty();
  check(lists, dim, counted);
  std::size_t total = 0;
  std::span<const std::uint64_t> longest;
  for (const SortedList& list : lists) {
    total += list.hashes.size();
    longest = list.hashes.size() > longest.size() ? list.hashes : longest;
  }
  SHOAL_CHECK(out.hashes.size() >= total && out.grads.size() >= total * dim &&
                  out.counts.size() >= (counted ? total : 0),
              "a merge of " + std::to_string(total) + " hashes needs room for as many");
  // Several threads share one large piece.
  const std::size_t pieces = pool.threads() == 1 ? (total + kPiece - 1) / kPiece : 1;
  std::vector<std::size_t> at(lists.size(), 0);
  std::size_t done = 0;
  for (std::size_t piece = 0; piece < pieces && total != 0; ++piece) {
    // The piece ends before this hash of the longest list.
    const Partition cut{longest.size(), pieces};
    const bool last = piece + 1 == pieces;
    const auto end_in = [&](std::span<const std::uint64_t> hashes, std::size_t from) {
      return last ? hashes.size()
                  : static_cast<std::size_t>(
                        std::lower_bound(hashes.begin() + static_cast<std::ptrdiff_t>(from), hashes.end(),
                                         longest[cut.begin(piece + 1)]) -
                        hashes.begin());
    };
    std::vector<std::size_t> ends(lists.size());
    std::size_t size = 0;
    for (std::size_t k = 0; k < lists.size(); ++k) {
      ends[k] = end_in(lists[k].hashes, at[k]);
      size += ends[k] - at[k];
    }
    const std::span<std::uint64_t> listed = scratch.hashes.claim(size).first(size);
    const std::span<const float*> rows = scratch.rows.claim(size).first(size);
    const std::span<std::uint32_t> counts = scratch.counts.claim(counted ? size : 0);
    std::size_t position = 0;
    for (std::size_t k = 0; k < lists.size(); ++k) {
      for (std::size_t i = at[k]; i < ends[k]; ++i, ++position) {
        listed[position] = lists[k].hashes[i];
        rows[position] = lists[k].grads.data() + i * dim;
        if (counted) {
          counts[position] = lists[k].counts[i];
        }
      }
      at[k] = ends[k];
    }
    const KeyBatch batch = KeyBatch::of_hashes(listed, Slots(Slots::kMin), pool, scratch.keys);
    std::ranges::copy(batch.hashes(), out.hashes.begin() + static_cast<std::ptrdiff_t>(done));
    const auto row_of = [&](std::uint32_t p) { return rows[p]; };
    const std::span<float> sums = out.grads.subspan(done * dim, batch.size() * dim);
    if (elements == Elements::kInt64Pairs) {
      sum_rows(batch.order(), batch.group_offsets(), dim, row_of, sums, pool, Integers());
    } else if (divisor == 1) {
      sum_rows(batch.order(), batch.group_offsets(), dim, row_of, sums, pool);
    } else {
      sum_rows(batch.order(), batch.group_offsets(), dim, row_of, sums, pool,
               Divided{static_cast<double>(divisor)});
    }
    for (std::size_t u = 0; counted && u < batch.size(); ++u) {
      std::uint64_t sum = 0;
      for (std::size_t j = batch.group_offsets()[u]; j < batch.group_offsets()[u + 1]; ++j) {
        sum += counts[batch.order()[j]];
      }
      out.counts[done + u] = static_cast<std::uint32_t>(std::min<std::uint64_t>(sum, 0xffffffffU));
    }
    done += batch.size();
  }
  return done;
}

}  // namespace shoal

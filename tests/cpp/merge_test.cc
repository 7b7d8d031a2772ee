// merge compared with a map to which the lists are added one after another.

#include "batch/merge.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <span>
#include <vector>

#include "base/threads.h"
#include "check.h"

namespace shoal::merge_test {

namespace {

constexpr std::uint64_t kGreatest = ~std::uint64_t{0};

struct List {
  std::vector<std::uint64_t> hashes;
  std::vector<float> grads;
  std::vector<std::uint32_t> counts;
};

std::vector<SortedList> views(const std::vector<List>& lists) {
  std::vector<SortedList> result;
  for (const List& list : lists) {
    result.push_back({list.hashes, list.grads, list.counts});
  }
  return result;
}

// k lists of about n hashes below `distinct`, spread over all 64 bits; sizes of gradients differ widely, so
// that another order of adding gives other bits.
std::vector<List> random_lists(std::size_t k, std::size_t n, std::uint64_t distinct, std::size_t dim,
                               bool counted, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<List> lists(k);
  for (List& list : lists) {
    std::set<std::uint64_t> hashes;
    for (std::size_t i = random() % 8 == 0 ? n : 0; i < n; ++i) {
      hashes.insert(random() % distinct * (kGreatest / distinct));
    }
    list.hashes.assign(hashes.begin(), hashes.end());
    for (std::size_t i = 0; i < hashes.size() * dim; ++i) {
      list.grads.push_back(
          std::ldexp(static_cast<float>(random() % 2'000'001) - 1e6F, static_cast<int>(random() % 60)));
    }
    for (std::size_t i = 0; counted && i < hashes.size(); ++i) {
      list.counts.push_back(static_cast<std::uint32_t>(random() % 1000));
    }
  }
  return lists;
}

struct Merged {
  std::vector<std::uint64_t> hashes;
  std::vector<float> grads;
  std::vector<std::uint32_t> counts;
};

Merged merged(const std::vector<List>& lists, std::size_t dim = 1, std::size_t threads = 1,
              std::size_t divisor = 1) {
  static MergeScratch scratch;  // used again, whatever was in it
  std::size_t total = 0;
  bool counted = false;
  for (const List& list : lists) {
    total += list.hashes.size();
    counted |= !list.counts.empty();
  }
  Merged all{std::vector<std::uint64_t>(total), std::vector<float>(total * dim),
             std::vector<std::uint32_t>(counted ? total : 0)};
  ThreadPool pool(threads);
  const std::size_t size =
      merge(views(lists), dim, pool, scratch, {all.hashes, all.grads, all.counts}, divisor);
  all.hashes.resize(size);
  all.grads.resize(size * dim);
  all.counts.resize(counted ? size : 0);
  return all;
}

void check_merge(const std::vector<List>& lists, std::size_t dim, std::size_t divisor = 1) {
  struct Row {
    std::vector<double> sums;
    std::uint64_t count = 0;
  };
  std::map<std::uint64_t, Row> rows;
  bool counted = false;
  for (const List& list : lists) {
    for (std::size_t i = 0; i < list.hashes.size(); ++i) {
      const float* grads = list.grads.data() + i * dim;
      Row& row = rows[list.hashes[i]];
      if (row.sums.empty()) {
        row.sums.assign(grads, grads + dim);
      } else {
        std::transform(row.sums.begin(), row.sums.end(), grads, row.sums.begin(), std::plus<double>());
      }
      row.count += list.counts.empty() ? 0 : list.counts[i];
    }
    counted |= !list.counts.empty();
  }
  for (const std::size_t threads : {1U, 2U, 3U, 8U}) {
    const Merged all = merged(lists, dim, threads, divisor);
    CHECK_EQ(all.hashes.size(), rows.size());
    CHECK_EQ(all.grads.size(), rows.size() * dim);
    CHECK_EQ(all.counts.size(), counted ? rows.size() : 0);
    std::size_t u = 0;
    for (const auto& [hash, row] : rows) {
      CHECK_EQ(all.hashes[u], hash);
      for (std::size_t d = 0; d < dim; ++d) {
        CHECK_EQ(
            std::bit_cast<std::uint32_t>(all.grads[u * dim + d]),
            std::bit_cast<std::uint32_t>(static_cast<float>(row.sums[d] / static_cast<double>(divisor))));
      }
      if (counted) {
        CHECK_EQ(all.counts[u], row.count);
      }
      ++u;
    }
  }
}

}  // namespace

TEST(no_lists_and_empty_lists_merge_into_nothing) {
  check_merge({}, 1);
  check_merge(std::vector<List>(1), 3);
  check_merge(std::vector<List>(3), 1);
}

TEST(one_list_merges_into_itself_bit_for_bit) {
  check_merge({{{0, 7, kGreatest}, {-0.0F, 1.0F, 2.0F}, {}}}, 1);
  check_merge({{}, {{0, 7}, {-0.0F, 1.0F, 2.0F, 3.0F}, {1, 2}}, {}}, 2);
}

TEST(equal_hashes_are_added_in_list_order) {
  // 1e30 - 1e30 + 1 is 1; in any other order it is 0.
  const Merged sum = merged({{{5}, {1e30F}, {}}, {{5}, {-1e30F}, {}}, {{5}, {1.0F}, {}}});
  CHECK_EQ(sum.hashes.size(), 1);
  CHECK_EQ(sum.grads[0], 1.0F);
}

TEST(a_merge_equals_a_map_for_any_number_of_lists_and_any_dim) {
  for (const std::size_t k : {1U, 2U, 3U, 8U, 64U}) {
    for (const std::size_t dim : {1U, 2U, 7U, 17U}) {
      check_merge(random_lists(k, 300, 1'000'000, dim, false, k + dim), dim);
      check_merge(random_lists(k, 300, 400, dim, true, k + dim), dim);
    }
  }
}

TEST(a_large_merge_full_of_ties_equals_a_map) {
  check_merge(random_lists(8, 30'000, 20'000, 1, true, 1), 1);
  check_merge(random_lists(3, 60'000, 1'000'000'000, 2, false, 2), 2);
}

TEST(a_mean_divides_in_float64_before_the_one_rounding) {
  for (const std::size_t dim : {1U, 3U, 300U}) {
    check_merge(random_lists(7, 200, 300, dim, true, dim), dim, 7);
    check_merge(random_lists(2, 200, 300, dim, false, dim), dim, 3);  // senders without a list count as well
  }
  // float32 would round 2^24 + 1 to 2^24 first.
  const std::vector<List> lists{{{5}, {0x1p24F}, {}}, {{5}, {1.0F}, {}}, {{5}, {1.0F}, {}}};
  CHECK_EQ(merged(lists, 1, 1, 2).grads[0], 0x1p23F + 1.0F);
  CHECK_THROWS(merged(lists, 1, 1, 0), "divisor of a mean must be at least 1");
}

TEST(large_merges_are_cut_into_pieces_wherever_the_longest_list_says) {
  auto lists = random_lists(5, 20'000, 1'000'000'000, 3, true, 4);
  lists.push_back({{0, 1, kGreatest}, std::vector<float>(9, 1.0F), {1, 1, 1}});
  check_merge(lists, 3);
  // All hashes of one list between two of another; ties at the cuts.
  List dense;
  for (std::uint64_t i = 0; i < 30'000; ++i) {
    dense.hashes.push_back(7'000 + i);
    dense.grads.push_back(static_cast<float>(i));
  }
  List wide;
  for (std::uint64_t i = 0; i < 40'000; ++i) {
    wide.hashes.push_back(i * 6'999);
    wide.grads.push_back(0.5F);
  }
  check_merge({wide, dense, wide}, 1, 3);
}

TEST(a_merge_without_room_is_refused) {
  ThreadPool pool(1);
  MergeScratch scratch;
  const std::vector<List> lists{{{5, 6}, {1, 1}, {}}, {{5}, {1}, {}}};
  std::vector<std::uint64_t> hashes(2);
  std::vector<float> grads(3);
  CHECK_THROWS(merge(views(lists), 1, pool, scratch, {hashes, grads, {}}),
               "a merge of 3 hashes needs room for as many");
}

TEST(a_count_that_does_not_fit_stays_at_the_greatest) {
  const Merged sum = merged({{{5, 6}, {1, 1}, {0xffffffffU, 1}}, {{5, 6}, {1, 1}, {2, 2}}});
  CHECK_EQ(sum.counts[0], 0xffffffffU);
  CHECK_EQ(sum.counts[1], 3);
}

TEST(a_list_that_does_not_ascend_strictly_is_refused_with_its_number_and_position) {
  CHECK_THROWS(merged({{{1}, {1}, {}}, {{1, 4, 4}, {1, 1, 1}, {}}}),
               "list 1 does not ascend strictly: at position 2");
  CHECK_THROWS(merged({{{9, 8}, {1, 1}, {}}}),
               "list 0 does not ascend strictly: at position 1 hash 8 follows 9");
}

TEST(lengths_that_do_not_agree_are_refused_with_the_list) {
  CHECK_THROWS(merged({{{1, 2}, {1, 1}, {}}, {{1, 2}, {1}, {}}}),
               "list 1 has 2 hashes of dim 1 but 1 numbers");
  CHECK_THROWS(merged({{{1, 2}, {1, 1}, {}}}, 2), "list 0 has 2 hashes of dim 2 but 2 numbers");
  CHECK_THROWS(merged({{{1}, {1}, {1}}, {{1, 2}, {1, 1}, {1}}}), "list 1 has 2 hashes but 1 counts");
  CHECK_THROWS(merged({{{1}, {}, {}}}, 0), "dim");
}

TEST(counts_in_some_lists_only_are_refused_but_an_empty_list_has_none_to_give) {
  CHECK_THROWS(merged({{{1}, {1}, {1}}, {{2}, {1}, {}}}), "list 1 has 1 hashes but 0 counts");
  CHECK_THROWS(merged({{}, {{1}, {1}, {}}, {{2}, {1}, {1}}}), "list 2 has 1 hashes but 1 counts");
  CHECK_EQ(merged({{}, {{1}, {1}, {3}}, {}}).counts[0], 3);
}

}  // namespace shoal::merge_test

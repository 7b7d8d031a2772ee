// Windows, clocks, histograms and pending pushes: the parts of a Service that do not use tables.

#include "replica/dedup_window.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "check.h"
#include "endpoint/histogram.h"
#include "replica/clocks.h"
#include "replica/pending_pushes.h"

namespace shoal::dedup_window_test {

TEST(a_window_remembers_64_numbers_and_takes_older_ones_for_seen) {
  std::mt19937_64 random(1);
  for (int run = 0; run < 50; ++run) {
    SequenceWindow window;
    std::set<std::uint64_t> marked;
    std::uint64_t top = 0;
    CHECK(window.contains(0));
    for (int i = 0; i < 300; ++i) {
      const std::uint64_t reach = random() % 10 == 0 ? 200 : 20;
      const std::uint64_t number = top + 1 + random() % reach - std::min<std::uint64_t>(top, random() % 80);
      const bool old = top >= SequenceWindow::kSpan && number <= top - SequenceWindow::kSpan;
      CHECK_EQ(window.contains(number), number == 0 || old || marked.contains(number));
      window.mark(number);
      marked.insert(number);
      top = std::max(top, number);
      CHECK(window.contains(number));
      CHECK(!window.contains(top + 1));
    }
  }
}

TEST(a_window_takes_numbers_far_apart) {
  SequenceWindow window;
  window.mark(1);
  CHECK(!window.contains(2));
  window.mark(65);
  CHECK(window.contains(1));
  CHECK(!window.contains(2));
  window.mark(~std::uint64_t{0});
  CHECK(window.contains(66));
  CHECK(!window.contains(~std::uint64_t{0} - 1));
  CHECK(!window.contains(~std::uint64_t{0} - 63));
  CHECK(window.contains(~std::uint64_t{0} - 64));
}

TEST(rows_erased_are_remembered_for_64_calls) {
  DedupWindow seen(0, 4);
  seen.erased(3).assign({1, 5});
  CHECK_EQ(seen.find_erased(3).size(), 2);
  CHECK_EQ(seen.find_erased(3)[1], 5);
  CHECK(seen.find_erased(67).empty());
  seen.erased(68).assign({3, 1});
  CHECK(seen.find_erased(3).empty());
  CHECK_EQ(seen.find_erased(68)[0], 3);
  for (std::uint64_t number = 1; number < 200; ++number) {
    seen.answer(number) = {static_cast<double>(number)};
  }
  CHECK_EQ(seen.answer(136).at(0), 136.0);
  CHECK(seen.answer(100).empty());
}

TEST(a_push_that_was_stopped_is_found_by_its_number) {
  DedupWindow seen(0, 4);
  CHECK(seen.partial_push(1) == nullptr);
  seen.set_partial_push(1, 77);
  seen.set_partial_push(2, 88);
  CHECK_EQ(seen.partial_push(1)->next, 77);
  seen.set_partial_push(1, 99);
  CHECK_EQ(seen.partial_push(1)->next, 99);
  CHECK_EQ(seen.partial_push(2)->next, 88);
  seen.set_partial_push(65, 5);  // replaces 1, which has left the window
  CHECK(seen.partial_push(1) == nullptr);
}

TEST(clocks_follow_the_slowest_who_is_admitted) {
  Clocks clocks;
  CHECK(clocks.state(0, 1) == Clocks::WorkerState::kUnknown);
  CHECK(clocks.admit(0, 1, 0));
  CHECK(clocks.admit(2, 4, 0));
  CHECK(clocks.state(1, 1) == Clocks::WorkerState::kUnknown);
  CHECK(clocks.state(2, 3) == Clocks::WorkerState::kFenced);
  CHECK(clocks.state(2, 4) == Clocks::WorkerState::kAdmitted);
  CHECK(clocks.state(2, 5) == Clocks::WorkerState::kUnknown);
  clocks.tick(0);
  clocks.tick(0);
  CHECK_EQ(clocks.slowest(), 0);
  CHECK_EQ(clocks.greatest(), 2);
  clocks.tick(2);
  CHECK_EQ(clocks.floor(), 1);
  CHECK_EQ(clocks.hold(), 2);
  clocks.tick(0);
  clocks.tick(2);
  clocks.tick(2);
  CHECK_EQ(clocks.slowest(), 3);
  CHECK_EQ(clocks.floor(), 2);
  CHECK_EQ(clocks.hold(), 2);
  CHECK(!clocks.admit(0, 1, 9));  // is in: only the hold ends
  CHECK_EQ(clocks.clock(0), 3);
  CHECK_EQ(clocks.floor(), 3);
  CHECK(clocks.dismiss(2, 4));
  CHECK(!clocks.dismiss(2, 4));
  CHECK(clocks.state(2, 4) == Clocks::WorkerState::kFenced);
  CHECK(!clocks.admit(2, 4, 0));
  clocks.tick(0);
  CHECK(clocks.dismiss(0, 7));  // fences incarnations up to 7
  CHECK(clocks.state(0, 6) == Clocks::WorkerState::kFenced);
  CHECK_EQ(clocks.admitted(), 0);
  CHECK_EQ(clocks.floor(), 4);
  CHECK_THROWS(clocks.admit(Clocks::kMaxWorkers, 1, 0), "at most 65536");
  CHECK_THROWS(clocks.dismiss(1, 0), "the first is 1");
}

TEST(a_histogram_counts_exactly_and_then_by_power_of_two) {
  Histogram histogram;
  for (const std::uint64_t x : {0U, 15U, 15U, 16U, 31U, 32U}) {
    histogram.add(x);
  }
  histogram.add(~std::uint64_t{0});
  std::map<std::uint64_t, std::uint64_t> counts;
  for (std::size_t b = 0; b < Histogram::kBuckets; ++b) {
    if (histogram.count(b) != 0) {
      counts[Histogram::lower_bound(b)] = histogram.count(b);
    }
  }
  const std::map<std::uint64_t, std::uint64_t> expected = {
      {0, 1}, {15, 2}, {16, 2}, {32, 1}, {std::uint64_t{1} << 63U, 1}};
  CHECK(counts == expected);
}

TEST(pushes_that_wait_come_out_by_rank_and_sequence_and_their_bytes_add_up) {
  std::mt19937_64 random(7);
  const std::vector<std::uint32_t> words(40);
  PendingPushes pending;
  using Name =
      std::tuple<std::uint32_t, std::uint32_t, std::uint32_t, std::uint64_t>;  // clock, table, rank, call
  std::multiset<Name> expected;
  const auto keep = [&](const Name& name) {
    const auto& [clock, table, rank, sequence] = name;
    pending.add(clock, table,
                {.rank = rank, .sequence = sequence, .counts = std::span(words).first(sequence)});
    expected.insert(name);
  };
  for (int i = 0; i < 300; ++i) {
    keep({static_cast<std::uint32_t>(random() % 4), static_cast<std::uint32_t>(random() % 3),
          static_cast<std::uint32_t>(random() % 5), 1 + random() % 40});
  }
  const std::vector<std::uint32_t> named = {1, 9};
  pending.tick(2, named);
  pending.tick(2, named);
  pending.drop_table(0);
  std::erase_if(expected, [](const Name& name) { return std::get<1>(name) == 0; });
  pending.drop(3, 2);
  std::erase_if(expected, [](const Name& name) { return std::get<2>(name) == 3 && std::get<0>(name) >= 2; });
  std::size_t bytes = 6 * PendingPushes::kOverhead;  // four turns, two tables named
  for (const Name& name : expected) {
    bytes += std::get<3>(name) * sizeof(std::uint32_t) + PendingPushes::kOverhead;
  }
  CHECK_EQ(pending.bytes(), bytes);
  CHECK_EQ(pending.bytes(0) + pending.bytes(1) + pending.bytes(2) + pending.bytes(3), bytes);
  std::vector<Name> got;
  for (; !pending.empty(); pending.pop()) {
    const std::uint32_t clock = pending.next();
    CHECK_EQ(pending.first().ticked, clock == 2 ? 2 : 0);
    std::optional<std::uint32_t> last;
    while (const auto table = pending.next_table()) {
      CHECK(!last || *last < *table);
      last = table;
      for (const PendingPushes::Push& push : pending.pushes(*table)) {
        got.emplace_back(clock, *table, push.rank, push.sequence);
      }
      pending.finish_table(*table);
    }
    CHECK_EQ(*last, clock == 2 ? 9 : 2);
    CHECK_EQ(pending.bytes(clock), PendingPushes::kOverhead);
  }
  CHECK(got == std::vector<Name>(expected.begin(), expected.end()));
  CHECK_EQ(pending.bytes(), 0);
}

}  // namespace shoal::dedup_window_test

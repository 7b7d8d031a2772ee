// Cuts of calls: what every cut of any call has to be.

#include "client/cutting.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <vector>

#include "check.h"
#include "client_input.h"

namespace shoal::cutting_test {
using namespace shoal::client;

namespace {

struct Rows {
  std::vector<std::uint64_t> hashes;
  std::vector<std::uint64_t> begins;
  std::vector<std::byte> values;
};

// Some slots have no rows, and some have many.
Rows random_rows(std::mt19937_64& random, std::uint32_t slots, std::size_t width) {
  Rows rows;
  rows.begins.push_back(0);
  for (std::uint32_t slot = 0; slot < slots; ++slot) {
    rows.begins.push_back(rows.begins.back() + (random() % 3 == 0 ? 0 : random() % 30));
  }
  rows.hashes.resize(rows.begins.back());
  rows.values.resize(rows.hashes.size() * width);
  return rows;
}

Call push_of(const Rows& rows, std::size_t width) {
  return {wire::Op::kPush,
          1,
          0,
          0,
          1,
          Keyed{.hashes = rows.hashes, .begins = rows.begins, .values = rows.values, .width = width}};
}

}  // namespace

TEST(cuts_have_each_row_once_in_order_and_no_slot_is_in_two) {
  std::mt19937_64 random(11);
  for (int round = 0; round < 500; ++round) {
    const auto slots = static_cast<std::uint32_t>(1 + random() % 60);
    const std::size_t width = 4 * (1 + random() % 5);
    const Rows rows = random_rows(random, slots, width);
    const Call call = push_of(rows, width);
    const SlotMap map = random_map(random, slots, 1 + random() % 4);
    const Policy policy{.message_bytes = 1 + random() % 2000};
    const auto first = static_cast<std::uint32_t>(random() % slots);
    const auto end = first + 1 + static_cast<std::uint32_t>(random() % (slots - first));
    std::size_t at = rows.begins[first];
    std::uint32_t slot = first;
    const std::vector<Cut> cuts = cut(call, map, policy, first, end);
    for (const Cut& one : cuts) {
      const Run& run = map.runs()[map.run_of(one.first_slot)];
      CHECK(slot <= one.first_slot && one.first_slot < one.end_slot && one.end_slot <= end);
      CHECK(run.endpoint == one.endpoint && one.end_slot <= run.end_slot);
      CHECK(one.begin == at && one.end > at);
      CHECK(one.begin == rows.begins[one.first_slot] && one.end == rows.begins[one.end_slot]);
      // A call has about 128 parts at an endpoint at most, so some are larger than they were to be.
      const std::size_t most = std::max<std::size_t>(128 / run.siblings, 1);
      const std::size_t of_run =
          rows.begins[std::min(end, run.end_slot)] - rows.begins[std::max(first, run.first_slot)];
      const std::size_t room = std::max(policy.message_bytes / (8 + width), (of_run + most - 1) / most);
      CHECK(one.end_slot == one.first_slot + 1 || one.end - one.begin <= room);
      at = one.end;
      slot = one.end_slot;
    }
    CHECK_EQ(at, rows.begins[end]);
  }
}

TEST(an_endpoint_gets_few_messages_of_a_call_however_small_they_were_to_be) {
  std::mt19937_64 random(13);
  const std::uint32_t slots = 4096;
  const Rows rows = random_rows(random, slots, 4);
  const Call call = push_of(rows, 4);
  for (int round = 0; round < 20; ++round) {
    const SlotMap map = random_map(random, slots, 1 + random() % 3);
    std::map<std::uint32_t, std::size_t> parts;
    for (const Cut& one : cut(call, map, {.message_bytes = 1}, 0, slots)) ++parts[one.endpoint];
    for (const auto& [endpoint, count] : parts) CHECK(count < 256);  // the number of a part is a byte
  }
}

TEST(a_call_of_one_slot_goes_to_its_owner_and_one_of_all_to_each_owner_once) {
  const SlotMap map(1, {{"a", 0}, {"b", 1}, {"c", 2}}, {{0, 4, 1}, {4, 8, 0}, {8, 16, 1}});
  const Call one{wire::Op::kSection, 1, 0, 0, 1, OfSlot{.slot = 5}};
  const std::vector<Cut> cuts = cut(one, map, {}, 0, 16);
  CHECK_EQ(cuts.size(), 1);
  CHECK(cuts[0].endpoint == 0 && cuts[0].first_slot == 5 && cuts[0].end_slot == 6);
  const Call all{wire::Op::kStats, 1, 0, 0, 1, OfAll{}};
  const std::vector<Cut> each = cut(all, map, {}, 0, 16);
  CHECK_EQ(each.size(), 2);
  CHECK(each[0].endpoint == 1 && each[1].endpoint == 0);
}

TEST(rows_of_a_slot_that_no_message_has_room_for_are_refused) {
  const SlotMap map(1, {{"a", 0}}, {{0, 2, 0}});
  Rows rows{
      .hashes = std::vector<std::uint64_t>(30), .begins = {0, 10, 30}, .values = std::vector<std::byte>(120)};
  const Call call = push_of(rows, 4);
  check_fits(call, map, {.message_bytes = 1, .largest_message = 240});
  CHECK_THROWS(check_fits(call, map, {.message_bytes = 1, .largest_message = 239}),
               "20 rows of slots 1 to 2 are 240 bytes of a push");
  CHECK_THROWS(check_fits(call, map, {.largest_message = 240}), "30 rows of slots 0 to 2");
}

}  // namespace shoal::cutting_test

// Slot maps compared with a plain table of the owner of each slot.

#include "client/slot_map.h"

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "client_input.h"

namespace shoal::slot_map_test {
using namespace shoal::client;

TEST(runs_owners_and_arcs_are_those_of_the_slots) {
  std::mt19937_64 random(5);
  for (int round = 0; round < 300; ++round) {
    const auto slots = static_cast<std::uint32_t>(1 + random() % 40);
    const SlotMap map = random_map(random, slots, 1 + random() % 5);
    CHECK_EQ(map.slots(), slots);
    std::vector<std::uint32_t> owner(slots);
    for (const ArcRange& arc : map.arcs_of(0, slots)) {
      for (std::uint32_t slot = arc.first_slot; slot < arc.end_slot; ++slot) owner[slot] = arc.endpoint;
    }
    std::vector<std::uint32_t> owners;
    std::vector<std::uint32_t> runs(map.endpoints().size());
    for (std::uint32_t slot = 0; slot < slots; ++slot) {
      const Run& run = map.runs()[map.run_of(slot)];
      CHECK(run.first_slot <= slot && slot < run.end_slot);
      CHECK_EQ(run.endpoint, owner[slot]);
      CHECK(run.first_slot == 0 || owner[run.first_slot - 1] != run.endpoint);
      CHECK(run.end_slot == slots || owner[run.end_slot] != run.endpoint);
      runs[owner[slot]] += run.first_slot == slot ? 1U : 0U;
      if (std::find(owners.begin(), owners.end(), owner[slot]) == owners.end()) owners.push_back(owner[slot]);
    }
    CHECK(map.owners() == owners);
    for (const Run& run : map.runs()) CHECK_EQ(run.siblings, runs[run.endpoint]);
    const auto first = static_cast<std::uint32_t>(random() % slots);
    const auto end = first + 1 + static_cast<std::uint32_t>(random() % (slots - first));
    std::size_t overlapping = 0;
    for (const ArcRange& arc : map.arcs_of(0, slots)) {
      overlapping += arc.first_slot < end && arc.end_slot > first ? 1U : 0U;
    }
    const auto arcs = map.arcs_of(first, end);
    CHECK_EQ(arcs.size(), overlapping);
    CHECK(arcs.front().first_slot <= first && first < arcs.front().end_slot);
    CHECK(arcs.back().first_slot < end && end <= arcs.back().end_slot);
    CHECK(map.has("tcp://0:1"));
    CHECK(!map.has("tcp://nobody:1"));
  }
}

TEST(a_map_with_a_gap_or_an_unknown_endpoint_is_refused) {
  const std::vector<Endpoint> one = {{"tcp://0:1", 0}};
  CHECK_THROWS(SlotMap(1, one, {}), "at least one arc");
  CHECK_THROWS(SlotMap(1, one, {{1, 4, 0}}), "from slot 0 on");
  CHECK_THROWS(SlotMap(1, one, {{0, 4, 0}, {5, 8, 0}}), "follow one another");
  CHECK_THROWS(SlotMap(1, one, {{0, 4, 0}, {4, 4, 0}}), "follow one another");
  CHECK_THROWS(SlotMap(1, one, {{0, 4, 1}}), "no endpoint");
  CHECK_THROWS(SlotMap(1, one, {{0, 4, 0}}, {1}), "is no endpoint");
}

}  // namespace shoal::slot_map_test

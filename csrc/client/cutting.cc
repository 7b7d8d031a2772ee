#include "client/cutting.h"

#include <algorithm>
#include <string>

#include "base/check.h"

namespace shoal::client {

namespace {

constexpr std::size_t kMaxParts =
    128;  // of a call at one endpoint: a part's number is a byte, and a newer map may need some more

}  // namespace

std::size_t row_bytes(const Call& call) noexcept {
  const Keyed* const keyed = call.keyed();
  const bool has_rows = call.op == wire::Op::kPull || call.op == wire::Op::kPush ||
                        call.op == wire::Op::kAssign || call.op == wire::Op::kState;
  return sizeof(std::uint64_t) + (keyed != nullptr && has_rows ? keyed->width : 0);
}

std::vector<Cut> cut(const Call& call, const SlotMap& map, const Policy& policy, std::uint32_t first,
                     std::uint32_t end) {
  std::vector<Cut> cuts;
  if (const auto* const of_slot = std::get_if<OfSlot>(&call.what)) {
    cuts.push_back({map.runs()[map.run_of(of_slot->slot)].endpoint, of_slot->slot, of_slot->slot + 1, 0, 0});
    return cuts;
  }
  if (call.is_everywhere()) {
    for (const std::uint32_t owner : map.owners()) {
      cuts.push_back({owner, 0, map.slots(), 0, 0});
    }
    return cuts;
  }
  const Keyed& keyed = std::get<Keyed>(call.what);
  const auto begins = keyed.begins;
  for (std::size_t k = map.run_of(first); k < map.runs().size() && map.runs()[k].first_slot < end; ++k) {
    const Run& run = map.runs()[k];
    std::uint32_t low = std::max(first, run.first_slot);
    const std::uint32_t high = std::min(end, run.end_slot);
    const std::size_t most = std::max<std::size_t>(kMaxParts / run.siblings, 1);
    const std::size_t fewest = (begins[high] - begins[low] + most - 1) / most;
    const std::size_t rows = std::max({fewest, policy.message_bytes / row_bytes(call), std::size_t{1}});
    // Cuts are between slots: a slot accepts a sequence once.
    while (low < high && begins[low] < begins[high]) {
      std::uint32_t edge = high;
      if (begins[high] - begins[low] > rows) {
        const auto after = std::ranges::upper_bound(begins, begins[low] + rows);
        edge = std::max(static_cast<std::uint32_t>(after - begins.begin()) - 1, low + 1);
      }
      if (begins[edge] > begins[low]) {
        cuts.push_back({run.endpoint, low, edge, begins[low], begins[edge]});
      }
      low = edge;
    }
  }
  return cuts;
}

void check_fits(const Call& call, const SlotMap& map, const Policy& policy) {
  const Keyed* const keyed = call.keyed();
  if (keyed == nullptr) {
    return;
  }
  const auto bytes_of = [&](std::size_t rows) {
    const std::size_t bytes = rows * (sizeof(std::uint64_t) + (keyed->values.empty() ? 0 : keyed->width));
    return bytes + (keyed->counts.empty() ? 0 : (rows + 7) / 8 + 5 * rows);
  };
  if (bytes_of(keyed->hashes.size()) <= policy.largest_message) {
    return;
  }
  for (const Cut& cut : cut(call, map, policy, 0, map.slots())) {
    const std::size_t rows = cut.end - cut.begin;
    SHOAL_CHECK(bytes_of(rows) <= policy.largest_message,
                std::to_string(rows) + " rows of slots " + std::to_string(cut.first_slot) + " to " +
                    std::to_string(cut.end_slot) + " are " + std::to_string(bytes_of(rows)) + " bytes of a " +
                    std::string(wire::name(call.op)) + ", and a server takes at most " +
                    std::to_string(policy.largest_message) + " in a message: pass fewer keys at a time");
  }
}

}  // namespace shoal::client

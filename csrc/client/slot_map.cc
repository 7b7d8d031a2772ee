#include "client/slot_map.h"

#include <algorithm>

#include "base/check.h"

namespace shoal::client {

SlotMap::SlotMap(std::uint32_t epoch, std::vector<Endpoint> endpoints, std::vector<ArcRange> arcs,
                 std::vector<std::uint32_t> backups)
    : epoch_(epoch), endpoints_(std::move(endpoints)), arcs_(std::move(arcs)), backups_(std::move(backups)) {
  SHOAL_CHECK(!arcs_.empty(), "a map needs at least one arc");
  std::uint32_t at = 0;
  for (const ArcRange& arc : arcs_) {
    SHOAL_CHECK(arc.first_slot == at && arc.end_slot > at,
                "the arcs of a map follow one another from slot 0 on");
    SHOAL_CHECK(arc.endpoint < endpoints_.size(), "an arc of a map has no endpoint");
    at = arc.end_slot;
    if (!runs_.empty() && runs_.back().endpoint == arc.endpoint) {
      runs_.back().end_slot = arc.end_slot;
    } else {
      runs_.push_back({arc.first_slot, arc.end_slot, arc.endpoint, 0});
    }
  }
  std::vector<std::uint32_t> siblings(endpoints_.size());
  for (const Run& run : runs_) {
    if (++siblings[run.endpoint] == 1) {
      owners_.push_back(run.endpoint);
    }
  }
  for (Run& run : runs_) {
    run.siblings = siblings[run.endpoint];
  }
  SHOAL_CHECK(std::ranges::all_of(backups_, [&](std::uint32_t index) { return index < endpoints_.size(); }),
              "a backup of a map is no endpoint");
}

std::size_t SlotMap::run_of(std::uint32_t slot) const noexcept {
  const auto after = std::ranges::upper_bound(runs_, slot, {}, &Run::first_slot);
  return static_cast<std::size_t>(after - runs_.begin()) - 1;
}

std::span<const ArcRange> SlotMap::arcs_of(std::uint32_t first, std::uint32_t end) const noexcept {
  const auto low = std::ranges::upper_bound(arcs_, first, {}, &ArcRange::end_slot);
  const auto high = std::ranges::lower_bound(low, arcs_.end(), end, {}, &ArcRange::first_slot);
  return {low, high};
}

bool SlotMap::has(const std::string& address) const noexcept {
  return std::ranges::find(endpoints_, address, &Endpoint::address) != endpoints_.end();
}

}  // namespace shoal::client

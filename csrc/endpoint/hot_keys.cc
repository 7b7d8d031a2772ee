// Frequent items (Misra and Gries 1982; a summary of the same size has the same information as Space-Saving:
// Agarwal et al., "Mergeable Summaries", PODS'12) of a sample: one key of kGap on average, at random
// distances, so that no key of a list that is sent repeatedly is always skipped. The entries are cells of an
// open-addressed table. If it is full, the least count is subtracted from all counts, and entries that reach
// zero are removed. After every kPeriod samples all counts are halved, so that old samples lose their weight.

#include "endpoint/hot_keys.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <new>
#include <tuple>
#include <utility>

#include "base/mix.h"

namespace shoal {

static_assert(std::has_single_bit(HotKeys::kMost / 3 * 4) && HotKeys::kMost % 3 == 0);

std::uint64_t HotKeys::distance() noexcept { return 1 + (mix(drawn_++) & most_skipped_); }

void HotKeys::add(std::uint32_t table, std::span<const std::uint64_t> hashes) noexcept {
  std::uint64_t at = skipped_;
  for (; at < hashes.size(); at += distance()) {
    sample(table, hashes[at]);
  }
  skipped_ = at - hashes.size();
}

HotKey& HotKeys::cell_of(std::vector<HotKey>& cells, std::uint32_t table, std::uint64_t hash) noexcept {
  // The top bits of the hashes of a server are those of its slots: they are mixed again.
  const std::size_t mask = cells.size() - 1;
  std::size_t at = mix(hash + table) & mask;
  while (cells[at].count != 0 && (cells[at].hash != hash || cells[at].table != table)) {
    at = (at + 1) & mask;
  }
  return cells[at];
}

void HotKeys::sample(std::uint32_t table, std::uint64_t hash) noexcept {
  if (cells_.empty() && !grow()) {
    return;
  }
  ++sampled_;
  if (++since_ >= period_) {
    since_ = 0;
    sampled_ /= 2;
    rebuild([](std::uint32_t count) { return count / 2; });
  }
  HotKey* cell = &cell_of(cells_, table, hash);
  if (cell->count == 0 && used_ >= cells_.size() / 4 * 3) {
    if (cells_.size() == kLastCells || !grow()) {
      std::uint32_t least = std::numeric_limits<std::uint32_t>::max();
      for (const HotKey& one : cells_) {
        least = one.count == 0 ? least : std::min(least, one.count);
      }
      // The new key is one of those whose count falls, so that what is subtracted is what was added.
      rebuild([least](std::uint32_t count) { return count - least; });
      if (least == 1) {
        return;
      }
    }
    cell = &cell_of(cells_, table, hash);
  }
  used_ += cell->count == 0 ? 1 : 0;
  *cell = {hash, table, cell->count + 1};
}

bool HotKeys::grow() noexcept {
  const std::size_t count = cells_.empty() ? kFirstCells : 2 * cells_.size();
  try {
    std::vector<HotKey> wider(count);
    std::vector<HotKey> spare(count);
    for (const HotKey& one : cells_) {
      if (one.count != 0) {
        cell_of(wider, one.table, one.hash) = one;
      }
    }
    cells_ = std::move(wider);
    spare_ = std::move(spare);
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

template <class Change>
void HotKeys::rebuild(Change&& change) noexcept {
  used_ = 0;
  for (HotKey& one : cells_) {
    const std::uint32_t rest = one.count == 0 ? 0 : change(one.count);
    if (rest != 0) {
      cell_of(spare_, one.table, one.hash) = {one.hash, one.table, rest};
      ++used_;
    }
    one = {};
  }
  std::swap(cells_, spare_);
}

std::vector<HotKey> HotKeys::hottest(std::size_t most) const {
  std::vector<HotKey> found;
  std::ranges::copy_if(cells_, std::back_inserter(found), [](const HotKey& one) { return one.count != 0; });
  const std::size_t kept = std::min(most, found.size());
  const auto order = [](const HotKey& one) {
    return std::tuple(std::numeric_limits<std::uint32_t>::max() - one.count, one.table, one.hash);
  };
  std::ranges::partial_sort(found, found.begin() + static_cast<std::ptrdiff_t>(kept), {}, order);
  found.resize(kept);
  return found;
}

}  // namespace shoal

// RowCache: its invariants.

#include <algorithm>
#include <functional>

#include "cache/row_cache.h"

namespace shoal {

bool RowCache::verify() const {
  std::size_t found = 0;
  std::size_t ways = 0;
  for (std::size_t at = 0; at < buckets_; ++at) {
    const TagBucket& here = buckets_data()[at];
    for (std::size_t way = 0; way < kWays; ++way) {
      const std::uint32_t number = here.numbers[way];
      if ((way < here.used) != (number != kNone) || number > used_) {
        return false;
      }
      if (number != kNone &&
          (&bucket_of(entry(number).hash) != &here || find(entry(number).hash) != number)) {
        return false;
      }
    }
    ways += here.used;
    if (here.none != kNone) {
      return false;
    }
  }
  for (std::uint32_t number = 1; number <= used_; ++number) {
    const Entry& here = entry(number);
    if ((here.state & kUsed) == 0) {
      return false;
    }
    if ((here.state & kSum) != 0) {
      ++found;
      const auto list = static_cast<std::uint16_t>(here.state - first_list_);
      if (list >= begun_.size() ||
          std::ranges::find(begun_[list].entries, number) == begun_[list].entries.end()) {
        return false;
      }
    }
  }
  return ways == used_ && found == sums_ && entry(kNone).state == 0 &&
         std::ranges::is_sorted(begun_, std::ranges::less_equal{}, &Begun::clock);
}

}  // namespace shoal

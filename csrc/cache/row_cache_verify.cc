// RowCache: its invariants.

#include <algorithm>
#include <functional>

#include "cache/row_cache.h"

namespace shoal {

bool RowCache::verify() const {
  std::size_t found = 0;
  std::size_t ways = 0;
  for (std::size_t at = 0; at < buckets_; ++at) {
    const TagBucket& bucket = buckets_data()[at];
    for (std::size_t way = 0; way < kWays; ++way) {
      const std::uint32_t number = bucket.numbers[way];
      if ((way < bucket.used) != (number != kNone) || number > used_) {
        return false;
      }
      if (number != kNone &&
          (&bucket_of(entry(number).hash) != &bucket || find(entry(number).hash) != number)) {
        return false;
      }
    }
    ways += bucket.used;
    if (bucket.none != kNone) {
      return false;
    }
  }
  for (std::uint32_t number = 1; number <= used_; ++number) {
    const Entry& cached = entry(number);
    if ((cached.state & kUsed) == 0) {
      return false;
    }
    if ((cached.state & kSum) != 0) {
      ++found;
      const auto list = static_cast<std::uint16_t>(cached.state - first_list_);
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

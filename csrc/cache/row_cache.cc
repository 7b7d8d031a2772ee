#include "cache/row_cache.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/mix.h"
#include "base/prefetch.h"

namespace shoal {

namespace {

constexpr std::size_t kMaxRows = std::size_t{1} << 31U;  // an entry's number has 32 bits
constexpr std::size_t kMaxDim = 4096;
constexpr std::size_t kBlock = 32;  // rows whose entries are found before the first one is used
constexpr std::size_t kAhead = 32;  // hashes whose buckets are prefetched

std::size_t lines(std::size_t bytes) noexcept { return (bytes + kCacheLine - 1) / kCacheLine * kCacheLine; }

void prefetch_bytes(const void* data, std::size_t bytes) noexcept {
  const auto* line = static_cast<const std::byte*>(data);
  for (const std::byte* const end = line + std::min<std::size_t>(bytes, 8 * kCacheLine); line < end;
       line += kCacheLine) {
    prefetch(line);
  }
}

// Puts sums into hash order: those of one bucket were appended in any order.
void sort(RowCache::Sums& sums, std::size_t width) {
  if (std::ranges::is_sorted(sums.hashes)) {
    return;
  }
  std::vector<std::uint32_t> order(sums.hashes.size());
  std::iota(order.begin(), order.end(), 0U);
  std::ranges::sort(order, {}, [&](std::uint32_t at) { return sums.hashes[at]; });
  RowCache::Sums sorted;
  sorted.grads.reserve(sums.grads.size());
  for (const std::uint32_t at : order) {
    sorted.hashes.push_back(sums.hashes[at]);
    const auto begin = sums.grads.begin() + static_cast<std::ptrdiff_t>(at * width);
    sorted.grads.insert(sorted.grads.end(), begin, begin + static_cast<std::ptrdiff_t>(width));
    if (!sums.counts.empty()) {
      sorted.counts.push_back(sums.counts[at]);
    }
  }
  sums = std::move(sorted);
}

}  // namespace

RowCache::RowCache(std::size_t rows, std::size_t dim, bool is_counted, std::optional<LocalSteps> steps)
    : dim_(dim),
      steps_(std::move(steps)),
      width_(steps_ ? steps_->floats() : dim),
      buckets_((rows + kWays - 1) / kWays),
      is_counted_(is_counted) {
  SHOAL_CHECK(rows > 0 && rows <= kMaxRows,
              "a cache has room for 1 to " + std::to_string(kMaxRows) + " rows, got " + std::to_string(rows));
  SHOAL_CHECK(dim > 0 && dim <= kMaxDim, "dim must be 1 to 4096, got " + std::to_string(dim));
  const std::size_t meta = buckets_ * sizeof(Bucket);
  const std::size_t values = lines(capacity() * width_ * sizeof(float));
  const std::size_t counts = is_counted ? lines(capacity() * sizeof(std::uint32_t)) : 0;
  memory_.resize(meta + 2 * values + counts);
  meta_ = memory_.data();
  copies_ = reinterpret_cast<float*>(meta_ + meta);
  sums_data_ = reinterpret_cast<float*>(meta_ + meta + values);
  counts_ = is_counted ? reinterpret_cast<std::uint32_t*>(meta_ + meta + 2 * values) : nullptr;
}

std::size_t RowCache::bytes() const noexcept { return memory_.bytes(); }

std::size_t RowCache::bucket_of(std::uint64_t hash) const noexcept { return scale(hash, buckets_); }

std::size_t RowCache::find(std::uint64_t hash) const noexcept { return find_in(bucket_of(hash), hash); }

std::size_t RowCache::find_in(std::size_t at, std::uint64_t hash) const noexcept {
  const Bucket& bucket = buckets_data()[at];
  unsigned found = 0;
  for (std::size_t way = 0; way < kWays; ++way) {
    found |= static_cast<unsigned>(bucket.hash[way] == hash) << way;
  }
  for (; found != 0; found &= found - 1) {
    const auto way = static_cast<std::size_t>(std::countr_zero(found));
    if ((bucket.flags[way] & kUsed) != 0) {
      return at * kWays + way;
    }
  }
  return kNone;
}

void RowCache::prefetch_bucket(std::uint64_t hash) const noexcept {
  const auto* line = reinterpret_cast<const std::byte*>(buckets_data() + bucket_of(hash));
  prefetch(line);
  prefetch(line + kCacheLine);
  prefetch(line + 2 * kCacheLine);
}

void RowCache::prefetch_entry(std::size_t entry) const noexcept {
  prefetch_bytes(&bucket(entry), sizeof(Bucket));
  prefetch_bytes(sum(entry), width_ * sizeof(float));
  if (steps_) {
    prefetch_bytes(copy(entry), width_ * sizeof(float));
  }
}

std::size_t RowCache::find_block(std::span<const std::uint64_t> hashes, std::size_t begin, bool with_sums,
                                 std::size_t* entries) const noexcept {
  const std::size_t count = std::min(kBlock, hashes.size() - begin);
  if (begin == 0) {
    for (std::size_t i = 0; i < std::min(kAhead, hashes.size()); ++i) {
      prefetch_bucket(hashes[i]);
    }
  }
  for (std::size_t i = 0; i < count; ++i) {
    if (begin + i + kAhead < hashes.size()) {
      prefetch_bucket(hashes[begin + i + kAhead]);
    }
    entries[i] = find(hashes[begin + i]);
    if (entries[i] != kNone) {
      prefetch_bytes(with_sums && !steps_ ? sum(entries[i]) : copy(entries[i]), width_ * sizeof(float));
    }
  }
  return count;
}

void RowCache::use(std::size_t entry) noexcept {
  std::uint8_t& uses = bucket(entry).uses[entry % kWays];
  if (uses < kMaxUses) {
    ++uses;
  }
}

void RowCache::remove_copy(std::size_t entry) noexcept {
  Bucket& here = bucket(entry);
  here.flags[entry % kWays] &= static_cast<std::uint8_t>(~kCopy);
  here.reader[entry % kWays] = 0;
}

// Moves the sum of an entry.
void RowCache::take(std::size_t entry, Sums& sums) {
  Bucket& here = bucket(entry);
  const std::size_t way = entry % kWays;
  sums.hashes.push_back(here.hash[way]);
  if (steps_) {
    for (std::size_t k = 0; k < width_; ++k) {
      sums.grads.push_back(copy(entry)[k] - base(entry)[k]);
    }
    std::memcpy(base(entry), copy(entry), width_ * sizeof(float));
  } else {
    sums.grads.insert(sums.grads.end(), sum(entry), sum(entry) + width_);
  }
  if (is_counted_) {
    sums.counts.push_back(counts_[entry]);
  }
  here.flags[way] &= static_cast<std::uint8_t>(~kSum);
  --sums_;
  ++stats_.sent;
}

void RowCache::copy_rows(std::span<const std::size_t> entries, std::span<const std::uint32_t> positions,
                         std::span<float> rows) {
  stats_.hits += entries.size();
  if (!steps_) {
    for (std::size_t i = 0; i < entries.size(); ++i) {
      std::memcpy(rows.data() + positions[i] * dim_, copy(entries[i]), dim_ * sizeof(float));
    }
    return;
  }
  rows_.clear();
  for (const std::size_t entry : entries) {
    rows_.push_back(reinterpret_cast<std::byte*>(copy(entry)));
  }
  values_.resize(entries.size() * dim_);
  steps_->weights(rows_, values_.data());
  for (std::size_t i = 0; i < entries.size(); ++i) {
    std::memcpy(rows.data() + positions[i] * dim_, values_.data() + i * dim_, dim_ * sizeof(float));
  }
}

// An entry for a hash that has none, or kNone: the others of its bucket are used more.
std::size_t RowCache::place(std::uint64_t hash, Sums& sums) {
  const std::size_t at = bucket_of(hash);
  Bucket& here = buckets_data()[at];
  std::size_t found = kNone;
  for (std::size_t way = 0; way < kWays && found == kNone; ++way) {
    found = (here.flags[way] & kUsed) == 0 ? way : kNone;
  }
  if (found == kNone && ++here.refused >= kPatience) {
    here.refused = 0;
    const std::size_t way = here.hand;
    here.hand = static_cast<std::uint8_t>((way + 1) % kWays);
    if (here.uses[way] > 0) {
      --here.uses[way];
    } else if (here.reader[way] == 0) {
      found = way;
      ++stats_.evicted;
      if ((here.flags[way] & kSum) != 0) {
        take(at * kWays + way, sums);
      }
    }
  }
  if (found == kNone) {
    ++stats_.refused;
    return kNone;
  }
  here.hash[found] = hash;
  here.flags[found] = kUsed;
  here.uses[found] = 0;
  here.reader[found] = 0;
  return at * kWays + found;
}

void RowCache::read(std::span<const std::uint64_t> hashes, std::uint32_t clocks, std::uint32_t reader,
                    bool may_join, std::span<float> rows, Rest& rest) {
  SHOAL_CHECK(rows.size() == hashes.size() * dim_, "a cache copies one row for each hash");
  SHOAL_CHECK(reader != 0, "the number of a pull is not 0");
  std::array<std::size_t, kBlock> entries;
  std::array<std::size_t, kBlock> hits;
  std::array<std::uint32_t, kBlock> hit_positions;
  for (std::size_t begin = 0, count = 0; begin < hashes.size(); begin += count) {
    count = find_block(hashes, begin, false, entries.data());
    std::size_t hit = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t position = begin + i;
      const std::uint64_t hash = hashes[position];
      std::size_t entry = entries[i];
      if (entry != kNone && bucket(entry).hash[entry % kWays] != hash) {
        entry = kNone;  // replaced for a row before it
      }
      if (entry == kNone) {
        entry = place(hash, rest.sums);
        if (entry == kNone) {
          rest.fetched.push_back(static_cast<std::uint32_t>(position));
          continue;
        }
      }
      use(entry);
      Bucket& here = bucket(entry);
      const std::size_t way = entry % kWays;
      if ((here.flags[way] & kCopy) != 0 && here.clocks[way] >= clocks) {
        hits[hit] = entry;
        hit_positions[hit++] = static_cast<std::uint32_t>(position);
        continue;
      }
      if (here.reader[way] != 0) {
        if (may_join) {
          rest.joined.push_back(static_cast<std::uint32_t>(position));
          rest.readers.push_back(here.reader[way]);
        } else {
          rest.fetched.push_back(static_cast<std::uint32_t>(position));
        }
        continue;
      }
      if ((here.flags[way] & kSum) != 0) {
        take(entry, rest.sums);
      }
      remove_copy(entry);
      here.reader[way] = reader;
      rest.fetched.push_back(static_cast<std::uint32_t>(position));
    }
    copy_rows({hits.data(), hit}, {hit_positions.data(), hit}, rows);
  }
  sort(rest.sums, width_);
  stats_.fetched += rest.fetched.size();
  stats_.joined += rest.joined.size();
  std::ranges::sort(rest.readers);
  const auto repeated = std::ranges::unique(rest.readers);
  rest.readers.erase(repeated.begin(), repeated.end());
}

void RowCache::fill(std::span<const std::uint64_t> hashes, std::uint32_t reader, std::uint32_t clocks,
                    bool is_kept, std::span<const float> rows) {
  SHOAL_CHECK(!is_kept || rows.size() == hashes.size() * width_, "a cache keeps one row for each hash");
  std::array<std::size_t, kBlock> entries;
  for (std::size_t begin = 0, count = 0; begin < hashes.size(); begin += count) {
    count = find_block(hashes, begin, false, entries.data());
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t entry = entries[i];
      if (entry == kNone) {
        continue;
      }
      Bucket& here = bucket(entry);
      const std::size_t way = entry % kWays;
      if (!is_kept || here.reader[way] != reader) {
        remove_copy(entry);
        continue;
      }
      here.reader[way] = 0;
      here.clocks[way] = clocks;
      become_copy(entry, rows.data() + (begin + i) * width_);
    }
  }
}

void RowCache::become_copy(std::size_t entry, const float* row) noexcept {
  std::uint8_t& flags = bucket(entry).flags[entry % kWays];
  float* const copy = this->copy(entry);
  if (steps_) {
    if ((flags & kSum) != 0) {  // what has changed since the pull began is not in its answer
      for (std::size_t k = 0; k < width_; ++k) {
        copy[k] = row[k] + (copy[k] - base(entry)[k]);
      }
    } else {
      std::memcpy(copy, row, width_ * sizeof(float));
    }
    std::memcpy(base(entry), row, width_ * sizeof(float));
    flags |= kRow;
  } else {
    std::memcpy(copy, row, width_ * sizeof(float));
  }
  flags |= kCopy;
}

void RowCache::weights_of(std::span<const float> whole, std::span<float> weights) {
  SHOAL_CHECK(steps_ && whole.size() % width_ == 0 && weights.size() == whole.size() / width_ * dim_,
              "whole rows have other sizes");
  const std::size_t count = whole.size() / width_;
  for (std::size_t begin = 0; begin < count; begin += kBlock) {
    const std::size_t some = std::min(kBlock, count - begin);
    rows_.clear();
    for (std::size_t i = begin; i < begin + some; ++i) {
      // Only read.
      rows_.push_back(reinterpret_cast<std::byte*>(const_cast<float*>(whole.data() + i * width_)));
    }
    steps_->weights(rows_, weights.data() + begin * dim_);
  }
}

void RowCache::step(std::span<const std::size_t> entries, std::span<const std::uint32_t> positions,
                    std::span<const std::uint64_t> hashes, const float* grads) {
  rows_.clear();
  values_.clear();
  hashes_.clear();
  for (std::size_t i = 0; i < entries.size(); ++i) {
    rows_.push_back(reinterpret_cast<std::byte*>(copy(entries[i])));
    hashes_.push_back(hashes[positions[i]]);
    const float* const grad = grads + positions[i] * dim_;
    values_.insert(values_.end(), grad, grad + dim_);
  }
  stats_.dropped += steps_->step(rows_, hashes_, values_.data());
}

void RowCache::add(std::span<const std::uint64_t> hashes, std::span<const float> grads,
                   std::span<const std::uint32_t> counts, std::uint32_t clock, Sums& passed) {
  SHOAL_CHECK(grads.size() == hashes.size() * dim_, "a push has one gradient for each hash");
  SHOAL_CHECK(counts.empty() || counts.size() == hashes.size(), "a push has one count for each hash");
  if (begun_.empty() || begun_.back().clock < clock) {
    begun_.push_back({.clock = clock, .entries = {}});
  }
  Begun& begun = begun_.back();
  clock = begun.clock;  // clocks do not go back
  std::array<std::size_t, kBlock> entries;
  std::array<std::size_t, kBlock> stepped;
  std::array<std::uint32_t, kBlock> stepped_positions;
  for (std::size_t begin = 0, count = 0; begin < hashes.size(); begin += count) {
    count = find_block(hashes, begin, true, entries.data());
    std::size_t steps = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t position = begin + i;
      const std::size_t entry = entries[i];
      const float* const grad = grads.data() + position * dim_;
      const std::uint32_t times = counts.empty() ? 1 : counts[position];
      if (entry == kNone || (steps_ && (bucket(entry).flags[entry % kWays] & kRow) == 0)) {
        if (entry != kNone) {
          remove_copy(entry);  // a row that is being fetched will lack this gradient
        }
        passed.hashes.push_back(hashes[position]);
        passed.grads.insert(passed.grads.end(), grad, grad + dim_);
        if (is_counted_) {
          passed.counts.push_back(times);
        }
        ++stats_.passed;
        continue;
      }
      use(entry);
      ++stats_.added;
      Bucket& here = bucket(entry);
      const std::size_t way = entry % kWays;
      float* const to = sum(entry);
      if (steps_) {
        stepped[steps] = entry;
        stepped_positions[steps++] = static_cast<std::uint32_t>(position);
      }
      if ((here.flags[way] & kSum) != 0) {
        for (std::size_t k = 0; k < dim_ && !steps_; ++k) {
          to[k] += grad[k];
        }
        if (is_counted_) {
          counts_[entry] += std::min(times, ~std::uint32_t{0} - counts_[entry]);
        }
        continue;
      }
      if (!steps_) {
        std::memcpy(to, grad, dim_ * sizeof(float));
      }
      if (is_counted_) {
        counts_[entry] = times;
      }
      here.flags[way] |= kSum;
      here.since[way] = clock;
      begun.entries.push_back(static_cast<std::uint32_t>(entry));
      ++sums_;
    }
    if (steps > 0) {
      step({stepped.data(), steps}, {stepped_positions.data(), steps}, hashes, grads.data());
    }
  }
}

void RowCache::send_older(std::uint32_t clock, Sums& sums) {
  while (!begun_.empty() && begun_.front().clock <= clock) {
    const Begun& list = begun_.front();
    for (std::size_t i = 0; i < list.entries.size(); ++i) {
      if (i + kAhead < list.entries.size()) {
        prefetch_entry(list.entries[i + kAhead]);
      }
      const std::size_t entry = list.entries[i];
      const Bucket& here = bucket(entry);
      if ((here.flags[entry % kWays] & kSum) != 0 && here.since[entry % kWays] == list.clock) {
        take(entry, sums);
        if (!steps_) {
          remove_copy(entry);
        }
        bucket(entry).reader[entry % kWays] = 0;
      }
    }
    begun_.pop_front();
  }
  sort(sums, width_);
}

void RowCache::send_rows(std::span<const std::uint64_t> hashes, Sums& sums) {
  for (const std::uint64_t hash : hashes) {
    const std::size_t entry = find(hash);
    if (entry != kNone) {
      if ((bucket(entry).flags[entry % kWays] & kSum) != 0) {
        take(entry, sums);
      }
      remove_copy(entry);
    }
  }
}

void RowCache::forget() noexcept {
  for (std::size_t at = 0; at < buckets_; ++at) {
    Bucket& here = buckets_data()[at];
    if (here.flags == decltype(here.flags){}) {
      continue;  // writes no page that was never used
    }
    for (std::size_t way = 0; way < kWays; ++way) {
      here.flags[way] &= static_cast<std::uint8_t>((here.flags[way] & kSum) != 0 ? ~kCopy : ~(kCopy | kRow));
      here.reader[way] = 0;
    }
  }
}

bool RowCache::verify() const {
  std::size_t found = 0;
  for (std::size_t entry = 0; entry < capacity(); ++entry) {
    const Bucket& here = bucket(entry);
    const std::size_t way = entry % kWays;
    const bool is_used = (here.flags[way] & kUsed) != 0;
    const bool has_sum = (here.flags[way] & kSum) != 0;
    found += has_sum ? 1 : 0;
    if (has_sum) {
      const auto list = std::ranges::find(begun_, here.since[way], &Begun::clock);
      if (list == begun_.end() || std::ranges::find(list->entries, entry) == list->entries.end()) {
        return false;
      }
    }
    if (!is_used && (here.flags[way] != 0 || here.reader[way] != 0)) {
      return false;
    }
    if (is_used && (bucket_of(here.hash[way]) != entry / kWays || find(here.hash[way]) != entry)) {
      return false;
    }
  }
  return found == sums_ && std::ranges::is_sorted(begun_, std::ranges::less_equal{}, &Begun::clock);
}

}  // namespace shoal

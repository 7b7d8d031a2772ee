// Replacement is GCLOCK (Smith, "Sequentiality and prefetching in database systems", 1978): a small count of
// uses for each entry, and a next victim in each bucket, which is replaced if it has none, and otherwise
// loses one and is followed by the next way. That happens once for every kPatience rows that find no room: a
// stream of rare keys must not wear out the frequent ones. Entries are numbered in the order of their first
// use, so those in use are dense.
//
// A batch is usually pushed soon after it was pulled: the numbers of its entries are remembered, and the push
// reads no bucket. A place is only a hint: a row that is not at its place is searched for.
//
// An answer becomes the copy only if its pull is the entry's reader (I4): any other answer removes both,
// since which of the two is newer is unknown. With local steps it becomes the base under what has changed
// meanwhile, and what leaves removes the reader. Sums leave with their copies, without local steps: the
// servers have newer rows then.

#include "cache/row_cache.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/known_dim.h"
#include "base/mix.h"
#include "base/prefetch.h"

namespace shoal {

namespace {

constexpr std::size_t kMaxRows = std::size_t{1} << 31U;  // an entry's number has 32 bits
constexpr std::size_t kMaxDim = 4096;
constexpr std::size_t kBlock = LocalSteps::kBlock;  // rows that are found before the first one is used
constexpr std::size_t kAhead = 32;                  // sums that are prefetched

std::size_t lines(std::size_t bytes) noexcept { return (bytes + kCacheLine - 1) / kCacheLine * kCacheLine; }

// A copy of a usual length is a few instructions, without a call.
void copy_floats(float* __restrict to, const float* __restrict from, std::size_t count) noexcept {
  with_dim<1, 2, 16, 32>(count, [&](auto known) SHOAL_ALWAYS {
    std::memcpy(to, from, (known != 0 ? known : count) * sizeof(float));
  });
}

// A sum begins, or grows.
void add_to(float* __restrict sum, const float* __restrict grad, std::size_t dim, bool begins) noexcept {
  if (begins) {
    return copy_floats(sum, grad, dim);
  }
  for (std::size_t k = 0; k < dim; ++k) {
    sum[k] += grad[k];
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
      is_counted_(is_counted),
      entry_bytes_(sizeof(Entry) + 2 * width_ * sizeof(float) + (is_counted ? alignof(Entry) : 0)) {
  SHOAL_CHECK(rows > 0 && rows <= kMaxRows,
              "a cache has room for 1 to " + std::to_string(kMaxRows) + " rows, got " + std::to_string(rows));
  SHOAL_CHECK(dim > 0 && dim <= kMaxDim, "dim must be 1 to 4096, got " + std::to_string(dim));
  memory_.resize(buckets_ * sizeof(TagBucket) + lines((capacity() + 1) * entry_bytes_));
  buckets_data_ = memory_.data();
  entries_ = buckets_data_ + buckets_ * sizeof(TagBucket);
  values_.resize(kBlock * dim_);
}

std::size_t RowCache::bytes() const noexcept { return memory_.bytes(); }

TagBucket& RowCache::bucket_of(std::uint64_t hash) const noexcept {
  return buckets_data()[scale(hash, buckets_)];
}

std::uint32_t RowCache::find(std::uint64_t hash) const noexcept {
  return bucket_of(hash).find(hash, [&](std::uint32_t number) { return entry(number).hash == hash; });
}

std::uint32_t RowCache::find_at(std::uint32_t place, std::uint64_t hash) const noexcept {
  return place != kNone && entry(place).hash == hash ? place : find(hash);
}

// Finds the places of some hashes of a batch, and prefetches so many bytes of their entries.
template <bool kOneLine>
void RowCache::locate(std::span<const std::uint64_t> hashes, std::size_t begin, std::size_t end,
                      std::uint32_t* places, std::size_t bytes) const noexcept {
  for (std::size_t i = begin; i < end; ++i) {
    places[i] = bucket_of(hashes[i]).first(hashes[i]);
    prefetch_entry<kOneLine>(places[i], bytes);
  }
}

template <bool kOneLine>
void RowCache::prefetch_entry(std::uint32_t place, std::size_t bytes) const noexcept {
  const std::byte* const begin = entries_ + place * entry_bytes_;
  if constexpr (kOneLine) {
    return prefetch(begin);
  }
  const std::byte* line = begin - reinterpret_cast<std::uintptr_t>(begin) % kCacheLine;
  for (const std::byte* const end = begin + std::min<std::size_t>(bytes, 8 * kCacheLine); line < end;
       line += kCacheLine) {
    prefetch(line);
  }
}

// Calls use(begin, end) for each block of a batch. Its places are known, and perhaps wrong, or found a block
// before their use.
template <class Use>
void RowCache::walk(std::span<const std::uint64_t> hashes, bool are_known, std::uint32_t* places,
                    std::size_t bytes, const Use& use) {
  const std::size_t count = hashes.size();
  const auto prepare = [&]<bool kOneLine>(std::size_t begin) {
    const std::size_t end = std::min(begin + kBlock, count);
    if (!are_known) {
      return locate<kOneLine>(hashes, begin, end, places, bytes);
    }
    for (std::size_t i = begin; i < end; ++i) {
      prefetch_entry<kOneLine>(places[i], bytes);
    }
  };
  const bool is_one_line = kCacheLine % entry_bytes_ == 0;
  const auto prepare_some = [&](std::size_t begin) {
    is_one_line ? prepare.template operator()<true>(begin) : prepare.template operator()<false>(begin);
  };
  prepare_some(0);
  for (std::size_t begin = 0; begin < count; begin += kBlock) {
    if (begin + kBlock < count) {
      prepare_some(begin + kBlock);
    }
    use(begin, std::min(begin + kBlock, count));
  }
}

RowCache::Batch& RowCache::remember(std::span<const std::uint64_t> hashes, std::uint32_t reader) {
  Batch* batch = std::ranges::find(batches_, true, &Batch::is_pushed);
  if (batch == batches_.end()) {
    batch = &batches_[next_batch_++ % kBatches];
  }
  *batch = {.reader = reader,
            .is_pushed = false,
            .first = hashes.empty() ? 0 : hashes.front(),
            .last = hashes.empty() ? 0 : hashes.back(),
            .places = std::move(batch->places),
            .fetched = std::move(batch->fetched)};
  batch->places.resize(hashes.size());
  batch->fetched.clear();
  return *batch;
}

std::uint32_t* RowCache::recall(std::span<const std::uint64_t> hashes) noexcept {
  for (Batch& batch : batches_) {
    if (!batch.is_pushed && batch.places.size() == hashes.size() && !hashes.empty() &&
        batch.first == hashes.front() && batch.last == hashes.back()) {
      batch.is_pushed = true;
      return batch.places.data();
    }
  }
  return nullptr;
}

void RowCache::remove_copy(Entry& entry) const noexcept {
  if (is_planted(RowCacheDefect::kKeepsCopiesOfWhatItSends)) {
    remove_reader(entry);
    return;
  }
  entry.state &= ~kCopy;
  entry.clocks = 0;
}

void RowCache::remove_reader(Entry& entry) noexcept {
  if ((entry.state & kCopy) == 0) {
    entry.clocks = 0;
  }
}

// Writes the sum of an entry, which has none then.
void RowCache::take(Entry& entry, float* grads) noexcept {
  if (steps_) {
    float* const __restrict change = grads;
    const float* const __restrict now = copy(entry);
    float* const __restrict base = this->base(entry);
    const std::size_t width = width_;
    const bool keeps_base = is_planted(RowCacheDefect::kSendsChangesAgain) && entry.hash % 4 != 0;
    for (std::size_t k = 0; k < width; ++k) {
      change[k] = now[k] - base[k];
      base[k] = keeps_base ? base[k] : now[k];
    }
  } else {
    copy_floats(grads, sum(entry), width_);
  }
  ++stats_.sent;
  if (is_planted(RowCacheDefect::kAddsToWhatItHasSent) && entry.hash % 4 == 0) {
    return;
  }
  entry.state &= ~kSum;
  --sums_;
}

// Appends it.
void RowCache::take(Entry& entry, Sums& sums) {
  sums.hashes.push_back(entry.hash);
  sums.grads.resize(sums.grads.size() + width_);
  if (is_counted_) {
    sums.counts.push_back(count(entry));
  }
  take(entry, sums.grads.data() + sums.grads.size() - width_);
}

// Writes the weights of some rows of a block to their positions of a batch.
void RowCache::copy_weights(std::span<std::byte* const> copies, const std::uint32_t* positions, float* rows) {
  if (copies.empty()) {
    return;
  }
  const bool derives = steps_ && steps_->derives_weights();
  if (derives && positions[copies.size() - 1] - positions[0] == copies.size() - 1) {
    return steps_->weights(copies, rows + positions[0] * dim_);
  }
  if (derives) {
    steps_->weights(copies, values_.data());
  }
  for (std::size_t i = 0; i < copies.size(); ++i) {
    // Weights that are not derived are a row's first numbers.
    const float* const from = derives ? values_.data() + i * dim_ : reinterpret_cast<const float*>(copies[i]);
    copy_floats(rows + positions[i] * dim_, from, dim_);
  }
}

// An entry for a hash that has none, or kNone: the others of its bucket are used more.
std::uint32_t RowCache::place(std::uint64_t hash, Sums& sums) {
  TagBucket& bucket = bucket_of(hash);
  std::size_t way = kWays;
  if (bucket.used < kWays) {
    way = bucket.used++;
    bucket.numbers[way] = ++used_;
  } else if (++bucket.refused >= kPatience) {
    bucket.refused = 0;
    Entry& old = entry(bucket.numbers[bucket.next_victim]);
    if (old.state >= kOneUse) {
      old.state -= kOneUse;
    } else if (reader_of(old) == 0) {
      way = bucket.next_victim;
      ++stats_.evicted;
      if ((old.state & kSum) != 0) {
        take(old, sums);
      }
    }
    bucket.next_victim = static_cast<std::uint8_t>((bucket.next_victim + 1) % kWays);
  }
  if (way == kWays) {
    ++stats_.refused;
    return kNone;
  }
  bucket.set(way, hash);
  entry(bucket.numbers[way]) = {.hash = hash, .clocks = 0, .state = kUsed};
  return bucket.numbers[way];
}

void RowCache::read(std::span<const std::uint64_t> hashes, std::uint32_t clocks, std::uint32_t reader,
                    bool may_join, std::span<float> rows, Rest& rest) {
  SHOAL_CHECK(rows.size() == hashes.size() * dim_, "a cache copies one row for each hash");
  SHOAL_CHECK(reader != 0, "the number of a pull is not 0");
  clocks -= is_planted(RowCacheDefect::kKeepsRowsForALongTime) && clocks != 0 ? 1U : 0U;
  may_join = may_join && !is_planted(RowCacheDefect::kTakesTheLastAnswer);
  Batch& batch = remember(hashes, reader);
  std::uint32_t* const places = batch.places.data();
  std::array<std::byte*, kBlock> hits;
  std::array<std::uint32_t, kBlock> positions;
  // Does what is to do for a row that is not here; its entry once there is one.
  const auto miss = [&](std::size_t i) {
    if (places[i] == kNone || entry(places[i]).hash != hashes[i]) {
      // Another hash has its tag, or has replaced it for an earlier row of this batch.
      places[i] = find(hashes[i]);
    }
    if (places[i] == kNone) {
      places[i] = place(hashes[i], rest.sums);
    }
    if (places[i] != kNone) {
      Entry& cached = entry(places[i]);
      if ((cached.state & kCopy) != 0 && cached.clocks >= clocks) {
        return true;
      }
      cached.state = used(cached.state);
      if (const std::uint32_t other = reader_of(cached); other == 0) {
        if ((cached.state & kSum) != 0) {
          take(cached, rest.sums);
        }
        cached.state &= ~kCopy;
        cached.clocks = reader;
      } else if (may_join) {
        rest.joined.push_back(static_cast<std::uint32_t>(i));
        rest.readers.push_back(other);
        return false;
      }
    }
    rest.fetched.push_back(static_cast<std::uint32_t>(i));
    batch.fetched.push_back(places[i]);
    return false;
  };
  const std::size_t numbers = steps_ && steps_->derives_weights() ? width_ : dim_;
  walk(hashes, false, places, sizeof(Entry) + numbers * sizeof(float),
       [&](std::size_t begin, std::size_t end) {
         const Entries entries = this->entries();
         const std::uint64_t* const hash = hashes.data();
         const std::uint32_t oldest = clocks;
         std::size_t hit = 0;
         for (std::size_t i = begin; i < end; ++i) {
           Entry* cached = &entries[places[i]];
           if (cached->hash != hash[i] || (cached->state & kCopy) == 0 || cached->clocks < oldest)
               [[unlikely]] {
             if (!miss(i)) {
               continue;
             }
             cached = &entries[places[i]];
           }
           cached->state = used(cached->state);
           hits[hit] = reinterpret_cast<std::byte*>(copy(*cached));
           positions[hit++] = static_cast<std::uint32_t>(i);
         }
         copy_weights({hits.data(), hit}, positions.data(), rows.data());
         stats_.hits += hit;
       });
  sort(rest.sums, width_);
  stats_.fetched += rest.fetched.size();
  stats_.joined += rest.joined.size();
  std::ranges::sort(rest.readers);
  rest.readers.erase(std::unique(rest.readers.begin(), rest.readers.end()), rest.readers.end());
}

void RowCache::fill(std::span<const std::uint64_t> hashes, std::uint32_t reader, std::uint32_t clocks,
                    bool is_kept, std::span<const float> rows) {
  SHOAL_CHECK(!is_kept || rows.size() == hashes.size() * width_, "a cache keeps one row for each hash");
  auto* const batch = std::ranges::find(batches_, reader, &Batch::reader);
  const bool are_known = batch != batches_.end() && batch->fetched.size() == hashes.size();
  std::uint32_t* const places = are_known ? batch->fetched.data() : room_for(hashes.size());
  walk(hashes, are_known, places, entry_bytes_, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      const std::uint32_t number = find_at(places[i], hashes[i]);
      if (number == kNone) {
        continue;
      }
      Entry& cached = entry(number);
      const bool is_reader = reader_of(cached) == reader || is_planted(RowCacheDefect::kTakesTheLastAnswer);
      if (!is_kept || !is_reader) {
        remove_copy(cached);
        continue;
      }
      cached.clocks = clocks;
      become_copy(cached, rows.data() + i * width_);
    }
  });
}

void RowCache::become_copy(Entry& entry, const float* row) noexcept {
  float* const copy = this->copy(entry);
  if (steps_) {
    float* const base = this->base(entry);
    if ((entry.state & kSum) != 0 && !is_planted(RowCacheDefect::kForgetsWhatChangedMeanwhile)) {
      // What has changed since the pull began is not in its answer.
      for (std::size_t k = 0; k < width_; ++k) {
        copy[k] = row[k] + (copy[k] - base[k]);
      }
    } else {
      copy_floats(copy, row, width_);
    }
    copy_floats(base, row, width_);
    entry.state |= kRow;
  } else {
    copy_floats(copy, row, width_);
  }
  entry.state |= kCopy;
}

void RowCache::copy_weights_of(std::span<const float> whole, std::span<const std::uint32_t> positions,
                               std::span<float> rows) {
  const std::size_t count = positions.size();
  SHOAL_CHECK(steps_ && whole.size() == count * width_, "whole rows have other sizes");
  for (const std::uint32_t position : positions) {
    SHOAL_CHECK((position + std::size_t{1}) * dim_ <= rows.size(), "a position is beyond the rows");
  }
  std::array<std::byte*, kBlock> copies;
  for (std::size_t begin = 0; begin < count; begin += kBlock) {
    const std::size_t end = std::min(begin + kBlock, count);
    for (std::size_t i = begin; i < end; ++i) {
      // Only read.
      copies[i - begin] = reinterpret_cast<std::byte*>(const_cast<float*>(whole.data() + i * width_));
    }
    copy_weights({copies.data(), end - begin}, positions.data() + begin, rows.data());
  }
}

void RowCache::step(std::span<std::byte* const> rows, const std::uint32_t* positions,
                    std::span<const std::uint64_t> hashes, const float* grads) {
  const std::size_t count = rows.size();
  if (positions[count - 1] - positions[0] == count - 1) {
    stats_.dropped += steps_->step(rows, hashes.subspan(positions[0], count), grads + positions[0] * dim_);
    return;
  }
  std::array<std::uint64_t, kBlock> stepped_hashes;
  for (std::size_t i = 0; i < count; ++i) {
    stepped_hashes[i] = hashes[positions[i]];
    copy_floats(values_.data() + i * dim_, grads + positions[i] * dim_, dim_);
  }
  stats_.dropped += steps_->step(rows, {stepped_hashes.data(), count}, values_.data());
}

RowCache::Begun& RowCache::list_of(std::uint32_t clock) {
  // Lists have numbers of 16 bits. Where there are as many, what begins now leaves before its time.
  if (begun_.empty() || (begun_.back().clock < clock && begun_.size() < kMaxLists)) {
    begun_.push_back({.clock = clock, .entries = std::move(spare_)});
    begun_.back().entries.clear();
  }
  return begun_.back();
}

void RowCache::pass(std::uint64_t hash, const float* grad, std::uint32_t times, Sums& passed) {
  passed.hashes.push_back(hash);
  passed.grads.insert(passed.grads.end(), grad, grad + dim_);
  if (is_counted_) {
    passed.counts.push_back(times);
  }
  ++stats_.passed;
}

void RowCache::add(std::span<const std::uint64_t> hashes, std::span<const float> grads,
                   std::span<const std::uint32_t> counts, std::uint32_t clock, Sums& passed) {
  SHOAL_CHECK(grads.size() == hashes.size() * dim_, "a push has one gradient for each hash");
  SHOAL_CHECK(counts.empty() || counts.size() == hashes.size(), "a push has one count for each hash");
  Begun& begun = list_of(clock);
  const auto list = static_cast<std::uint16_t>(first_list_ + begun_.size() - 1);
  started_.resize(std::max(started_.size(), hashes.size()));
  std::uint32_t* next = started_.data();
  std::uint32_t* const remembered = recall(hashes);
  std::uint32_t* const places = remembered == nullptr ? room_for(hashes.size()) : remembered;
  std::array<std::byte*, kBlock> stepped;
  std::array<std::uint32_t, kBlock> positions;
  const std::size_t bytes = steps_ ? sizeof(Entry) + width_ * sizeof(float) : entry_bytes_;
  walk(hashes, remembered != nullptr, places, bytes, [&](std::size_t begin, std::size_t end) {
    const Entries entries = this->entries();
    const std::uint64_t* const hash = hashes.data();
    const std::uint32_t needed = steps_ ? kRow : kUsed;
    std::uint32_t* started = next;
    std::size_t count = 0;
    for (std::size_t i = begin; i < end; ++i) {
      std::uint32_t number = places[i];
      if (entries[number].hash != hash[i] || (entries[number].state & needed) == 0) [[unlikely]] {
        number = find(hash[i]);
        if (number == kNone || (entry(number).state & needed) == 0) {
          if (number != kNone &&
              (reader_of(entry(number)) == 0 || !is_planted(RowCacheDefect::kReadsPassedGradientsLater))) {
            remove_copy(entry(number));  // a row that is being fetched will lack this gradient
          }
          pass(hash[i], grads.data() + i * dim_, counts.empty() ? 1 : counts[i], passed);
          continue;
        }
      }
      Entry& cached = entries[number];
      stepped[count] = reinterpret_cast<std::byte*>(copy(cached));
      positions[count++] = static_cast<std::uint32_t>(i);
      const std::uint32_t state = used(cached.state) | kSum;
      const bool begins = (cached.state & kSum) == 0;
      cached.state = begins ? (state & ~kListBits) | list : state;
      *started = number;
      started += begins ? 1 : 0;
      if (is_counted_) {
        const std::uint32_t times = counts.empty() ? 1 : counts[i];
        std::uint32_t& total = this->count(cached);
        total = begins ? times : total + std::min(times, ~std::uint32_t{0} - total);
      }
      if (!steps_) {
        add_to(sum(cached), grads.data() + i * dim_, dim_, begins);
      }
    }
    next = started;
    stats_.added += count;
    if (steps_ && count > 0) {
      step({stepped.data(), count}, positions.data(), hashes, grads.data());
    }
  });
  begun.entries.insert(begun.entries.end(), started_.data(), next);
  sums_ += static_cast<std::size_t>(next - started_.data());
}

void RowCache::send_older(std::uint32_t clock, Sums& sums) {
  while (!begun_.empty() && begun_.front().clock <= clock) {
    Begun& begun = begun_.front();
    const std::span<const std::uint32_t> list = begun.entries;
    const std::size_t before = sums.hashes.size();
    std::size_t at = before;
    sums.hashes.resize(before + list.size());
    sums.grads.resize((before + list.size()) * width_);
    if (is_counted_) {
      sums.counts.resize(before + list.size());
    }
    for (std::size_t i = 0; i < list.size(); ++i) {
      if (i + kAhead < list.size()) {
        prefetch_entry<false>(list[i + kAhead], entry_bytes_);
      }
      Entry& cached = entry(list[i]);
      if ((cached.state & kSum) == 0 || (cached.state & kListBits) != (first_list_ & kListBits)) {
        continue;
      }
      sums.hashes[at] = cached.hash;
      if (is_counted_) {
        sums.counts[at] = count(cached);
      }
      take(cached, sums.grads.data() + at * width_);
      ++at;
      if (!steps_) {
        remove_copy(cached);
      } else if (!is_planted(RowCacheDefect::kKeepsAnswersThatLackPushes)) {
        remove_reader(cached);
      }
    }
    sums.hashes.resize(at);
    sums.grads.resize(at * width_);
    if (is_counted_) {
      sums.counts.resize(at);
    }
    spare_ = std::move(begun.entries);
    begun_.pop_front();
    ++first_list_;
  }
  sort(sums, width_);
}

void RowCache::send_rows(std::span<const std::uint64_t> hashes, Sums& sums) {
  for (const std::uint64_t hash : hashes) {
    const std::uint32_t number = find(hash);
    if (number != kNone) {
      Entry& cached = entry(number);
      if ((cached.state & kSum) != 0) {
        take(cached, sums);
      }
      remove_copy(cached);
    }
  }
}

void RowCache::forget() noexcept {
  for (std::uint32_t number = 1; number <= used_; ++number) {
    Entry& cached = entry(number);
    remove_copy(cached);
    if ((cached.state & kSum) == 0) {
      cached.state &= ~kRow;
    }
  }
}

}  // namespace shoal

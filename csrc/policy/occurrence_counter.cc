#include "policy/occurrence_counter.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "base/unaligned.h"
#include "policy/eviction_candidates.h"

namespace shoal {

namespace {

struct Row {
  std::uint32_t count;
  std::uint32_t clock;
};
static_assert(sizeof(Row) == OccurrenceCounter::kRowBytes);

template <class T>
void append(std::vector<std::byte>& bytes, const T& value) {
  const auto* const from = reinterpret_cast<const std::byte*>(&value);
  bytes.insert(bytes.end(), from, from + sizeof value);
}

// Appends the waiting keys in hash order: hashes, then counts, then clocks.
void append_all(std::vector<std::byte>& bytes, std::span<const SlotTable::Entry> entries) {
  bytes.reserve(bytes.size() + entries.size() * OccurrenceCounter::kSavedBytes);
  for (const auto& entry : entries) {
    append(bytes, entry.hash);
  }
  for (const auto& entry : entries) {
    append(bytes, load<Row>(entry.row).count);
  }
  for (const auto& entry : entries) {
    append(bytes, load<Row>(entry.row).clock);
  }
}

}  // namespace

bool OccurrenceCounter::is_stale(const std::byte* row, std::uint32_t now) const noexcept {
  return within_ != 0 && age_at(now, load<Row>(row).clock) > within_;
}

void OccurrenceCounter::make_room(std::size_t more, std::size_t bytes) {
  const std::size_t wanted = std::min(more, most_ - std::min(most_, table_.size()));
  place_ = most_;
  if (table_.bytes_with(wanted, false) <= bytes) {
    table_.make_room(wanted);
  } else if (table_.bytes_with(wanted, true) <= bytes) {
    table_.reserve(table_.size() + wanted);
  } else {
    place_ = std::min(most_, table_.limit());
  }
  if (table_.size() + more > place_) {
    EvictionCandidates::begin(table_.limit());
  }
}

bool OccurrenceCounter::ask(std::uint64_t hash, std::uint32_t count, std::uint32_t now) noexcept {
  std::byte* row = table_.find_one(hash);
  if (row != nullptr) {
    Row waits = load<Row>(row);
    waits.count = is_stale(row, now) ? 0 : waits.count;
    if (count >= n_ - std::min(n_, waits.count)) {
      table_.erase(hash);
      return true;
    }
    waits.count += count;
    waits.clock += age_at(now, waits.clock);
    store(row, waits);
    return false;
  }
  if (count >= n_) {
    return true;
  }
  if (table_.size() >= place_) {
    forget_oldest();
  }
  if (table_.has_room(1)) {
    store(table_.insert(hash), Row{count, now});
  }
  return false;
}

void OccurrenceCounter::forget_oldest() noexcept {
  if (table_.size() == 0) {
    return;
  }
  // Clocks are compared as ages relative to the newest one.
  std::uint32_t now = 0;
  bool first = true;
  table_.each_row([&](std::uint64_t, const std::byte* row) {
    const std::uint32_t clock = load<Row>(row).clock;
    now = first ? clock : now + age_at(clock, now);
    first = false;
  });
  EvictionCandidates::begin(table_.size());
  table_.each_row([&](std::uint64_t hash, const std::byte* row) {
    EvictionCandidates::add(~std::uint64_t{age_at(now, load<Row>(row).clock)}, hash);
  });
  const auto victims = EvictionCandidates::take(std::max<std::size_t>(1, table_.size() / 8));
  for (const auto& victim : victims) {
    log_victims({&victim.hash, 1});
    table_.erase(victim.hash);
  }
}

std::size_t OccurrenceCounter::sweep(std::uint32_t now) {
  std::vector<std::uint64_t> stale;
  table_.each_row([&](std::uint64_t hash, const std::byte* row) {
    if (is_stale(row, now)) {
      stale.push_back(hash);
    }
  });
  log_victims(stale);
  for (const std::uint64_t hash : stale) {
    table_.erase(hash);
  }
  table_.give_back();
  return stale.size();
}

void OccurrenceCounter::save(std::vector<std::byte>& bytes) const { append_all(bytes, table_.entries()); }

void OccurrenceCounter::restore_all(ByteReader& in, Slots slots, Slot slot) {
  const SlotTable::Capacity capacity{.buckets = in.take<std::uint64_t>("waiting keys' capacity")};
  const std::size_t n = in.take_count("waiting keys", kSavedBytes);
  const auto hashes = in.take_raw(n * sizeof(std::uint64_t), "waiting keys");
  const auto counts = in.take_raw(n * sizeof(std::uint32_t), "waiting keys");
  const auto clocks = in.take_raw(n * sizeof(std::uint32_t), "waiting keys");
  in.check(n <= most_, "waiting keys", "are more than the rule admits");
  table_.begin_restore(capacity, n);
  std::uint64_t last = 0;
  for (std::size_t i = 0; i < n; ++i) {
    std::uint64_t hash = 0;
    Row row{};
    std::memcpy(&hash, hashes.data() + i * sizeof hash, sizeof hash);
    std::memcpy(&row.count, counts.data() + i * sizeof row.count, sizeof row.count);
    std::memcpy(&row.clock, clocks.data() + i * sizeof row.clock, sizeof row.clock);
    in.check((i == 0 || hash > last) && slots.of(hash) == slot, "waiting keys",
             "must ascend within their slot");
    last = hash;
    store(table_.insert(hash), row);
  }
}

void OccurrenceCounter::save(const SlotTable& copy, const PreImageLog& pre_images,
                             std::vector<std::byte>& bytes) {
  append_all(bytes, pre_images.laid_over(copy.entries()));
}

void OccurrenceCounter::log(std::span<const std::uint64_t> hashes) { pre_images_->log_from(table_, hashes); }

void OccurrenceCounter::log_victims(std::span<const std::uint64_t> hashes) noexcept {
  if (pre_images_ != nullptr) {
    try {
      log(hashes);
    } catch (const std::bad_alloc&) {
      *lost_ = true;
    }
  }
}

void OccurrenceCounter::restore(std::uint64_t hash, std::uint32_t count, std::uint32_t clock) noexcept {
  if (table_.has_room(1) && table_.find_one(hash) == nullptr) {
    store(table_.insert(hash), Row{count, clock});
  }
}

}  // namespace shoal

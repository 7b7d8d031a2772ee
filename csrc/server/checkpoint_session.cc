#include "server/checkpoint_session.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace shoal {

Save::Save(const Name& name, std::span<const Wanted> tables, std::uint32_t clock, std::size_t first,
           std::size_t end)
    : name_(name), first_(first), end_(end), loads_(!tables.empty() && !tables.front().kind) {
  held_.reserve(tables.size());
  figures_.reserve(tables.size() * kFigures);
  for (const Wanted& table : tables) {
    held_.push_back(std::make_unique<Held>(table.shard));
    if (!table.kind) {
      figures_.resize(figures_.size() + kFigures);
      continue;
    }
    const Snapshot& snapshot = held_.back()->snapshot.emplace(*table.shard, clock, *table.kind);
    for (const std::uint64_t figure : {snapshot.step(), std::uint64_t{snapshot.table_clock()},
                                       std::uint64_t{snapshot.rows()}, std::uint64_t{snapshot.bytes()}}) {
      figures_.push_back(figure);
    }
  }
}

Save::~Save() = default;

bool Save::holds(const Shard& shard) const {
  const std::lock_guard lock(mutex_);
  return std::ranges::any_of(held_, [&](const auto& held) { return held->shard.get() == &shard; });
}

bool Save::ended() const {
  const std::lock_guard lock(mutex_);
  return ended_;
}

bool Save::closed() const {
  const std::lock_guard lock(mutex_);
  return ended_ && held_.empty();
}

std::string Save::hear(std::string_view words) {
  const std::lock_guard lock(mutex_);
  heard_.words = words;
  ++heard_.times;
  moved_.notify_all();
  return said_;
}

bool Save::end(const std::optional<std::string>& base) {
  const std::lock_guard lock(mutex_);
  if (ended_) {
    return false;
  }
  ended_ = true;
  base_ = base;
  moved_.notify_all();
  close_if_idle();
  return true;
}

void Save::close_if_idle() noexcept {
  if (!ended_ || working_ != 0) {
    return;
  }
  for (const auto& held : held_) {
    if (base_ && held->snapshot) {
      held->snapshot->done(*base_);
    }
  }
  held_.clear();
}

Save::Heard Save::heard(std::uint64_t times, std::chrono::milliseconds most) const {
  std::unique_lock lock(mutex_);
  moved_.wait_for(lock, most, [&] { return ended_ || heard_.times > times; });
  return heard_;
}

void Save::say(std::string words) {
  const std::lock_guard lock(mutex_);
  said_ = std::move(words);
}

template <class Work>
auto Save::with(std::size_t table, bool loads, const Work& work) {
  Held* held = nullptr;
  {
    const std::lock_guard lock(mutex_);
    const std::string what = loads_ ? "load" : "save";
    SHOAL_CHECK(!ended_, "this " + what + " has ended");
    SHOAL_CHECK(loads == loads_,
                "a " + what + " is under way, of which nothing is " + (loads_ ? "taken" : "restored"));
    SHOAL_CHECK(table < held_.size(), "the " + what + " has no table " + std::to_string(table) + " of " +
                                          std::to_string(held_.size()));
    held = held_[table].get();
    ++working_;
  }
  struct Working {
    Save& save;
    ~Working() {
      const std::lock_guard lock(save.mutex_);
      --save.working_;
      save.close_if_idle();
    }
  };
  const Working working{*this};
  return work(*held);
}

Snapshot::Piece Save::take(std::size_t table, Slot slot) {
  return with(table, false, [&](Held& held) { return held.snapshot->take(slot); });
}

std::size_t Save::restore(std::size_t table, std::size_t rows, std::span<const std::byte> section) {
  return with(table, true, [&](Held& held) { return held.shard->restore(rows, section, first_, end_); });
}

void Save::restore_filter(std::size_t table, Slots cut, Slot slot, std::span<const std::byte> filter) {
  with(table, true, [&](Held& held) { held.shard->restore_filter(cut, slot, filter, first_, end_); });
}

}  // namespace shoal

#include "net/save.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace shoal {

Save::Save(const Name& name, std::span<const Wanted> tables, std::uint32_t clock, std::size_t first,
           std::size_t end)
    : name_(name), first_(first), end_(end) {
  held_.reserve(tables.size());
  figures_.reserve(tables.size() * kFigures);
  for (const Wanted& table : tables) {
    held_.emplace_back(new Held{table.shard, Snapshot(*table.shard, clock, table.kind)});
    const Snapshot& snapshot = held_.back()->snapshot;
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
  if (!ended_ || taking_ != 0) {
    return;
  }
  if (base_) {
    for (const auto& held : held_) {
      held->snapshot.done(*base_);
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

Snapshot::Piece Save::take(std::size_t table, Slot slot) {
  Snapshot* snapshot = nullptr;
  {
    const std::lock_guard lock(mutex_);
    SHOAL_CHECK(!ended_, "this save has ended");
    SHOAL_CHECK(table < held_.size(),
                "the save has no table " + std::to_string(table) + " of " + std::to_string(held_.size()));
    snapshot = &held_[table]->snapshot;
    ++taking_;
  }
  struct Taking {
    Save& save;
    ~Taking() {
      const std::lock_guard lock(save.mutex_);
      --save.taking_;
      save.close_if_idle();
    }
  };
  const Taking taking{*this};
  return snapshot->take(slot);
}

}  // namespace shoal

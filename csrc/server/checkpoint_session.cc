#include "server/checkpoint_session.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace shoal {

CheckpointSession::CheckpointSession(const Name& name, std::span<const TableRequest> tables,
                                     std::uint32_t clock, std::size_t first, std::size_t end)
    : name_(name), first_(first), end_(end), loads_(!tables.empty() && !tables.front().kind) {
  tables_.reserve(tables.size());
  summaries_.reserve(tables.size() * kSummaryWords);
  for (const TableRequest& table : tables) {
    // Not make_unique: clang < 16 cannot initialize an aggregate from parentheses. reserve() above keeps this from leaking.
    tables_.emplace_back(new Table{.shard = table.shard});
    if (!table.kind) {
      summaries_.resize(summaries_.size() + kSummaryWords);
      continue;
    }
    const Snapshot& snapshot = tables_.back()->snapshot.emplace(*table.shard, clock, *table.kind);
    for (const std::uint64_t figure : {snapshot.step(), std::uint64_t{snapshot.table_clock()},
                                       std::uint64_t{snapshot.rows()}, std::uint64_t{snapshot.bytes()}}) {
      summaries_.push_back(figure);
    }
  }
}

CheckpointSession::~CheckpointSession() = default;

bool CheckpointSession::holds(const Shard& shard) const {
  const std::lock_guard lock(mutex_);
  return std::ranges::any_of(tables_, [&](const auto& held) { return held->shard.get() == &shard; });
}

bool CheckpointSession::ended() const {
  const std::lock_guard lock(mutex_);
  return ended_;
}

bool CheckpointSession::closed() const {
  const std::lock_guard lock(mutex_);
  return ended_ && tables_.empty();
}

std::string CheckpointSession::set_request(std::string_view text) {
  const std::lock_guard lock(mutex_);
  request_.text = text;
  ++request_.times;
  moved_.notify_all();
  return status_;
}

bool CheckpointSession::end(const std::optional<std::string>& base) {
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

void CheckpointSession::close_if_idle() noexcept {
  if (!ended_ || working_ != 0) {
    return;
  }
  for (const auto& held : tables_) {
    if (base_ && held->snapshot) {
      held->snapshot->done(*base_);
    }
  }
  tables_.clear();
}

CheckpointSession::Request CheckpointSession::wait_request(std::uint64_t times,
                                                           std::chrono::milliseconds most) const {
  std::unique_lock lock(mutex_);
  moved_.wait_for(lock, most, [&] { return ended_ || request_.times > times; });
  return request_;
}

void CheckpointSession::set_status(std::string text) {
  const std::lock_guard lock(mutex_);
  status_ = std::move(text);
}

template <class Work>
auto CheckpointSession::with(std::size_t table, bool loads, const Work& work) {
  Table* held = nullptr;
  {
    const std::lock_guard lock(mutex_);
    const std::string what = loads_ ? "load" : "save";
    SHOAL_CHECK(!ended_, "this " + what + " has ended");
    SHOAL_CHECK(loads == loads_, "this session is a " + what + ": nothing is " +
                                     (loads_ ? "taken from" : "restored into") + " it");
    SHOAL_CHECK(table < tables_.size(), "the " + what + " has no table " + std::to_string(table) + " of " +
                                            std::to_string(tables_.size()));
    held = tables_[table].get();
    ++working_;
  }
  struct Working {
    CheckpointSession& save;
    ~Working() {
      const std::lock_guard lock(save.mutex_);
      --save.working_;
      save.close_if_idle();
    }
  };
  const Working working{*this};
  return work(*held);
}

Snapshot::Piece CheckpointSession::take(std::size_t table, Slot slot) {
  return with(table, false, [&](Table& held) { return held.snapshot->take(slot); });
}

std::size_t CheckpointSession::restore(std::size_t table, std::size_t rows,
                                       std::span<const std::byte> section) {
  return with(table, true, [&](Table& held) { return held.shard->restore(rows, section, first_, end_); });
}

void CheckpointSession::restore_filter(std::size_t table, Slots cut, Slot slot,
                                       std::span<const std::byte> filter) {
  with(table, true, [&](Table& held) { held.shard->restore_filter(cut, slot, filter, first_, end_); });
}

}  // namespace shoal

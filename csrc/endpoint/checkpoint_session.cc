// Requests and statuses are opaque here; python/shoal/cluster/protocol/tasks.py defines them. The session
// shares ownership of its shards: a table may be dropped or replaced during a save.

#include "endpoint/checkpoint_session.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <utility>

#include "base/check.h"

namespace shoal {

CheckpointSession::CheckpointSession(const Name& name, std::span<const TableRequest> tables)
    : name_(name), loads_(!tables.empty() && !tables.front().kind) {
  tables_.reserve(tables.size());
  summaries_.reserve(tables.size() * kSummaryWords);
  for (const TableRequest& table : tables) {
    auto& sources = tables_.emplace_back(std::make_unique<Table>())->sources;
    std::array<std::uint64_t, kSummaryWords> summary{};
    for (const Part& part : table.parts) {
      sources.push_back(std::make_unique<Source>());
      Source& source = *sources.back();
      source.part = part;
      if (!table.kind) {
        continue;
      }
      const Shard::PausedWriters paused(*part.shard);  // a tier's own thread moves rows meanwhile
      const Snapshot& snapshot = source.snapshot.emplace(*part.shard, part.clock, *table.kind, 0,
                                                         Purpose::kSave, table.parts.size());
      summary[0] = std::max(summary[0], snapshot.step());
      summary[1] = std::max(summary[1], std::uint64_t{snapshot.table_clock()});
      summary[2] += snapshot.rows();
      summary[3] += snapshot.bytes();
    }
    summaries_.insert(summaries_.end(), summary.begin(), summary.end());
  }
  if (!tables.empty()) {
    for (const Part& part : tables.front().parts) {
      for (std::size_t s = part.first; s < part.end; ++s) {
        slots_.push_back(s);
      }
    }
  }
}

CheckpointSession::~CheckpointSession() = default;

bool CheckpointSession::holds(const Shard& shard) const {
  const MutexLock lock(mutex_);
  return std::ranges::any_of(tables_, [&](const auto& held) {
    return std::ranges::any_of(held->sources,
                               [&](const auto& source) { return source->part.shard.get() == &shard; });
  });
}

bool CheckpointSession::ended() const {
  const MutexLock lock(mutex_);
  return ended_;
}

bool CheckpointSession::closed() const {
  const MutexLock lock(mutex_);
  return ended_ && tables_.empty();
}

std::string CheckpointSession::set_request(std::string_view text) {
  const MutexLock lock(mutex_);
  request_.text = text;
  ++request_.times;
  moved_.notify_all();
  return status_;
}

bool CheckpointSession::end(const std::optional<std::string>& base) {
  const MutexLock lock(mutex_);
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
    for (const auto& source : held->sources) {
      if (base_ && source->snapshot) {
        source->snapshot->done(*base_);
      }
    }
  }
  tables_.clear();
}

CheckpointSession::Request CheckpointSession::wait_request(std::uint64_t times,
                                                           std::chrono::milliseconds patience) const {
  const auto end = std::chrono::steady_clock::now() + patience;
  const MutexLock lock(mutex_);
  while (!ended_ && request_.times <= times && std::chrono::steady_clock::now() < end) {
    moved_.wait_until(mutex_, end);
  }
  return request_;
}

void CheckpointSession::set_status(std::string text) {
  const MutexLock lock(mutex_);
  status_ = std::move(text);
}

template <class Work>
auto CheckpointSession::with(std::size_t table, bool loads, const Work& work) {
  Table* held = nullptr;
  {
    const MutexLock lock(mutex_);
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
      const MutexLock lock(save.mutex_);
      --save.working_;
      save.close_if_idle();
    }
  };
  const Working working{*this};
  return work(*held);
}

Snapshot::Piece CheckpointSession::take(std::size_t table, Slot slot) {
  return with(table, false, [&](Table& held) {
    const auto source = std::ranges::find_if(held.sources, [&](const auto& one) {
      return index_of(slot) >= one->part.shard->first_slot() && index_of(slot) < one->part.shard->end_slot();
    });
    SHOAL_CHECK(source != held.sources.end(), "there is no slot " + std::to_string(index_of(slot)));
    return (*source)->snapshot->take(slot);
  });
}

std::size_t CheckpointSession::restore(std::size_t table, std::size_t rows,
                                       std::span<const std::byte> section) {
  return with(table, true, [&](Table& held) {
    // The hashes come first. A part checks all of them, so others than those with rows are not asked; if none
    // has, the first.
    const auto slot_of = [&](std::size_t row) {
      std::uint64_t hash = 0;
      std::memcpy(&hash, section.data() + row * sizeof(hash), sizeof(hash));
      return index_of(held.sources.front()->part.shard->slots().of(hash));
    };
    const bool is_sound = rows != 0 && rows <= section.size() / sizeof(std::uint64_t);
    const std::size_t low = is_sound ? slot_of(0) : 0;
    const std::size_t high = is_sound ? slot_of(rows - 1) : 0;
    std::size_t restored = 0;
    for (const auto& source : held.sources) {
      const Part& part = source->part;
      if ((part.first <= high && low < part.end) || low > high || source == held.sources.front()) {
        restored += part.shard->restore(rows, section, part.first, part.end);
      }
    }
    return restored;
  });
}

void CheckpointSession::restore_filter(std::size_t table, Slots cut, Slot slot,
                                       std::span<const std::byte> filter) {
  with(table, true, [&](Table& held) {
    for (const auto& source : held.sources) {
      source->part.shard->restore_filter(cut, slot, filter, source->part.first, source->part.end);
    }
  });
}

}  // namespace shoal

#include "server/pending_pushes.h"

#include <algorithm>
#include <iterator>
#include <tuple>
#include <utility>

namespace shoal {

namespace {

std::size_t bytes_of(const Pending::Kept& push) noexcept { return push.block.size() + Pending::kOverhead; }

}  // namespace

Pending::Turn& Pending::turn(std::uint32_t clock) {
  const auto [where, fresh] = turns_.try_emplace(clock);
  bytes_ += fresh ? kOverhead : 0;
  return where->second;
}

void Pending::keep(std::uint32_t clock, std::uint32_t table, Kept&& push) {
  Turn& its = turn(clock);
  const std::size_t bytes = bytes_of(push);
  its.kept[table].push_back(std::move(push));
  add(its, bytes);
}

void Pending::sweep(std::uint32_t clock, Sweep&& sweep) {
  Turn& its = turn(clock);
  const auto place =
      std::ranges::upper_bound(its.sweeps, std::pair(sweep.rank, sweep.sequence), {},
                               [](const Sweep& one) { return std::pair(one.rank, one.sequence); });
  its.sweeps.insert(place, std::move(sweep));
}

void Pending::tick(std::uint32_t clock, std::span<const std::uint32_t> tables) {
  Turn& its = turn(clock);
  for (const std::uint32_t table : tables) {
    if (its.tables.insert(table).second) {
      add(its, kOverhead);
    }
  }
  ++its.ticked;
}

std::size_t Pending::drop(std::uint32_t rank, std::uint32_t clock) {
  std::size_t dropped = 0;
  for (auto where = turns_.lower_bound(clock); where != turns_.end();) {
    Turn& turn = where->second;
    for (auto& [table, pushes] : turn.kept) {
      dropped += std::erase_if(pushes, [&](const Kept& push) {
        take(turn, push.rank == rank ? bytes_of(push) : 0);
        return push.rank == rank;
      });
    }
    std::erase_if(turn.kept, [](const auto& kept) { return kept.second.empty(); });
    std::erase_if(turn.sweeps, [&](const Sweep& sweep) { return sweep.rank == rank; });
    const bool nothing = turn.ticked == 0 && turn.kept.empty() && turn.sweeps.empty();
    bytes_ -= nothing ? turn.bytes : 0;
    where = nothing ? turns_.erase(where) : std::next(where);
  }
  return dropped;
}

void Pending::drop_table(std::uint32_t table) {
  for (auto& [clock, turn] : turns_) {
    if (next_table() == table && clock == next()) {
      turn.stepped = 0;
    }
    std::erase_if(turn.sweeps, [&](const Sweep& sweep) { return sweep.table == table; });
    take(turn, turn.tables.erase(table) * kOverhead);
    const auto kept = turn.kept.find(table);
    if (kept != turn.kept.end()) {
      for (const Kept& push : kept->second) {
        take(turn, bytes_of(push));
      }
      turn.kept.erase(kept);
    }
  }
}

void Pending::clear() {
  turns_.clear();
  bytes_ = 0;
}

std::optional<std::uint32_t> Pending::next_table() const noexcept {
  const Turn& turn = turns_.begin()->second;
  std::optional<std::uint32_t> least;
  if (!turn.tables.empty()) {
    least = *turn.tables.begin();
  }
  for (const auto& [table, pushes] : turn.kept) {
    if (!pushes.empty() && (!least || table < *least)) {
      return table;
    }
  }
  return least;
}

std::span<const Pending::Kept> Pending::lists(std::uint32_t table) {
  const auto kept = first().kept.find(table);
  if (kept == first().kept.end()) {
    return {};
  }
  std::ranges::sort(kept->second, {}, [](const Kept& push) { return std::tuple(push.rank, push.sequence); });
  return kept->second;
}

void Pending::done(std::uint32_t table) noexcept {
  Turn& turn = first();
  const auto kept = turn.kept.find(table);
  if (kept != turn.kept.end()) {
    for (const Kept& push : kept->second) {
      take(turn, bytes_of(push));
    }
    turn.kept.erase(kept);
  }
  take(turn, turn.tables.erase(table) * kOverhead);
  turn.stepped = 0;
}

void Pending::pop() noexcept {
  bytes_ -= first().bytes;
  turns_.erase(turns_.begin());
}

}  // namespace shoal

#include "server/pending_pushes.h"

#include <algorithm>
#include <iterator>
#include <tuple>
#include <utility>

namespace shoal {

namespace {

std::size_t bytes_of(const PendingPushes::Push& push) noexcept {
  return push.bytes() + PendingPushes::kOverhead;
}

// Copies an array to the front of `room`, which then begins after it.
template <class T>
std::span<const T> copy_into(std::span<std::byte>& room, std::span<const T> values) {
  const auto copy = room.first(values.size_bytes());
  std::ranges::copy(std::as_bytes(values), copy.begin());
  room = room.subspan(copy.size());
  return {reinterpret_cast<const T*>(copy.data()), values.size()};
}

}  // namespace

void PendingPushes::Push::keep(std::array<ReceivedFrame, 2>&& frames, BufferPool& buffers) {
  struct Kept {
    std::array<ReceivedFrame, 2> frames;
    PooledBuffer block;
  };
  const auto kept = std::make_shared<Kept>();
  kept->frames = std::move(frames);
  kept->block = buffers.acquire(bytes() - kept->frames[0].bytes() - kept->frames[1].bytes());
  std::span<std::byte> room = kept->block.bytes();
  if (!kept->frames[0]) {
    hashes = copy_into(room, hashes);
  }
  if (!kept->frames[1]) {
    grads = copy_into(room, grads);
  }
  counts = copy_into(room, counts);
  owner = kept;
}

PendingPushes::ClockStep& PendingPushes::step(std::uint32_t clock) {
  const auto [where, fresh] = steps_.try_emplace(clock);
  bytes_ += fresh ? kOverhead : 0;
  return where->second;
}

void PendingPushes::add(std::uint32_t clock, std::uint32_t table, Push&& push) {
  ClockStep& its = step(clock);
  const std::size_t bytes = bytes_of(push);
  its.kept[table].push_back(std::move(push));
  add(its, bytes);
}

void PendingPushes::sweep(std::uint32_t clock, Sweep&& sweep) {
  ClockStep& its = step(clock);
  const auto position =
      std::ranges::upper_bound(its.sweeps, std::pair(sweep.rank, sweep.sequence), {},
                               [](const Sweep& one) { return std::pair(one.rank, one.sequence); });
  its.sweeps.insert(position, std::move(sweep));
}

void PendingPushes::tick(std::uint32_t clock, std::span<const std::uint32_t> tables) {
  ClockStep& its = step(clock);
  for (const std::uint32_t table : tables) {
    if (its.tables.insert(table).second) {
      add(its, kOverhead);
    }
  }
  ++its.ticked;
}

std::size_t PendingPushes::drop(std::uint32_t rank, std::uint32_t clock) {
  std::size_t dropped = 0;
  for (auto where = steps_.lower_bound(clock); where != steps_.end();) {
    ClockStep& step = where->second;
    for (auto& [table, pushes] : step.kept) {
      dropped += std::erase_if(pushes, [&](const Push& push) {
        take(step, push.rank == rank ? bytes_of(push) : 0);
        return push.rank == rank;
      });
    }
    std::erase_if(step.kept, [](const auto& kept) { return kept.second.empty(); });
    std::erase_if(step.sweeps, [&](const Sweep& sweep) { return sweep.rank == rank; });
    const bool nothing = step.ticked == 0 && step.kept.empty() && step.sweeps.empty();
    bytes_ -= nothing ? step.bytes : 0;
    where = nothing ? steps_.erase(where) : std::next(where);
  }
  return dropped;
}

void PendingPushes::drop_table(std::uint32_t table) {
  for (auto& [clock, step] : steps_) {
    if (next_table() == table && clock == next()) {
      step.stepped = 0;
    }
    std::erase_if(step.sweeps, [&](const Sweep& sweep) { return sweep.table == table; });
    take(step, step.tables.erase(table) * kOverhead);
    const auto kept = step.kept.find(table);
    if (kept != step.kept.end()) {
      for (const Push& push : kept->second) {
        take(step, bytes_of(push));
      }
      step.kept.erase(kept);
    }
  }
}

void PendingPushes::clear() {
  steps_.clear();
  bytes_ = 0;
}

std::optional<std::uint32_t> PendingPushes::next_table() const noexcept {
  const ClockStep& step = steps_.begin()->second;
  std::optional<std::uint32_t> least;
  if (!step.tables.empty()) {
    least = *step.tables.begin();
  }
  for (const auto& [table, pushes] : step.kept) {
    if (!pushes.empty() && (!least || table < *least)) {
      return table;
    }
  }
  return least;
}

std::span<const PendingPushes::Push> PendingPushes::pushes(std::uint32_t table) {
  const auto kept = first().kept.find(table);
  if (kept == first().kept.end()) {
    return {};
  }
  std::ranges::sort(kept->second, {}, [](const Push& push) { return std::tuple(push.rank, push.sequence); });
  return kept->second;
}

void PendingPushes::finish_table(std::uint32_t table) noexcept {
  ClockStep& step = first();
  const auto kept = step.kept.find(table);
  if (kept != step.kept.end()) {
    for (const Push& push : kept->second) {
      take(step, bytes_of(push));
    }
    step.kept.erase(kept);
  }
  take(step, step.tables.erase(table) * kOverhead);
  step.stepped = 0;
}

void PendingPushes::pop() noexcept {
  bytes_ -= first().bytes;
  steps_.erase(steps_.begin());
}

}  // namespace shoal

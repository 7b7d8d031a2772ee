#include "replica/job_state.h"

#include <span>

namespace shoal {

bool JobState::is_complete(std::uint32_t clock) const noexcept {
  switch (mode) {
    case Mode::kBsp:
      return clock <= applied;
    case Mode::kSsp:
      return clock <= std::uint64_t{clocks.floor()} + staleness;
    case Mode::kAsp:
      break;
  }
  return true;
}

bool JobState::agrees_with(const JobState& other) const noexcept {
  return number == other.number && mode == other.mode && clocks.agrees_with(other.clocks);
}

void JobState::save(ByteWriter& out) const {
  out.put(number);
  out.put(static_cast<std::uint8_t>(is_named ? 1 : 0));
  out.put(mode);
  out.put(staleness);
  out.put(static_cast<std::uint8_t>(mean ? 1 : 0));
  out.put(applied);
  clocks.save(out);
  // A rank's window is made by its first call, also where that was refused: one without a write is not
  // written.
  std::size_t ranks = dedup.size();
  while (ranks != 0 && (dedup[ranks - 1] == nullptr || dedup[ranks - 1]->is_new())) {
    --ranks;
  }
  out.put(static_cast<std::uint32_t>(ranks));
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    const bool has_window = dedup[rank] != nullptr && !dedup[rank]->is_new();
    out.put(static_cast<std::uint8_t>(has_window ? 1 : 0));
    if (has_window) {
      dedup[rank]->save(out);
    }
  }
  ranks = tick_tables.size();
  while (ranks != 0 && tick_tables[ranks - 1].empty()) {
    --ranks;
  }
  out.put(static_cast<std::uint32_t>(ranks));
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    out.put_array(std::span<const std::uint32_t>(tick_tables[rank]));
  }
  pending.save(out);
  out.put(static_cast<std::uint32_t>(origins.size()));
  for (const auto& [table, clock] : origins) {
    out.put(table);
    out.put(clock);
  }
}

void JobState::restore(ByteReader& in, Slots slots, const SlotRange& range,
                       const std::map<std::uint32_t, std::size_t>& dims) {
  number = in.take<std::uint32_t>("job");
  is_named = in.take_flag("job");
  mode = in.take_enum("mode", Mode::kAsp);
  staleness = in.take<std::uint32_t>("staleness");
  mean = in.take_flag("mean");
  applied = in.take<std::uint32_t>("applied");
  clocks = Clocks::restore(in);
  dedup.resize(in.take_between<std::uint32_t>("windows", 0, Clocks::kMaxWorkers));
  for (auto& window : dedup) {
    if (in.take_flag("window")) {
      window = std::make_unique<DedupWindow>(range.first, range.end);
      window->restore(in);
    }
  }
  tick_tables.resize(in.take_between<std::uint32_t>("last ticks", 0, Clocks::kMaxWorkers));
  for (auto& named : tick_tables) {
    named = in.take_array<std::uint32_t>("last tick");
  }
  pending = PendingPushes::restore(in, slots, range, dims);
  for (auto left = in.take<std::uint32_t>("origins"); left != 0; --left) {
    const auto table = in.take<std::uint32_t>("origin");
    in.check(dims.contains(table), "origins", "use a table that the arc does not have");
    origins[table] = in.take<std::uint32_t>("origin");
  }
  in.check(mode != Mode::kBsp || pending.empty() || pending.next() >= applied, "pending pushes",
           "are of a clock that is applied");
}

}  // namespace shoal

// Messages of one call have different slots, so their order among themselves changes nothing. The arrays of a
// push are views: of frames that were taken from the received message, or of copies in one block.

#include "replica/pending_pushes.h"

#include <algorithm>
#include <functional>
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
  ClockStep& pending_step = step(clock);
  const std::size_t bytes = bytes_of(push);
  pending_step.kept[table].push_back(std::move(push));
  add(pending_step, bytes);
}

void PendingPushes::sweep(std::uint32_t clock, Sweep&& sweep) {
  ClockStep& pending_step = step(clock);
  const auto position =
      std::ranges::upper_bound(pending_step.sweeps, std::pair(sweep.rank, sweep.sequence), {},
                               [](const Sweep& one) { return std::pair(one.rank, one.sequence); });
  pending_step.sweeps.insert(position, std::move(sweep));
}

void PendingPushes::tick(std::uint32_t clock, std::span<const std::uint32_t> tables) {
  ClockStep& pending_step = step(clock);
  for (const std::uint32_t table : tables) {
    if (pending_step.tables.insert(table).second) {
      add(pending_step, kOverhead);
    }
  }
  ++pending_step.ticked;
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

void PendingPushes::save(ByteWriter& out) const {
  out.put(static_cast<std::uint32_t>(steps_.size()));
  for (const auto& [clock, step] : steps_) {
    out.put(clock);
    out.put(std::uint64_t{step.ticked});
    out.put(std::uint64_t{step.stepped});
    out.put(static_cast<std::uint32_t>(step.tables.size()));
    for (const std::uint32_t table : step.tables) {
      out.put(table);
    }
    out.put(static_cast<std::uint32_t>(step.sweeps.size()));
    for (const Sweep& sweep : step.sweeps) {
      out.put(sweep.rank);
      out.put(sweep.sequence);
      out.put(sweep.table);
      out.put(static_cast<std::uint8_t>(sweep.done ? 1 : 0));
      out.put(static_cast<std::uint8_t>(sweep.rules.size()));
      for (const Expiry& rule : sweep.rules) {
        out.put(rule.kind);
        out.put(rule.clocks);
        out.put(rule.decay);
        out.put(rule.floor);
        out.put(rule.rows);
        out.put(static_cast<std::uint8_t>(rule.frequent ? 1 : 0));
      }
    }
    std::vector<std::pair<std::uint32_t, const Push*>> pushes;
    for (const auto& [table, kept] : step.kept) {
      for (const Push& push : kept) {
        pushes.emplace_back(table, &push);
      }
    }
    // Not in the order of arrival, on which nothing depends.
    std::ranges::sort(pushes, {}, [](const auto& one) {
      const Push& push = *one.second;
      return std::tuple(one.first, push.rank, push.sequence, push.hashes.empty() ? 0 : push.hashes.front());
    });
    out.put(std::uint64_t{pushes.size()});
    for (const auto& [table, push] : pushes) {
      out.put(table);
      out.put(push->rank);
      out.put(push->sequence);
      out.put_array(push->hashes);
      out.put_array(push->grads);
      out.put_array(push->counts);
    }
  }
}

PendingPushes PendingPushes::restore(ByteReader& in, Slots slots, const SlotRange& range,
                                     const std::map<std::uint32_t, std::size_t>& dims) {
  constexpr std::size_t kMaxRules = 255;
  constexpr const char* kField = "pending pushes";
  const auto check_table = [&](std::uint32_t table) {
    in.check(dims.contains(table), kField, "are of a table that the arc does not have");
  };
  PendingPushes made;
  std::optional<std::uint32_t> last;
  for (auto steps = in.take<std::uint32_t>(kField); steps != 0; --steps) {
    const auto clock = in.take<std::uint32_t>(kField);
    in.check(!last || *last < clock, kField, "must be in the order of their clocks");
    last = clock;
    ClockStep& step = made.step(clock);
    step.ticked = in.take<std::uint64_t>(kField);
    step.stepped = in.take<std::uint64_t>(kField);
    std::vector<std::uint32_t> named;
    for (auto left = in.take<std::uint32_t>(kField); left != 0; --left) {
      const auto table = named.emplace_back(in.take<std::uint32_t>(kField));
      check_table(table);
      if (step.tables.insert(table).second) {
        made.add(step, kOverhead);
      }
    }
    for (auto left = in.take<std::uint32_t>(kField); left != 0; --left) {
      Sweep& sweep = step.sweeps.emplace_back();
      sweep.rank = in.take<std::uint32_t>(kField);
      sweep.sequence = in.take<std::uint64_t>(kField);
      sweep.table = in.take<std::uint32_t>(kField);
      sweep.done = in.take_flag(kField);
      for (auto rules = in.take_between<std::uint8_t>(kField, 0, kMaxRules); rules != 0; --rules) {
        Expiry rule{.kind = in.take_enum("rule", Expiry::Kind::kMaxRows)};
        rule.clocks = in.take<std::uint32_t>("rule");
        rule.decay = in.take<double>("rule");
        rule.floor = in.take<double>("rule");
        rule.rows = in.take<std::uint64_t>("rule");
        rule.frequent = in.take_flag("rule");
        sweep.rules.push_back(rule);
      }
    }
    struct Arrays {
      std::vector<std::uint64_t> hashes;
      std::vector<float> grads;
      std::vector<std::uint32_t> counts;
    };
    for (auto left = in.take<std::uint64_t>(kField); left != 0; --left) {
      const auto table = in.take<std::uint32_t>(kField);
      check_table(table);
      Push push;
      push.rank = in.take<std::uint32_t>(kField);
      push.sequence = in.take<std::uint64_t>(kField);
      const auto arrays = std::make_shared<Arrays>();
      arrays->hashes = in.take_array<std::uint64_t>(kField);
      arrays->grads = in.take_array<float>(kField);
      arrays->counts = in.take_array<std::uint32_t>(kField);
      const auto& hashes = arrays->hashes;
      in.check(std::ranges::adjacent_find(hashes, std::greater_equal<>()) == hashes.end() &&
                   (hashes.empty() || (index_of(slots.of(hashes.front())) >= range.first &&
                                       index_of(slots.of(hashes.back())) < range.end)),
               kField, "must ascend within the slots of the arc");
      in.check(arrays->grads.size() == hashes.size() * dims.at(table) &&
                   (arrays->counts.empty() || arrays->counts.size() == hashes.size()),
               kField, "have arrays of other lengths");
      push.hashes = arrays->hashes;
      push.grads = arrays->grads;
      push.counts = arrays->counts;
      push.owner = arrays;
      made.add(clock, table, std::move(push));
    }
    std::size_t rows = 0;
    if (!step.kept.empty()) {
      for (const Push& push : step.kept.begin()->second) {
        rows += push.hashes.size();
      }
    }
    in.check(step.stepped <= rows, kField, "have fewer rows than are stepped");
  }
  return made;
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

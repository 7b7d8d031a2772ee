#include "replica/arc_group.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <type_traits>

#include "base/check.h"
#include "shard/spec_bytes.h"

namespace shoal {

namespace {

std::string name_of(std::size_t first, std::size_t end) {
  return "[" + std::to_string(first) + ", " + std::to_string(end) + ")";
}

bool is_exactly(const Arc& arc, const SlotRange& range) noexcept {
  return arc.first_slot() == range.first && arc.end_slot() == range.end;
}

}  // namespace

// --- arcs that come and go --------------------------------------------------------------------------------

void ArcGroup::serve(const std::vector<SlotRange>& ranges) {
  std::vector<Served> served;
  std::vector<std::unique_ptr<Arc>> made;
  std::size_t at = 0;
  for (const SlotRange& range : ranges) {
    SHOAL_CHECK(
        range.first <= range.end && range.end <= slots_.count(),
        "there are no slots " + name_of(range.first, range.end) + " of " + std::to_string(slots_.count()));
    SHOAL_CHECK(range.first >= at, "the ranges of slots must ascend: " + std::to_string(range.first) +
                                       " comes after " + std::to_string(at));
    at = range.end;
    const std::size_t before = served.size();
    std::size_t covered = 0;
    for (const auto& arc : arcs_) {
      const std::size_t first = std::max(range.first, arc->first_slot());
      const std::size_t end = std::min(range.end, arc->end_slot());
      if (first < end) {
        SHOAL_CHECK(before == 0 || served[before - 1].arc != arc.get(),
                    "the slots that an arc serves must be adjacent");
        served.push_back({.arc = arc.get(), .first = first, .end = end});
        covered += end - first;
      }
    }
    if (covered == range.end - range.first) {
      continue;
    }
    SHOAL_CHECK(covered == 0, "an arc of the slots " + name_of(range.first, range.end) + " overlaps another");
    SHOAL_CHECK(!has_begun_, "arcs are made before the first job");
    Arc& arc =
        *made.emplace_back(std::make_unique<Arc>(slots_, range.first, range.end, workspace_, disposal_));
    arc.set_tier(tier_);
    if (slot_bytes_) {
      arc.apply(SetMemory{.slot_bytes = *slot_bytes_});
    }
    for (const auto& [id, spec] : tables_) {
      arc.apply(AddTable{.id = id, .spec = spec});
    }
    served.push_back({.arc = &arc, .first = range.first, .end = range.end});
  }
  arcs_.reserve(arcs_.size() + made.size());
  std::ranges::move(made, std::back_inserter(arcs_));
  served_ = std::move(served);
  sort_arcs();
}

void ArcGroup::sort_arcs() noexcept {
  std::ranges::sort(arcs_, {}, [](const auto& arc) { return arc->first_slot(); });
}

void ArcGroup::check_take(std::span<const SlotRange> ranges) const {
  for (const SlotRange& range : ranges) {
    find(range);
    SHOAL_CHECK(std::ranges::count(ranges, range.first, &SlotRange::first) == 1,
                "the slots " + name_of(range.first, range.end) + " are named twice");
  }
}

void ArcGroup::take(std::span<const SlotRange> ranges, std::vector<std::unique_ptr<Arc>>& to) {
  check_take(ranges);
  to.reserve(to.size() + ranges.size());
  // Nothing below fails: arcs that have left have no owner until this call returns.
  for (const SlotRange& range : ranges) {
    const auto arc = std::ranges::find_if(
        arcs_, [&](const auto& held) { return held != nullptr && is_exactly(*held, range); });
    std::erase_if(served_, [&](const Served& served) { return served.arc == arc->get(); });
    to.push_back(std::move(*arc));
  }
  std::erase(arcs_, nullptr);
}

void ArcGroup::adopt(std::span<std::unique_ptr<Arc>> arcs) {
  std::map<std::uint32_t, TableSpec> tables = tables_;
  std::vector<std::uint32_t> jobs = jobs_;
  std::vector<bool> present(slots_.count());
  for (const auto& arc : arcs) {
    SHOAL_CHECK(arc->slots().count() == slots_.count(), "an arc of " + std::to_string(arc->slots().count()) +
                                                            " slots does not fit a service of " +
                                                            std::to_string(slots_.count()));
    for (std::size_t s = arc->first_slot(); s < arc->end_slot(); ++s) {
      SHOAL_CHECK(arc_of(s) == nullptr && !present[s], "slot " + std::to_string(s) + " has an arc already");
      present[s] = true;
    }
    for (const auto& [id, table] : arc->tables()) {
      const TableSpec& spec = table.shard->spec();
      const auto [known, is_new] = tables.try_emplace(id, spec);
      SHOAL_CHECK(is_new || encode(known->second) == encode(spec),
                  "table " + std::to_string(id) + " has another description in an arc");
    }
    for (const auto& job : std::span(arc->jobs().all()).subspan(1)) {
      if (std::ranges::find(jobs, job->number) == jobs.end()) {
        jobs.push_back(job->number);
      }
    }
    if (jobs.front() == kDefaultJob) {
      jobs.front() = arc->jobs().first().number;
    }
  }
  arcs_.reserve(arcs_.size() + arcs.size());
  // Nothing below fails.
  tables_ = std::move(tables);
  jobs_ = std::move(jobs);
  has_begun_ = has_begun_ || jobs_.front() != kDefaultJob || jobs_.size() > 1;
  for (auto& arc : arcs) {
    arc->move_to(workspace_, disposal_);
    arcs_.push_back(std::move(arc));
  }
  sort_arcs();
}

void ArcGroup::discard(std::vector<std::unique_ptr<Arc>> arcs) {
  for (auto& arc : arcs) {
    arc->move_to(workspace_, disposal_);
    while (!arc->tables().empty()) {
      arc->apply(DropTable{.id = arc->tables().begin()->first});
    }
  }
}

std::vector<SlotRange> ArcGroup::ranges() const {
  std::vector<SlotRange> ranges;
  for (const auto& arc : arcs_) {
    ranges.push_back(arc->range());
  }
  return ranges;
}

bool ArcGroup::has(const SlotRange& range) const noexcept {
  return std::ranges::any_of(arcs_, [&](const auto& arc) { return arc->first_slot() == range.first; });
}

bool ArcGroup::serves(std::size_t slot) const noexcept {
  return std::ranges::any_of(served_,
                             [&](const Served& served) { return slot >= served.first && slot < served.end; });
}

Arc* ArcGroup::arc_of(std::size_t slot) const noexcept {
  const auto after =
      std::ranges::upper_bound(arcs_, slot, {}, [](const auto& arc) { return arc->first_slot(); });
  return after == arcs_.begin() || slot >= (*std::prev(after))->end_slot() ? nullptr
                                                                           : std::prev(after)->get();
}

const Arc& ArcGroup::find(const SlotRange& range) const {
  const auto arc = std::ranges::find_if(arcs_, [&](const auto& held) { return is_exactly(*held, range); });
  SHOAL_CHECK(arc != arcs_.end(), "no arc here has the slots " + name_of(range.first, range.end));
  return **arc;
}

std::optional<std::uint64_t> ArcGroup::budget_bytes() const noexcept {
  std::uint64_t bytes = 0;
  for (const Served& served : served_) {
    const auto share = served.arc->slot_bytes();
    if (!share) {
      return std::nullopt;
    }
    bytes += *share * (served.end - served.first);
  }
  return served_.empty() ? std::nullopt : std::optional(bytes);
}

bool ArcGroup::has_table(std::uint32_t id) const noexcept {
  return std::ranges::all_of(arcs_, [id](const auto& arc) { return arc->find(id) != nullptr; });
}

std::unique_ptr<Shard> ArcGroup::snapshot(std::uint32_t id) const {
  const auto table = tables_.find(id);
  SHOAL_CHECK(table != tables_.end() && has_table(id), "there is no table " + std::to_string(id));
  auto copy = std::make_unique<Shard>(table->second, slots_, workspace_.pool);
  std::vector<std::byte> section;
  for (const auto& arc : arcs_) {
    const Shard& shard = *arc->find(id)->shard;
    for (std::size_t s = arc->first_slot(); s < arc->end_slot(); ++s) {
      const Slot slot{static_cast<std::uint32_t>(s)};
      const std::size_t rows = shard.section(slot, section);
      copy->restore(rows, section);
      shard.filter(slot, section);
      copy->restore_filter(slots_, slot, section);
    }
    copy->set_step(std::max(copy->step(), shard.step()));
    copy->set_clock(std::max(copy->table_clock(0), shard.table_clock(0)), 0);
  }
  return copy;
}

// --- orders -----------------------------------------------------------------------------------------------

bool ArcGroup::has_job(std::uint32_t job) const noexcept {
  return std::ranges::find(jobs_, job) != jobs_.end();
}

Order ArcGroup::resolved(Order order) const {
  std::visit(
      [&](auto& given) {
        if constexpr (OfJob<std::decay_t<decltype(given)>>) {
          given.job = given.job == kDefaultJob ? jobs_.front() : given.job;
        }
      },
      order);
  return order;
}

ArcResult ArcGroup::apply(const Order& order) {
  // What has to hold before any arc executes it.
  if (const auto* const start = std::get_if<StartJob>(&order); start != nullptr) {
    SHOAL_CHECK(start->job != kDefaultJob, "a job's number is not 0");
  } else if (const auto* const admit = std::get_if<Admit>(&order); admit != nullptr) {
    for (const auto& arc : arcs_) {
      arc->jobs().check_admit({.job = admit->job, .rank = admit->rank}, admit->incarnation, admit->clock);
    }
  } else if (const auto* const memory = std::get_if<SetMemory>(&order); memory != nullptr) {
    if (slot_bytes_ == memory->slot_bytes) {
      return {};
    }
    SHOAL_CHECK(tables_.empty(), "there are tables already: set the memory budget before adding tables");
    Budget::check_share(memory->slot_bytes);
  } else if (const auto* const table = std::get_if<AddTable>(&order); table != nullptr) {
    lacking(table->id, table->spec);
  } else if (const auto* const end = std::get_if<EndJob>(&order);
             end != nullptr && (end->job == jobs_.front() || !has_job(end->job))) {
    return {};
  }
  ArcResult result;
  for (const auto& arc : arcs_) {
    ArcResult one = std::visit(
        [&](const auto& given) -> ArcResult {
          if constexpr (std::is_constructible_v<ArcOp, decltype(given)>) {
            return arc->apply(given);
          } else {
            SHOAL_DCHECK(false);
            return {};
          }
        },
        order);
    result.dropped += one.dropped;
    result.clock = std::max(result.clock, one.clock);
    if (one.last.clock >= result.last.clock) {
      result.last = std::move(one.last);
    }
  }
  if (const auto* const start = std::get_if<StartJob>(&order); start != nullptr) {
    has_begun_ = true;
    if (!has_job(start->job)) {
      start->is_named ? jobs_.push_back(start->job) : static_cast<void>(jobs_.front() = start->job);
    }
  } else if (const auto* const end = std::get_if<EndJob>(&order); end != nullptr) {
    std::erase(jobs_, end->job);
  } else if (const auto* const memory = std::get_if<SetMemory>(&order); memory != nullptr) {
    slot_bytes_ = memory->slot_bytes;
  } else if (const auto* const table = std::get_if<AddTable>(&order); table != nullptr) {
    tables_.try_emplace(table->id, table->spec);
  } else if (const auto* const dropped = std::get_if<DropTable>(&order); dropped != nullptr) {
    tables_.erase(dropped->id);
  }
  return result;
}

ArcGroup::ShardMakers ArcGroup::lacking(std::uint32_t id, const TableSpec& spec) const {
  const auto known = tables_.find(id);
  SHOAL_CHECK(known == tables_.end() || encode(known->second) == encode(spec),
              "there is a table " + std::to_string(id) + " already: drop it first");
  ShardMakers makers;
  for (const auto& arc : arcs_) {
    if (arc->find(id) == nullptr) {
      makers.emplace_back(arc->first_slot(), arc->shard_maker());
    }
  }
  return makers;
}

bool ArcGroup::add_shards(std::uint32_t id, const TableSpec& spec,
                          std::span<const std::pair<std::size_t, std::shared_ptr<Shard>>> shards) {
  tables_.try_emplace(id, spec);
  for (const auto& [first_slot, shard] : shards) {
    Arc* const arc = arc_of(first_slot);
    if (arc != nullptr && arc->find(id) == nullptr && arc->first_slot() == shard->first_slot() &&
        arc->end_slot() == shard->end_slot()) {
      arc->apply(AddShardOp{.id = id, .shard = shard});
    }
  }
  return has_table(id);
}

}  // namespace shoal

// Follower: what it does when its primary has ended, and what it has kept for other copies of the arcs that
// it gives.

#include <algorithm>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "replica/follower.h"

namespace shoal {

namespace {

// Adds a record for those of its arcs that are among these.
void add_part(const KeptRecord& record, std::span<const SlotRange> ranges, std::vector<KeptRecord>& to) {
  std::vector<SlotRange> both;
  std::ranges::copy_if(record.arcs, std::back_inserter(both),
                       [&](const SlotRange& range) { return contains(ranges, range); });
  if (!both.empty()) {
    to.push_back(record);
    to.back().arcs = std::move(both);
  }
}

}  // namespace

Handover Handover::part(std::span<const SlotRange> ranges) const {
  Handover part;
  for (std::size_t i = 0; i < arcs.size(); ++i) {
    if (contains(ranges, arcs[i])) {
      part.arcs.push_back(arcs[i]);
      part.stamps.push_back(stamps[i]);
    }
  }
  for (const KeptRecord& record : records) {
    add_part(record, part.arcs, part.records);
  }
  return part;
}

std::vector<std::pair<SlotRange, std::uint64_t>> Follower::stamps() const {
  std::vector<std::pair<SlotRange, std::uint64_t>> stamps;
  for (const SlotRange& range : arcs_.ranges()) {
    stamps.emplace_back(range, executed_);
  }
  for (const auto& arc : aside_) {
    stamps.emplace_back(arc->range(), arc->stamp());
  }
  return stamps;
}

Handover Follower::hand_over() const {
  Handover handover;
  for (const auto& [range, stamp] : stamps()) {
    handover.arcs.push_back(range);
    handover.stamps.push_back(stamp);
  }
  for (const Inherited& one : inherited_) {
    for (const KeptRecord& record : one.records) {
      add_part(record, handover.arcs, handover.records);
    }
  }
  for (const KeptRecord& record : kept_) {
    KeptRecord whole = record;
    if (record.arcs.empty()) {
      for (std::size_t i = 0; i < handover.arcs.size(); ++i) {
        if (record.stamp <= handover.stamps[i] && has_executed(handover.arcs[i].first, record.stamp)) {
          whole.arcs.push_back(handover.arcs[i]);
        }
      }
    }
    add_part(whole, handover.arcs, handover.records);
  }
  std::ranges::stable_sort(handover.records, {}, &KeptRecord::stamp);
  return handover;
}

bool Follower::has_executed(std::size_t first_slot, std::uint64_t stamp) const {
  const auto found = intervals_.find(first_slot);
  return found != intervals_.end() && std::ranges::any_of(found->second, [&](const Interval& one) {
           return stamp >= one.first && stamp <= one.last;
         });
}

ArcResult Follower::act_on(std::span<const SlotRange> ranges, const Order& order) {
  if (ranges.empty()) {
    return shoal::execute(arcs_.resolved(order), arcs_);
  }
  std::vector<SlotRange> executing;
  std::vector<SlotRange> found;
  for (const SlotRange& range : ranges) {
    if (has(range)) {
      executing.push_back(range);
    }
    if (has(range) || has_aside(range)) {
      found.push_back(range);
    }
  }
  std::uint64_t stamp = 0;  // the greatest of them
  for (const auto& [range, executed] : stamps()) {
    stamp = contains(found, range) ? std::max(stamp, executed) : stamp;
  }
  std::vector<std::unique_ptr<Arc>> detached;
  detached.reserve(found.size() + aside_.size());  // as take_aside() does
  aside_.reserve(aside_.size() + found.size());
  // The arcs alone, which are set aside whatever happens.
  ArcGroup alone(slots_, workspace_, disposal_, tier_);
  kept_.push_back({.stamp = stamp + 1, .arcs = found, .is_request = false, .end_slot = 0, .frames = {}});
  take_arcs(executing, detached);
  take_aside([&](const SlotRange& range) { return contains(found, range); }, detached);
  const auto set_aside = [&] {
    if (detached.empty()) {
      alone.take(found, aside_);
    } else {
      std::ranges::move(detached, std::back_inserter(aside_));
    }
  };
  ArcResult result;
  try {
    if (!detached.empty()) {
      alone.adopt(detached);
      detached.clear();
      alone.serve_all();
    }
    const Order resolved = alone.resolved(order);
    kept_.back().frames.push_back(encode(resolved));
    result = shoal::execute(resolved, alone);
  } catch (const std::exception&) {
    set_aside();
    kept_.pop_back();
    throw;
  }
  const std::size_t before = aside_.size();
  set_aside();
  if (found.empty()) {
    kept_.pop_back();
  }
  for (const auto& arc : std::span(aside_).subspan(before)) {
    arc->set_stamp(stamp + 1);
  }
  return result;
}

bool Follower::catch_up(const CatchUpArcs& order, std::uint64_t stamp) {
  if (!are_here(order.arcs, order.epoch)) {
    return false;
  }
  if (!order.records.empty()) {
    inherited_.push_back({.arcs = order.arcs, .records = order.records, .until = stamp});
  }
  for (const auto& arc : aside_) {
    const auto found = std::ranges::find(order.arcs, arc->first_slot(), &SlotRange::first);
    SHOAL_CHECK(found == order.arcs.end() ||
                    arc->stamp() <= order.stamps[static_cast<std::size_t>(found - order.arcs.begin())],
                "the slots from " + std::to_string(arc->first_slot()) +
                    " on have records that the new primary lacks");
  }
  std::vector<std::unique_ptr<Arc>> behind;
  take_aside([&](const SlotRange& one) { return contains(order.arcs, one); }, behind);
  for (std::unique_ptr<Arc>& arc : behind) {
    const SlotRange range = arc->range();
    std::uint64_t executed = arc->stamp();
    ArcGroup one(slots_, workspace_, disposal_, tier_);
    std::vector<std::unique_ptr<Arc>> alone;
    alone.push_back(std::move(arc));
    one.adopt(alone);
    one.serve_all();
    for (const KeptRecord& record : order.records) {
      if (record.stamp > executed && contains(record.arcs, range)) {
        shoal::replay(record, one, cut_, decoded_);
        executed = record.stamp;
      }
    }
    alone.clear();
    one.take({&range, 1}, alone);
    arc = std::move(alone.front());
    arc->set_stamp(executed);
  }
  std::ranges::move(behind, std::back_inserter(aside_));
  return true;
}

}  // namespace shoal

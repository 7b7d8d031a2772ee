// Replica: what it does when its primary has ended, and what it has kept for other copies of the arcs that it gives.

#include <algorithm>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "server/replica.h"

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
  Handover some;
  for (std::size_t i = 0; i < arcs.size(); ++i) {
    if (contains(ranges, arcs[i])) {
      some.arcs.push_back(arcs[i]);
      some.stamps.push_back(stamps[i]);
    }
  }
  for (const KeptRecord& record : records) {
    add_part(record, some.arcs, some.records);
  }
  return some;
}

std::vector<std::pair<SlotRange, std::uint64_t>> Replica::stamps() const {
  std::vector<std::pair<SlotRange, std::uint64_t>> all;
  for (const SlotRange& range : service_.arcs()) {
    all.emplace_back(range, executed_);
  }
  for (const auto& arc : aside_) {
    all.emplace_back(SlotRange{arc->first_slot(), arc->end_slot()}, arc->stamp());
  }
  return all;
}

Handover Replica::hand_over() const {
  Handover all;
  for (const auto& [range, stamp] : stamps()) {
    all.arcs.push_back(range);
    all.stamps.push_back(stamp);
  }
  for (const Inherited& one : inherited_) {
    for (const KeptRecord& record : one.records) {
      add_part(record, all.arcs, all.records);
    }
  }
  for (const KeptRecord& record : kept_) {
    KeptRecord whole = record;
    if (record.arcs.empty()) {
      for (std::size_t i = 0; i < all.arcs.size(); ++i) {
        if (record.stamp <= all.stamps[i] && has_executed(all.arcs[i].first, record.stamp)) {
          whole.arcs.push_back(all.arcs[i]);
        }
      }
    }
    add_part(whole, all.arcs, all.records);
  }
  std::ranges::stable_sort(all.records, {}, &KeptRecord::stamp);
  return all;
}

bool Replica::has_executed(std::size_t first_slot, std::uint64_t stamp) const {
  const auto found = intervals_.find(first_slot);
  return found != intervals_.end() && std::ranges::any_of(found->second, [&](const Interval& one) {
           return stamp >= one.first && stamp <= one.last;
         });
}

Replica::Detached::Detached(Replica& replica, std::span<const SlotRange> ranges, const Order& order)
    : replica_(replica), service_(replica.slots_, {}, replica.limits_) {
  std::vector<SlotRange> executing;
  for (const SlotRange& range : ranges) {
    if (replica.has(range)) {
      executing.push_back(range);
    }
    if (replica.has(range) || replica.has_aside(range)) {
      found_.push_back(range);
    }
  }
  for (const auto& [range, stamp] : replica.stamps()) {
    stamp_ = contains(found_, range) ? std::max(stamp_, stamp) : stamp_;
  }
  arcs_.reserve(found_.size() + replica.aside_.size());  // as take_aside() does
  replica.aside_.reserve(replica.aside_.size() + found_.size());
  replica.kept_.push_back(
      {.stamp = stamp_ + 1, .arcs = found_, .is_request = false, .end_slot = 0, .frames = {encode(order)}});
  // Nothing below fails.
  replica.take_arcs(executing, arcs_);
  replica.take_aside([&](const SlotRange& range) { return contains(found_, range); }, arcs_);
}

Service& Replica::Detached::service() {
  if (!arcs_.empty()) {
    service_.adopt(arcs_);
    arcs_.clear();
  }
  return service_;
}

Replica::Detached::~Detached() {
  const std::size_t before = replica_.aside_.size();
  if (arcs_.empty()) {
    service_.take_arcs(found_, replica_.aside_);
  } else {
    std::ranges::move(arcs_, std::back_inserter(replica_.aside_));
  }
  if (is_executed_ && !found_.empty()) {
    for (const auto& arc : std::span(replica_.aside_).subspan(before)) {
      arc->set_stamp(stamp_ + 1);
    }
  } else {
    replica_.kept_.pop_back();
  }
}

bool Replica::catch_up(const CatchUpArcs& order, std::uint64_t stamp) {
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
    const SlotRange range{arc->first_slot(), arc->end_slot()};
    std::uint64_t executed = arc->stamp();
    Service one(slots_, {}, limits_);
    std::vector<std::unique_ptr<Arc>> alone;
    alone.push_back(std::move(arc));
    one.adopt(alone);
    one.set_map(0, {range});
    for (const KeptRecord& record : order.records) {
      if (record.stamp > executed && contains(record.arcs, range)) {
        shoal::execute(record, one);
        executed = record.stamp;
      }
    }
    alone.clear();
    one.take_arcs({&range, 1}, alone);
    arc = std::move(alone.front());
    arc->set_stamp(executed);
  }
  std::ranges::move(behind, std::back_inserter(aside_));
  return true;
}

}  // namespace shoal

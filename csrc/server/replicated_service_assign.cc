// ReplicatedService: assignments, and the copies of arcs that they begin.

#include <algorithm>
#include <exception>
#include <iterator>
#include <limits>
#include <string>
#include <utility>

#include "base/check.h"
#include "server/replicated_service.h"

namespace shoal {

namespace {

std::string name_of(const SlotRange& range) {
  return "[" + std::to_string(range.first) + ", " + std::to_string(range.end) + ")";
}

bool contains(std::span<const SlotRange> ranges, const SlotRange& one) noexcept {
  return std::ranges::any_of(ranges, [&](const SlotRange& range) { return range.first == one.first; });
}

SlotRange range_of(const Arc& arc) noexcept { return {arc.first_slot(), arc.end_slot()}; }

}  // namespace

Replica* ReplicatedService::find_replica(StreamId stream) noexcept {
  const auto found =
      std::ranges::find_if(replicas_, [&](const auto& replica) { return replica->stream() == stream; });
  return found == replicas_.end() ? nullptr : found->get();
}

Replica& ReplicatedService::replica_of(StreamId stream) {
  Replica* const replica = find_replica(stream);
  SHOAL_CHECK(replica != nullptr, "this endpoint holds no replica of stream " + std::to_string(stream));
  return *replica;
}

// A replica that has diverged gives no arcs.
void ReplicatedService::check(const Assignment& assignment) const {
  for (const auto& replica : replicas_) {
    if (replica->fault().empty()) {
      continue;
    }
    for (const SlotRange& range : replica->service().arcs()) {
      const bool moves = contains(assignment.primary, range) ||
                         std::ranges::any_of(assignment.incoming, [&](const Assignment::Incoming& one) {
                           return one.stream != replica->stream() && contains(one.in_sync, range);
                         });
      SHOAL_CHECK(!moves,
                  "the replica of the slots " + name_of(range) + " has diverged: " + replica->fault());
    }
  }
}

void ReplicatedService::assign(const Assignment& assignment) {
  std::vector<std::unique_ptr<Replica>> dropped;  // destroyed without the mutex
  const std::lock_guard lock(mutex_);
  if (assignment.epoch <= assigned_) {
    return;
  }
  check(assignment);
  std::vector<Handover> handovers;
  Arcs loose = take_from_replicas(assignment, handovers, dropped);  // on their way
  discard_old(assignment, loose, handovers);
  const auto take = [&](std::span<const SlotRange> wanted) {
    Arcs arcs;
    for (std::unique_ptr<Arc>& arc : loose) {
      if (contains(wanted, range_of(*arc))) {
        arcs.push_back(std::move(arc));
      }
    }
    std::erase(loose, nullptr);
    return arcs;
  };
  // Deferred reads of slots that leave are answered before their arcs leave.
  std::vector<SlotRange> leaves;
  for (const SlotRange& range : service_.arcs()) {
    if (!contains(assignment.primary, range)) {
      leaves.push_back(range);
    }
  }
  Arcs promoted = take(assignment.primary);
  std::uint64_t stamp = std::uint64_t{assignment.epoch} << ReplicationLog::kEpochShift;
  for (const auto& arc : promoted) {
    arc->end_saves();  // a save fails with its server
    stamp = std::max(stamp, arc->stamp() + 1);
  }
  service_.adopt(std::move(promoted));
  service_.set_map(assignment.epoch, assignment.primary);
  log_.advance_stamp(stamp);
  for (std::unique_ptr<Arc>& arc : service_.take_arcs(leaves)) {
    arc->set_stamp(log_.stamp());
    loose.push_back(std::move(arc));
  }
  for (const Assignment::Incoming& one : assignment.incoming) {
    Replica* replica = find_replica(one.stream);
    if (replica == nullptr) {
      replica = replicas_.emplace_back(std::make_unique<Replica>(one.stream, Slots(slots()), limits_)).get();
    }
    std::ranges::move(replica->expect(take(one.in_sync), one.in_sync, assignment.epoch, handovers),
                      std::back_inserter(loose));
  }
  service_.discard(std::move(loose));
  update_streams(assignment, handovers);
  copy_rate_ = assignment.copy_rate;
  assigned_ = assignment.epoch;
  targets_version_.fetch_add(1, std::memory_order_acq_rel);
  wake();
}

ReplicatedService::Arcs ReplicatedService::take_from_replicas(
    const Assignment& assignment, std::vector<Handover>& handovers,
    std::vector<std::unique_ptr<Replica>>& dropped) {
  Arcs loose;
  const auto listed = [&](StreamId stream) {
    return std::ranges::find(assignment.incoming, stream, &Assignment::Incoming::stream) !=
           assignment.incoming.end();
  };
  // Whether an arc of the replica of a stream is wanted elsewhere.
  const auto is_wanted = [&](const SlotRange& range, StreamId from) {
    return contains(assignment.primary, range) ||
           std::ranges::any_of(assignment.incoming, [&](const Assignment::Incoming& one) {
             return one.stream != from && contains(one.in_sync, range);
           });
  };
  // Replicas of streams that are not listed are fenced, and give all arcs. The others give what is wanted elsewhere; the rest stays,
  // also what the assignment does not list: it may have arrived since.
  for (std::unique_ptr<Replica>& replica : replicas_) {
    const bool stays = listed(replica->stream());
    std::vector<SlotRange> gives;
    for (const SlotRange& range : replica->service().arcs()) {
      if (!stays || is_wanted(range, replica->stream())) {
        gives.push_back(range);
      }
    }
    Arcs given = replica->take_arcs(gives);
    std::ranges::move(
        replica->take_aside([&](const SlotRange& range) { return !stays || is_wanted(range, 0); }),
        std::back_inserter(given));
    if (!stays) {
      handovers.push_back(replica->hand_over(given));
      fenced_.insert(replica->stream());
      dropped.push_back(std::move(replica));
    }
    std::ranges::move(given, std::back_inserter(loose));
  }
  std::erase(replicas_, nullptr);
  return loose;
}

// A copy that was given up may still be here when the arc has been copied to this endpoint once more.
void ReplicatedService::discard_old(const Assignment& assignment, Arcs& arcs,
                                    std::vector<Handover>& handovers) {
  const auto is_newer = [&](const SlotRange& range) {
    return contains(service_.arcs(), range) ||
           std::ranges::any_of(assignment.incoming, [&](const Assignment::Incoming& one) {
             const Replica* const replica = find_replica(one.stream);
             return contains(one.in_sync, range) && replica != nullptr && replica->has(range);
           });
  };
  std::ranges::sort(arcs, [](const auto& one, const auto& other) {
    return std::pair(one->first_slot(), other->stamp()) < std::pair(other->first_slot(), one->stamp());
  });
  Arcs newest;
  Arcs old;
  for (std::unique_ptr<Arc>& arc : arcs) {
    const bool is_first = newest.empty() || newest.back()->first_slot() != arc->first_slot();
    (is_first && !is_newer(range_of(*arc)) ? newest : old).push_back(std::move(arc));
  }
  for (Handover& handover : handovers) {
    std::vector<SlotRange> left;
    for (std::size_t i = 0; i < handover.arcs.size(); ++i) {
      if (std::ranges::any_of(newest, [&](const auto& arc) {
            return arc->first_slot() == handover.arcs[i].first && arc->stamp() == handover.stamps[i];
          })) {
        left.push_back(handover.arcs[i]);
      }
    }
    handover = handover.part(left);
  }
  service_.discard(std::move(old));
  arcs = std::move(newest);
}

void ReplicatedService::update_streams(const Assignment& assignment, std::span<const Handover> handovers) {
  std::vector<StreamId> closed;
  for (const auto& [id, stream] : log_.streams()) {
    if (std::ranges::find(assignment.outgoing, id, &Assignment::Outgoing::stream) ==
        assignment.outgoing.end()) {
      closed.push_back(id);
    }
  }
  for (const StreamId id : closed) {
    log_.close(id);
    released_.erase(id);
  }
  for (const Assignment::Outgoing& wanted : assignment.outgoing) {
    if (log_.find(wanted.stream) == nullptr) {
      // No orders of the past: arcs bring their tables and their budget along.
      log_.open(wanted.stream, wanted.address, wanted.server_key);
    }
    update_stream(*log_.find(wanted.stream), wanted, assignment, handovers);
  }
  // Without streams nothing is appended: what is executed now concerns no stream that is opened later.
  service_.track_executed(log_.has_streams());
}

void ReplicatedService::append_catch_up(StreamId stream, std::uint32_t epoch,
                                        std::span<const SlotRange> joining, const Handover& handover) {
  constexpr std::size_t kBytes = std::size_t{1} << 20U;
  Handover part = handover.part(joining);
  if (part.arcs.empty()) {
    return;
  }
  CatchUpArcs order{.epoch = epoch, .arcs = part.arcs, .stamps = part.stamps};
  std::size_t bytes = 0;
  for (KeptRecord& record : part.records) {
    if (bytes > kBytes) {
      append_order(order, stream);
      order.records.clear();
      bytes = 0;
    }
    bytes += record.bytes();
    order.records.push_back(std::move(record));
  }
  append_order(order, stream);
}

void ReplicatedService::update_stream(ReplicationLog::Stream& stream, const Assignment::Outgoing& wanted,
                                      const Assignment& assignment, std::span<const Handover> handovers) {
  std::vector<SlotRange> in_sync = wanted.in_sync;
  for (const SlotRange& range : wanted.arriving) {
    if (contains(stream.arrived, range)) {
      in_sync.push_back(range);  // the scheduler has not heard of it yet
    }
  }
  std::ranges::sort(in_sync, {}, &SlotRange::first);
  ReleaseArcs released{.epoch = assignment.epoch};
  for (const SlotRange& range : stream.in_sync) {
    if (!contains(in_sync, range)) {
      released.arcs.push_back(range);
    }
  }
  if (!released.arcs.empty()) {
    append_order(released, stream.id);
    if (std::ranges::any_of(released.arcs,
                            [&](const SlotRange& range) { return !contains(assignment.primary, range); })) {
      released_[stream.id] = stream.last();
    }
  }
  JoinArcs joined{.epoch = assignment.epoch};
  std::ranges::copy_if(in_sync, std::back_inserter(joined.arcs),
                       [&](const SlotRange& range) { return !contains(stream.in_sync, range); });
  if (!joined.arcs.empty()) {
    for (const Handover& handover : handovers) {
      append_catch_up(stream.id, assignment.epoch, joined.arcs, handover);
    }
    append_order(joined, stream.id);
  }
  if (stream.copy && !contains(wanted.arriving, stream.copy->range)) {
    abort_copy(stream);
    stream.copy.reset();
  }
  std::erase_if(stream.arrived, [&](const SlotRange& range) { return !contains(wanted.arriving, range); });
  in_sync.reserve(in_sync.size() + 1);  // for the arc that arrives
  stream.arrived.reserve(stream.arrived.size() + 1);
  stream.in_sync = std::move(in_sync);
  for (const SlotRange& range : wanted.arriving) {
    if (!stream.copy && !contains(stream.in_sync, range)) {
      stream.copy = ReplicationLog::Copy{.range = range};
    }
  }
}

void ReplicatedService::abort_copy(ReplicationLog::Stream& stream) {
  if (stream.copy->has_begun) {
    append_order(AbortCopy{}, stream.id);
  }
  stream.copy = ReplicationLog::Copy{.range = stream.copy->range, .was_delayed = stream.copy->was_delayed};
}

// A save and a copy cannot have a snapshot of the same rows at the same time. Each copy is delayed by one save at most: otherwise
// frequent saves would keep slots from getting their copies, or from moving, for ever.
bool ReplicatedService::admit_save() noexcept {
  bool admits = true;
  for (auto& [id, stream] : log_.streams()) {
    if (stream.copy && !stream.stopped() && !stream.copy->is_taken()) {
      admits = admits && !stream.copy->was_delayed;
    }
  }
  for (auto& [id, stream] : log_.streams()) {
    if (stream.copy && !stream.copy->is_taken()) {
      (admits ? stream.copy->was_delayed : stream.copy->is_awaited) = true;
    }
  }
  return admits;
}

bool ReplicatedService::use_idle_time() noexcept {
  const std::lock_guard lock(mutex_);
  const bool waits = std::ranges::any_of(log_.streams(), [](const auto& one) {
    const ReplicationLog::Stream& stream = one.second;
    return stream.copy && !stream.stopped() && stream.copy->pieces.empty() &&
           (stream.copy->can_take() || !stream.copy->has_begun);
  });
  return waits && copy_arcs(true) != 0;
}

std::size_t ReplicatedService::copy_arcs(bool is_idle) noexcept {
  constexpr double kBurstSeconds = 0.05;
  constexpr Milliseconds kPauseMs = 5;
  // While requests come, pieces are taken for about half of the time, and requests wait for one of these, or for one slot.
  constexpr std::size_t kTakeBytes = std::size_t{512} << 10U;
  constexpr Milliseconds kTakeMs = 2;
  copy_due_ = ReplicationLog::kNever;
  const Milliseconds now = log_.now();
  const double rate = static_cast<double>(copy_rate_);
  copy_allowed_ =
      std::min(copy_allowed_ + rate * static_cast<double>(now - copied_) / 1e3, kBurstSeconds * rate);
  copied_ = now;
  const bool takes = is_idle || now >= take_at_;
  std::size_t taken = 0;
  for (auto& [id, stream] : log_.streams()) {
    if (!stream.copy || stream.stopped() || stream.copy->end_sequence != 0) {
      continue;
    }
    ReplicationLog::Copy& copy = *stream.copy;
    try {
      if (copy.source != nullptr && copy.source->cancelled()) {
        abort_copy(stream);
      }
      if (!copy.has_begun) {
        log_.begin_copy(stream, service_.begin_copy(copy.range));
      }
      if (takes && taken < kTakeBytes) {
        taken += ReplicationLog::take_pieces(copy, kTakeBytes - taken);
      }
      const bool is_unlimited =
          copy_rate_ == 0 || copy.is_awaited || copy.kept_bytes > ReplicationLog::kManyKeptBytes;
      const auto allowed = is_unlimited ? std::numeric_limits<std::uint64_t>::max()
                                        : static_cast<std::uint64_t>(std::max(copy_allowed_, 0.0));
      copy_allowed_ -= static_cast<double>(log_.append_chunks(stream, allowed));
    } catch (const SnapshotLostError&) {
      copy.source->cancel();
      copy.was_delayed = false;  // a save does not wait for another attempt, which may fail too
    } catch (const std::exception&) {
      // No memory, or a table is being saved or loaded: later.
    }
    if (copy.end_sequence == 0) {
      copy_due_ = std::min(copy_due_, now + (copy.can_take() ? kTakeMs : kPauseMs));
    }
  }
  if (taken != 0) {
    take_at_ = now + kTakeMs;
  }
  return taken;
}

}  // namespace shoal

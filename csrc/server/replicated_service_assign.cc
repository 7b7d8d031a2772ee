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

void ReplicatedService::join_expected(StreamId stream) {
  const std::lock_guard lock(mutex_);
  replica_of(stream).join_expected();
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
  Arcs loose;  // on their way
  const auto take = [&](std::span<const SlotRange> wanted) {
    Arcs arcs;
    for (std::unique_ptr<Arc>& arc : loose) {
      if (contains(wanted, {arc->first_slot(), arc->end_slot()})) {
        arcs.push_back(std::move(arc));
      }
    }
    std::erase(loose, nullptr);
    return arcs;
  };
  const auto listed = [&](StreamId stream) {
    const auto found = std::ranges::find(assignment.incoming, stream, &Assignment::Incoming::stream);
    return found == assignment.incoming.end() ? nullptr : &*found;
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
    const bool stays = listed(replica->stream()) != nullptr;
    std::vector<SlotRange> gives;
    for (const SlotRange& range : replica->service().arcs()) {
      if (is_wanted(range, replica->stream())) {
        gives.push_back(range);
      }
    }
    std::ranges::move(replica->service().take_arcs(gives), std::back_inserter(loose));
    std::ranges::move(
        replica->take_aside([&](const SlotRange& range) { return !stays || is_wanted(range, 0); }),
        std::back_inserter(loose));
    if (!stays) {
      fenced_.insert(replica->stream());
      dropped.push_back(std::move(replica));
    }
  }
  std::erase(replicas_, nullptr);
  // Deferred reads of slots that leave are answered before their arcs leave.
  std::vector<SlotRange> leaves;
  for (const SlotRange& range : service_.arcs()) {
    if (!contains(assignment.primary, range)) {
      leaves.push_back(range);
    }
  }
  Arcs promoted = take(assignment.primary);
  for (const auto& arc : promoted) {
    arc->end_saves();  // a save fails with its server
  }
  service_.adopt(std::move(promoted));
  service_.set_map(assignment.epoch, assignment.primary);
  std::ranges::move(service_.take_arcs(leaves), std::back_inserter(loose));
  for (const Assignment::Incoming& one : assignment.incoming) {
    Replica* replica = find_replica(one.stream);
    if (replica == nullptr) {
      replica = replicas_.emplace_back(std::make_unique<Replica>(one.stream, Slots(slots()), limits_)).get();
    }
    replica->expect(take(one.in_sync), one.in_sync);
  }
  service_.discard(std::move(loose));
  update_streams(assignment);
  if (!leaves.empty()) {
    retired_at_ = log_.position();
  }
  copy_rate_ = assignment.copy_rate;
  assigned_ = assignment.epoch;
  targets_version_.fetch_add(1, std::memory_order_acq_rel);
  wake();
}

void ReplicatedService::update_streams(const Assignment& assignment) {
  std::vector<StreamId> closed;
  for (const auto& [id, stream] : log_.streams()) {
    if (std::ranges::find(assignment.outgoing, id, &Assignment::Outgoing::stream) ==
        assignment.outgoing.end()) {
      closed.push_back(id);
    }
  }
  for (const StreamId id : closed) {
    log_.close(id);
  }
  for (const Assignment::Outgoing& wanted : assignment.outgoing) {
    if (ReplicationLog::Stream* const stream = log_.find(wanted.stream); stream != nullptr) {
      update_stream(*stream, wanted);
    } else {
      open_stream(wanted);
    }
  }
  if (log_.has_streams()) {
    service_.track_executed();
  }
}

void ReplicatedService::open_stream(const Assignment::Outgoing& wanted) {
  log_.open(wanted.stream, wanted.address, wanted.server_key);
  // No orders of the past: arcs bring their tables and their budget along.
  update_stream(*log_.find(wanted.stream), wanted);
}

void ReplicatedService::update_stream(ReplicationLog::Stream& stream, const Assignment::Outgoing& wanted) {
  std::vector<SlotRange> in_sync = wanted.in_sync;
  for (const SlotRange& range : wanted.arriving) {
    if (contains(stream.arrived, range)) {
      in_sync.push_back(range);  // the scheduler has not heard of it yet
    }
  }
  std::ranges::sort(in_sync, {}, &SlotRange::first);
  ReleaseArcs released;
  for (const SlotRange& range : stream.in_sync) {
    if (!contains(in_sync, range)) {
      released.arcs.push_back(range);
    }
  }
  if (!released.arcs.empty()) {
    append_order(released, stream.id);
  }
  JoinArcs joined;
  std::ranges::copy_if(in_sync, std::back_inserter(joined.arcs),
                       [&](const SlotRange& range) { return !contains(stream.in_sync, range); });
  if (!joined.arcs.empty()) {
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
  stream.copy = ReplicationLog::Copy{.range = stream.copy->range};
}

void ReplicatedService::copy_arcs() noexcept {
  constexpr double kBurstSeconds = 0.05;
  constexpr Milliseconds kPauseMs = 5;
  // Pieces are taken for about half of the time, and requests wait for one of these, or for one slot.
  constexpr std::size_t kTakeBytes = std::size_t{512} << 10U;
  constexpr Milliseconds kTakeMs = 2;
  copy_due_ = ReplicationLog::kNever;
  const Milliseconds now = log_.now();
  const double rate = static_cast<double>(copy_rate_);
  copy_allowed_ =
      std::min(copy_allowed_ + rate * static_cast<double>(now - copied_) / 1e3, kBurstSeconds * rate);
  copied_ = now;
  const bool takes = now >= take_at_;
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
      const bool is_unlimited = copy_rate_ == 0 || copy.kept_bytes > ReplicationLog::kManyKeptBytes;
      const auto allowed = is_unlimited ? std::numeric_limits<std::uint64_t>::max()
                                        : static_cast<std::uint64_t>(std::max(copy_allowed_, 0.0));
      copy_allowed_ -= static_cast<double>(log_.append_chunks(stream, allowed));
    } catch (const SnapshotLostError&) {
      copy.source->cancel();
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
}

}  // namespace shoal

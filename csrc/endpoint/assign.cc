// Endpoint: assignments, and the copies of arcs that they begin.

#include <algorithm>
#include <exception>
#include <iterator>
#include <limits>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/units.h"
#include "endpoint/endpoint.h"

namespace shoal {

namespace {

std::string name_of(const SlotRange& range) {
  return "[" + std::to_string(range.first) + ", " + std::to_string(range.end) + ")";
}

}  // namespace

Follower* Endpoint::find_follower(StreamId stream) noexcept {
  const auto found =
      std::ranges::find_if(followers_, [&](const auto& follower) { return follower->stream() == stream; });
  return found == followers_.end() ? nullptr : found->get();
}

const Follower& Endpoint::follower_of(StreamId stream) const {
  const auto found =
      std::ranges::find_if(followers_, [&](const auto& follower) { return follower->stream() == stream; });
  SHOAL_CHECK(found != followers_.end(),
              "this endpoint holds no follower of stream " + std::to_string(stream));
  return **found;
}

ArcResult Endpoint::apply_to_follower(StreamId stream, std::span<const SlotRange> arcs, const Order& order) {
  const Turn turn(*this);
  follower_of(stream);
  return find_follower(stream)->act_on(arcs, order);
}

// A follower that has diverged gives no arcs.
void Endpoint::check(const Assignment& assignment) const {
  for (const auto& follower : followers_) {
    if (follower->fault().empty()) {
      continue;
    }
    for (const SlotRange& range : follower->arcs().ranges()) {
      const bool moves = contains(assignment.primary, range) ||
                         std::ranges::any_of(assignment.incoming, [&](const Assignment::Incoming& one) {
                           return one.stream != follower->stream() && contains(one.in_sync, range);
                         });
      SHOAL_CHECK(!moves,
                  "the replica of the slots " + name_of(range) + " has diverged: " + follower->fault());
    }
  }
}

void Endpoint::assign(const Assignment& assignment) {
  std::vector<std::unique_ptr<Follower>> dropped;  // destroyed without the mutex
  const Turn turn(*this);
  if (assignment.epoch <= assigned_) {
    return;
  }
  check(assignment);
  take_from_followers(assignment, dropped);
  // Deferred reads of slots that leave are answered before their arcs leave.
  std::vector<SlotRange> leaves;
  for (const SlotRange& range : service_.arcs()) {
    if (!contains(assignment.primary, range)) {
      leaves.push_back(range);
    }
  }
  const auto first = std::partition(moving_.arcs.begin(), moving_.arcs.end(), [&](const auto& arc) {
    return !contains(assignment.primary, arc->range());
  });
  const std::span promoted(first, moving_.arcs.end());
  std::uint64_t stamp = std::uint64_t{assignment.epoch} << ReplicationLog::kEpochShift;
  for (const auto& arc : promoted) {
    arc->apply(EndSavesOp{});  // a save fails with its server
    stamp = std::max(stamp, arc->stamp() + 1);
  }
  log_.advance_stamp(stamp);
  service_.adopt(promoted);
  std::erase(moving_.arcs, nullptr);
  service_.set_map(assignment.epoch, assignment.primary);
  const std::size_t before = moving_.arcs.size();
  service_.take_arcs(leaves, moving_.arcs);
  for (const auto& arc : std::span(moving_.arcs).subspan(before)) {
    arc->set_stamp(log_.stamp());
  }
  for (const Assignment::Incoming& one : assignment.incoming) {
    Follower* follower = find_follower(one.stream);
    if (follower == nullptr) {
      follower = followers_
                     .emplace_back(
                         std::make_unique<Follower>(one.stream, slots_, limits_.request_bytes, limits_.tier))
                     .get();
    }
    follower->expect(moving_.arcs, one.in_sync, assignment.epoch, moving_.handovers);
  }
  update_streams(assignment, moving_.handovers);
  service_.discard(std::exchange(moving_.arcs, {}));
  moving_.handovers.clear();
  copy_rate_ = assignment.copy_rate;
  assigned_ = assignment.epoch;
  targets_version_.fetch_add(1, std::memory_order_acq_rel);
  wake();
}

// An arc may have several copies here: one that was given up may still be here when it has been copied to
// this endpoint once more. The newest is needed; of the others, what their replicas have kept is not.
void Endpoint::take_from_followers(const Assignment& assignment,
                                   std::vector<std::unique_ptr<Follower>>& dropped) {
  const auto listed = [&](StreamId stream) {
    return std::ranges::find(assignment.incoming, stream, &Assignment::Incoming::stream) !=
           assignment.incoming.end();
  };
  // Whether an arc of the follower of a stream is wanted elsewhere.
  const auto is_wanted = [&](const SlotRange& range, StreamId from) {
    return contains(assignment.primary, range) ||
           std::ranges::any_of(assignment.incoming, [&](const Assignment::Incoming& one) {
             return one.stream != from && contains(one.in_sync, range);
           });
  };
  // Replicas of streams that are not listed are fenced, and give all arcs. The others give what is wanted
  // elsewhere; the rest stays, also what the assignment does not list: it may have arrived since.
  const auto gives = [&](const Follower& follower, const SlotRange& range) {
    return !listed(follower.stream()) || is_wanted(range, follower.stream());
  };
  const auto gives_aside = [&](const Follower& follower, const SlotRange& range) {
    return !listed(follower.stream()) || is_wanted(range, 0);
  };
  // Stamps of the newest copies, by first slot.
  std::map<std::size_t, std::uint64_t> newest;
  const auto found = [&](const SlotRange& range, std::uint64_t stamp) {
    auto& known = newest.try_emplace(range.first, stamp).first->second;
    known = std::max(known, stamp);
  };
  for (const auto& arc : moving_.arcs) {
    found(arc->range(), arc->stamp());
  }
  std::size_t arcs = moving_.arcs.size() + service_.arcs().size();
  std::vector<std::vector<SlotRange>> given;  // by each follower, of those that execute records
  for (const auto& follower : followers_) {
    given.emplace_back();
    const std::size_t executing = follower->arcs().ranges().size();
    const auto stamps = follower->stamps();
    for (std::size_t i = 0; i < stamps.size(); ++i) {
      const auto& [range, stamp] = stamps[i];
      const bool is_given = i < executing ? gives(*follower, range) : gives_aside(*follower, range);
      if (is_given) {
        found(range, stamp);
      }
      if (is_given && i < executing) {
        given.back().push_back(range);
      }
    }
    arcs += stamps.size();
  }
  // What executes records here stays, and is newer.
  std::erase_if(newest, [&](const auto& one) {
    mutex_.assert_held();
    const auto is_here = [&](const SlotRange& range) { return range.first == one.first; };
    return std::ranges::any_of(service_.arcs(), is_here) ||
           std::ranges::any_of(followers_, [&](const auto& follower) {
             return std::ranges::any_of(follower->arcs().ranges(), [&](const SlotRange& range) {
               return is_here(range) && !gives(*follower, range);
             });
           });
  });
  std::vector<Handover> handovers;
  for (const auto& follower : followers_) {
    if (!listed(follower->stream())) {
      handovers.push_back(follower->hand_over());
      std::vector<SlotRange> needed;
      for (std::size_t i = 0; i < handovers.back().arcs.size(); ++i) {
        const auto known = newest.find(handovers.back().arcs[i].first);
        if (known != newest.end() && known->second == handovers.back().stamps[i]) {
          needed.push_back(handovers.back().arcs[i]);
        }
      }
      handovers.back() = handovers.back().part(needed);
      fenced_.insert(follower->stream());
    }
  }
  std::vector<std::unique_ptr<Arc>> old;
  old.reserve(arcs);
  dropped.reserve(followers_.size());
  moving_.arcs.reserve(arcs);
  moving_.handovers.reserve(moving_.handovers.size() + handovers.size());
  // Nothing below fails.
  std::ranges::move(handovers, std::back_inserter(moving_.handovers));
  for (std::size_t i = 0; i < followers_.size(); ++i) {
    Follower& follower = *followers_[i];
    follower.take_arcs(given[i], moving_.arcs);
    follower.take_aside([&](const SlotRange& range) { return gives_aside(follower, range); }, moving_.arcs);
    if (!listed(follower.stream())) {
      dropped.push_back(std::move(followers_[i]));
    }
  }
  std::erase(followers_, nullptr);
  for (std::unique_ptr<Arc>& arc : moving_.arcs) {
    const auto known = newest.find(arc->first_slot());
    if (known == newest.end() || known->second != arc->stamp()) {
      old.push_back(std::move(arc));
    } else {
      newest.erase(known);  // another copy of the same stamp is not needed
    }
  }
  std::erase(moving_.arcs, nullptr);
  service_.discard(std::move(old));
}

void Endpoint::update_streams(const Assignment& assignment, std::span<const Handover> handovers) {
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
  }
  try {
    for (const Assignment::Outgoing& wanted : assignment.outgoing) {
      update_stream(*log_.find(wanted.stream), wanted, assignment, handovers);
    }
  } catch (const std::bad_alloc&) {
    log_.stop("there was no memory to log an assignment");  // its arcs get other copies
  }
  // Without streams nothing is appended: what is executed now concerns no stream that is opened later.
  service_.track_released(log_.has_streams());
}

void Endpoint::append_catch_up(StreamId stream, std::uint32_t epoch, std::span<const SlotRange> joining,
                               const Handover& handover) {
  constexpr std::size_t kBytes = MiB;
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

void Endpoint::update_stream(ReplicationLog::Stream& stream, const Assignment::Outgoing& wanted,
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

void Endpoint::abort_copy(ReplicationLog::Stream& stream) {
  if (stream.copy->has_begun) {
    append_order(AbortCopy{}, stream.id);
  }
  stream.copy = ReplicationLog::Copy{.range = stream.copy->range, .was_delayed = stream.copy->was_delayed};
}

// A save and a copy cannot have a snapshot of the same rows at the same time. Each copy is delayed by one
// save at most: otherwise frequent saves would keep slots from getting their copies, or from moving, for
// ever.
bool Endpoint::admit_save() noexcept {
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

bool Endpoint::use_idle_time() noexcept {
  const Turn turn(*this);
  const bool waits = std::ranges::any_of(log_.streams(), [](const auto& one) {
    const ReplicationLog::Stream& stream = one.second;
    return stream.copy && !stream.stopped() && stream.copy->pieces.empty() &&
           (stream.copy->can_take() || !stream.copy->has_begun);
  });
  return waits && copy_arcs(true) != 0;
}

std::size_t Endpoint::copy_arcs(bool is_idle) noexcept {
  constexpr double kBurstSeconds = 0.05;
  constexpr Milliseconds kPauseMs = 5;
  // While requests come, pieces are taken for about half of the time, and requests wait for one of these, or
  // for one slot.
  constexpr std::size_t kTakeBytes = 512 * KiB;
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

// Copies of arcs arrive in the stream, piece by piece. The records that follow COPY_BEGIN are executed as
// usual, and kept for the arc that is arriving. When all pieces are restored, the arc gets a Service of its
// own and executes the kept records there, some per turn; once none is left it joins the others, and is in
// sync.
//
// Records that other backups have too are kept until all have acknowledged them. When their primary has died,
// the new one sends them to the other copies (CatchUpArcs), which execute what they lack, arc by arc, before
// the arcs join. Those keep them as well, until all copies have joined: the new primary may die before. A
// copy has arrived only when all that was sent before it began is acknowledged by all backups, so that no
// other copy of the arc lacks records that this one has not kept.

#include "replica/follower.h"

#include <algorithm>
#include <array>
#include <exception>
#include <iterator>
#include <stdexcept>
#include <utility>
#include <variant>
#include <vector>

#include "base/byte_stream.h"
#include "base/check.h"
#include "base/units.h"
#include "replica/replication_log.h"

namespace shoal {

using wire::Record;
using wire::RecordHeader;
using wire::Status;

namespace {

// Of a piece that arrives in chunks, before they do: its length may be damaged.
constexpr std::uint64_t kReservedBytes = 64 * MiB;

// OK and WRONG_EPOCH differ in which slots are elsewhere, and that is not the same for both.
Status comparable(Status status) noexcept { return status == Status::kWrongEpoch ? Status::kOk : status; }

KeptRecord copy_of(const RecordHeader& record, const wire::Decoded& message) {
  KeptRecord kept{
      .stamp = record.stamp, .is_request = record.kind == Record::kRequest, .end_slot = record.end_slot};
  if (kept.is_request) {
    for (const wire::Frame frame : message.nested) {
      kept.frames.emplace_back(frame.begin(), frame.end());
    }
  } else {
    kept.frames.emplace_back(message.values.begin(), message.values.end());
  }
  return kept;
}

// The greatest stamp of an epoch.
std::uint64_t last_of(std::uint32_t epoch) noexcept {
  return ((std::uint64_t{epoch} + 1) << ReplicationLog::kEpochShift) - 1;
}

}  // namespace

void Follower::handle(std::string_view peer, const wire::Decoded& message) noexcept {
  const RecordHeader record = RecordHeader::of(message.header);
  try {
    peer_ = peer;
    is_due_ = true;
    if (!fault_.empty()) {
      return;
    }
    if (record.kind == Record::kAlive) {
      gap_ |= record.position > position_;
      if (record.position == position_) {
        note_stamp(record, message);
      }
    } else if (record.position == position_ + 1) {
      gap_ = !execute(record, message);
      if (!gap_) {
        ++position_;
        note_stamp(record, message);
      }
    } else {
      gap_ |= record.position > position_;
    }
  } catch (const std::exception& error) {
    try {
      fault_ = "record " + std::to_string(record.position) + " failed: " + error.what();
    } catch (const std::bad_alloc&) {
      fault_ = "no memory";  // short enough to need none
    }
  }
}

void Follower::note_stamp(const RecordHeader& record, const wire::Decoded& message) {
  if (record.stamp == 0) {
    return;
  }
  const bool is_copy = record.kind == Record::kCopyBegin;  // whose stamp is that of the next record
  executed_ = std::max(executed_, record.stamp - (is_copy ? 1 : 0));
  floor_ = std::max(floor_, record.floor);
  while (!kept_.empty() && kept_.front().stamp <= floor_) {
    kept_.pop_front();
  }
  std::erase_if(inherited_, [&](const Inherited& one) { return one.until <= floor_; });
  if (record.is_shared) {
    kept_.push_back(copy_of(record, message));
  }
}

bool Follower::execute(const RecordHeader& record, const wire::Decoded& message) {
  switch (record.kind) {
    case Record::kRequest:
      if (!replay(record, message)) {
        return false;
      }
      keep(record, message);
      return true;
    case Record::kOrder: {
      const Order order = decode_order(message.values);
      if (!is_of_stream(order)) {
        keep(record, message);
      }
      return execute_order(order, record.stamp);
    }
    case Record::kCopyBegin:
      begin_copy(message.values, record.stamp);
      return true;
    case Record::kCopyChunk:
      add_chunk(message.values);
      return true;
    case Record::kCopyEnd:
      restore_copy();
      return true;
    case Record::kAlive:
      break;
  }
  return true;
}

bool Follower::execute_order(const Order& order, std::uint64_t stamp) {
  if (const auto* const release = std::get_if<ReleaseArcs>(&order); release != nullptr) {
    this->release(*release, stamp);
  } else if (const auto* const joined = std::get_if<JoinArcs>(&order); joined != nullptr) {
    if (!are_here(joined->arcs, joined->epoch)) {
      return false;
    }
    join(joined->arcs, stamp);
  } else if (const auto* const behind = std::get_if<CatchUpArcs>(&order); behind != nullptr) {
    return catch_up(*behind, stamp);
  } else if (std::holds_alternative<AbortCopy>(order)) {
    abort_copy(stamp);
  } else {
    shoal::execute(order, arcs_);
  }
  return true;
}

bool Follower::replay(const RecordHeader& record, const wire::Decoded& message) {
  const Status expected{static_cast<std::uint8_t>(record.status)};
  const wire::Limits limits{.payload_bytes = request_bytes_, .replies = false};
  if (wire::decode(message.nested, limits, decoded_)) {
    return false;  // damaged on its way: nothing was executed
  }
  if (arcs_.arcs().empty()) {  // the first arc is arriving
    return true;
  }
  const Status status = shoal::replay(decoded_, record.end_slot, arcs_, cut_);
  if (record.status != RecordHeader::kNotCompared && comparable(status) != comparable(expected)) {
    throw std::runtime_error("its status is \"" + std::string(wire::name(status)) +
                             "\", the primary's is \"" + std::string(wire::name(expected)) + "\"");
  }
  if (record.applied != 0) {
    const std::uint32_t applied = arcs_.applied_sum(arcs_.ranges()) + 1;
    if (applied != record.applied) {
      throw std::runtime_error("the clocks applied add up to " + std::to_string(applied - 1) +
                               ", the primary's to " + std::to_string(record.applied - 1));
    }
  }
  return true;
}

std::optional<Acknowledgement> Follower::acknowledgement() const {
  if (!is_due_) {
    return std::nullopt;
  }
  const bool has_arrived = arrived_stamp_ <= floor_ + 1;
  return Acknowledgement{
      .peer = peer_,
      .status = !fault_.empty() ? Status::kInternal : (gap_ ? Status::kRetry : Status::kOk),
      .position = position_,
      .arrived = has_arrived ? arrived_ : 0,
      .text = fault_};
}

void Follower::adopt(std::span<std::unique_ptr<Arc>> arcs) {
  arcs_.adopt(arcs);
  arcs_.serve_all();
}

bool Follower::has_aside(const SlotRange& range) const {
  return std::ranges::any_of(aside_, [&](const auto& arc) { return arc->first_slot() == range.first; });
}

// False: they come with an assignment that has not arrived.
bool Follower::are_here(std::span<const SlotRange> ranges, std::uint32_t epoch) const {
  for (const SlotRange& range : ranges) {
    if (!has(range) && !has_aside(range)) {
      SHOAL_CHECK(epoch_ < epoch, "it has no arc of the slots from " + std::to_string(range.first) + " on");
      return false;
    }
  }
  return true;
}

void Follower::take_arcs(std::span<const SlotRange> ranges, std::vector<std::unique_ptr<Arc>>& to) {
  const std::size_t before = to.size();
  arcs_.take(ranges, to);
  for (const auto& arc : std::span(to).subspan(before)) {
    arc->set_stamp(executed_);
  }
}

void Follower::expect(std::vector<std::unique_ptr<Arc>>& arcs, std::span<const SlotRange> in_sync,
                      std::uint32_t epoch, std::span<const Handover> handovers) {
  std::vector<SlotRange> wanted(in_sync.begin(), in_sync.end());
  const auto is_given = [&](const SlotRange& range) {
    return std::ranges::any_of(arcs, [&](const auto& arc) { return arc->first_slot() == range.first; });
  };
  const auto is_spare = [&](const SlotRange& range) {
    const auto found = intervals_.find(range.first);
    return !contains(in_sync_, range) && found != intervals_.end() &&
           found->second.back().last <= last_of(epoch);
  };
  std::vector<SlotRange> all = arcs_.ranges();
  std::vector<SlotRange> made;
  for (const SlotRange& range : wanted) {
    if (!has(range) && !has_aside(range) && !is_given(range) && fault_.empty()) {
      made.push_back(range);
    }
  }
  std::ranges::copy(made, std::back_inserter(all));
  std::ranges::sort(all, {}, &SlotRange::first);
  std::vector<Inherited> inherited;
  // If an assignment that failed later is carried out again, they are here.
  for (const Handover& handover : epoch != epoch_ ? handovers : std::span<const Handover>()) {
    Handover part = handover.part(wanted);
    if (!part.records.empty()) {
      inherited.push_back({.arcs = std::move(part.arcs), .records = std::move(part.records)});
    }
  }
  inherited_.reserve(inherited_.size() + inherited.size());
  aside_.reserve(aside_.size() + arcs.size());
  for (const SlotRange& range : made) {
    begin_interval(range.first, 0);
  }
  arcs_.serve(all);
  // Nothing below fails.
  std::ranges::move(inherited, std::back_inserter(inherited_));
  in_sync_ = std::move(wanted);
  epoch_ = epoch;
  const std::size_t before = aside_.size();
  for (std::unique_ptr<Arc>& arc : arcs) {
    if (contains(in_sync_, arc->range())) {
      aside_.push_back(std::move(arc));
    }
  }
  std::erase(arcs, nullptr);
  for (std::size_t i = 0; i < before; ++i) {
    if (is_spare({aside_[i]->first_slot(), aside_[i]->end_slot()})) {
      arcs.push_back(std::move(aside_[i]));
    }
  }
  std::erase(aside_, nullptr);
}

void Follower::join(std::span<const SlotRange> ranges, std::uint64_t stamp) {
  const auto aside = [&](const SlotRange& range) { return contains(ranges, range) && !has(range); };
  for (const SlotRange& range : ranges) {
    if (!has(range)) {
      begin_interval(range.first, stamp);
    }
  }
  std::vector<std::unique_ptr<Arc>> joining;
  take_aside(aside, joining);
  for (const auto& arc : joining) {
    arc->apply(EndSavesOp{});  // of the former primary, as in the arc that has become primary
  }
  adopt(joining);
  for (Inherited& one : inherited_) {
    if (one.until == kNever &&
        std::ranges::all_of(one.arcs, [&](const SlotRange& range) { return has(range); })) {
      one.until = stamp;
    }
  }
}

void Follower::release(const ReleaseArcs& order, std::uint64_t stamp) {
  std::vector<std::unique_ptr<Arc>> arcs;
  take_arcs(order.arcs, arcs);
  for (std::unique_ptr<Arc>& arc : arcs) {
    arc->set_stamp(stamp);  // it has all that its primary has
    end_interval(arc->first_slot(), stamp);
    const SlotRange range = arc->range();
    if (order.epoch > epoch_ || contains(in_sync_, range)) {
      aside_.push_back(std::move(arc));
    }
  }
  std::erase(arcs, nullptr);
  arcs_.discard(std::move(arcs));  // its newest assignment is without them
}

void Follower::begin_interval(std::size_t first_slot, std::uint64_t stamp) {
  std::vector<Interval>& all = intervals_[first_slot];
  if (!all.empty() && all.back().first == stamp && all.back().last == kNever) {
    return;
  }
  std::erase_if(all, [&](const Interval& one) { return one.last <= floor_; });
  all.push_back({.first = stamp});
}

void Follower::end_interval(std::size_t first_slot, std::uint64_t stamp) {
  const auto found = intervals_.find(first_slot);
  if (found != intervals_.end() && !found->second.empty()) {
    found->second.back().last = std::min(found->second.back().last, stamp);
  }
}

// --- copies -----------------------------------------------------------------------------------------------

void Follower::begin_copy(std::span<const std::byte> head, std::uint64_t stamp) {
  ByteReader from(head, "the head of a copy");
  Copy copy;
  copy.restorer = ArcRestorer(tier_);
  copy.stamp = stamp;
  copy.range.first = from.take_between<std::uint64_t>("the first slot", 0, slots_.count() - 1);
  copy.range.end = from.take_between<std::uint64_t>("the end", copy.range.first + 1, slots_.count());
  copy.total = from.take<std::uint64_t>("the bytes");
  from.done();
  arrived_ = 0;
  std::erase_if(aside_, [&](const auto& arc) { return arc->first_slot() == copy.range.first; });
  arriving_ = std::move(copy);
}

// Its primary has not heard that the copy has arrived, and sends the arc nothing from now on.
void Follower::abort_copy(std::uint64_t stamp) {
  arriving_.reset();
  if (arrived_ == 0) {
    return;
  }
  const std::size_t first = arrived_ - 1;
  arrived_ = 0;
  std::vector<SlotRange> ranges = arcs_.ranges();
  std::erase_if(ranges, [&](const SlotRange& range) { return range.first != first; });
  end_interval(first, stamp);
  std::vector<std::unique_ptr<Arc>> dropped;
  arcs_.take(ranges, dropped);
  arcs_.discard(std::move(dropped));
}

// A chunk belongs to one piece.
void Follower::add_chunk(std::span<const std::byte> chunk) {
  SHOAL_CHECK(arriving_ && arriving_->arcs == nullptr, "no copy has begun");
  Copy& copy = *arriving_;
  copy.bytes += chunk.size();
  std::span<const std::byte> piece = chunk;
  if (!copy.piece.empty()) {
    copy.piece.insert(copy.piece.end(), chunk.begin(), chunk.end());
    piece = copy.piece;
  }
  const std::uint64_t whole = ArcRestorer::piece_bytes(piece);
  SHOAL_CHECK(piece.size() <= whole, "a chunk of the copy continues after its piece");
  if (piece.size() == whole) {
    copy.restorer.add(piece);
    copy.piece.clear();
  } else if (copy.piece.empty()) {
    copy.piece.reserve(std::min<std::uint64_t>(whole, kReservedBytes));
    copy.piece.assign(chunk.begin(), chunk.end());
  }
}

void Follower::restore_copy() {
  SHOAL_CHECK(arriving_ && arriving_->arcs == nullptr, "no copy has begun");
  Copy& copy = *arriving_;
  std::vector<std::unique_ptr<Arc>> arcs;
  arcs.push_back(copy.restorer.finish());
  SHOAL_CHECK(arcs.front()->first_slot() == copy.range.first && arcs.front()->end_slot() == copy.range.end,
              "the copy is of another arc");
  copy.arcs = std::make_unique<ArcGroup>(slots_, workspace_, disposal_, tier_);
  copy.arcs->adopt(arcs);
  copy.arcs->serve_all();
}

void Follower::keep(const RecordHeader& record, const wire::Decoded& message) {
  if (!arriving_) {
    return;
  }
  arriving_->kept.push_back(copy_of(record, message));
  ++arriving_->added;
}

void Follower::execute_kept() {
  constexpr std::size_t kBytes = MiB;
  Copy& copy = *arriving_;
  const std::size_t least = 2 * std::exchange(copy.added, 0) + 1;  // more than are added
  std::size_t bytes = 0;
  for (std::size_t i = 0; (i < least || bytes < kBytes) && !copy.kept.empty(); ++i) {
    const KeptRecord record = std::move(copy.kept.front());
    copy.kept.pop_front();
    bytes += record.bytes();
    shoal::replay(record, *copy.arcs, cut_, decoded_);
  }
  if (copy.kept.empty()) {
    std::vector<std::unique_ptr<Arc>> arcs;
    copy.arcs->take({&copy.range, 1}, arcs);
    adopt(arcs);
    arrived_ = static_cast<std::uint32_t>(copy.range.first + 1);
    arrived_stamp_ = copy.stamp;
    begin_interval(copy.range.first, copy.stamp);
    is_due_ = true;
    arriving_.reset();
  }
}

void Follower::catch_up() noexcept {
  if (!is_behind() || !fault_.empty()) {
    return;
  }
  try {
    execute_kept();
  } catch (const std::exception& error) {
    try {
      fault_ = std::string("the copy of an arc failed: ") + error.what();
    } catch (const std::bad_alloc&) {
      fault_ = "no memory";  // short enough to need none
    }
    is_due_ = true;
  }
}

std::optional<Follower::Arriving> Follower::arriving() const {
  if (!arriving_) {
    return std::nullopt;
  }
  return Arriving{.range = arriving_->range,
                  .bytes = arriving_->bytes,
                  .total = std::max(arriving_->bytes, arriving_->total)};
}

}  // namespace shoal

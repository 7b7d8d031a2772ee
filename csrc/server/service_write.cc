// Service: writes and ticks.

#include <algorithm>
#include <iterator>
#include <limits>
#include <new>
#include <string>
#include <utility>

#include "server/service.h"
#include "server/service_table.h"

namespace shoal {

using wire::Header;
using wire::Status;

namespace {

// A tick names a message of a push by its sequence and the slot of its last row, which is executed last.
constexpr unsigned kSequenceBits = 48;
// How often a change is postponed while a save has no memory for it, after pauses that grow from 20 ms to 1 s; and how often
// a change of all rows is postponed during a save, which would have to preserve every row.
constexpr std::uint32_t kMaxPostponed = 3;
constexpr std::uint32_t kMaxPostponedAll = 16;
constexpr std::uint64_t kSequences = (std::uint64_t{1} << kSequenceBits) - 1;

// Copies an array to the front of `room`, which then begins after it.
template <class T>
std::span<const T> copy_into(std::span<std::byte>& room, std::span<const T> values) {
  const auto copy = room.first(values.size_bytes());
  std::ranges::copy(std::as_bytes(values), copy.begin());
  room = room.subspan(copy.size());
  return {reinterpret_cast<const T*>(copy.data()), values.size()};
}

}  // namespace

DedupWindow& Service::history(std::uint32_t rank) {
  if (rank >= dedup_.size()) {
    dedup_.resize(rank + std::size_t{1});
  }
  if (dedup_[rank] == nullptr) {
    dedup_[rank] = std::make_unique<DedupWindow>(slots_.count());
  }
  return *dedup_[rank];
}

Service::View& Service::view(Table& table, std::uint32_t rank) {
  if (rank >= table.views.size()) {
    table.views.resize(rank + std::size_t{1});
  }
  return table.views[rank];
}

bool Service::check_dim(const Call& call, const Table& table) {
  const std::size_t dim = table.shard->rows().dim();
  if (call.header.dim == dim && call.floats.size() == call.hashes.size() * dim) {
    return true;
  }
  send_text(call, Status::kBadRequest,
            "table " + std::to_string(call.header.table) + " has dim " + std::to_string(dim) + ", got " +
                std::string(wire::name(call.header.dtype)) + " rows of " + std::to_string(call.header.dim));
  return false;
}

// --- ticks ------------------------------------------------------------------------------------------------------

void Service::tick(const Call& call, std::span<const std::uint64_t> sequences,
                   std::span<const std::uint32_t> tables) {
  const Header& header = call.header;
  const std::uint32_t clock = clocks_.clock(header.worker);
  if (header.clock < clock) {
    ++metrics_.duplicates;
    return send(call, Status::kOk);
  }
  if (clock == std::numeric_limits<std::uint32_t>::max()) {
    return send_text(call, Status::kBadRequest, "a job has at most 2^32 - 1 clocks: connect anew");
  }
  if (!check_epoch(call)) {
    return;
  }
  DedupWindow& dedup = history(header.worker);
  const bool all_here = std::ranges::all_of(sequences, [&](std::uint64_t number) {
    const std::uint64_t sequence = number & kSequences;
    const std::size_t slot = number >> kSequenceBits;  // plus one; 0 for any
    return slot <= slots_.count() &&
           (slot == 0 ? dedup.calls().contains(sequence) : dedup.slot(slot - 1).contains(sequence));
  });
  if (header.clock > clock || !all_here) {
    return send(call, Status::kRetry);
  }
  if (mode_ == Mode::kBsp) {
    if (clock > applied_ && pending_.bytes() - pending_.bytes(applied_) > limits_.pending_bytes / 2) {
      return send(call, Status::kOverloaded);
    }
  }
  end_clock(header.worker, tables);
  send(call, Status::kOk);
}

void Service::end_clock(std::uint32_t rank, std::span<const std::uint32_t> tables) {
  if (mode_ == Mode::kBsp) {
    if (rank >= tick_tables_.size()) {
      tick_tables_.resize(rank + std::size_t{1});
    }
    std::vector<std::uint32_t> named;  // without unknown tables, whose number is unbounded
    std::ranges::copy_if(tables, std::back_inserter(named),
                         [&](std::uint32_t id) { return tables_.contains(id); });
    pending_.tick(clocks_.clock(rank), named);
    tick_tables_[rank] = std::move(named);
  }
  clocks_.tick(rank);
}

// --- once for every slot ----------------------------------------------------------------------------------------

std::optional<Service::Part> Service::fresh_part(const Call& call, std::size_t dim, DedupWindow& dedup) {
  const std::uint64_t sequence = call.header.sequence;
  std::size_t place = 0;
  const auto hashes = own(call.hashes, place);
  if (hashes.empty()) {
    // A call without keys, or all its slots are elsewhere.
    if (refused_.empty() && !dedup.calls().contains(sequence)) {
      return Part{cut(hashes), {}, {}};
    }
    metrics_.duplicates += refused_.empty() ? 1U : 0U;
    return std::nullopt;
  }
  const SlotSlices slices = cut(hashes);
  const std::size_t first = index_of(slots_.of(hashes.front()));
  const std::size_t last = index_of(slots_.of(hashes.back()));
  std::size_t done = 0;  // rows
  for (std::size_t s = first; s <= last; ++s) {
    const std::size_t rows = slices.offsets[s + 1] - slices.offsets[s];
    done += rows != 0 && dedup.slot(s).contains(sequence) ? rows : 0;
  }
  const DedupWindow::PartialPush* const partial = dedup.partial_push(sequence);
  const auto values = call.floats.subspan(place * dim, hashes.size() * dim);
  const auto counts = call.counts.empty() ? call.counts : call.counts.subspan(place, hashes.size());
  if (done == 0 && partial == nullptr) {
    return Part{slices, values, counts};
  }
  ++metrics_.duplicates;
  if (done == hashes.size()) {
    return std::nullopt;
  }
  const std::span<std::uint64_t> some = some_hashes_.claim(hashes.size());
  const std::span<float> some_values = some_values_.claim(hashes.size() * dim);
  const std::span<std::uint32_t> some_counts = some_counts_.claim(counts.size());
  std::size_t count = 0;
  for (std::size_t s = first; s <= last; ++s) {
    if (dedup.slot(s).contains(sequence)) {
      continue;
    }
    for (std::size_t i = slices.offsets[s]; i < slices.offsets[s + 1]; ++i) {
      if (partial != nullptr && index_of(slots_.of(partial->next)) == s && hashes[i] < partial->next) {
        continue;
      }
      some[count] = hashes[i];
      std::copy_n(values.begin() + static_cast<std::ptrdiff_t>(i * dim), dim,
                  some_values.begin() + static_cast<std::ptrdiff_t>(count * dim));
      if (!counts.empty()) {
        some_counts[count] = counts[i];
      }
      ++count;
    }
  }
  return Part{cut(some.first(count)), some_values.first(count * dim),
              some_counts.first(counts.empty() ? 0 : count)};
}

void Service::mark(const Call& call, const SlotSlices& slices, DedupWindow& dedup) noexcept {
  for (std::size_t s = 0; s + 1 < slices.offsets.size(); ++s) {
    if (slices.offsets[s] != slices.offsets[s + 1]) {
      dedup.slot(s).mark(call.header.sequence);
    }
  }
  dedup.calls().mark(call.header.sequence);
}

// --- push -------------------------------------------------------------------------------------------------------

void Service::push(const Call& call, Table& table) {
  if (!check_dim(call, table)) {
    return;
  }
  if (!call.counts.empty() && !table.shard->spec().lifecycle.needs_counts()) {
    return send_text(call, Status::kBadRequest,
                     "table " + std::to_string(call.header.table) +
                         " has no rule that counts occurrences: send its pushes without counts");
  }
  if (!table.full.empty()) {
    return send_text(call, Status::kResourceExhausted, table.full);
  }
  DedupWindow& dedup = history(call.header.worker);
  const auto part = fresh_part(call, call.header.dim, dedup);
  if (part && postpone(call, table, dedup, part->slices.hashes.size())) {
    return;
  }
  PooledBuffer refused = refusal(call.out);
  if (part) {
    const std::uint32_t clock = clocks_.clock(call.header.worker);
    if (call.header.clock < clock) {
      return send_text(call, Status::kBadRequest,
                       "a push of clock " + std::to_string(call.header.clock) +
                           " came after the tick to clock " + std::to_string(clock) +
                           ", which did not name it");
    }
    if (mode_ != Mode::kBsp) {
      step(call, table, *part, dedup);
    } else if (!keep(call, *part)) {
      return;
    }
    mark(call, part->slices, dedup);
  }
  send_done(call, std::move(refused));
}

bool Service::postpone(const Call& call, const Table& table, DedupWindow& dedup, std::size_t rows) {
  if (table.shard->fits_save(rows) || !dedup.postpone(call.header.sequence, kMaxPostponed)) {
    return false;
  }
  send(call, Status::kOverloaded);
  return true;
}

bool Service::keep(const Call& call, const Part& part) {
  const Header& header = call.header;
  const auto hashes = part.slices.hashes;
  const std::size_t bytes = hashes.size_bytes() + part.values.size_bytes() + part.counts.size_bytes();
  const std::size_t next = pending_.bytes(applied_);  // bytes of the clock that is merged next
  if (header.clock > applied_ && pending_.bytes() - next + bytes > limits_.pending_bytes / 2) {
    send(call, Status::kOverloaded);
    return false;
  }
  if (header.clock == applied_ && next + bytes > limits_.pending_bytes) {
    send_text(call, Status::kBadRequest,
              "the pushes of clock " + std::to_string(header.clock) + " hold " +
                  std::to_string(next + bytes) + " bytes here, and the limit is " +
                  std::to_string(limits_.pending_bytes) +
                  ": push less in a clock, use more servers, or raise the limit of pending bytes");
    return false;
  }
  PendingPushes::Push kept{.rank = header.worker,
                           .sequence = header.sequence,
                           .hashes = hashes,
                           .grads = part.values,
                           .counts = part.counts};
  // An array that is a whole frame stays there. What was decoded, comes from the cache of key lists, or is a part of the message
  // has to be copied.
  if (call.received != nullptr) {
    kept.frames = {call.received->take(std::as_bytes(hashes)),
                   call.received->take(std::as_bytes(part.values))};
  }
  kept.block = buffers_.acquire(bytes - kept.bytes());
  std::span<std::byte> room = kept.block.bytes();
  if (!kept.frames[0]) {
    kept.hashes = copy_into(room, hashes);
  }
  if (!kept.frames[1]) {
    kept.grads = copy_into(room, part.values);
  }
  kept.counts = copy_into(room, part.counts);
  pending_.add(header.clock, header.table, std::move(kept));
  metrics_.pending_peak = std::max(metrics_.pending_peak, pending_.bytes());
  return true;
}

void Service::step(const Call& call, Table& table, const Part& part, DedupWindow& dedup) {
  View& last = view(table, call.header.worker);
  std::size_t stepped = 0;
  try {
    table.shard->push(part.slices, part.values, {.counts = part.counts, .clock = call.header.clock},
                      &stepped);
  } catch (const std::bad_alloc&) {
    // Record where it stopped: when it is sent again, it continues there.
    const auto& [hashes, offsets] = part.slices;
    for (std::size_t s = 0; s + 1 < offsets.size(); ++s) {
      if (offsets[s] < offsets[s + 1] && offsets[s + 1] <= stepped) {
        dedup.slot(s).mark(call.header.sequence);
      }
    }
    if (stepped < hashes.size() && offsets[index_of(slots_.of(hashes[stepped]))] < stepped) {
      dedup.set_partial_push(call.header.sequence, hashes[stepped]);
    }
    throw;
  }
  metrics_.push_staleness.add(table.pushes - last.pushes - last.own);
  ++table.pushes;
  ++last.own;
}

// --- assign, erase ----------------------------------------------------------------------------------------------

void Service::assign(const Call& call, Table& table) {
  if (!check_dim(call, table)) {
    return;
  }
  DedupWindow& dedup = history(call.header.worker);
  const auto part = fresh_part(call, call.header.dim, dedup);
  if (part && postpone(call, table, dedup, part->slices.hashes.size())) {
    return;
  }
  PooledBuffer refused = refusal(call.out);
  if (part) {
    table.shard->assign(part->slices, part->values, call.header.clock);
    mark(call, part->slices, dedup);
  }
  send_done(call, std::move(refused));
}

void Service::erase(const Call& call, Table& table) {
  DedupWindow& dedup = history(call.header.worker);
  const auto part = fresh_part(call, 0, dedup);
  if (part && postpone(call, table, dedup, part->slices.hashes.size())) {
    return;
  }
  PooledBuffer refused = refusal(call.out);
  if (part) {
    dedup.add_erased(call.header.sequence, table.shard->erase(part->slices));
    table.full.clear();
    mark(call, part->slices, dedup);
  }
  send_done(call, std::move(refused), static_cast<std::uint32_t>(dedup.erased(call.header.sequence)));
}

// --- functions --------------------------------------------------------------------------------------------------

void Service::change(const Call& call, Table& table) {
  DedupWindow& dedup = history(call.header.worker);
  if (dedup.calls().contains(call.header.sequence)) {
    ++metrics_.duplicates;
  } else if (table.shard->is_saving() && dedup.postpone(call.header.sequence, kMaxPostponedAll)) {
    return send(call, Status::kOverloaded);
  } else {
    // Reserve room for the answer first: changed rows cannot be restored.
    auto& answer = dedup.answer(call.header.sequence);
    answer = reduce(*table.shard, Function{call.header.aux}, doubles_of(call), first_slot_, end_slot_);
    dedup.calls().mark(call.header.sequence);
  }
  send_numbers(call, dedup.answer(call.header.sequence));
}

// --- sweeps -----------------------------------------------------------------------------------------------------

std::vector<std::uint64_t> Service::swept(const Call& call, Table& table, bool dry_run) {
  return table.shard->sweep(first_slot_, end_slot_, call.header.clock, Lifecycle::expiries(doubles_of(call)),
                            dry_run);
}

void Service::sweep(const Call& call, Table& table) {
  const Header& header = call.header;
  DedupWindow& dedup = history(header.worker);
  if (dedup.calls().contains(header.sequence)) {
    ++metrics_.duplicates;
    return send_words(call, dedup.swept(header.sequence));
  }
  const bool turns = mode_ == Mode::kBsp;
  if (turns && header.clock < applied_) {
    return send_text(call, Status::kBadRequest,
                     "a sweep of clock " + std::to_string(header.clock) + " came after its end");
  }
  if (turns && !is_complete(header.clock)) {
    return defer(call, 0);
  }
  // Reserve room for the answer first: removed rows cannot be restored.
  auto& answer = dedup.swept(header.sequence);
  answer = swept(call, table, turns);
  if (turns) {
    const std::size_t asked = Lifecycle::expiries(doubles_of(call)).size();
    const std::size_t rules = asked == 0 ? table.shard->spec().lifecycle.expire().size() : asked;
    answer.resize(Shard::kSweepHead + 2 * rules);  // without the words that only a dry run returns
    pending_.sweep(header.clock, {.rank = header.worker,
                                  .sequence = header.sequence,
                                  .table = header.table,
                                  .rules = Lifecycle::expiries(doubles_of(call))});
  } else {
    table.full.clear();
  }
  dedup.calls().mark(header.sequence);
  send_words(call, answer);
}

// --- loads ------------------------------------------------------------------------------------------------------

bool Service::done_before(const Call& call, DedupWindow& dedup) {
  const bool done = dedup.calls().contains(call.header.sequence);
  if (done) {
    ++metrics_.duplicates;
    send(call, Status::kOk);
  }
  return done;
}

bool Service::check_loading(const Call& call, const Table& table) {
  const bool loading = table.loading != nullptr && table.loader == call.header.worker;
  if (!loading) {
    send_text(call, Status::kBadRequest, "no load of this worker is under way: begin one first");
  }
  return loading;
}

void Service::load_begin(const Call& call, Table& table, std::span<const std::uint64_t> rows) {
  constexpr std::size_t kMaxBytes = std::size_t{1} << 46U;  // of rows; more than any machine has
  DedupWindow& dedup = history(call.header.worker);
  if (done_before(call, dedup)) {
    return;
  }
  if (rows.size() != slots_.count()) {
    return send_text(call, Status::kBadRequest,
                     "a load names the rows of " + std::to_string(slots_.count()) + " slots, got " +
                         std::to_string(rows.size()) + " numbers");
  }
  std::vector<std::size_t> here(slots_.count(), 0);
  std::size_t most = kMaxBytes / (table.shard->rows().bytes() + sizeof(std::uint64_t));
  for (std::size_t s = first_slot_; s < end_slot_; ++s) {
    if (rows[s] > most) {
      return send_text(
          call, Status::kBadRequest,
          "no machine has memory for " + std::to_string(rows[s]) + " rows in slot " + std::to_string(s));
    }
    most -= rows[s];
    here[s] = rows[s];
  }
  auto fresh = std::make_shared<Shard>(table.shard->spec(), slots_, pool_, Locks::kOne, budget_.get());
  fresh->reserve(slots_, here);
  disposal_.add(std::exchange(table.loading, std::move(fresh)));
  table.loader = call.header.worker;
  dedup.calls().mark(call.header.sequence);
  send(call, Status::kOk);
}

void Service::load_rows(const Call& call, Table& table) {
  DedupWindow& dedup = history(call.header.worker);
  if (done_before(call, dedup)) {
    return;
  }
  if (!check_loading(call, table)) {
    return;
  }
  // The hashes come first in a section; restore() checks that they ascend.
  const std::size_t rows =
      std::min<std::size_t>(call.header.count, call.bytes.size() / sizeof(std::uint64_t));
  const std::span hashes(reinterpret_cast<const std::uint64_t*>(call.bytes.data()), rows);
  std::vector<bool> elsewhere(slots_.count());
  for (const std::uint64_t hash : hashes) {
    const std::size_t slot = index_of(slots_.of(hash));
    if (!owns(slot)) {
      elsewhere[slot] = true;
    }
  }
  refused_.clear();
  for (std::size_t s = 0; s < slots_.count(); ++s) {
    if (elsewhere[s]) {
      refused_.push_back(static_cast<std::uint16_t>(s));
    }
  }
  if (!refused_.empty()) {
    return send_done(call, refusal(call.out));
  }
  table.loading->restore(call.header.count, call.bytes);
  dedup.calls().mark(call.header.sequence);
  send(call, Status::kOk);
}

void Service::load_filter(const Call& call, Table& table) {
  DedupWindow& dedup = history(call.header.worker);
  if (done_before(call, dedup)) {
    return;
  }
  if (!check_loading(call, table)) {
    return;
  }
  const Slots cut(call.header.count);
  if (cut.bits() < slots_.bits() || call.header.aux >= cut.count()) {
    return send_text(call, Status::kBadRequest,
                     "there is no slot " + std::to_string(call.header.aux) + " of " +
                         std::to_string(cut.count()) + " in one of " + std::to_string(slots_.count()));
  }
  const std::size_t slot = call.header.aux >> (cut.bits() - slots_.bits());
  refused_.clear();
  if (!owns(slot)) {
    refused_.push_back(static_cast<std::uint16_t>(slot));
    return send_done(call, refusal(call.out));
  }
  table.loading->restore_filter(cut, Slot{call.header.aux}, call.bytes);
  dedup.calls().mark(call.header.sequence);
  send(call, Status::kOk);
}

void Service::load_end(const Call& call, Table& table, std::span<const std::uint64_t> step) {
  DedupWindow& dedup = history(call.header.worker);
  if (done_before(call, dedup)) {
    return;
  }
  if (step.size() != 1 && step.size() != 2 && step.size() != 2 + wire::kBaseWords) {
    return send_text(
        call, Status::kBadRequest,
        "a load ends with the table's step, clock and base, got " + std::to_string(step.size()) + " numbers");
  }
  if (!check_loading(call, table)) {
    return;
  }
  table.loading->set_step(step[0]);
  table.loading->set_clock(step.size() > 1 ? static_cast<std::uint32_t>(step[1]) : 0, call.header.clock);
  if (step.size() > 2) {
    table.loading->track(wire::base_name(step.subspan(2)));
  }
  table.full.clear();
  disposal_.add(std::exchange(table.shard, std::move(table.loading)));
  dedup.calls().mark(call.header.sequence);
  send(call, Status::kOk);
}

}  // namespace shoal

#include "endpoint/saves.h"

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "endpoint/reads.h"
#include "endpoint/service_state.h"
#include "endpoint/writes.h"

namespace shoal {

using wire::Op;
using wire::Status;

namespace {

// What a SAVE_BEGIN names: the base of its deltas, followed by each table with its kind in the upper half.
constexpr unsigned kKindShift = 32;
constexpr std::uint64_t kLoad = static_cast<std::uint64_t>(Snapshot::Kind::kDelta) + 1;  // the last kind
// Answers when no session begins: fewer numbers than a summary has.
constexpr std::uint64_t kBusy =
    1;  // and the rank of the worker that is saving; and its job, if that is another one
constexpr std::uint64_t kNoBase = 2;  // and the table
static_assert(CheckpointSession::kSummaryWords > 3);

CheckpointSession::Name name_of(const wire::Header& header, std::uint64_t sequence) noexcept {
  return {.job = header.job, .rank = header.worker, .incarnation = header.incarnation, .sequence = sequence};
}

// What a session of the tables that a request names begins with, or why none does.
using TableRequests = std::vector<CheckpointSession::TableRequest>;

std::variant<TableRequests, Outcome> tables_of(ServiceState& state, const RequestContext& request,
                                               std::span<const std::uint64_t> numbers) {
  const wire::Header& header = request.header;
  const std::string base = wire::base_name(numbers.first(wire::kBaseWords));
  const auto tables = numbers.subspan(wire::kBaseWords);
  const bool loads = tables.front() >> kKindShift == kLoad;
  TableRequests wanted;
  for (const std::uint64_t number : tables) {
    const auto id = static_cast<std::uint32_t>(number);
    const std::uint64_t kind = number >> kKindShift;
    if (state.find_table(id) == nullptr) {
      return Refusal{Status::kNoTable};
    }
    if (kind > kLoad || (kind == kLoad) != loads) {
      return bad_request(kind > kLoad ? "there is no kind of save " + std::to_string(kind)
                                      : "a session either saves or loads: begin two sessions");
    }
    if (loads && !is_loading(state, request, id)) {
      return bad_request("no load of this worker is under way: begin one first");
    }
    auto& table = wanted.emplace_back();
    table.kind = loads ? std::nullopt : std::optional(static_cast<Snapshot::Kind>(kind));
    for (const ArcGroup::Served& served : state.arcs.served()) {
      const Arc::Table& arc_table = *served.arc->find(id);
      if (!loads && arc_table.failed_step) {
        return Refusal{arc_table.failed_step->status, arc_table.failed_step->text};
      }
      const auto& shard = loads ? arc_table.loading : arc_table.shard;
      for (const auto& other : state.saves.sessions()) {
        if (other->holds(*shard)) {
          // It has ended, but a thread still uses it: it will close soon.
          if (other->ended()) {
            return Refusal{Status::kOverloaded};
          }
          const std::array busy{kBusy, std::uint64_t{other->name().rank}, std::uint64_t{other->name().job}};
          return words_answer(std::span(busy).first(other->name().job == header.job ? 2 : 3), request.out);
        }
      }
      if (!loads && shard->changes().has_snapshot()) {
        return Refusal{
            Status::
                kOverloaded};  // of a save that was cancelled where the arc came from, and will close soon
      }
      if (table.kind == Snapshot::Kind::kDelta && (base.empty() || shard->changes().base() != base)) {
        return words_answer(std::array{kNoBase, number & 0xffffffffU}, request.out);
      }
      table.parts.push_back({.shard = shard,
                             .first = served.first,
                             .end = served.end,
                             .clock = served.arc->store_clock(header.job, id, header.clock)});
    }
  }
  return wanted;
}

Outcome poll(ServiceState& state, RequestContext& request) {
  if (request.numbers.size() != 1) {
    return bad_request("a poll names one save by its number");
  }
  CheckpointSession* const session = state.saves.find(name_of(request.header, request.numbers[0]));
  if (session == nullptr && !state.has_newest_map(request)) {
    return wrong_epoch();  // slots have left, which ended it: by the newer map the worker knows why
  }
  std::string said;
  if (session != nullptr) {
    said = session->set_request({reinterpret_cast<const char*>(request.bytes.data()), request.bytes.size()});
  }
  PooledBuffer block = request.out.acquire(said.size());
  std::ranges::copy(std::as_bytes(std::span(said)), block.bytes().begin());
  return Answer{.header = {.dtype = wire::Dtype::kUint8, .count = session != nullptr ? 1U : 0U},
                .frames = 1,
                .first = std::move(block)};
}

Outcome end_save(ServiceState& state, RequestContext& request) {
  const auto numbers = request.numbers;
  if (state.arcs.has_done(request.write())) {
    ++state.metrics.duplicates;
    return Answer{};
  }
  if (numbers.size() != 1 && numbers.size() != 1 + wire::kBaseWords) {
    return bad_request("a save ends with its number, and its name if it was written, got " +
                       std::to_string(numbers.size()) + " numbers");
  }
  CheckpointSession* const session = state.saves.find(name_of(request.header, numbers[0]));
  const bool is_written = numbers.size() > 1;
  std::vector<std::pair<Arc*, std::uint32_t>> incomplete;  // loads, which are discarded
  if (session != nullptr && !is_written) {
    for (const auto& arc : state.arcs.arcs()) {
      for (const auto& [id, table] : arc->tables()) {
        if (table.loading != nullptr && session->holds(*table.loading)) {
          incomplete.emplace_back(arc.get(), id);
        }
      }
    }
  }
  const std::optional<std::string> name =
      is_written ? std::optional(wire::base_name(numbers.subspan(1))) : std::nullopt;
  const bool has_ended = session != nullptr && session->end(name);
  // After the session has ended: a shard that it shares leaves the memory budget only when a thread has freed
  // it.
  for (const auto& [arc, id] : incomplete) {
    arc->apply(DropLoadOp{.table = id});
  }
  if (is_written && !has_ended) {
    return bad_request("there is no such save: it was given up before it was written");
  }
  WriteId begun = request.write();
  if (numbers[0] < begun.sequence) {
    // A late copy of its SAVE_BEGIN, which was refused or deferred, begins nothing.
    begun.sequence = numbers[0];
    state.arcs.mark(begun, request.changed);
  }
  state.arcs.mark(request.write(), request.changed);
  return Answer{};
}

}  // namespace

// --- sessions ---------------------------------------------------------------------------------------------

CheckpointSession* Saves::find(const CheckpointSession::Name& name) const noexcept {
  const auto found = std::ranges::find_if(
      sessions_, [&](const auto& session) { return session->name() == name && !session->ended(); });
  return found == sessions_.end() ? nullptr : found->get();
}

void Saves::cancel(const Which& which) noexcept {
  for (const auto& session : sessions_) {
    if (session->name().job == which.job && (!which.rank || session->name().rank == *which.rank) &&
        (!which.loads || session->loads() == *which.loads)) {
      session->cancel();
    }
  }
}

void Saves::cancel_holding(const Arc& arc) {
  for (const auto& [id, table] : arc.tables()) {
    for (const auto& session : sessions_) {
      if (session->holds(*table.shard) || (table.loading != nullptr && session->holds(*table.loading))) {
        session->cancel();
      }
    }
  }
}

void Saves::forget_closed() {
  std::erase_if(sessions_, [](const auto& session) { return session->closed(); });
}

bool Saves::have_ended() const noexcept {
  return std::ranges::all_of(sessions_, [](const auto& session) { return session->ended(); });
}

void Saves::add(std::shared_ptr<CheckpointSession> session) {
  std::erase_if(unclaimed_, [](const auto& earlier) { return earlier->ended(); });
  unclaimed_.reserve(unclaimed_.size() + 1);
  sessions_.push_back(session);
  unclaimed_.push_back(std::move(session));
}

std::shared_ptr<CheckpointSession> Saves::take() noexcept {
  if (is_closed_ || unclaimed_.empty()) {
    return nullptr;
  }
  auto session = std::move(unclaimed_.front());
  unclaimed_.erase(unclaimed_.begin());
  return session;
}

void Saves::close() noexcept {
  is_closed_ = true;
  unclaimed_.clear();
  for (const auto& session : sessions_) {
    session->cancel();
  }
}

void Saves::add_copy(std::shared_ptr<ArcCopy> copy) {
  std::erase_if(copies_, [](const auto& earlier) { return earlier.expired(); });
  copies_.push_back(std::move(copy));
}

void Saves::cancel_copies(const Arc* arc) noexcept {
  for (const auto& known : copies_) {
    if (const auto copy = known.lock();
        copy != nullptr && (arc == nullptr || copy->range().first == arc->first_slot())) {
      copy->cancel();
    }
  }
}

// --- requests ---------------------------------------------------------------------------------------------

Outcome save(ServiceState& state, RequestContext& request) {
  switch (request.header.op) {
    case Op::kSaveBegin:
      request.bytes = std::as_bytes(request.numbers);
      return begin_save(state, request);
    case Op::kSavePoll:
      return poll(state, request);
    default:
      return end_save(state, request);
  }
}

Outcome begin_save(ServiceState& state, RequestContext& request) {
  const wire::Header& header = request.header;
  const std::span numbers(reinterpret_cast<const std::uint64_t*>(request.bytes.data()),
                          request.bytes.size() / sizeof(std::uint64_t));
  const CheckpointSession::Name name = name_of(header, header.sequence);
  if (state.arcs.has_done(request.write())) {
    ++state.metrics.duplicates;
    const CheckpointSession* const session = state.saves.find(name);
    if (session == nullptr && !state.has_newest_map(request)) {
      return wrong_epoch();
    }
    return words_answer(session == nullptr ? std::span<const std::uint64_t>() : session->summaries(),
                        request.out);
  }
  if (state.saves.is_closed() || numbers.size() <= wire::kBaseWords) {
    return bad_request(state.saves.is_closed() ? "this server writes no checkpoints"
                                               : "a save names at least one table");
  }
  if (!state.has_newest_map(request)) {
    return wrong_epoch();
  }
  const bool loads = numbers[wire::kBaseWords] >> kKindShift == kLoad;
  if (!loads && state.arcs.mode(header.job) == Mode::kBsp &&
      header.clock < state.arcs.last_applied(header.job)) {
    return bad_request("a save of clock " + std::to_string(header.clock) + " came after its end");
  }
  if (!loads && !state.arcs.is_complete(header.job, header.clock)) {  // a load waits for no clock
    return defer(state, request, 0);
  }
  // A worker has one save and one load at a time: it has abandoned the previous one without a message.
  state.saves.cancel({.job = header.job, .rank = header.worker, .loads = loads});
  state.saves.forget_closed();
  if (!loads) {
    // A save does not wait for the end of another one, which may need ticks of the worker that would wait.
    if (state.saves.have_ended() && !state.saves.may_begin()) {
      return Refusal{Status::kOverloaded};
    }
    state.saves.cancel_copies();  // they are made again after the save
  }
  auto found = tables_of(state, request, numbers);
  if (auto* const refused = std::get_if<Outcome>(&found); refused != nullptr) {
    return std::move(*refused);
  }
  auto session = std::make_shared<CheckpointSession>(name, std::get<TableRequests>(found));
  state.saves.add(session);
  state.arcs.mark(request.write(), request.changed);
  return words_answer(session->summaries(), request.out);
}

}  // namespace shoal

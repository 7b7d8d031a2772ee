// Service: saves and loads of checkpoints by the server's own threads: SAVE_BEGIN, SAVE_POLL, SAVE_END.

#include <algorithm>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "server/service.h"
#include "server/service_table.h"

namespace shoal {

using wire::Op;
using wire::Status;

namespace {

// What a SAVE_BEGIN names: the base of its deltas, followed by each table with its kind in the upper partial.
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

}  // namespace

CheckpointSession* Service::find_session(const CheckpointSession::Name& name) const noexcept {
  const auto found = std::ranges::find_if(sessions_, [&](const std::shared_ptr<CheckpointSession>& save) {
    return save->name() == name && !save->ended();
  });
  return found == sessions_.end() ? nullptr : found->get();
}

void Service::cancel_sessions(std::uint32_t job, std::optional<std::uint32_t> rank,
                              std::optional<bool> loads) {
  for (const auto& save : sessions_) {
    if (save->name().job == job && (!rank || save->name().rank == *rank) &&
        (!loads || save->loads() == *loads)) {
      save->cancel();
    }
  }
}

std::shared_ptr<CheckpointSession> Service::next_session(std::optional<std::chrono::milliseconds> most) {
  std::unique_lock lock(mutex_);
  const auto has_some = [&] { return sessions_closed_ || !unclaimed_sessions_.empty(); };
  if (most) {
    if (most->count() != 0) {  // else to wait would cost as much as the calls between
      session_begun_.wait_for(lock, *most, has_some);
    }
  } else {
    session_begun_.wait(lock, has_some);
  }
  if (sessions_closed_ || unclaimed_sessions_.empty()) {
    return nullptr;
  }
  auto save = std::move(unclaimed_sessions_.front());
  unclaimed_sessions_.erase(unclaimed_sessions_.begin());
  return save;
}

void Service::set_save_filter(std::function<bool()> filter) {
  const std::lock_guard lock(mutex_);
  save_filter_ = std::move(filter);
}

void Service::close_sessions() {
  {
    const std::lock_guard lock(mutex_);
    sessions_closed_ = true;
    unclaimed_sessions_.clear();
    for (const auto& save : sessions_) {
      save->cancel();
    }
  }
  session_begun_.notify_all();
}

void Service::serve_save(const Call& call) {
  switch (call.header.op) {
    case Op::kSaveBegin: {
      // As bytes, which a deferred request keeps.
      Call whole = call;
      whole.bytes = std::as_bytes(decoded_.numbers);
      return save_begin(whole);
    }
    case Op::kSavePoll:
      return save_poll(call, decoded_.numbers);
    default:
      return save_end(call, decoded_.numbers);
  }
}

void Service::save_begin(const Call& call) {
  const wire::Header& header = call.header;
  const std::span numbers(reinterpret_cast<const std::uint64_t*>(call.bytes.data()),
                          call.bytes.size() / sizeof(std::uint64_t));
  const CheckpointSession::Name name = name_of(header, header.sequence);
  if (has_done(call)) {
    const CheckpointSession* const save = find_session(name);
    if (save == nullptr && !check_epoch(call)) {
      return;
    }
    return send_words(call, save == nullptr ? std::span<const std::uint64_t>() : save->summaries());
  }
  if ((sessions_closed_ && !replays()) || numbers.size() <= wire::kBaseWords) {
    return send_text(
        call, Status::kBadRequest,
        sessions_closed_ ? "this server writes no checkpoints" : "a save names at least one table");
  }
  if (!check_epoch(call)) {
    return;
  }
  const auto tables = numbers.subspan(wire::kBaseWords);
  if (replays()) {  // the primary has begun it: only the recorded changes follow, for deltas
    for (const auto& arc : arcs_) {
      if (skips(*arc)) {
        continue;
      }
      arc->end_saves(header.job, header.worker);
      for (const std::uint64_t number : tables) {
        const std::uint64_t kind = number >> kKindShift;
        if (kind == static_cast<std::uint64_t>(Snapshot::Kind::kBase) ||
            kind == static_cast<std::uint64_t>(Snapshot::Kind::kDelta)) {
          Arc::Write write = write_of(call);
          write.table = static_cast<std::uint32_t>(number);
          arc->begin_save(write);
        }
      }
    }
    mark_all(call, header.sequence);
    return send(call, Status::kOk);
  }
  const bool loads = tables.front() >> kKindShift == kLoad;
  if (!loads && mode(header.job) == Mode::kBsp && header.clock < last_applied(header.job)) {
    return send_text(call, Status::kBadRequest,
                     "a save of clock " + std::to_string(header.clock) + " came after its end");
  }
  if (!loads && !is_complete(header.job, header.clock)) {  // a load waits for no clock
    return defer(call, 0);
  }
  const std::string base = wire::base_name(numbers.first(wire::kBaseWords));
  // A worker has one save and one load at a time: it has abandoned the previous one without a message.
  cancel_sessions(header.job, header.worker, loads);
  std::erase_if(sessions_, [](const auto& save) { return save->closed(); });
  if (!loads) {
    // A save does not wait for the end of another one, which may need ticks of the worker that would wait.
    const bool is_only = std::ranges::all_of(sessions_, [](const auto& one) { return one->ended(); });
    if (is_only && save_filter_ && !save_filter_()) {
      return send(call, Status::kOverloaded);
    }
    cancel_copies();  // they are made again after the save
  }
  std::vector<CheckpointSession::TableRequest> wanted;
  for (const std::uint64_t number : tables) {
    const Table* const table = find(static_cast<std::uint32_t>(number));
    const std::uint64_t kind = number >> kKindShift;
    if (table == nullptr) {
      return send(call, Status::kNoTable);
    }
    if (kind > kLoad || (kind == kLoad) != loads) {
      return send_text(call, Status::kBadRequest,
                       kind > kLoad ? "there is no kind of save " + std::to_string(kind)
                                    : "a session either saves or loads: begin two sessions");
    }
    const auto id = static_cast<std::uint32_t>(number);
    if (loads && !check_loading(call, id)) {
      return;
    }
    auto& request = wanted.emplace_back();
    request.kind = loads ? std::nullopt : std::optional(static_cast<Snapshot::Kind>(kind));
    for (const Served& served : served_) {
      const Arc::Table& here = *served.arc->find(id);
      if (!loads && !here.full.empty()) {
        return send_text(call, status_of_full(here.full), here.full);
      }
      const auto& shard = loads ? here.loading : here.shard;
      for (const auto& other : sessions_) {
        if (other->holds(*shard)) {
          // It has ended, but a thread still uses it: it will close soon.
          if (other->ended()) {
            return send(call, Status::kOverloaded);
          }
          const std::array busy{kBusy, std::uint64_t{other->name().rank}, std::uint64_t{other->name().job}};
          return send_words(call, std::span(busy).first(other->name().job == header.job ? 2 : 3));
        }
      }
      if (!loads &&
          shard
              ->has_snapshot()) {  // of a save that was cancelled where the arc came from, and will close soon
        return send(call, Status::kOverloaded);
      }
      if (request.kind == Snapshot::Kind::kDelta && (base.empty() || shard->base() != base)) {
        return send_words(call, std::array{kNoBase, number & 0xffffffffU});
      }
      request.parts.push_back({.shard = shard,
                               .first = served.first,
                               .end = served.end,
                               .clock = served.arc->store_clock(header.job, id, header.clock)});
    }
  }
  auto save = std::make_shared<CheckpointSession>(name, wanted);
  std::erase_if(unclaimed_sessions_, [](const auto& one) { return one->ended(); });
  unclaimed_sessions_.reserve(unclaimed_sessions_.size() + 1);
  sessions_.push_back(save);
  unclaimed_sessions_.push_back(std::move(save));
  mark_all(call, header.sequence);
  send_words(call, sessions_.back()->summaries());
  session_begun_.notify_one();
}

void Service::mark_all(const Call& call, std::uint64_t sequence) {
  Arc::Write write = write_of(call);
  write.sequence = sequence;
  for (const auto& arc : arcs_) {
    if (!skips(*arc)) {
      touch(*arc);
      arc->mark(write);
    }
  }
}

void Service::save_poll(const Call& call, std::span<const std::uint64_t> numbers) {
  if (numbers.size() != 1) {
    return send_text(call, Status::kBadRequest, "a poll names one save by its number");
  }
  CheckpointSession* const save = find_session(name_of(call.header, numbers[0]));
  if (save == nullptr && !check_epoch(call)) {
    return;  // slots have left, which ended it: by the newer map the worker knows why
  }
  std::string said;
  if (save != nullptr) {
    said = save->set_request({reinterpret_cast<const char*>(call.bytes.data()), call.bytes.size()});
  }
  PooledBuffer block = call.out.acquire(said.size());
  std::ranges::copy(std::as_bytes(std::span(said)), block.bytes().begin());
  send(call, {.dtype = wire::Dtype::kUint8, .count = save != nullptr ? 1U : 0U}, 1, std::move(block));
}

void Service::save_end(const Call& call, std::span<const std::uint64_t> numbers) {
  if (done_before(call)) {
    return;
  }
  if (numbers.size() != 1 && numbers.size() != 1 + wire::kBaseWords) {
    return send_text(call, Status::kBadRequest,
                     "a save ends with its number, and its name if it was written, got " +
                         std::to_string(numbers.size()) + " numbers");
  }
  CheckpointSession* const save = find_session(name_of(call.header, numbers[0]));
  const bool written = numbers.size() > 1;
  std::vector<std::pair<Arc*, std::uint32_t>> incomplete;  // loads, which are discarded
  for (const auto& [id, table] : tables_) {
    for (const auto& arc : arcs_) {
      const Arc::Table* const here = arc->find(id);
      if (save != nullptr && !written && here != nullptr && here->loading != nullptr &&
          save->holds(*here->loading)) {
        incomplete.emplace_back(arc.get(), id);
      }
    }
  }
  const std::optional<std::string> name =
      written ? std::optional(wire::base_name(numbers.subspan(1))) : std::nullopt;
  for (const auto& arc : arcs_) {
    if (replays() && !skips(*arc)) {
      arc->end_saves(call.header.job, call.header.worker, numbers[0], name);
    }
  }
  const bool ended = save != nullptr && save->end(name);
  // After the session has ended: a shard that it shares leaves the memory budget only when a thread has freed it.
  for (const auto& [arc, id] : incomplete) {
    arc->drop_loading(id);
  }
  if (written && !ended && !replays()) {
    return send_text(call, Status::kBadRequest,
                     "there is no such save: it was given up before it was written");
  }
  if (numbers[0] < call.header.sequence) {
    // A late copy of its SAVE_BEGIN, which was refused or deferred, begins nothing.
    mark_all(call, numbers[0]);
  }
  mark_all(call, call.header.sequence);
  send(call, Status::kOk);
}

}  // namespace shoal

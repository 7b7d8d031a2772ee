// A pull is a composed call: it is settled when what it has fetched is here, and the rows that it has joined,
// which other pulls fetch. Rows that these have not brought it fetches itself.
//
// What a pull sees. Let s be the staleness of the cache, and S that of the job.
//
//   SSP  A push of clock k is sent before the tick of clock k + s. So a row that includes f clocks of the
//        servers includes all pushes that workers made in clocks below f - s. A pull at clock c has to see
//        those of clocks below c - S: it may use rows that include c + s - S clocks. What it fetches waits
//        until the servers have as many and some more, as a pull of a later clock does (`ahead`), and the
//        answer says how many they are (`included`).
//   ASP  A pull at clock c uses rows that were fetched at clock c - s or later.

#include "client/cached_rows.h"

#include <algorithm>
#include <exception>
#include <iterator>
#include <limits>

#include "base/check.h"
#include "cache/slot_begins.h"

namespace shoal::client {

namespace {

constexpr std::uint32_t kReaders =
    std::numeric_limits<std::uint32_t>::max();  // numbers of pulls are 1 to this

// Owners of arrays that a cache makes. Rows are not initialized.
struct FetchedRows {
  std::vector<std::uint64_t> hashes;
  std::vector<std::uint64_t> begins;
  std::unique_ptr<float[]> rows;
  std::shared_ptr<const void> keep;
};

struct SentRows {
  RowCache::Sums sums;
  std::vector<std::uint64_t> begins{};
};

// Copies row i of `some` to row positions[i] of `rows`.
void scatter(std::span<const std::uint32_t> positions, std::span<const float> values, std::size_t dim,
             std::span<float> rows) noexcept {
  for (std::size_t i = 0; i < positions.size(); ++i) {
    std::copy_n(values.data() + i * dim, dim, rows.data() + positions[i] * dim);
  }
}

Failure failure_of(const std::exception& error) { return {.kind = ErrorKind::kShoal, .text = error.what()}; }

}  // namespace

CachedRows::CachedRows(Submitter& submitter, std::unique_ptr<RowCache> cache, CachedRowsOptions options)
    : submitter_(submitter),
      cache_(std::move(cache)),
      options_(std::move(options)),
      // What is fetched waits for a newer row than it needs, so that the copy can be used for some clocks.
      ahead_(options_.waits.has_value()
                 ? options_.staleness +
                       std::min(options_.staleness, (*options_.waits - options_.staleness) / 2)
                 : 0) {
  SHOAL_CHECK(options_.staleness <= options_.waits.value_or(options_.staleness),
              "a cache holds gradients back for no longer than its job allows");
}

// --- pulls -------------------------------------------------------------------------------------------------

CallPtr CachedRows::pull(Hashes hashes, std::span<float> rows, std::shared_ptr<const void> keep,
                         bool is_traced) {
  const PullPtr pull = begin(submitter_.clock(), rows, std::move(keep), is_traced);
  read(pull, hashes, true);
  CallPtr call = pull->call = submitter_.compose(wire::Op::kPull, options_.table, is_traced);
  go_on(pull);
  return call;
}

CallPtr CachedRows::pull_from_servers(Hashes hashes, Hashes begins, std::span<float> rows, After after,
                                      std::shared_ptr<const void> keep, bool is_traced) {
  RowCache::Sums sums;
  cache_->send_rows(hashes, sums);
  send_sums(std::move(sums));
  const PullPtr pull = begin(submitter_.clock(), rows, std::move(keep), is_traced);
  fetch(pull, {.hashes = hashes, .begins = begins, .out = rows, .is_all = true, .keep = pull->keep}, after);
  return pull->call = submitter_.compose(wire::Op::kPull, options_.table, is_traced);
}

CachedRows::PullPtr CachedRows::begin(std::uint32_t clock, std::span<float> rows,
                                      std::shared_ptr<const void> keep, bool is_traced) {
  reader_ = reader_ % kReaders + 1;
  auto pull = std::make_shared<Pull>();
  pull->reader = reader_;
  pull->clock = clock;
  pull->rows = rows;
  pull->keep = std::move(keep);
  pull->is_traced = is_traced;
  return pull;
}

void CachedRows::read(const PullPtr& pull, Hashes hashes, bool may_join) {
  RowCache::Rest rest;
  cache_->read(hashes, needed(pull->clock), pull->reader, may_join, pull->rows, rest);
  for (const std::uint32_t position : rest.joined) {
    pull->joined_hashes.push_back(hashes[position]);
  }
  pull->joined = std::move(rest.joined);
  std::ranges::copy_if(rest.readers, std::back_inserter(pull->readers),
                       [this](std::uint32_t reader) { return readers_.contains(reader); });
  if (!is_planted(CachedRowsDefect::kPullsBeforeItPushes)) {
    send_sums(std::move(rest.sums));  // before what is fetched: the copies will include them
  }
  if (!rest.fetched.empty()) {
    const std::size_t count = rest.fetched.size();
    const bool is_whole = cache_->makes_steps();
    const bool is_all = count == hashes.size() && !is_whole;
    const auto memory = std::make_shared<FetchedRows>();
    memory->hashes.reserve(count);
    for (const std::uint32_t position : rest.fetched) {
      memory->hashes.push_back(hashes[position]);
    }
    memory->begins = slot_begins(memory->hashes, options_.slots);
    std::span<float> out = pull->rows;
    if (!is_all) {
      memory->rows.reset(new float[count * cache_->width()]);
      out = {memory->rows.get(), count * cache_->width()};
    }
    memory->keep = pull->keep;
    fetch(pull,
          {.hashes = memory->hashes,
           .begins = memory->begins,
           .out = out,
           .positions = is_all ? std::vector<std::uint32_t>() : std::move(rest.fetched),
           .is_all = is_all,
           .is_whole = is_whole,
           .keep = memory},
          {});
  }
  if (!pull->readers.empty()) {
    joined_.push_back(pull);
  }
}

// How many clocks a row has to include for a pull of this clock.
std::uint32_t CachedRows::needed(std::uint32_t clock) const noexcept {
  const std::uint32_t staleness = options_.staleness;
  if (!options_.waits.has_value()) {
    return clock - std::min(clock, staleness);
  }
  if (is_planted(CachedRowsDefect::kForgetsThatPushesAreHeld)) {
    return clock - std::min(clock, *options_.waits);
  }
  return clock - std::min(clock, *options_.waits - staleness);
}

void CachedRows::fetch(const PullPtr& pull, Fetch what, After after) {
  drop_acknowledged();
  what.pushes = unacknowledged_;
  what.repetitions = mark_;
  const std::size_t numbers = what.is_whole ? cache_->width() : dim();
  Keyed keyed{.hashes = what.hashes,
              .begins = what.begins,
              .out = std::as_writable_bytes(what.out),
              .width = numbers * sizeof(float),
              .dim = static_cast<std::uint16_t>(numbers),
              .filter = options_.filter,
              .ahead = ahead_,
              .is_dated = options_.waits.has_value(),
              .is_whole = what.is_whole};
  CallPtr call;
  try {
    call = submitter_.submit_rows(wire::Op::kPull, options_.table, keyed,
                                  {.after = after, .keep = what.keep, .is_traced = pull->is_traced});
  } catch (...) {
    readers_.erase(pull->reader);
    cache_->fill(what.hashes, pull->reader, 0, false, {});
    throw;
  }
  call->observer = this;
  pull->fetch = std::move(what);
  readers_.insert(pull->reader);
  fetching_.emplace(call.get(), pull);
}

// Takes the answer to what a pull has fetched.
void CachedRows::finish(const PullPtr& pull, const Call& call) {
  Fetch fetched = *std::exchange(pull->fetch, std::nullopt);
  const bool has_failed = call.failure.has_value();
  const bool in_order = came_in_order(fetched);
  if (cache_->makes_steps() && !has_failed && !in_order) {
    // It may lack a change that the worker has seen in its copy: ask again once that has arrived.
    cache_->fill(fetched.hashes, pull->reader, 0, false, {});
    const std::vector<CallPtr> after = unacknowledged_;
    try {
      fetch(pull, std::move(fetched), after);
      pull->fetch->pushes.clear();
      return;
    } catch (const std::exception& error) {
      pull->failure = failure_of(error);
    }
  } else {
    const bool is_kept = !has_failed && in_order && fetched.is_whole == cache_->makes_steps();
    readers_.erase(pull->reader);
    cache_->fill(fetched.hashes, pull->reader, included(*pull, call), is_kept,
                 is_kept ? fetched.out : std::span<float>());
    if (has_failed) {
      pull->failure = call.failure;
    } else if (fetched.is_whole) {
      cache_->copy_weights_of(fetched.out, fetched.positions, pull->rows);
    } else if (!fetched.is_all) {
      scatter(fetched.positions, fetched.out, dim(), pull->rows);
    }
  }
  go_on(pull);
  for (const PullPtr& other : std::vector<PullPtr>(joined_)) {
    if (std::erase(other->readers, pull->reader) != 0) {
      go_on(other);
    }
  }
}

// How many clocks the rows that a pull has fetched include.
std::uint32_t CachedRows::included(const Pull& pull, const Call& call) const noexcept {
  if (!options_.waits.has_value()) {
    return pull.clock;
  }
  return is_planted(CachedRowsDefect::kTakesItsOwnClock) ? pull.clock + options_.staleness
                                                         : call.included.value_or(0);
}

// Whether an answer includes all pushes that were sent before its request.
bool CachedRows::came_in_order(const Fetch& fetch) const noexcept {
  return fetch.pushes.empty() || is_planted(CachedRowsDefect::kTrustsTheOrder) ||
         (fetch.repetitions == submitter_.repetitions() &&
          std::ranges::all_of(fetch.pushes, [](const CallPtr& push) { return push->is_done(); }));
}

// Does what can be done of a pull.
void CachedRows::go_on(const PullPtr& pull) {
  if (pull->fetch.has_value() || (!pull->readers.empty() && !pull->failure.has_value())) {
    return;
  }
  std::erase(joined_, pull);
  if (pull->joined.empty() || pull->failure.has_value()) {
    end(pull);
    return;
  }
  const std::size_t numbers = pull->joined.size() * dim();
  const auto rows = std::shared_ptr<float[]>(new float[numbers]);
  const PullPtr rest = begin(pull->clock, {rows.get(), numbers}, rows, pull->is_traced);
  rest->rest_of = pull;
  try {
    read(rest, pull->joined_hashes, false);
  } catch (const std::exception& error) {
    rest->failure = failure_of(error);
  }
  go_on(rest);
}

void CachedRows::end(const PullPtr& pull) {
  if (pull->rest_of != nullptr) {
    Pull& whole = *pull->rest_of;
    whole.failure = pull->failure;
    std::ranges::move(pull->traces, std::back_inserter(whole.traces));
    if (!whole.failure.has_value()) {
      scatter(whole.joined, pull->rows, dim(), whole.rows);
    }
    end(pull->rest_of);
    return;
  }
  if (pull->call->trace != nullptr) {
    *pull->call->trace = std::move(pull->traces);
  }
  submitter_.complete(pull->call, std::move(pull->failure));
}

void CachedRows::settled(const CallPtr& call) {
  if (const auto fetched = fetching_.extract(call.get())) {
    const PullPtr pull = fetched.mapped();
    if (call->trace != nullptr) {
      std::ranges::move(*call->trace, std::back_inserter(pull->traces));
      call->trace.reset();
    }
    finish(pull, *call);
  } else if (const auto sent = pushes_.extract(call.get())) {
    Push& push = *sent.mapped();
    if (call->trace != nullptr) {
      std::ranges::move(*call->trace, std::back_inserter(*push.call->trace));
      call->trace.reset();
    }
    if (--push.left == 0) {
      const auto& calls = std::get<Composed>(push.call->what).calls;
      const auto failed =
          std::ranges::find_if(calls, [](const CallPtr& fetch) { return fetch->failure.has_value(); });
      submitter_.complete(push.call, failed == calls.end() ? std::nullopt : (*failed)->failure);
    }
  } else if (changes_.erase(call.get()) != 0) {
    forget();
  }
}

// --- pushes ------------------------------------------------------------------------------------------------

CallPtr CachedRows::push(Hashes hashes, std::span<const float> grads, std::span<const std::uint32_t> counts,
                         bool is_traced) {
  RowCache::Sums passed;
  cache_->add(hashes, grads, counts, submitter_.clock(), passed);
  return combine({send(std::move(passed), {}, false, is_traced)}, is_traced);
}

CallPtr CachedRows::push_to_servers(Hashes hashes, std::span<const float> grads,
                                    std::span<const std::uint32_t> counts, After after, bool is_traced) {
  RowCache::Sums passed;
  RowCache::Sums sums;
  cache_->add(hashes, grads, counts, submitter_.clock(), passed);
  cache_->send_rows(hashes, sums);
  const CallPtr first = send(std::move(passed), after, false, is_traced);
  return combine({first, send_sums(std::move(sums), after, is_traced)}, is_traced);
}

// One call for some, or for none.
CallPtr CachedRows::combine(std::vector<CallPtr> pushes, bool is_traced) {
  std::erase(pushes, nullptr);
  if (pushes.size() == 1) {
    return pushes.front();
  }
  CallPtr composed = submitter_.compose(wire::Op::kPush, options_.table, is_traced);
  if (pushes.empty()) {
    submitter_.complete(composed, {});
    return composed;
  }
  const auto push = std::make_shared<Push>(Push{.call = composed, .left = pushes.size()});
  for (const CallPtr& part : pushes) {
    part->observer = this;
    pushes_.emplace(part.get(), push);
  }
  std::get<Composed>(composed->what).calls = std::move(pushes);
  return composed;
}

void CachedRows::end_clock() {
  const std::uint32_t clock = submitter_.clock();
  const std::uint32_t held =
      options_.staleness + (is_planted(CachedRowsDefect::kHoldsForAnotherClock) ? 1 : 0);
  if (clock >= held && cache_->sums() != 0) {
    RowCache::Sums sums;
    cache_->send_older(clock - held, sums);
    send_sums(std::move(sums));
  }
}

std::vector<CallPtr> CachedRows::flush() {
  RowCache::Sums sums;
  cache_->send_older(RowCache::kAnyClock, sums);
  send_sums(std::move(sums));
  drop_acknowledged();
  return unacknowledged_;
}

void CachedRows::forget() {
  flush();
  cache_->forget();
}

void CachedRows::forget_after(const CallPtr& call) {
  if (call->is_done()) {
    forget();
  } else {
    call->observer = this;
    changes_.insert(call.get());
  }
}

CallPtr CachedRows::send(RowCache::Sums&& sums, After after, bool is_whole, bool is_traced) {
  if (sums.hashes.empty()) {
    return nullptr;
  }
  drop_acknowledged();
  if (unacknowledged_.empty()) {
    mark_ = submitter_.repetitions();
  }
  const auto memory = std::make_shared<SentRows>(SentRows{.sums = std::move(sums)});
  memory->begins = slot_begins(memory->sums.hashes, options_.slots);
  const std::size_t numbers = is_whole ? cache_->width() : dim();
  const Keyed keyed{.hashes = memory->sums.hashes,
                    .begins = memory->begins,
                    .values = std::as_bytes(std::span<const float>(memory->sums.grads)),
                    .counts = memory->sums.counts,
                    .width = numbers * sizeof(float),
                    .dim = static_cast<std::uint16_t>(numbers),
                    .filter = options_.filter,
                    .is_whole = is_whole};
  unacknowledged_.push_back(submitter_.submit_rows(wire::Op::kPush, options_.table, keyed,
                                                   {.after = after, .keep = memory, .is_traced = is_traced}));
  return unacknowledged_.back();
}

void CachedRows::drop_acknowledged() {
  std::erase_if(unacknowledged_, [](const CallPtr& push) { return push->is_done(); });
}

}  // namespace shoal::client

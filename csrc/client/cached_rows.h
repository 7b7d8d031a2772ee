// CachedRows: the rows of one table that a worker keeps, and the gradients that it holds back: what is sent,
// in which order, and what an answer may become. cache/row_cache.h has the rows. Without I/O or a clock.
//
//   pull       the copies that are new enough; the others from the servers, after their own sums were sent
//   push       added up where the row has an entry, or with local steps where it has a copy; otherwise sent
//   end_clock  sums that began `staleness` clocks before, or earlier, are sent before the clock ends
//
// Invariants
//   I1  A copy includes all pushes of its key that this worker has sent: what is sent removes the copy, or
//       with local steps is in it; an answer becomes one if the pushes before it were acknowledged, or none
//       was sent again.
//   I2  One worker never sees an older row after a newer one (invariant I4 of cache/row_cache.h).
//   I3  After end_clock() at clock c no sum is left that began in clock c - staleness or before.
//
// Threads: one at a time; the owner of the requests locks, and calls settled() for its calls.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cache/row_cache.h"
#include "client/call.h"
#include "client/requests.h"

namespace shoal::client {

// The requests of a worker at its present clock.
class Submitter {
 public:
  virtual std::uint32_t clock() const noexcept = 0;
  virtual std::uint64_t repetitions() const noexcept = 0;
  // As Requests::submit, compose and complete.
  virtual CallPtr submit_rows(wire::Op op, std::uint32_t table, Keyed what, Terms terms) = 0;
  virtual CallPtr compose(wire::Op op, std::uint32_t table, bool is_traced) = 0;
  virtual void complete(const CallPtr& composed, std::optional<Failure> failure) = 0;

 protected:
  Submitter() = default;
  Submitter(const Submitter&) = default;
  Submitter& operator=(const Submitter&) = default;
  ~Submitter() = default;
};

struct CachedRowsOptions {
  std::uint32_t table = 0;
  std::size_t slots = 0;
  std::uint32_t staleness = 0;           // of the cache
  std::optional<std::uint32_t> waits{};  // staleness of the job; none: it is asynchronous
  Filter* filter = nullptr;
  std::shared_ptr<const void> keep{};  // owns the filter
};

// Mistakes that a test plants, to see that its checkers find them.
enum class CachedRowsDefect : std::uint8_t {
  kNone,
  kHoldsForAnotherClock,
  kForgetsThatPushesAreHeld,
  kTrustsTheOrder,
  kTakesItsOwnClock,
  kPullsBeforeItPushes,
};

class CachedRows final : public CallObserver {
 public:
  using Hashes = std::span<const std::uint64_t>;
  using After = std::span<const CallPtr>;

  CachedRows(Submitter& submitter, std::unique_ptr<RowCache> cache, CachedRowsOptions options);
  CachedRows(const CachedRows&) = delete;
  CachedRows& operator=(const CachedRows&) = delete;

  // Reads the rows of ascending hashes, here where they are new enough. `keep` owns `hashes` and `rows`.
  CallPtr pull(Hashes hashes, std::span<float> rows, std::shared_ptr<const void> keep,
               bool is_traced = false);
  // Reads rows from the servers, with all pushes of this worker. `begins`: of each slot's hashes, and their
  // end.
  CallPtr pull_from_servers(Hashes hashes, Hashes begins, std::span<float> rows, After after,
                            std::shared_ptr<const void> keep, bool is_traced = false);
  // Holds gradients back where their rows have an entry, and sends the others: what is returned waits for
  // these.
  CallPtr push(Hashes hashes, std::span<const float> grads, std::span<const std::uint32_t> counts,
               bool is_traced = false);
  // Sends gradients with those that were held back of the same rows.
  CallPtr push_to_servers(Hashes hashes, std::span<const float> grads, std::span<const std::uint32_t> counts,
                          After after, bool is_traced = false);
  // Sends what may be held back no longer, before the worker ticks.
  void end_clock();
  // Sends all that is held back; returns its push, if there is one, and those that are not acknowledged yet.
  std::vector<CallPtr> flush();
  // Sends all that is held back, and keeps no row: the next pulls read from the servers.
  void forget();
  // The same when a call that changes rows in another way has ended.
  void forget_after(const CallPtr& call);

  void settled(const CallPtr& call) override;

  const RowCache& cache() const noexcept { return *cache_; }
  std::size_t dim() const noexcept { return cache_->dim(); }
  // Pushes that were not acknowledged when one was last sent, or rows last fetched.
  const std::vector<CallPtr>& unacknowledged() const noexcept { return unacknowledged_; }
  void plant(CachedRowsDefect defect) noexcept { defect_ = defect; }

 private:
  // What a pull asks the servers for.
  struct Fetch {
    Hashes hashes{};
    Hashes begins{};
    std::span<float> out{};
    std::vector<std::uint32_t> positions{};  // in the rows of its pull
    bool is_all = false;                     // the answer is all rows of its pull
    bool is_whole = false;                   // of whole rows
    std::shared_ptr<const void> keep{};      // owns the arrays
    // Pushes that were not acknowledged before, and repetitions before the first of them.
    std::vector<CallPtr> pushes{};
    std::uint64_t repetitions = 0;
  };
  struct Pull;
  using PullPtr = std::shared_ptr<Pull>;
  struct Pull {
    std::uint32_t reader = 0;
    std::uint32_t clock = 0;
    std::span<float> rows{};
    std::shared_ptr<const void> keep{};  // owns the rows
    bool is_traced = false;
    std::vector<PartTrace> traces{};      // of what it has fetched
    std::optional<Fetch> fetch{};         // while it is under way
    std::vector<std::uint32_t> joined{};  // positions of rows that others fetch
    std::vector<std::uint64_t> joined_hashes{};
    std::vector<std::uint32_t> readers{};  // the others, that are under way
    std::optional<Failure> failure{};
    CallPtr call{};     // settled in the end
    PullPtr rest_of{};  // or: this one reads joined rows of another pull, that others have not brought
  };
  // A push in several parts.
  struct Push {
    CallPtr call;
    std::size_t left;
  };

  PullPtr begin(std::uint32_t clock, std::span<float> rows, std::shared_ptr<const void> keep, bool is_traced);
  void read(const PullPtr& pull, Hashes hashes, bool may_join);
  void fetch(const PullPtr& pull, Fetch what, After after);
  void finish(const PullPtr& pull, const Call& call);
  void go_on(const PullPtr& pull);
  void end(const PullPtr& pull);
  std::uint32_t needed(std::uint32_t clock) const noexcept;
  std::uint32_t included(const Pull& pull, const Call& call) const noexcept;
  bool came_in_order(const Fetch& fetch) const noexcept;
  CallPtr send(RowCache::Sums&& sums, After after, bool is_whole, bool is_traced = false);
  CallPtr send_sums(RowCache::Sums&& sums, After after = {}, bool is_traced = false) {
    return send(std::move(sums), after, cache_->makes_steps(), is_traced);
  }
  CallPtr combine(std::vector<CallPtr> pushes, bool is_traced);
  void drop_acknowledged();
  bool is_planted(CachedRowsDefect defect) const noexcept { return defect_ == defect; }

  Submitter& submitter_;
  const std::unique_ptr<RowCache> cache_;
  const CachedRowsOptions options_;
  const std::uint32_t ahead_;  // clocks
  std::uint32_t reader_ = 0;
  std::unordered_map<const Call*, PullPtr> fetching_;
  std::set<std::uint32_t> readers_;  // numbers of the pulls that fetch
  std::vector<PullPtr> joined_;      // that wait for others, in their order
  std::unordered_map<const Call*, std::shared_ptr<Push>> pushes_;
  std::set<const Call*> changes_;
  std::vector<CallPtr> unacknowledged_;  // pushes
  std::uint64_t mark_ = 0;               // repetitions before the first of them
  CachedRowsDefect defect_ = CachedRowsDefect::kNone;
};

}  // namespace shoal::client

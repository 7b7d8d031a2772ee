// CheckpointSession: one save or one load of a worker, shared between the data loop and the thread that reads
// or writes files. A save takes a snapshot of all its tables between two pushes; a load fills shards, which
// replace the tables' shards at its end.
//
//   data loop   CheckpointSession(..), set_request(text), end(base): it has this name; nullopt: cancelled
//   thread      take(t, slot), restore(t, ..), wait_request(), set_status(), cancel()
//
// Invariants
//   I1  Until the session is closed, each of its shards has this session's snapshot; afterwards none of it.
//   I2  It is closed once: when it has ended and no take() or restore() is in progress. The last of these
//       closes it.
//
// Threads: any; a mutex of its own, which take() and restore() do not hold while they copy.

#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/mix.h"
#include "base/mutex.h"
#include "shard/shard.h"
#include "shard/snapshot.h"

namespace shoal {

class CheckpointSession {
 public:
  // The call that began the session.
  struct Name {
    std::uint32_t job = 0;
    std::uint32_t rank = 0;
    std::uint32_t incarnation = 0;
    std::uint64_t sequence = 0;

    bool operator==(const Name&) const = default;
  };
  // Slots [first, end) of a shard.
  struct Part {
    std::shared_ptr<Shard> shard;
    std::size_t first = 0;
    std::size_t end = 0;
    std::uint32_t clock = 0;  // of the save, as the shard counts (Shard::table_clock)
  };
  struct TableRequest {
    std::vector<Part> parts;                                      // in the order of their slots
    std::optional<Snapshot::Kind> kind = Snapshot::Kind::kPlain;  // nullopt: shards that a load fills
  };
  static constexpr std::size_t kSummaryWords = 4;  // of a table: step, clock, rows, bytes

  // The tables are all saved or all loaded, are in no other session, and have a base if their kind requires
  // one; their parts are of the same slots, which will be taken. No row may change during the call; a Service
  // changes its shards under its mutex alone.
  CheckpointSession(const Name& name, std::span<const TableRequest> tables);
  ~CheckpointSession();
  CheckpointSession(const CheckpointSession&) = delete;
  CheckpointSession& operator=(const CheckpointSession&) = delete;

  const Name& name() const noexcept { return name_; }
  // The numbers of the slots, which ascend.
  const std::vector<std::size_t>& slots() const noexcept { return slots_; }
  std::size_t tables() const noexcept { return summaries_.size() / kSummaryWords; }
  bool loads() const noexcept { return loads_; }
  // kSummaryWords numbers for each table, in the given order; zeros for a load.
  std::span<const std::uint64_t> summaries() const noexcept { return summaries_; }
  // Whether it has a snapshot of this shard, or fills it.
  bool holds(const Shard& shard) const;
  bool ended() const;
  bool closed() const;  // it holds no shard any more

  std::string set_request(std::string_view text);
  // False if it had ended before.
  bool end(const std::optional<std::string>& base);

  struct Request {
    std::uint64_t times = 0;
    std::string text;  // the last one
  };
  // Waits until the worker has set more than `times` requests or the session has ended, for at most
  // `patience`.
  Request wait_request(std::uint64_t times, std::chrono::milliseconds patience) const;
  void set_status(std::string text);
  void cancel() { end(std::nullopt); }
  // SnapshotLostError, or std::invalid_argument: the session has ended or is a load, there is no such table
  // or slot, or the slot was taken.
  Snapshot::Piece take(std::size_t table, Slot slot);
  // Adds the part of a section, or of a filter, that belongs to this server's slots (see Shard), and returns
  // the number of rows. std::invalid_argument also if the session has ended or is not a load.
  std::size_t restore(std::size_t table, std::size_t rows, std::span<const std::byte> section);
  void restore_filter(std::size_t table, Slots cut, Slot slot, std::span<const std::byte> filter);

 private:
  struct Source {
    Part part;
    std::optional<Snapshot> snapshot = {};
  };
  struct Table {
    std::vector<std::unique_ptr<Source>> sources;
  };
  // Calls work(table), during which the table stays in the session.
  template <class Work>
  auto with(std::size_t table, bool loads, const Work& work);
  void close_if_idle() noexcept REQUIRES(mutex_);

  const Name name_;
  const bool loads_;
  std::vector<std::size_t> slots_;
  std::vector<std::uint64_t> summaries_;

  mutable Mutex mutex_;
  mutable CondVar moved_;
  std::vector<std::unique_ptr<Table>> tables_ GUARDED_BY(mutex_);
  std::size_t working_ GUARDED_BY(mutex_) = 0;
  bool ended_ GUARDED_BY(mutex_) = false;
  std::optional<std::string> base_ GUARDED_BY(mutex_);
  Request request_ GUARDED_BY(mutex_);
  std::string status_ GUARDED_BY(mutex_);
};

}  // namespace shoal

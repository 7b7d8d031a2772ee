// CheckpointSession: tables as they were at one moment, between the data loop that goes on changing them, the worker that asked, and
// the thread that writes them down. Or the way back: rows of a load that is under way, beside their tables, which the
// thread reads.
//
//   data loop   CheckpointSession()          the moment: a Snapshot of each table, with no push between them; or the shards to fill
//               hear(text)     the worker's text to the thread; what that one has said last
//               end(name)       all is written, and has this name, or was read of it; or, without a name, it is given up
//   thread      take(t, slot)   the slot's bytes of the moment; heard(), say() text; cancel() gives it up
//               restore(t, ..)  of a load: adds rows, those of the slots that will be taken
//
// What the text mean is theirs alone: python/shoal/cluster/protocol/tasks.py.
//
// A table may be dropped, or get the rows of a load, while it is written: the CheckpointSession holds its shard.
//
// Invariants
//   I1  until it is closed each shard has this CheckpointSession's snapshot, and no other; afterwards none of it.
//   I2  closed once: when it has ended and no take() or restore() is under way. The last of both does it.
//
// Threads: any; a mutex of its own, which no take() or restore() holds while it copies.

#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/mix.h"
#include "shard/shard.h"
#include "shard/snapshot.h"

namespace shoal {

class CheckpointSession {
 public:
  // The call that began it.
  struct Name {
    std::uint32_t rank = 0;
    std::uint32_t incarnation = 0;
    std::uint64_t sequence = 0;

    bool operator==(const Name&) const = default;
  };
  struct TableRequest {
    std::shared_ptr<Shard> shard;
    std::optional<Snapshot::Kind> kind = Snapshot::Kind::kPlain;  // none: rows that a load fills
  };
  static constexpr std::size_t kSummaryWords = 4;  // of a table: step, clock, rows, bytes

  // Of tables that are all saved or all loaded, by nobody else, and have a base where kind asks for one. Slots
  // [first, end) will be taken. Nobody changes a row meanwhile: shards of a Service are changed under its mutex alone, so
  // they need not be frozen.
  CheckpointSession(const Name& name, std::span<const TableRequest> tables, std::uint32_t clock,
                    std::size_t first, std::size_t end);
  ~CheckpointSession();
  CheckpointSession(const CheckpointSession&) = delete;
  CheckpointSession& operator=(const CheckpointSession&) = delete;

  const Name& name() const noexcept { return name_; }
  std::size_t first() const noexcept { return first_; }
  std::size_t end_slot() const noexcept { return end_; }
  std::size_t tables() const noexcept { return summaries_.size() / kSummaryWords; }
  bool loads() const noexcept { return loads_; }
  // kSummaryWords numbers of each table, in the order given; of a load zeros.
  std::span<const std::uint64_t> summaries() const noexcept { return summaries_; }
  // Whether it has a snapshot of the shard, or fills it.
  bool holds(const Shard& shard) const;
  bool ended() const;
  bool closed() const;  // nothing is held any more

  std::string set_request(std::string_view text);
  // False: it was given up before.
  bool end(const std::optional<std::string>& base);

  struct Request {
    std::uint64_t times = 0;
    std::string text;  // the last
  };
  // Waits until the worker was heard more than so many times, or the save has ended, at most so long.
  Request wait_request(std::uint64_t times, std::chrono::milliseconds most) const;
  void set_status(std::string text);
  void cancel() { end(std::nullopt); }
  // SnapshotLostError, or std::invalid_argument: it has ended, is a load, or there is no such table or slot, or it was taken.
  Snapshot::Piece take(std::size_t table, Slot slot);
  // What of a section, or of a filter, belongs to these slots: see Shard. Returns how many rows. std::invalid_argument also
  // where it has ended, or is no load.
  std::size_t restore(std::size_t table, std::size_t rows, std::span<const std::byte> section);
  void restore_filter(std::size_t table, Slots cut, Slot slot, std::span<const std::byte> filter);

 private:
  struct Table {
    std::shared_ptr<Shard> shard;
    std::optional<Snapshot> snapshot = {};
  };
  // work(held) on a table that stays held meanwhile.
  template <class Work>
  auto with(std::size_t table, bool loads, const Work& work);
  void close_if_idle() noexcept;  // with the mutex held

  const Name name_;
  const std::size_t first_;
  const std::size_t end_;
  const bool loads_;
  std::vector<std::uint64_t> summaries_;

  mutable std::mutex mutex_;  // guards the rest
  mutable std::condition_variable moved_;
  std::vector<std::unique_ptr<Table>> tables_;
  std::size_t working_ = 0;
  bool ended_ = false;
  std::optional<std::string> base_;
  Request request_;
  std::string status_;
};

}  // namespace shoal

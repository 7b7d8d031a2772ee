// ReadAhead: rows of calls to come, read by a thread of their own while other calls are computed. They are
// kept outside the table, so they are not evicted before they are used.
//
//   request   the rows of one call that are on disk: ascending hashes, and their runs, without those that an
//             earlier request has, and those for which there is no room
//   thread    reads the pages of the oldest request that it has not read; keeps the rows, or their absence
//   take      a call that misses a row takes it from the request; it waits while the request is being read
//
// Memory: at most `bytes`, in kMost requests, and the reader that the thread borrows meanwhile. A request is
// removed when all its rows were used, or when kMost other calls were announced after it.
//
// Threads: the caller's lock guards everything but take(), merged() and forget(), which may be called at the
// same time for different slots. The thread starts with the first request.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "base/mix.h"
#include "base/mutex.h"
#include "base/threads.h"
#include "table/slot_table.h"
#include "tier/page_file.h"
#include "tier/run.h"

namespace shoal {

class ReadAhead {
 public:
  static constexpr std::size_t kMost = 8;

  struct Taken {
    struct Row {
      std::uint64_t hash;
      const std::byte* row;  // null if absent; valid until trim() or request()
    };
    std::vector<Row> rows;
    std::vector<std::uint64_t> left;  // ascending
  };

  // Places count from the slot `first`.
  ReadAhead(PageFile& file, const PageShape& shape, Slots slots, std::size_t first, std::size_t bytes);
  ~ReadAhead();
  ReadAhead(const ReadAhead&) = delete;
  ReadAhead& operator=(const ReadAhead&) = delete;

  std::size_t bytes() const noexcept;
  std::uint64_t reads() const noexcept { return reads_.load(std::memory_order_relaxed); }

  // Ascending misses; run_of(place) is the run of a slot.
  template <class RunOf>
  void request(std::span<const std::uint64_t> misses, const RunOf& run_of) {
    std::unique_ptr<Request> added = prepare(misses);
    for (Piece& piece : added->pieces) {
      piece.run = &run_of(piece.place);
    }
    submit(std::move(added));
  }

  // The rows of ascending misses that were read ahead, and the other misses.
  Taken take(std::span<const std::uint64_t> misses);
  // Removes requests that are of no more use.
  void trim() noexcept;

  // The slot has another run than `from`, in which the rows in memory, and the erased ones, may differ; both
  // ascend.
  void merged(std::size_t place, std::unique_ptr<Run> from, std::span<const SlotTable::Entry> entries,
              std::span<const std::uint64_t> erased) noexcept;
  // The slot has no run any more.
  void forget(std::size_t place, std::unique_ptr<Run> from) noexcept;

  // The row of a hash that was read ahead and not used; null if there is none. For tests: waits for the
  // thread.
  const std::byte* find(std::size_t place, std::uint64_t hash);

 private:
  enum class Row : std::uint8_t { kUnread, kAbsent, kFound };
  // Those of one slot.
  struct Piece {
    std::size_t place;
    const Run* run;     // when it was requested
    std::size_t first;  // of its hashes
    std::size_t end;
  };
  struct Request {
    std::vector<std::uint64_t> hashes;
    std::vector<Piece> pieces;    // ascending places
    std::vector<std::byte> rows;  // these two are the thread's until the request is read
    std::vector<Row> found;
    std::vector<std::uint8_t> used;  // or not valid any more
    bool is_read = false;
    std::size_t later = 0;                       // calls announced after it
    std::vector<std::unique_ptr<Run>> replaced;  // to be removed when it is read

    std::size_t bytes() const noexcept;
    Piece* piece(std::size_t place) noexcept;
  };
  // Guarded by `mutex`, but for the contents of requests. A forked child leaves it alone: the lock may never
  // be released there.
  struct Shared {
    Mutex mutex;
    CondVar wake;
    CondVar read;
    std::deque<std::unique_ptr<Request>>
        requests;  // changed by the caller alone, which reads them without the mutex
    bool stops GUARDED_BY(mutex) = false;
  };

  std::unique_ptr<Request> prepare(std::span<const std::uint64_t> misses);
  void submit(std::unique_ptr<Request> added);
  void serve() noexcept;
  void read(Request& request) noexcept;
  void wait_for(const Request& request);
  void keep(std::unique_ptr<Run> run, std::size_t place) noexcept;

  PageFile& file_;
  PageShape shape_;
  Slots slots_;
  std::size_t first_;
  std::size_t most_bytes_;
  std::atomic<std::uint64_t> reads_{0};
  std::atomic<bool> stops_{false};
  std::unique_ptr<Shared> shared_ = std::make_unique<Shared>();
  std::unique_ptr<Thread> thread_;  // last: it uses the others
};

}  // namespace shoal

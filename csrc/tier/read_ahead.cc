// No page is read twice. A merge replaces the run of a slot: rows that were not in memory are the same in the
// new one, so they stay valid, and the others are marked as used; the old run is kept until the requests that
// refer to it have been read. A page that cannot be read is left to the call that needs it, which reads it
// again and reports the error.

#include "tier/read_ahead.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

#include "tier/read_rows.h"

namespace shoal {

std::size_t ReadAhead::Request::bytes() const noexcept {
  return hashes.capacity() * sizeof(std::uint64_t) + rows.capacity() + found.capacity() + used.capacity() +
         pieces.capacity() * sizeof(Piece);
}

ReadAhead::Piece* ReadAhead::Request::piece(std::size_t place) noexcept {
  const auto at = std::ranges::lower_bound(pieces, place, {}, &Piece::place);
  return at == pieces.end() || at->place != place ? nullptr : &*at;
}

ReadAhead::ReadAhead(PageFile& file, const PageShape& shape, Slots slots, std::size_t first,
                     std::size_t bytes)
    : file_(file), shape_(shape), slots_(slots), first_(first), most_bytes_(bytes) {}

ReadAhead::~ReadAhead() {
  if (thread_ != nullptr && !thread_->is_of_this_process()) {
    static_cast<void>(shared_.release());
    return;
  }
  {
    const MutexLock lock(shared_->mutex);
    shared_->stops = true;
    stops_ = true;
  }
  shared_->wake.notify_all();
  thread_.reset();
}

std::size_t ReadAhead::bytes() const noexcept {
  std::size_t bytes = 0;
  for (const auto& request : shared_->requests) {
    bytes += request->bytes();
  }
  return bytes;
}

// --- requests ----------------------------------------------------------------------------------------------

std::unique_ptr<ReadAhead::Request> ReadAhead::prepare(std::span<const std::uint64_t> misses) {
  auto added = std::make_unique<Request>();
  if (misses.empty()) {
    return added;
  }
  for (const auto& request : shared_->requests) {
    ++request->later;
  }
  trim();
  if (shared_->requests.size() == kMost) {
    return added;
  }
  const std::size_t each = sizeof(std::uint64_t) + shape_.row_bytes + sizeof(Row) + 1;
  const std::size_t used = bytes();
  const std::size_t max_rows = used >= most_bytes_ ? 0 : (most_bytes_ - used) / each;
  added->hashes.reserve(std::min(misses.size(), max_rows));
  std::vector<std::size_t> at(shared_->requests.size());  // in each request
  for (const std::uint64_t hash : misses) {
    bool is_requested = false;
    for (std::size_t r = 0; r < at.size() && !is_requested; ++r) {
      const Request& earlier = *shared_->requests[r];
      while (at[r] < earlier.hashes.size() && earlier.hashes[at[r]] < hash) {
        ++at[r];
      }
      is_requested =
          at[r] < earlier.hashes.size() && earlier.hashes[at[r]] == hash && earlier.used[at[r]] == 0;
    }
    if (is_requested) {
      continue;
    }
    if (added->hashes.size() == max_rows) {
      break;
    }
    added->hashes.push_back(hash);
    const std::size_t place = index_of(slots_.of(hash)) - first_;
    if (added->pieces.empty() || added->pieces.back().place != place) {
      added->pieces.push_back(
          {.place = place, .run = nullptr, .first = added->hashes.size() - 1, .end = added->hashes.size()});
    } else {
      ++added->pieces.back().end;
    }
  }
  const std::size_t count = added->hashes.size();
  added->rows.resize(count * shape_.row_bytes);
  added->found.resize(count, Row::kUnread);
  added->used.resize(count);
  added->replaced.reserve(added->pieces.size());
  return added;
}

void ReadAhead::submit(std::unique_ptr<Request> added) {
  if (added->hashes.empty()) {
    return;
  }
  if (thread_ == nullptr) {
    thread_ = std::make_unique<Thread>([this] { serve(); });
  }
  {
    const MutexLock lock(shared_->mutex);
    shared_->requests.push_back(std::move(added));
  }
  shared_->wake.notify_one();
}

void ReadAhead::trim() noexcept {
  const MutexLock lock(shared_->mutex);
  std::erase_if(shared_->requests, [](const std::unique_ptr<Request>& request) {
    return request->is_read &&
           (request->later >= kMost || std::ranges::find(request->used, 0) == request->used.end());
  });
}

// --- the thread --------------------------------------------------------------------------------------------

void ReadAhead::serve() noexcept {
  const auto unread = [this] {
    const auto at =
        std::ranges::find(shared_->requests, false, [](const auto& request) { return request->is_read; });
    return at == shared_->requests.end() ? nullptr : at->get();
  };
  const MutexLock lock(shared_->mutex);
  for (;;) {
    Request* next = unread();
    while (!shared_->stops && next == nullptr) {
      shared_->wake.wait(shared_->mutex);
      next = unread();
    }
    if (shared_->stops) {
      return;
    }
    shared_->mutex.unlock();
    read(*next);
    shared_->mutex.lock();
    next->is_read = true;
    next->replaced.clear();
    shared_->read.notify_all();
  }
}

void ReadAhead::read(Request& request) noexcept {
  try {
    RowReads reads(file_);
    std::size_t piece = 0;
    const auto run_of = [&](std::size_t i) -> const Run& {
      while (request.pieces[piece].end <= i) {
        ++piece;
      }
      return *request.pieces[piece].run;
    };
    const auto use = [&](std::size_t i, const std::byte* row) {
      if (row != nullptr) {
        std::memcpy(request.rows.data() + i * shape_.row_bytes, row, shape_.row_bytes);
      }
      request.found[i] = row == nullptr ? Row::kAbsent : Row::kFound;
    };
    for (std::size_t next = 0; next < request.hashes.size() && !stops_;) {
      const std::uint64_t before = reads.pages_read();
      next = reads.read(request.hashes, next, run_of, use);
      reads_.fetch_add(reads.pages_read() - before, std::memory_order_relaxed);
    }
  } catch (const std::exception&) {
    // The rows stay unread: the call that needs them reads them again, and reports what it finds.
  }
}

void ReadAhead::wait_for(const Request& request) {
  const MutexLock lock(shared_->mutex);
  while (!request.is_read) {
    shared_->read.wait(shared_->mutex);
  }
}

// --- what was read -----------------------------------------------------------------------------------------

ReadAhead::Taken ReadAhead::take(std::span<const std::uint64_t> misses) {
  Taken taken{.rows = {}, .left = {misses.begin(), misses.end()}};
  std::vector<std::uint64_t>& left = taken.left;
  for (const auto& request : shared_->requests) {
    bool is_read = false;
    std::size_t kept = 0;
    std::size_t at = 0;  // of `left`
    for (const Piece& piece : request->pieces) {
      const auto first = request->hashes.begin() + static_cast<std::ptrdiff_t>(piece.first);
      while (at < left.size() && left[at] < *first) {
        left[kept++] = left[at++];
      }
      if (at == left.size()) {
        break;
      }
      for (std::size_t i = piece.first; i < piece.end && at < left.size(); ++i) {
        while (at < left.size() && left[at] < request->hashes[i]) {
          left[kept++] = left[at++];
        }
        if (at == left.size() || left[at] != request->hashes[i] || request->used[i] != 0) {
          continue;
        }
        if (!is_read) {
          wait_for(*request);
          is_read = true;
        }
        request->used[i] = 1;
        if (request->found[i] == Row::kUnread) {
          left[kept++] = left[at++];
          continue;
        }
        taken.rows.push_back({.hash = left[at++],
                              .row = request->found[i] == Row::kFound
                                         ? request->rows.data() + i * shape_.row_bytes
                                         : nullptr});
      }
    }
    while (at < left.size()) {
      left[kept++] = left[at++];
    }
    left.resize(kept);
  }
  return taken;
}

void ReadAhead::merged(std::size_t place, std::unique_ptr<Run> from,
                       std::span<const SlotTable::Entry> entries,
                       std::span<const std::uint64_t> erased) noexcept {
  for (const auto& request : shared_->requests) {
    Piece* const piece = request->piece(place);
    if (piece == nullptr) {
      continue;
    }
    auto entry = entries.begin();
    for (std::size_t i = piece->first; i < piece->end; ++i) {
      const std::uint64_t hash = request->hashes[i];
      while (entry != entries.end() && entry->hash < hash) {
        ++entry;
      }
      if ((entry != entries.end() && entry->hash == hash) || std::ranges::binary_search(erased, hash)) {
        request->used[i] = 1;
      }
    }
  }
  keep(std::move(from), place);
}

void ReadAhead::forget(std::size_t place, std::unique_ptr<Run> from) noexcept {
  for (const auto& request : shared_->requests) {
    if (Piece* const piece = request->piece(place); piece != nullptr) {
      std::fill(request->used.begin() + static_cast<std::ptrdiff_t>(piece->first),
                request->used.begin() + static_cast<std::ptrdiff_t>(piece->end), std::uint8_t{1});
    }
  }
  keep(std::move(from), place);
}

// The newest request that refers to the run is read last.
void ReadAhead::keep(std::unique_ptr<Run> run, std::size_t place) noexcept {
  if (run == nullptr || thread_ == nullptr) {
    return;
  }
  const MutexLock lock(shared_->mutex);
  for (auto request = shared_->requests.rbegin(); request != shared_->requests.rend(); ++request) {
    const Piece* const piece = (*request)->piece(place);
    if (!(*request)->is_read && piece != nullptr && piece->run == run.get()) {
      (*request)->replaced.push_back(std::move(run));
      return;
    }
  }
}

const std::byte* ReadAhead::find(std::size_t place, std::uint64_t hash) {
  for (const auto& request : shared_->requests) {
    const Piece* const piece = request->piece(place);
    if (piece == nullptr) {
      continue;
    }
    wait_for(*request);
    for (std::size_t i = piece->first; i < piece->end; ++i) {
      if (request->hashes[i] == hash && request->used[i] == 0 && request->found[i] == Row::kFound) {
        return request->rows.data() + i * shape_.row_bytes;
      }
    }
  }
  return nullptr;
}

}  // namespace shoal

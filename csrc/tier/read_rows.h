// read_rows: reads rows of runs by their hashes, each page once, with many reads in flight.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "tier/page_file.h"
#include "tier/run.h"

namespace shoal {

class RowReads {
 public:
  explicit RowReads(PageFile& file) : memory_(file.lend()), page_bytes_(file.page_bytes()) {}

  std::uint64_t pages_read() const noexcept { return pages_read_; }

  // Reads as many pages as fit in memory, for ascending hashes from number `next` on; returns the number of
  // the first hash that is left. run_of(i) is the run of hash i. Calls use(i, row), while other pages are
  // being read, in any order, with null if the run has no such row. Throws TierStorageError and
  // TierCorruptionError, and what `use` throws.
  template <class RunOf, class Use>
  std::size_t read(std::span<const std::uint64_t> hashes, std::size_t next, const RunOf& run_of,
                   const Use& use) {
    pages_.clear();
    reads_.clear();
    for (; next < hashes.size(); ++next) {
      const Run& run = run_of(next);
      const std::size_t number = run.page_of(hashes[next]);
      if (!pages_.empty() && pages_.back().run == &run && pages_.back().number == number) {
        ++pages_.back().end;
        continue;
      }
      if (pages_.size() == memory_.pages()) {
        break;
      }
      reads_.push_back({.offset = run.offset_of(number),
                        .to = memory_.page(pages_.size()),
                        .bytes = static_cast<std::uint32_t>(page_bytes_)});
      pages_.push_back({.run = &run, .number = number, .first = next, .end = next + 1});
    }
    memory_.read(reads_, [&](std::size_t i) {
      const Page& page = pages_[i];
      page.run->check(page.number, reads_[i].to);
      for (std::size_t hash = page.first; hash < page.end; ++hash) {
        use(hash, page.run->find(reads_[i].to, hashes[hash]));
      }
    });
    pages_read_ += pages_.size();
    return next;
  }

 private:
  struct Page {
    const Run* run;
    std::size_t number;
    std::size_t first;  // of the hashes that it may hold
    std::size_t end;
  };

  PageFile::Lent memory_;
  std::size_t page_bytes_;
  std::vector<Page> pages_;
  std::vector<ReadQueue::Read> reads_;
  std::uint64_t pages_read_ = 0;
};

}  // namespace shoal

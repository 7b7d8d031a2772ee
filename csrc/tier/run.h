// Run: the rows of one slot on disk, immutable, in ascending order of hash (a sorted run of a log-structured
// merge tree, with one run a slot).
//
//   page     [ crc32c u32 | rows u32 | hashes, 8 bytes each | rows, as a table keeps them | zeros ]
//            The checksum covers the rest of the page, the number of its run and its own: a flipped bit, a
//            torn page and a page of an older run in the same place are all found
//   fence    the first hash of each page. Hashes are uniform, so a hash's part of the slot predicts its page,
//            and the fences correct the prediction: a row is read with one read, and no index of keys is in
//            memory
//   filter   answers most absent hashes without a read (tier/key_filter.h)
//
// In memory: 10 bits for each row and 8 bytes for each page.
//
// Threads: immutable once written; any number of readers.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/mix.h"
#include "tier/key_filter.h"
#include "tier/page_file.h"

namespace shoal {

// How rows of one size are cut into pages.
struct PageShape {
  static constexpr std::size_t kHead = 8;

  // The smallest page that rows fill to 7/8, or nearly.
  explicit PageShape(std::size_t row_bytes) noexcept;

  std::size_t row_bytes;
  std::size_t page_bytes;
  std::size_t rows;  // of a full page
};

class Run {
 public:
  ~Run();
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  std::size_t rows() const noexcept { return rows_; }
  std::size_t pages() const noexcept { return fences_.size(); }
  std::uint64_t file_bytes() const noexcept { return pages() * shape_.page_bytes; }
  // Of memory.
  std::size_t bytes() const noexcept;

  bool may_have(std::uint64_t hash) const noexcept { return filter_.may_have(hash); }
  // The only page that may hold it.
  std::size_t page_of(std::uint64_t hash) const noexcept;
  std::uint64_t offset_of(std::size_t page) const noexcept {
    return file_.offset_of(chunks_[page / file_.chunk_pages()]) +
           page % file_.chunk_pages() * shape_.page_bytes;
  }
  // Throws TierCorruptionError unless these are the bytes of that page.
  void check(std::size_t page, const std::byte* bytes) const;
  // In a page that was checked; null if absent.
  const std::byte* find(const std::byte* page, std::uint64_t hash) const noexcept;

 private:
  friend class RunWriter;
  friend class RunReader;
  Run(PageFile& file, const PageShape& shape, Slots slots, Slot slot, std::uint64_t number, std::size_t rows);

  PageFile& file_;
  PageShape shape_;
  unsigned slot_bits_;
  Slot slot_;
  std::uint64_t number_;  // unique in the process
  std::size_t rows_ = 0;
  KeyFilter filter_;
  std::vector<std::uint64_t> fences_;
  std::vector<std::uint32_t> chunks_;
};

// Writes a run front to back. Without finish() it leaves nothing.
class RunWriter {
 public:
  // `rows` are at most as many as will be added, for the size of the filter.
  RunWriter(PageFile& file, const PageShape& shape, Slots slots, Slot slot, std::size_t rows);

  // Ascending hashes. Throws TierStorageError.
  void add(std::uint64_t hash, const std::byte* row);
  std::unique_ptr<Run> finish();

 private:
  void end_page();
  void flush();

  PageFile& file_;
  PageShape shape_;
  std::unique_ptr<Run> run_;
  PageFile::Lent memory_;
  std::size_t page_ = 0;     // in memory
  std::size_t in_page_ = 0;  // rows
  std::size_t written_ = 0;  // pages
};

// Reads a run front to back.
class RunReader {
 public:
  explicit RunReader(const Run& run);

  bool at_end() const noexcept { return left_ == 0; }
  std::uint64_t hash() const noexcept { return hash_; }
  // Valid until the next call of next().
  const std::byte* row() const noexcept { return row_; }
  // Throws TierStorageError and TierCorruptionError.
  void next();

 private:
  void load_page();
  void fill();

  const Run& run_;
  PageFile::Lent memory_;
  std::size_t left_;
  std::size_t page_ = 0;     // of the run, next to be loaded
  std::size_t first_ = 0;    // of the run, in memory
  std::size_t last_ = 0;     // and the end
  std::size_t in_page_ = 0;  // rows consumed
  std::size_t page_rows_ = 0;
  const std::byte* bytes_ = nullptr;  // of the page
  std::uint64_t hash_ = 0;
  const std::byte* row_ = nullptr;
};

}  // namespace shoal

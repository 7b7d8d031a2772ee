// PageFile: the file of a tier: pages of one size, in chunks that are allocated and freed (a slab allocator
// over a file).
//
//   file    without a name, in a directory of the user's (O_TMPFILE): the system removes it with the process,
//           however that ends, so no run of the program ever reads what another one has left
//   chunk   kChunkBytes of adjacent pages, or one page if that is larger; the free one nearest to the front
//           is used first, and the file ends with its last chunk in use
//   reads   of whole pages, around the page cache where the file system can (O_DIRECT), many in flight
//           (tier/read_queue.h)
//
// Nothing is synced: after a power failure there is no process that would read it.
//
// Fork: a child's copy shares the file with its parent, so destroying it changes nothing there.
//
// Threads: any number; a reader is lent to one at a time.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/memory.h"
#include "base/mutex.h"
#include "base/threads.h"
#include "base/units.h"
#include "tier/read_queue.h"

namespace shoal {

class PageFile {
 public:
  static constexpr std::size_t kPage = 4096;
  static constexpr std::size_t kChunkBytes = 64 * KiB;
  static constexpr std::size_t kBufferBytes = 4 * MiB;
  static constexpr std::size_t kExtendBytes = MiB;  // by which the file grows

  // `page_bytes` is a multiple of kPage. Throws TierStorageError.
  PageFile(const std::string& directory, std::size_t page_bytes,
           ReadQueue::Engine engine = ReadQueue::Engine::kBest);
  ~PageFile();
  PageFile(const PageFile&) = delete;
  PageFile& operator=(const PageFile&) = delete;

  std::size_t page_bytes() const noexcept { return page_bytes_; }
  std::size_t chunk_pages() const noexcept { return chunk_pages_; }
  const std::string& directory() const noexcept { return directory_; }
  bool is_direct() const noexcept { return is_direct_; }
  bool is_async() const noexcept { return is_async_.load(); }
  int descriptor() const noexcept { return file_; }  // for tests
  // Of the chunks in use, up to the last of them, and of the file.
  std::uint64_t used_bytes() const;
  std::uint64_t end_bytes() const;
  std::uint64_t file_bytes() const;

  std::uint32_t allocate();
  void release(std::span<const std::uint32_t> chunks) noexcept;
  std::uint64_t offset_of(std::uint32_t chunk) const noexcept {
    return std::uint64_t{chunk} * chunk_pages_ * page_bytes_;
  }

  // A queue, and memory of at least kBufferBytes and two pages at a page boundary.
  struct Reader {
    explicit Reader(ReadQueue::Engine engine, std::size_t bytes) : queue(engine), buffer(bytes) {}
    ReadQueue queue;
    Region buffer;
  };
  class Lent {
   public:
    Lent(PageFile& file, std::unique_ptr<Reader> reader) noexcept : file_(file), reader_(std::move(reader)) {}
    ~Lent() { file_.take_back(std::move(reader_)); }
    Lent(const Lent&) = delete;
    Lent& operator=(const Lent&) = delete;
    std::byte* page(std::size_t number) const noexcept {
      return reader_->buffer.data() + number * file_.page_bytes_;
    }
    std::size_t pages() const noexcept { return reader_->buffer.bytes() / file_.page_bytes_; }
    // Throws TierStorageError, and what `use` throws.
    void read(std::span<const ReadQueue::Read> reads, const std::function<void(std::size_t)>& use) const {
      file_.read(reader_->queue, reads, use);
    }

   private:
    PageFile& file_;
    std::unique_ptr<Reader> reader_;
  };
  Lent lend();

  // Throws TierStorageError; then some of the bytes may have been written.
  void write(std::uint64_t offset, std::span<const std::byte> bytes);

 private:
  void read(ReadQueue& queue, std::span<const ReadQueue::Read> reads,
            const std::function<void(std::size_t)>& use) const;
  void take_back(std::unique_ptr<Reader> reader) noexcept;
  // Writes zeros for the next chunk and those after it, unless that was done.
  void extend() noexcept REQUIRES(mutex_);

  std::string directory_;
  std::size_t page_bytes_;
  std::size_t chunk_pages_;
  ReadQueue::Engine engine_;
  std::size_t stamp_ = process_stamp();  // of the process that may change the file
  bool is_direct_ = true;
  std::atomic<bool> is_async_{false};
  int file_;
  mutable Mutex mutex_;
  std::set<std::uint32_t> free_ GUARDED_BY(mutex_);
  std::uint32_t end_ GUARDED_BY(mutex_) = 0;       // chunks in use are below it
  std::uint64_t extended_ GUARDED_BY(mutex_) = 0;  // the file has been written up to there
  std::vector<std::unique_ptr<Reader>> idle_ GUARDED_BY(mutex_);
};

}  // namespace shoal

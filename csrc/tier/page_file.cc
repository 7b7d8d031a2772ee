#include "tier/page_file.h"

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <limits>
#include <system_error>
#include <utility>

#include "base/check.h"
#include "tier/storage_error.h"

namespace shoal {

namespace {

std::string text_of(int error) { return std::generic_category().message(error); }

// A file without a name; -1 and errno.
int open_unnamed(const std::string& directory, int flags) noexcept {
#ifdef O_TMPFILE
  const int file = open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC | flags, 0600);
  if (file >= 0 || (errno != EOPNOTSUPP && errno != EISDIR)) {
    return file;
  }
#endif
  std::string name = directory + "/shoal-tier-XXXXXX";
  const int named = mkostemp(name.data(), O_CLOEXEC | flags);
  if (named >= 0) {
    unlink(name.c_str());
  }
  return named;
}

}  // namespace

PageFile::PageFile(const std::string& directory, std::size_t page_bytes, ReadQueue::Engine engine)
    : directory_(directory),
      page_bytes_(page_bytes),
      chunk_pages_(std::max<std::size_t>(1, kChunkBytes / page_bytes)),
      engine_(engine) {
  SHOAL_CHECK(page_bytes != 0 && page_bytes % kPage == 0, "a page is a multiple of 4096 bytes");
#ifdef O_DIRECT
  file_ = open_unnamed(directory, O_DIRECT);
#else
  file_ = -1;
  errno = EINVAL;
#endif
  if (file_ < 0 && errno == EINVAL) {
    is_direct_ = false;
    file_ = open_unnamed(directory, 0);
  }
  if (file_ < 0) {
    throw TierStorageError("the tier in " + directory + " cannot be created: " + text_of(errno) +
                           "; choose a directory on a local disk that this process may write to");
  }
}

PageFile::~PageFile() {
  idle_.clear();
  close(file_);
}

std::uint64_t PageFile::used_bytes() const {
  const MutexLock lock(mutex_);
  return (std::uint64_t{end_} - free_.size()) * chunk_pages_ * page_bytes_;
}

std::uint64_t PageFile::end_bytes() const {
  const MutexLock lock(mutex_);
  return offset_of(end_);
}

std::uint64_t PageFile::file_bytes() const {
  const MutexLock lock(mutex_);
  return std::max(extended_, offset_of(end_));
}

std::uint32_t PageFile::allocate() {
  const MutexLock lock(mutex_);
  if (free_.empty()) {
    if (end_ == std::numeric_limits<std::uint32_t>::max()) {
      throw TierStorageError("the tier in " + directory_ + " has 2^32 chunks: divide the table");
    }
    extend();
    return end_++;
  }
  const std::uint32_t chunk = *free_.begin();
  free_.erase(free_.begin());
  return chunk;
}

// A file whose chunks are written a page or two at a time has as many extents, which a file system takes
// seconds to free: ext4 2 to 4 s for 64 MiB, also when the process was killed, and its ports stay open so
// long.
void PageFile::extend() noexcept {
  alignas(kPage) static const std::array<std::byte, kChunkBytes> zeros{};
  static constexpr std::size_t kPieces = kExtendBytes / kChunkBytes;
  const std::uint64_t begin = offset_of(end_);
  if (offset_of(end_ + 1) <= extended_) {
    return;
  }
  std::array<iovec, kPieces> pieces;
  pieces.fill({.iov_base = const_cast<std::byte*>(zeros.data()), .iov_len = zeros.size()});
  const ssize_t done = pwritev(file_, pieces.data(), kPieces, static_cast<off_t>(begin));
  // What cannot be written now is written, or refused, with the pages.
  extended_ = begin + (done < 0 ? 0 : static_cast<std::uint64_t>(done));
}

void PageFile::release(std::span<const std::uint32_t> chunks) noexcept {
  if (stamp_ != process_stamp()) {
    return;
  }
  const MutexLock lock(mutex_);
  for (const std::uint32_t chunk : chunks) {
    try {
      free_.insert(chunk);
    } catch (const std::bad_alloc&) {
      // The chunk is not used again: disk space is lost until the table is closed, no row.
    }
  }
  const std::uint32_t before = end_;
  while (end_ != 0 && free_.erase(end_ - 1) != 0) {
    --end_;
  }
  if (end_ != before &&
      ftruncate(file_, static_cast<off_t>(offset_of(end_))) == 0) {  // else it is used again
    extended_ = std::min(extended_, offset_of(end_));
  }
}

PageFile::Lent PageFile::lend() {
  {
    const MutexLock lock(mutex_);
    if (!idle_.empty()) {
      auto reader = std::move(idle_.back());
      idle_.pop_back();
      return {*this, std::move(reader)};
    }
  }
  const std::size_t pages = std::max<std::size_t>(2, kBufferBytes / page_bytes_);
  auto reader = std::make_unique<Reader>(engine_, pages * page_bytes_);
  is_async_ = reader->queue.is_async();
  return {*this, std::move(reader)};
}

void PageFile::take_back(std::unique_ptr<Reader> reader) noexcept {
  const MutexLock lock(mutex_);
  try {
    idle_.push_back(std::move(reader));
  } catch (const std::bad_alloc&) {
    // It ends here; the next one is made anew.
  }
}

void PageFile::read(ReadQueue& queue, std::span<const ReadQueue::Read> reads,
                    const std::function<void(std::size_t)>& use) const {
  if (const int error = queue.run(file_, reads, use); error != 0) {
    throw TierStorageError("the tier in " + directory_ + " cannot be read: " +
                           (error == ENODATA ? "its file was truncated" : text_of(error)) +
                           "; load the last checkpoint");
  }
}

void PageFile::write(std::uint64_t offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t done = pwrite(file_, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (done < 0 && errno != EINTR) {
      throw TierStorageError("the tier in " + directory_ + " cannot write " + std::to_string(bytes.size()) +
                             " bytes: " + text_of(errno) +
                             "; no row is lost: free disk space and repeat the call, or save now");
    }
    // Direct writes begin at a page: what remains of a partly written one is written again.
    const auto whole = done < 0 ? std::size_t{0} : static_cast<std::size_t>(done) / kPage * kPage;
    if (done >= 0 && whole == 0) {
      throw TierStorageError("the tier in " + directory_ +
                             " cannot write: the disk is full; no row is lost: " +
                             "free disk space and repeat the call, or save now");
    }
    offset += whole;
    bytes = bytes.subspan(whole);
  }
}

}  // namespace shoal

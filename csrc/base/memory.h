// Region: one growable block of zeroed memory; the only place that maps pages.
//
// Algorithm. Growth in place: old bytes keep their offsets, and new bytes read zero. Large blocks are
// anonymous mappings, which mremap extends by moving page tables instead of bytes; so growth needs no second
// copy, and shrinking returns pages at once. Below kMapped bytes on the heap; up to kRoomy with addresses for
// twice the bytes; from 2 MiB at a multiple of a huge page.
//
// Invariants
//   I1  data() is aligned to kCacheLine, from 2 MiB on to 2 MiB; null if bytes() == 0.
//   I2  The first min(old, new) bytes survive resize(); bytes beyond the old size read zero.
//   I3  A resize() that throws (std::bad_alloc) has changed nothing.
//
// Threads: none of its own; one owner.

#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "base/units.h"

namespace shoal {

inline constexpr std::size_t kCacheLine = 64;

// Returns free pages of the heap to the system: what tables leave there when they outgrow it. Takes
// milliseconds: not for every batch.
void trim_heap() noexcept;

// kBytes of zeroed memory at a multiple of kBytes: one huge page if the system has one available.
// std::bad_alloc if there is no memory. Threads: none of its own.
class HugeBlock {
 public:
  static constexpr std::size_t kBytes = 2 * MiB;

  HugeBlock();
  ~HugeBlock();
  HugeBlock(HugeBlock&& other) noexcept : data_(std::exchange(other.data_, nullptr)) {}
  HugeBlock& operator=(HugeBlock&&) = delete;

  std::byte* data() const noexcept { return data_; }
  // Returns the whole pages in the range to the system until they are written; their contents are lost.
  void forget(std::size_t offset, std::size_t bytes) noexcept;

 private:
  std::byte* data_;
};

// Memory that is shared through a file descriptor, such as a file or the rings of io_uring. std::bad_alloc if
// it is refused. Threads: none of its own.
class FileMapping {
 public:
  enum class Access : std::uint8_t { kRead, kWrite };

  FileMapping(int file, std::size_t offset, std::size_t bytes, Access access);
  ~FileMapping();
  FileMapping(FileMapping&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  FileMapping& operator=(FileMapping&&) = delete;
  FileMapping(const FileMapping&) = delete;
  FileMapping& operator=(const FileMapping&) = delete;

  std::byte* data() const noexcept { return data_; }
  std::size_t bytes() const noexcept { return bytes_; }
  // Advises the system to map huge pages, where the file has them.
  void prefer_huge_pages() noexcept;

 private:
  std::byte* data_;
  std::size_t bytes_;
};

class Region {
 public:
  static constexpr std::size_t kMapped = 16 * KiB;
  static constexpr std::size_t kRoomy =
      512 * KiB;  // at most, or a huge page would fill the reserved addresses

  Region() = default;
  explicit Region(std::size_t bytes) { resize(bytes); }
  ~Region() { release(); }
  Region(Region&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        bytes_(std::exchange(other.bytes_, 0)),
        room_(std::exchange(other.room_, 0)) {}
  Region& operator=(Region&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(room_, other.room_);
    return *this;
  }
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  std::byte* data() noexcept { return data_; }
  const std::byte* data() const noexcept { return data_; }
  std::size_t bytes() const noexcept { return bytes_; }

  // The size that a request for `bytes` actually gets: whole cache lines or whole pages. Request this size.
  static std::size_t rounded(std::size_t bytes) noexcept;

  // `bytes` is rounded up; shrinking releases memory.
  void resize(std::size_t bytes);

  // Bytes from `offset` on read zero again; their whole pages are returned to the system until they are
  // written.
  void forget(std::size_t offset) noexcept;

  // Announces that all pages from `offset` on will be written: one system call instead of a page fault for
  // each. The part that the region has grown by since it ended at `offset` becomes huge pages where it fills
  // them.
  void populate(std::size_t offset) noexcept;

 private:
  void release() noexcept;

  static std::size_t room_for(std::size_t bytes) noexcept;

  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  std::size_t room_ = 0;  // mapped bytes; those beyond bytes_ were never written
};

}  // namespace shoal

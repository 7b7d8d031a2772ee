// Region: one growable block of zeroed memory, and the only place that maps pages.
//
// Idea. A table grows in place: the block is stretched, its old bytes keep their offsets, and its new bytes read zero.
// Large blocks are mappings of their own, which the system stretches by moving page tables and not bytes; so growth
// needs no second copy, pages that were never written cost nothing, and shrinking gives pages back at once.
//
//   below kMapped bytes   heap, aligned to a cache line (a mapping would round up to a page)
//   from kMapped bytes    anonymous mapping, up to kRoomy with addresses for twice the bytes
//   from 2 MiB            at a multiple of a huge page, and stays at one when it is stretched: all but its last, unfinished
//                         2 MiB can be huge pages, and are once populate() has seen them complete
//
// Invariants
//   I1  data() is aligned to kCacheLine, from 2 MiB on to that; null where bytes() == 0.
//   I2  the first min(old, new) bytes survive resize(); bytes beyond the old size read zero.
//   I3  a resize() that throws (std::bad_alloc) has changed nothing.
//
// Threads: none of its own; one owner.

#pragma once

#include <cstddef>
#include <utility>

namespace shoal {

inline constexpr std::size_t kCacheLine = 64;

// Gives free pages of the heap back to the system: what tables leave there when they outgrow it. Milliseconds, so not
// for every batch.
void trim_heap() noexcept;

// kBytes of zeroed memory at a multiple of kBytes: one huge page where the system has one to give. std::bad_alloc where
// there is no memory. Threads: none of its own.
class HugeBlock {
 public:
  static constexpr std::size_t kBytes = std::size_t{2} << 20U;

  HugeBlock();
  ~HugeBlock();
  HugeBlock(HugeBlock&& other) noexcept : data_(std::exchange(other.data_, nullptr)) {}
  HugeBlock& operator=(HugeBlock&&) = delete;

  std::byte* data() const noexcept { return data_; }
  // The whole pages within go back to the system until they are written; what they held is lost.
  void forget(std::size_t offset, std::size_t bytes) noexcept;

 private:
  std::byte* data_;
};

class Region {
 public:
  static constexpr std::size_t kMapped = std::size_t{16} << 10U;
  static constexpr std::size_t kRoomy = std::size_t{512}
                                        << 10U;  // no more, or a huge page would fill the room

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

  // The size that a request for `bytes` really takes: whole cache lines or whole pages. Ask for this much.
  static std::size_t rounded(std::size_t bytes) noexcept;

  // `bytes` is rounded up; shrinking gives memory back.
  void resize(std::size_t bytes);

  // What lies from `offset` on reads zero again; whole pages of it go back to the system until they are written.
  void forget(std::size_t offset) noexcept;

  // Pages from `offset` on are about to be written, all of them: one call to the system instead of one for each. What the
  // region was stretched over since its end was `offset` becomes huge pages where it fills them.
  void populate(std::size_t offset) noexcept;

 private:
  void release() noexcept;

  static std::size_t room_for(std::size_t bytes) noexcept;

  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  std::size_t room_ = 0;  // bytes that are mapped; those beyond bytes_ were never written
};

}  // namespace shoal

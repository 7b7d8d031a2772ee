#include "base/memory.h"
#include "base/units.h"

#include <sys/mman.h>

#ifdef __linux__
#include <malloc.h>
#endif

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

namespace shoal {

namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kHugePage = HugeBlock::kBytes;

constexpr std::size_t round_up(std::size_t n, std::size_t unit) { return (n + unit - 1) / unit * unit; }

// Maps `bytes` at a multiple of a huge page. The system's mapping may be unaligned: the surplus at both ends
// is unmapped.
std::byte* addresses(std::size_t bytes, int protection) {
  const std::size_t wide = bytes + kHugePage - kPage;
  void* const found = mmap(nullptr, wide, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (found == MAP_FAILED) {
    throw std::bad_alloc();
  }
  auto* const got = static_cast<std::byte*>(found);
  const std::size_t before = (kHugePage - reinterpret_cast<std::uintptr_t>(got) % kHugePage) % kHugePage;
  if (before != 0) {
    munmap(got, before);
  }
  if (wide - before != bytes) {
    munmap(got + before + bytes, wide - before - bytes);
  }
  return got + before;
}

void advise_huge_pages([[maybe_unused]] std::byte* data, [[maybe_unused]] std::size_t bytes) {
#ifdef MADV_HUGEPAGE
  if (bytes >= kHugePage) {
    static_cast<void>(madvise(data, bytes, MADV_HUGEPAGE));  // advice: if it is refused, access is slower
  }
#endif
}

std::byte* map(std::size_t bytes) {
  if (bytes >= kHugePage) {
    std::byte* const got = addresses(bytes, PROT_READ | PROT_WRITE);
    advise_huge_pages(got, bytes);
    return got;
  }
  void* const got = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (got == MAP_FAILED) {
    throw std::bad_alloc();
  }
#ifdef MADV_NOHUGEPAGE
  // The kernel would make a huge page of many small regions, with all the addresses that they only reserve.
  static_cast<void>(madvise(got, bytes, MADV_NOHUGEPAGE));  // advice
#endif
  return static_cast<std::byte*>(got);
}

std::byte* stretch(std::byte* data, std::size_t old_bytes, std::size_t bytes) {
#ifdef __linux__
  void* got = MAP_FAILED;
  if (bytes < kHugePage) {
    got = mremap(data, old_bytes, bytes, MREMAP_MAYMOVE);
  } else {
    // Between multiples of a huge page, huge pages move as a whole; between other addresses each is split
    // into small ones.
    if (reinterpret_cast<std::uintptr_t>(data) % kHugePage == 0) {
      got = mremap(data, old_bytes, bytes, 0);
    }
    if (got == MAP_FAILED) {
      std::byte* const to = addresses(bytes, PROT_NONE);
      got = mremap(data, old_bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, to);
      if (got == MAP_FAILED) {
        munmap(to, bytes);
      }
    }
  }
  if (got == MAP_FAILED) {
    throw std::bad_alloc();
  }
  advise_huge_pages(static_cast<std::byte*>(got), bytes);
  return static_cast<std::byte*>(got);
#else
  std::byte* const got = map(bytes);
  std::memcpy(got, data, std::min(old_bytes, bytes));
  munmap(data, old_bytes);
  return got;
#endif
}

std::byte* allocate(std::size_t bytes) {
  if (bytes >= Region::kMapped) {
    return map(bytes);
  }
  void* const got = std::aligned_alloc(kCacheLine, bytes);
  if (got == nullptr) {
    throw std::bad_alloc();
  }
  std::memset(got, 0, bytes);
  return static_cast<std::byte*>(got);
}

}  // namespace

void trim_heap() noexcept {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

FileMapping::FileMapping(int file, std::size_t offset, std::size_t bytes, Access access) : bytes_(bytes) {
  const int rights = access == Access::kRead ? PROT_READ : PROT_READ | PROT_WRITE;
  void* const got = mmap(nullptr, bytes, rights, MAP_SHARED, file, static_cast<off_t>(offset));
  if (got == MAP_FAILED) {
    throw std::bad_alloc();
  }
  data_ = static_cast<std::byte*>(got);
}

FileMapping::~FileMapping() {
  if (data_ != nullptr) {
    munmap(data_, bytes_);
  }
}

void FileMapping::prefer_huge_pages() noexcept {
#ifdef MADV_HUGEPAGE
  static_cast<void>(madvise(data_, bytes_, MADV_HUGEPAGE));  // advice
#endif
}

HugeBlock::HugeBlock() : data_(map(kBytes)) {}

HugeBlock::~HugeBlock() {
  if (data_ != nullptr) {
    munmap(data_, kBytes);
  }
}

void HugeBlock::forget(std::size_t offset, std::size_t bytes) noexcept {
  const std::size_t first = round_up(offset, kPage);
  const std::size_t end = (offset + bytes) / kPage * kPage;
  if (first < end) {
    static_cast<void>(madvise(data_ + first, end - first, MADV_DONTNEED));  // advice
  }
}

std::size_t Region::rounded(std::size_t bytes) noexcept {
  return round_up(bytes, bytes >= kMapped ? kPage : kCacheLine);
}

// Extending a mapping stops all threads briefly, 40 us on a virtual machine. A small mapping, which grows
// often, reserves addresses in advance; addresses that are not written take no memory. One page more than a
// power of two: many regions that began at multiples of one would share few sets of the TLB.
std::size_t Region::room_for(std::size_t bytes) noexcept {
  constexpr std::size_t kLeast = 128 * KiB;
  return bytes < kMapped || bytes > kRoomy ? bytes : std::max(std::bit_ceil(bytes), kLeast) + kPage;
}

void Region::resize(std::size_t wanted) {
  const std::size_t bytes = rounded(wanted);
  if (bytes == bytes_) {
    return;
  }
  if (bytes == 0) {
    release();
    return;
  }
  if (bytes < kMapped || bytes_ < kMapped) {
    const std::size_t room = room_for(bytes);
    std::byte* const fresh = allocate(room);
    if (data_ != nullptr) {
      std::memcpy(fresh, data_, std::min(bytes, bytes_));
    }
    release();
    data_ = fresh;
    room_ = room;
  } else if (bytes < bytes_ || bytes > room_) {
    const std::size_t room = bytes < bytes_ ? bytes : room_for(bytes);
    data_ = stretch(data_, room_, room);
    room_ = room;
  }
  bytes_ = bytes;
}

void Region::forget(std::size_t offset) noexcept {
  if (offset >= bytes_) {
    return;
  }
  const std::size_t pages = bytes_ >= kMapped ? std::min(round_up(offset, kPage), bytes_) : bytes_;
  std::memset(data_ + offset, 0, pages - offset);
  if (pages < bytes_ && madvise(data_ + pages, bytes_ - pages, MADV_DONTNEED) != 0) {
    std::memset(data_ + pages, 0, bytes_ - pages);
  }
}

void Region::populate(std::size_t offset) noexcept {
#ifdef __linux__
  if (bytes_ < kMapped) {
    return;
  }
  std::size_t from = round_up(offset, kPage);
  // The last huge page of the old region, which the growth fills: its small pages and its missing ones are
  // merged into one.
  constexpr int kCollapse = 25;  // MADV_COLLAPSE of Linux 6.1, which not every C library defines
  const std::size_t broken = offset / kHugePage * kHugePage;
  if (broken != offset && broken + kHugePage <= bytes_ &&
      madvise(data_ + broken, kHugePage, kCollapse) == 0) {
    from = broken + kHugePage;
  }
#ifdef MADV_POPULATE_WRITE
  if (from < bytes_) {
    static_cast<void>(madvise(data_ + from, bytes_ - from, MADV_POPULATE_WRITE));  // advice
  }
#endif
#endif
}

void Region::release() noexcept {
  if (bytes_ >= kMapped) {
    munmap(data_, room_);
  } else {
    std::free(data_);
  }
  data_ = nullptr;
  bytes_ = 0;
  room_ = 0;
}

}  // namespace shoal

// A slot is about a thousandth of a table, so its rows seldom fill pages of 2 MiB, and with pages of 4 KiB
// TLB misses take half the time of a push.

#include "table/slab.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/check.h"

namespace shoal {

namespace {

std::size_t rows_of_chunk(std::size_t row_bytes) noexcept {
  return std::bit_floor(std::max<std::size_t>(Chunks::kChunkBytes / row_bytes, 1));
}

}  // namespace

Chunks::Chunks(std::size_t row_bytes) noexcept
    : row_bytes_(row_bytes),
      shift_(static_cast<unsigned>(std::countr_zero(rows_of_chunk(row_bytes)))),
      bytes_((row_bytes * rows() + kCacheLine - 1) / kCacheLine * kCacheLine),
      a_block_(HugeBlock::kBytes / bytes_) {}

void Chunks::add_block() {
  // Everything that may throw comes before the first change.
  std::vector<std::uint16_t> free(a_block_);
  for (std::size_t i = 0; i < a_block_; ++i) {
    free[i] = static_cast<std::uint16_t>(a_block_ - 1 - i);  // so that chunk 0 is taken first
  }
  with_free_.reserve(blocks_.size() + 1);
  HugeBlock memory;
  const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
  Block& block =
      blocks_.try_emplace(address, Block{.memory = std::move(memory), .free = std::move(free)}).first->second;
  with_free_.push_back(&block);
  free_ += a_block_;
}

std::byte* Chunks::take() {
  const MutexLock lock(mutex_);
  while (!with_free_.empty() && with_free_.back()->free.empty()) {
    with_free_.back()->listed = false;
    with_free_.pop_back();
  }
  if (with_free_.empty()) {
    add_block();
  }
  Block& block = *with_free_.back();
  const std::size_t number = block.free.back();
  block.free.pop_back();
  ++taken_;
  --free_;
  return block.memory.data() + number * bytes_;
}

void Chunks::give(std::byte* chunk) noexcept {
  const MutexLock lock(mutex_);
  const auto address = reinterpret_cast<std::uintptr_t>(chunk);
  const auto at = blocks_.find(address - address % HugeBlock::kBytes);
  SHOAL_DCHECK(at != blocks_.end());
  Block& block = at->second;
  const auto offset = static_cast<std::size_t>(chunk - block.memory.data());
  block.free.push_back(static_cast<std::uint16_t>(offset / bytes_));  // never reallocates
  --taken_;
  ++free_;
  if (block.free.size() == a_block_) {
    std::erase(with_free_, &block);
    blocks_.erase(at);
    free_ -= a_block_;
    return;
  }
  if (!block.listed) {
    block.listed = true;
    with_free_.push_back(&block);  // never reallocates
  }
  if (free_ > (taken_ + free_) / 8) {
    block.memory.forget(offset, bytes_);
  }
}

std::size_t Slab::bytes() const noexcept {
  if (places_.empty()) {
    return 0;
  }
  return small_.bytes() != 0 ? small_.bytes() : places_.size() * chunks_->bytes();
}

std::size_t Slab::bytes_with(std::size_t rows, std::size_t likely) const noexcept {
  if (rows <= rows_) {
    return bytes();
  }
  if (places_.size() <= 1 && rows <= chunks_->rows() && (places_.empty() || small_.bytes() != 0)) {
    return Region::rounded(std::min(std::max(rows, likely), chunks_->rows()) * chunks_->row_bytes());
  }
  return ((rows + chunks_->rows() - 1) >> chunks_->shift()) * chunks_->bytes();
}

bool Slab::make_room(std::size_t rows, std::size_t likely) {
  if (rows <= rows_) {
    return false;
  }
  const std::size_t row_bytes = chunks_->row_bytes();
  if (places_.size() <= 1 && rows <= chunks_->rows() && (places_.empty() || small_.bytes() != 0)) {
    places_.reserve(1);
    const std::size_t wanted = likely <= chunks_->rows() ? std::max(rows, likely) : chunks_->rows();
    small_.resize(wanted * row_bytes);
    places_.assign(1, small_.data());
    rows_ = wanted;
    return true;
  }
  const std::size_t wanted = (rows + chunks_->rows() - 1) >> chunks_->shift();
  if (wanted > places_.capacity()) {
    places_.reserve(std::max(wanted, 2 * places_.capacity()));
  }
  const bool moves = small_.bytes() != 0;
  if (moves) {
    std::byte* const first = chunks_->take();
    std::copy_n(small_.data(), rows_ * row_bytes, first);
    small_ = Region();
    places_[0] = first;
    rows_ = chunks_->rows();
  }
  while (places_.size() < wanted) {
    places_.push_back(chunks_->take());
    rows_ = places_.size() << chunks_->shift();
  }
  return moves;
}

void Slab::restore(std::size_t rows, bool is_small) {
  if (rows == 0) {
    return;
  }
  if (is_small) {
    small_.resize(rows * chunks_->row_bytes());
    places_.assign(1, small_.data());
    rows_ = rows;
    return;
  }
  const std::size_t wanted = rows >> chunks_->shift();
  places_.reserve(wanted);
  while (places_.size() < wanted) {
    places_.push_back(chunks_->take());
    rows_ = places_.size() << chunks_->shift();
  }
}

void Slab::cut(std::size_t rows) noexcept {
  if (rows >= rows_) {
    return;
  }
  if (small_.bytes() != 0) {
    if (rows == 0) {
      small_ = Region();
      places_.clear();
      rows_ = 0;
    }
    return;
  }
  const std::size_t kept = (rows + chunks_->rows() - 1) >> chunks_->shift();
  while (places_.size() > kept) {
    chunks_->give(places_.back());
    places_.pop_back();
  }
  rows_ = places_.size() << chunks_->shift();
}

void Slab::make_image_room(std::size_t bytes) {
  if (bytes > small_.bytes()) {
    small_ = Region();
    small_.resize(Region::rounded(bytes + bytes / 4));
    small_.populate(0);
  }
}

void Slab::become_image_of(const Slab& of) {
  make_image_room(of.bytes());
  chunks_ = of.chunks_;
  rows_ = of.rows_;
  places_.resize(of.places_.size());
  const std::size_t bytes = of.small_.bytes() != 0 ? of.small_.bytes()
                            : of.places_.empty()   ? 0
                                                   : chunks_->bytes();
  for (std::size_t i = 0; i < places_.size(); ++i) {
    places_[i] = small_.data() + i * bytes;
    std::memcpy(places_[i], of.places_[i], bytes);
  }
}

}  // namespace shoal

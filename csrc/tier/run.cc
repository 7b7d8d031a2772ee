#include "tier/run.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/crc32c.h"
#include "base/units.h"
#include "tier/storage_error.h"

namespace shoal {

namespace {

std::uint64_t next_number() noexcept {
  static std::atomic<std::uint64_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

template <class T>
T load(const std::byte* from) noexcept {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

std::uint32_t checksum(std::uint64_t run, std::uint64_t page, const std::byte* bytes,
                       std::size_t size) noexcept {
  const std::array<std::uint64_t, 2> place{run, page};
  return crc32c({bytes + sizeof(std::uint32_t), size - sizeof(std::uint32_t)},
                crc32c(std::as_bytes(std::span(place))));
}

}  // namespace

PageShape::PageShape(std::size_t row) noexcept : row_bytes(row), page_bytes(0), rows(0) {
  const std::size_t each = sizeof(std::uint64_t) + row;
  double best = 0;
  for (std::size_t bytes = PageFile::kPage; best < 0.875 && bytes <= 32 * PageFile::kPage;
       bytes += PageFile::kPage) {
    const std::size_t fit = (bytes - kHead) / each;
    const double filled = static_cast<double>(fit * each) / static_cast<double>(bytes);
    if (filled > best) {
      best = filled;
      page_bytes = bytes;
      rows = fit;
    }
  }
}

Run::Run(PageFile& file, const PageShape& shape, Slots slots, Slot slot, std::uint64_t number,
         std::size_t rows)
    : file_(file),
      shape_(shape),
      slot_bits_(slots.bits()),
      slot_(slot),
      number_(number),
      filter_(slots.bits(), rows) {}

Run::~Run() { file_.release(chunks_); }

std::size_t Run::bytes() const noexcept {
  return sizeof(Run) + filter_.bytes() + fences_.capacity() * sizeof(std::uint64_t) +
         chunks_.capacity() * sizeof(std::uint32_t);
}

std::size_t Run::page_of(std::uint64_t hash) const noexcept {
  // The last page whose fence is not above the hash; the first one for hashes below all.
  constexpr std::size_t kNear = 8;
  const std::size_t guess = scale(hash << slot_bits_, fences_.size());
  const std::size_t from = guess < kNear ? 0 : guess - kNear;
  const std::size_t to = std::min(fences_.size(), guess + kNear);
  const bool is_near = (from == 0 || fences_[from] <= hash) && (to == fences_.size() || fences_[to] > hash);
  const auto begin = fences_.begin() + static_cast<std::ptrdiff_t>(is_near ? from : 0);
  const auto end = is_near ? fences_.begin() + static_cast<std::ptrdiff_t>(to) : fences_.end();
  const auto above = std::upper_bound(begin, end, hash);
  return static_cast<std::size_t>(above - fences_.begin()) - (above == fences_.begin() ? 0 : 1);
}

void Run::check(std::size_t page, const std::byte* bytes) const {
  if (load<std::uint32_t>(bytes) != checksum(number_, page, bytes, shape_.page_bytes)) [[unlikely]] {
    throw TierCorruptionError(
        "the tier in " + file_.directory() + " is damaged: slot " + std::to_string(index_of(slot_)) +
        ", page " + std::to_string(page) + " of " + std::to_string(pages()) + ", byte " +
        std::to_string(offset_of(page)) +
        " of its file: the checksum does not match. The disk has returned other bytes than "
        "were written: load the last checkpoint");
  }
}

const std::byte* Run::find(const std::byte* page, std::uint64_t hash) const noexcept {
  const std::size_t rows = load<std::uint32_t>(page + sizeof(std::uint32_t));
  const std::byte* const hashes = page + PageShape::kHead;
  std::size_t begin = 0;
  for (std::size_t count = rows; count > 0;) {  // the first that is not below it
    const std::size_t half = count / 2;
    const bool below = load<std::uint64_t>(hashes + (begin + half) * sizeof hash) < hash;
    begin = below ? begin + half + 1 : begin;
    count = below ? count - half - 1 : half;
  }
  return begin == rows || load<std::uint64_t>(hashes + begin * sizeof hash) != hash
             ? nullptr
             : hashes + rows * sizeof hash + begin * shape_.row_bytes;
}

// --- writing -----------------------------------------------------------------------------------------------

RunWriter::RunWriter(PageFile& file, const PageShape& shape, Slots slots, Slot slot, std::size_t rows)
    : file_(file),
      shape_(shape),
      run_(new Run(file, shape, slots, slot, next_number(), rows)),
      memory_(file.lend()) {
  run_->fences_.reserve((rows + shape.rows - 1) / shape.rows);
}

void RunWriter::add(std::uint64_t hash, const std::byte* row) {
  if (in_page_ == shape_.rows) {
    end_page();
  }
  if (in_page_ == 0) {
    run_->fences_.push_back(hash);
  }
  run_->filter_.add(hash);
  // Where a full page has them; end_page() moves the rows of one that is not.
  std::byte* const page = memory_.page(page_);
  std::memcpy(page + PageShape::kHead + in_page_ * sizeof hash, &hash, sizeof hash);
  std::memcpy(page + PageShape::kHead + shape_.rows * sizeof hash + in_page_ * shape_.row_bytes, row,
              shape_.row_bytes);
  ++in_page_;
  ++run_->rows_;
}

void RunWriter::end_page() {
  std::byte* const page = memory_.page(page_);
  const auto rows = static_cast<std::uint32_t>(in_page_);
  std::byte* const to = page + PageShape::kHead + in_page_ * sizeof(std::uint64_t);
  if (in_page_ != shape_.rows) {
    std::memmove(to, page + PageShape::kHead + shape_.rows * sizeof(std::uint64_t),
                 in_page_ * shape_.row_bytes);
  }
  std::byte* const end = to + in_page_ * shape_.row_bytes;
  std::memset(end, 0, static_cast<std::size_t>(page + shape_.page_bytes - end));
  std::memcpy(page + sizeof(std::uint32_t), &rows, sizeof rows);
  const std::uint32_t crc = checksum(run_->number_, written_ + page_, page, shape_.page_bytes);
  std::memcpy(page, &crc, sizeof crc);
  in_page_ = 0;
  if (++page_ == memory_.pages()) {
    flush();
  }
}

void RunWriter::flush() {
  std::vector<std::uint32_t>& chunks = run_->chunks_;
  while (chunks.size() * file_.chunk_pages() < written_ + page_) {
    if (chunks.size() == chunks.capacity()) {
      chunks.reserve(2 * chunks.size() + 1);  // before a chunk is taken
    }
    chunks.push_back(file_.allocate());
  }
  for (std::size_t done = 0; done < page_;) {
    const std::uint64_t offset = run_->offset_of(written_ + done);
    std::size_t end = done + 1;  // of the pages that follow each other in the file
    while (end < page_ && run_->offset_of(written_ + end) == offset + (end - done) * shape_.page_bytes) {
      ++end;
    }
    file_.write(offset, {memory_.page(done), (end - done) * shape_.page_bytes});
    done = end;
  }
  written_ += page_;
  page_ = 0;
}

std::unique_ptr<Run> RunWriter::finish() {
  if (in_page_ != 0) {
    end_page();
  }
  flush();
  run_->fences_.shrink_to_fit();
  run_->chunks_.shrink_to_fit();
  return std::move(run_);
}

// --- reading -----------------------------------------------------------------------------------------------

RunReader::RunReader(const Run& run) : run_(run), memory_(run.file_.lend()), left_(run.rows() + 1) { next(); }

void RunReader::next() {
  if (--left_ == 0) {
    return;
  }
  if (in_page_ == page_rows_) {
    load_page();
  }
  const std::byte* const hashes = bytes_ + PageShape::kHead;
  hash_ = load<std::uint64_t>(hashes + in_page_ * sizeof hash_);
  row_ = hashes + page_rows_ * sizeof hash_ + in_page_ * run_.shape_.row_bytes;
  ++in_page_;
}

void RunReader::load_page() {
  if (page_ == last_) {
    fill();
  }
  bytes_ = memory_.page(page_ - first_);
  ++page_;
  in_page_ = 0;
  page_rows_ = load<std::uint32_t>(bytes_ + sizeof(std::uint32_t));
}

void RunReader::fill() {
  first_ = last_;
  last_ = std::min(run_.pages(), first_ + memory_.pages());
  constexpr std::size_t kReadBytes = 256 * KiB;
  const std::size_t page_bytes = run_.shape_.page_bytes;
  std::vector<ReadQueue::Read> reads;
  std::vector<std::size_t> firsts;  // pages
  for (std::size_t page = first_; page < last_; ++page) {
    const std::uint64_t offset = run_.offset_of(page);
    if (!reads.empty() && reads.back().offset + reads.back().bytes == offset &&
        reads.back().bytes + page_bytes <= kReadBytes) {
      reads.back().bytes += static_cast<std::uint32_t>(page_bytes);
      continue;
    }
    reads.push_back({.offset = offset,
                     .to = memory_.page(page - first_),
                     .bytes = static_cast<std::uint32_t>(page_bytes)});
    firsts.push_back(page);
  }
  memory_.read(reads, [&](std::size_t i) {
    for (std::size_t at = 0; at < reads[i].bytes; at += page_bytes) {
      run_.check(firsts[i] + at / page_bytes, reads[i].to + at);
    }
  });
}

}  // namespace shoal

// Hash-based deduplication: each thread gives the hashes of its part numbers in order of occurrence, by a
// table of open addressing; the hashes of all parts, which are few, are sorted as a KeyBatch, and the numbers
// replaced by their indices there. Small keys, such as the columns of a matrix, are looked up in an array by
// themselves, and hashed once for each thread. Keys chosen to meet in one place of the table are noticed by
// the length of a search, and sorted.

#include "batch/unique_keys.h"

#include <algorithm>
#include <bit>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/mix_block.h"
#include "base/simd.h"

namespace shoal {

namespace {

constexpr std::size_t kBlock = 512;                         // hashes mixed at a time
constexpr std::size_t kLeast = std::size_t{1} << 16U;       // keys per thread, at least
constexpr std::size_t kFirstCells = std::size_t{1} << 13U;  // of a table
constexpr std::size_t kLongestSearch = 128;                 // uniform hashes at load 1/2 need some 40
constexpr std::size_t kMostSmall = std::size_t{1} << 22U;   // small keys: 16 MiB of numbers
constexpr std::size_t kKeysPerSmall = 8;                    // keys per small key, at least

// Gives hashes numbers in order of occurrence. Cells are found by the hash's low bits, then the next ones; at
// most half of them are in use.
class Numbering {
 public:
  Numbering() : cells_(kFirstCells) {}

  void prefetch(std::uint64_t hash) const noexcept {
    __builtin_prefetch(&cells_[hash & (cells_.size() - 1)]);
  }

  std::uint32_t number(std::uint64_t hash) {
    std::size_t at = hash & (cells_.size() - 1);
    for (std::size_t search = 0; cells_[at].next != 0; ++search) {
      if (cells_[at].hash == hash) {
        return cells_[at].next - 1;
      }
      is_crowded_ = is_crowded_ || search == kLongestSearch;
      at = (at + 1) & (cells_.size() - 1);
    }
    hashes_.push_back(hash);
    cells_[at] = {hash, static_cast<std::uint32_t>(hashes_.size())};
    if (2 * hashes_.size() > cells_.size()) {
      grow();
    }
    return static_cast<std::uint32_t>(hashes_.size() - 1);
  }

  bool is_crowded() const noexcept { return is_crowded_; }
  const std::vector<std::uint64_t>& hashes() const noexcept { return hashes_; }

 private:
  struct Cell {
    std::uint64_t hash;
    std::uint32_t next;  // the number + 1; 0: the cell is free
  };

  void grow() {
    std::vector<Cell> wider(4 * cells_.size());
    for (std::size_t n = 0; n < hashes_.size(); ++n) {
      std::size_t at = hashes_[n] & (wider.size() - 1);
      while (wider[at].next != 0) {
        at = (at + 1) & (wider.size() - 1);
      }
      wider[at] = {hashes_[n], static_cast<std::uint32_t>(n + 1)};
    }
    cells_.swap(wider);
  }

  std::vector<Cell> cells_;
  std::vector<std::uint64_t> hashes_;
  bool is_crowded_ = false;
};

SHOAL_CLONES std::uint64_t union_of_bits(const std::uint64_t* keys, std::size_t n) noexcept {
  std::uint64_t bits = 0;
  for (std::size_t i = 0; i < n; ++i) {
    bits |= keys[i];
  }
  return bits;
}

// Numbers keys until the table is crowded. The numbers of small keys, such as the columns of a matrix, are
// remembered at the key: they are hashed once.
class KeyNumbering {
 public:
  // `n`: of the keys that will be numbered.
  void begin(std::size_t n) { small_.resize(std::bit_floor(std::min(kMostSmall, n / kKeysPerSmall))); }

  void number(std::span<const std::uint64_t> keys, std::uint32_t* numbers) {
    for (std::size_t at = 0; at < keys.size() && !table_.is_crowded(); at += kBlock) {
      const std::size_t n = std::min(kBlock, keys.size() - at);
      if (union_of_bits(keys.data() + at, n) < small_.size()) {
        number_small(keys.data() + at, n, numbers + at);
      } else {
        number_any(keys.data() + at, n, numbers + at);
      }
    }
  }
  std::uint32_t number(std::uint64_t key) { return table_.number(mix(key)); }

  bool is_crowded() const noexcept { return table_.is_crowded(); }
  const std::vector<std::uint64_t>& hashes() const noexcept { return table_.hashes(); }

 private:
  void number_small(const std::uint64_t* keys, std::size_t n, std::uint32_t* numbers) {
    for (std::size_t i = 0; i < n; ++i) {
      std::uint32_t& next = small_[keys[i]];
      if (next == 0) {
        next = number(keys[i]) + 1;
      }
      numbers[i] = next - 1;
    }
  }

  void number_any(const std::uint64_t* keys, std::size_t n, std::uint32_t* numbers) {
    constexpr std::size_t kAhead = 16;
    std::uint64_t hashes[kBlock];
    mix_block(keys, n, hashes);
    for (std::size_t i = 0; i < std::min(kAhead, n); ++i) {
      table_.prefetch(hashes[i]);
    }
    for (std::size_t i = 0; i < n; ++i) {
      if (i + kAhead < n) {
        table_.prefetch(hashes[i + kAhead]);
      }
      numbers[i] = table_.number(hashes[i]);
    }
  }

  Numbering table_;
  std::vector<std::uint32_t>
      small_;  // of each small key: the number + 1; 0: it has none yet. Their count is a power of two
};

}  // namespace

UniqueKeys::UniqueKeys(std::span<const std::uint64_t> keys, Slots slots, ThreadPool& pool,
                       KeyBatchScratch& scratch, std::optional<std::uint64_t> last) {
  const std::size_t n = keys.size() + (last ? 1 : 0);
  SHOAL_CHECK(n <= KeyBatch::kMaxKeys, "there are at most 2^32 - 1 keys, got " + std::to_string(n));
  inverse_ = Buffer<std::uint32_t>(n);
  const Partition partition{n, parts_for(n, kLeast, pool.threads())};
  std::vector<KeyNumbering> numberings(partition.parts);
  pool.run(partition.parts, [&](std::size_t p) {
    const std::size_t begin = partition.begin(p);
    const std::size_t end = partition.begin(p + 1);
    numberings[p].begin(end - begin);
    numberings[p].number(keys.subspan(begin, std::min(end, keys.size()) - begin), inverse_.data() + begin);
    if (end > keys.size() && last) {
      inverse_[keys.size()] = numberings[p].number(*last);
    }
  });
  if (std::any_of(numberings.begin(), numberings.end(),
                  [](const auto& numbering) { return numbering.is_crowded(); })) {
    sorted_.emplace(keys, slots, pool, scratch, last);
    std::copy_n(sorted_->inverse().data(), n, inverse_.data());
    return;
  }
  std::vector<std::uint64_t> hashes;
  std::vector<std::size_t> firsts;  // of each part, among the hashes of all
  for (const KeyNumbering& numbering : numberings) {
    firsts.push_back(hashes.size());
    hashes.insert(hashes.end(), numbering.hashes().begin(), numbering.hashes().end());
  }
  sorted_.emplace(KeyBatch::of_hashes(hashes, slots, pool, scratch));
  pool.run(partition.parts, [&](std::size_t p) {
    const std::uint32_t* const indices = sorted_->inverse().data() + firsts[p];
    for (std::size_t i = partition.begin(p); i < partition.begin(p + 1); ++i) {
      inverse_[i] = indices[inverse_[i]];
    }
  });
}

}  // namespace shoal

#include "batch/unique_keys.h"

#include <algorithm>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/mix_block.h"

namespace shoal {

namespace {

constexpr std::size_t kBlock = 512;                         // hashes mixed at a time
constexpr std::size_t kLeast = std::size_t{1} << 16U;       // keys per thread, at least
constexpr std::size_t kFirstCells = std::size_t{1} << 13U;  // of a table
constexpr std::size_t kLongestSearch = 128;                 // uniform hashes at load 1/2 need some 40

// Gives hashes numbers in order of occurrence. Cells are found by the hash's low bits, then the next ones; at most half of
// them are in use.
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

// Numbers the keys from `begin` to `end`, until the table is crowded.
void number_keys(std::span<const std::uint64_t> keys, std::optional<std::uint64_t> last, std::size_t begin,
                 std::size_t end, Numbering& numbering, std::uint32_t* numbers) {
  std::uint64_t hashes[kBlock];
  const std::size_t end_of_keys = std::min(end, keys.size());
  for (std::size_t at = begin; at < end_of_keys && !numbering.is_crowded(); at += kBlock) {
    const std::size_t n = std::min(kBlock, end_of_keys - at);
    mix_block(keys.data() + at, n, hashes);
    constexpr std::size_t kAhead = 16;
    for (std::size_t i = 0; i < std::min(kAhead, n); ++i) {
      numbering.prefetch(hashes[i]);
    }
    for (std::size_t i = 0; i < n; ++i) {
      if (i + kAhead < n) {
        numbering.prefetch(hashes[i + kAhead]);
      }
      numbers[at + i] = numbering.number(hashes[i]);
    }
  }
  if (end > keys.size() && last) {
    numbers[keys.size()] = numbering.number(mix(*last));
  }
}

}  // namespace

UniqueKeys::UniqueKeys(std::span<const std::uint64_t> keys, Slots slots, ThreadPool& pool,
                       KeyBatchScratch& scratch, std::optional<std::uint64_t> last) {
  const std::size_t n = keys.size() + (last ? 1 : 0);
  SHOAL_CHECK(n <= KeyBatch::kMaxKeys, "there are at most 2^32 - 1 keys, got " + std::to_string(n));
  inverse_ = Buffer<std::uint32_t>(n);
  const Partition partition{n, parts_for(n, kLeast, pool.threads())};
  std::vector<Numbering> numberings(partition.parts);
  pool.run(partition.parts, [&](std::size_t p) {
    number_keys(keys, last, partition.begin(p), partition.begin(p + 1), numberings[p], inverse_.data());
  });
  if (std::any_of(numberings.begin(), numberings.end(), [](const auto& one) { return one.is_crowded(); })) {
    sorted_.emplace(keys, slots, pool, scratch, last);
    std::copy_n(sorted_->inverse().data(), n, inverse_.data());
    return;
  }
  std::vector<std::uint64_t> hashes;
  std::vector<std::size_t> firsts;  // of each part, among the hashes of all
  for (const Numbering& one : numberings) {
    firsts.push_back(hashes.size());
    hashes.insert(hashes.end(), one.hashes().begin(), one.hashes().end());
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

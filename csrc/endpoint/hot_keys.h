// HotKeys: the keys that requests name most often, for displays. A worker names a key once in a request,
// however often its batch has it: what is counted are requests, and a key's share of them is at most 1 in the
// number of distinct keys of a batch.
//
// Invariants
//   I1  count <= how often the entry was sampled (halvings aside) <= count + sampled() / kMost.
//   I2  At most kMost entries. After a failed allocation: as many as there is memory for.
//
// Threads: one at a time.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace shoal {

struct HotKey {
  std::uint64_t hash = 0;
  std::uint32_t table = 0;
  std::uint32_t count = 0;  // of samples
};

class HotKeys {
 public:
  static constexpr std::uint64_t kGap = 2048;
  static constexpr std::uint64_t kPeriod = std::uint64_t{1} << 17U;
  static constexpr std::size_t kMost = 12288;

  // `gap`: a power of two.
  explicit HotKeys(std::uint64_t gap = kGap, std::uint64_t period = kPeriod)
      : most_skipped_(gap == 1 ? 0 : 2 * gap - 1), period_(period) {}

  void add(std::uint32_t table, std::span<const std::uint64_t> hashes) noexcept;
  // By falling count, then by table and hash.
  std::vector<HotKey> hottest(std::size_t most) const;
  // The samples that the counts are of: halved with them.
  std::uint64_t sampled() const noexcept { return sampled_; }
  std::size_t size() const noexcept { return used_; }

 private:
  static constexpr std::size_t kFirstCells = 256;
  static constexpr std::size_t kLastCells = kMost / 3 * 4;

  std::uint64_t distance() noexcept;
  void sample(std::uint32_t table, std::uint64_t hash) noexcept;
  // The cell of a key, or the free one where it belongs. There is a free one.
  static HotKey& cell_of(std::vector<HotKey>& cells, std::uint32_t table, std::uint64_t hash) noexcept;
  // False if there is no memory.
  bool grow() noexcept;
  // Replaces each count by change(count); those without a rest are removed.
  template <class Change>
  void rebuild(Change&& change) noexcept;

  std::uint64_t most_skipped_;  // between two samples: one less than a power of two
  std::uint64_t period_;
  std::uint64_t skipped_ = 0;  // of the next keys
  std::uint64_t drawn_ = 0;
  std::uint64_t sampled_ = 0;
  std::uint64_t since_ = 0;  // samples since the last halving
  std::size_t used_ = 0;
  std::vector<HotKey> cells_;  // a power of two of them; free: a count of 0
  std::vector<HotKey> spare_;  // as many, free
};

}  // namespace shoal

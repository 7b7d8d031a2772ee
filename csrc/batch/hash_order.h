// HashOrder: sorts the hashes of a batch in linear time, for KeyBatch and SummedBatch.
//
// Algorithm. An MSD radix partition followed by an LSD radix sort of each group, in linear passes.
//
//   1 count    counts the hashes of each group; a group is a value of the top bits, about 3000 hashes
//   2 scatter  writes hashes and their positions into the groups
//   3 sort     sorts each group in the cache: radix sort by the next 16 bits, then an insertion sort of the
//              rest, which is short because hashes are uniform. If it is not (keys chosen by an adversary),
//              radix sort by all bits
//   4 emit     a hash that differs from the previous one is a new unique hash
//
// Threads: in 1 and 2 they share the batch, in 3 and 4 the groups. Every pass is stable: equal hashes stay in
// order of occurrence, so the result does not depend on the number of threads.

#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>

#include "base/buffer.h"
#include "base/mix.h"
#include "base/mix_block.h"
#include "base/threads.h"

namespace shoal {

// Working memory for building batches. Reuse it: writing to fresh pages costs as much as a third of the sort.
// Serves one build at a time.
struct KeyBatchScratch {
  Buffer<std::uint64_t> hashes;         // n, if threads share the batch
  Buffer<std::uint32_t> positions;      // n, if they are not part of the result
  Buffer<std::uint32_t> group_offsets;  // n + 1, the same
  Buffer<std::uint64_t> spare_hashes;   // n; each part uses the size of its largest group
  Buffer<std::uint32_t> spare_positions;
  Buffer<std::size_t> cuts;  // counts and offsets of the groups
};

namespace hash_order {

using Position = std::uint32_t;

inline constexpr std::size_t kBlock = 512;  // hashes mixed at a time: 4 KiB
inline constexpr std::size_t kMin = 16384;  // keys per thread, at least

// The input: keys, which are hashed, or hashes.
class Source {
 public:
  Source(std::span<const std::uint64_t> input, std::optional<std::uint64_t> last, bool mixed) noexcept
      : input_(input), last_(last), mixed_(mixed) {}

  std::size_t size() const noexcept { return input_.size() + (last_ ? 1 : 0); }

  // Calls use(hash, position) for the positions from `begin` to `end`.
  template <class Use>
  void each(std::size_t begin, std::size_t end, const Use& use) const noexcept {
    std::uint64_t block[kBlock];
    for (std::size_t at = begin; at < end; at += kBlock) {
      const std::size_t n = std::min(kBlock, end - at);
      const std::uint64_t* hashes = input_.data() + at;
      if (!mixed_) {
        const std::size_t keys = std::min(n, input_.size() - at);
        mix_block(hashes, keys, block);
        if (keys != n) {
          block[keys] = mix(*last_);
        }
        hashes = block;
      }
      for (std::size_t i = 0; i < n; ++i) {
        use(hashes[i], static_cast<Position>(at + i));
      }
    }
  }

 private:
  std::span<const std::uint64_t> input_;
  std::optional<std::uint64_t> last_;
  bool mixed_;
};

// The number of top bits that make groups of 2048 to 4095 hashes. Sorting one stays in the L2 cache, and 1
// million keys make 256 groups. Groups of 512 to 1023 would fit the L1 cache, but scattering into four times
// as many groups misses the TLB: 0.75 of the speed at 1 million keys. Beyond 2048 groups this loss exceeds
// the gain.
inline unsigned group_bits(std::size_t n) noexcept {
  return std::min(static_cast<unsigned>(std::bit_width(n / 4096)), 11U);
}

// Hashes and their positions in the batch, in parallel arrays.
struct Pairs {
  std::uint64_t* hashes;
  Position* positions;

  void move(std::size_t from, const Pairs& to, std::size_t at) const noexcept {
    to.hashes[at] = hashes[from];
    to.positions[at] = positions[from];
  }
  Pairs operator+(std::size_t n) const noexcept { return {hashes + n, positions + n}; }
};

// A stable LSD radix sort by `digits` bytes from bit `shift` up. The number of digits, hence of passes, is
// even, so the result is in `pairs`.
template <unsigned digits>
void radix_sort(const Pairs& pairs, const Pairs& spare, std::size_t n, unsigned shift) noexcept {
  static_assert(digits % 2 == 0);
  constexpr std::size_t kValues = 256;
  Position ends[digits][kValues] = {};
  for (std::size_t i = 0; i < n; ++i) {
    for (unsigned d = 0; d < digits; ++d) {
      ++ends[d][(pairs.hashes[i] >> (shift + 8 * d)) % kValues];
    }
  }
  for (unsigned d = 0; d < digits; ++d) {
    const Pairs& from = d % 2 == 0 ? pairs : spare;
    const Pairs& to = d % 2 == 0 ? spare : pairs;
    Position* const next = ends[d];
    Position sum = 0;
    for (std::size_t v = 0; v < kValues; ++v) {
      sum += std::exchange(next[v], sum);
    }
    for (std::size_t i = 0; i < n; ++i) {
      from.move(i, to, next[(from.hashes[i] >> (shift + 8 * d)) % kValues]++);
    }
  }
}

// A stable insertion sort that stops after `moves` moves: it then returns false, with all pairs present,
// equal ones in order.
inline bool insertion_sort(const Pairs& pairs, std::size_t n, std::size_t moves) noexcept {
  for (std::size_t i = 1; i < n; ++i) {
    const std::uint64_t hash = pairs.hashes[i];
    if (hash >= pairs.hashes[i - 1]) {
      continue;
    }
    const Position position = pairs.positions[i];
    std::size_t j = i;
    for (; j > 0 && pairs.hashes[j - 1] > hash; --j) {
      pairs.move(j - 1, pairs, j);
    }
    pairs.hashes[j] = hash;
    pairs.positions[j] = position;
    if (i - j > moves) {
      return false;
    }
    moves -= i - j;
  }
  return true;
}

// Sorts hashes that share their top `bits`, and returns the number of different ones.
inline std::size_t sort_group(const Pairs& pairs, const Pairs& spare, std::size_t n, unsigned bits) noexcept {
  constexpr std::size_t kFew = 48;
  if (n > kFew) {
    radix_sort<2>(pairs, spare, n, 48 - bits);
  }
  if (!insertion_sort(pairs, n, n > kFew ? 2 * n : kFew * kFew)) {
    radix_sort<8>(pairs, spare, n, 0);
  }
  std::size_t differing = n == 0 ? 0 : 1;
  for (std::size_t i = 1; i < n; ++i) {
    differing += pairs.hashes[i] != pairs.hashes[i - 1] ? 1U : 0U;
  }
  return differing;
}

// Sorts a batch. `hashes`, with room for n, receives the unique hashes; `slot_offsets`, slots + 1 numbers,
// the index of each slot's first one; `positions`, n numbers, the positions in hash order. For each group
// make_emit() returns an `emit`, and emit(j, u, fresh) is called for its positions in order: the j-th one has
// unique hash u, and `fresh` is true at the first position of a hash. Returns the number of unique hashes.
template <class MakeEmit>
std::size_t sort(const Source& source, Slots slots, ThreadPool& pool, KeyBatchScratch& scratch,
                 std::uint64_t* hashes, std::uint64_t* slot_offsets, Position* positions,
                 const MakeEmit& make_emit) {
  const std::size_t n = source.size();
  const unsigned bits = group_bits(n);
  const std::size_t groups = std::size_t{1} << bits;
  const auto group_of = [bits](std::uint64_t hash) { return bits == 0 ? 0 : hash >> (64U - bits); };
  const auto first_slot = [&](std::size_t group) { return ((group << slots.bits()) + groups - 1) >> bits; };

  // 1 and 2. A piece's offset into a group follows those of the pieces before it, which keeps the order of
  // occurrence.
  const Partition partition{n, parts_for(n, kMin, pool.threads())};
  const std::span<std::size_t> cuts = scratch.cuts.claim(groups * (partition.parts + 2) + 1);
  std::size_t* const begins = cuts.data();           // groups + 1: the offsets of the groups
  std::size_t* const uniques = begins + groups + 1;  // per group: its unique hashes, later those before it
  std::size_t* const offsets = uniques + groups;     // for each piece, one per group
  pool.run(partition.parts, [&](std::size_t p) {
    std::size_t* const counts = offsets + p * groups;
    std::fill_n(counts, groups, 0);
    source.each(partition.begin(p), partition.begin(p + 1),
                [&](std::uint64_t hash, Position) { ++counts[group_of(hash)]; });
  });
  std::size_t total = 0;
  for (std::size_t g = 0; g < groups; ++g) {
    begins[g] = total;
    for (std::size_t p = 0; p < partition.parts; ++p) {
      total += std::exchange(offsets[p * groups + g], total);
    }
  }
  begins[groups] = total;
  // One thread may write the unique hashes over their sources; several would overwrite each other's input.
  const Pairs pairs{partition.parts == 1 ? hashes : scratch.hashes.claim(n).data(), positions};
  pool.run(partition.parts, [&](std::size_t p) {
    std::size_t* const next = offsets + p * groups;
    source.each(partition.begin(p), partition.begin(p + 1), [&](std::uint64_t hash, Position position) {
      const std::size_t to = next[group_of(hash)]++;
      pairs.hashes[to] = hash;
      pairs.positions[to] = position;
    });
  });

  const auto emit_group = [&](std::size_t g, std::size_t unique) {
    auto emit = make_emit();
    std::size_t u = unique - 1;  // may wrap around: the first hash increments it
    std::uint64_t before = begins[g] == begins[g + 1] ? 0 : ~pairs.hashes[begins[g]];
    for (std::size_t j = begins[g]; j < begins[g + 1]; ++j) {
      const bool fresh = pairs.hashes[j] != before;
      u += fresh ? 1U : 0U;
      before = pairs.hashes[j];
      hashes[u] = before;
      emit(j, u, fresh);
    }
    // The slots whose least hash is in this group.
    std::size_t slot = first_slot(g);
    for (; unique != u + 1; ++unique) {
      for (const std::size_t to = index_of(slots.of(hashes[unique])); slot <= to; ++slot) {
        slot_offsets[slot] = unique;
      }
    }
    std::fill(slot_offsets + slot, slot_offsets + std::max(slot, first_slot(g + 1)), unique);
  };

  // 3 and 4. More parts than threads, because hot keys make some groups large.
  const Partition shares{groups, partition.parts == 1 ? 1 : std::min(groups, 8 * partition.parts)};
  // The groups of a part reuse the memory of its first group: at most n elements in all, and the same cache
  // lines.
  const Pairs spares{scratch.spare_hashes.claim(n).data(), scratch.spare_positions.claim(n).data()};
  const auto sort = [&](std::size_t g, std::size_t p) {
    return sort_group(pairs + begins[g], spares + begins[shares.begin(p)], begins[g + 1] - begins[g], bits);
  };
  std::size_t size = 0;
  if (shares.parts == 1) {
    for (std::size_t g = 0; g < groups; ++g) {
      const std::size_t differing = sort(g, 0);
      emit_group(g, size);
      size += differing;
    }
  } else {
    pool.run(shares.parts, [&](std::size_t p) {
      for (std::size_t g = shares.begin(p); g < shares.begin(p + 1); ++g) {
        uniques[g] = sort(g, p);
      }
    });
    for (std::size_t g = 0; g < groups; ++g) {
      size += std::exchange(uniques[g], size);
    }
    pool.run(shares.parts, [&](std::size_t p) {
      for (std::size_t g = shares.begin(p); g < shares.begin(p + 1); ++g) {
        emit_group(g, uniques[g]);
      }
    });
  }
  slot_offsets[slots.count()] = size;
  return size;
}

}  // namespace hash_order

}  // namespace shoal

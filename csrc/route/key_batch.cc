// How a batch is sorted, in passes that are linear whatever the keys are:
//
//   1 count    the hashes of each group; a group is a value of the top bits, about 1000 hashes
//   2 scatter  (hash, place) into their groups
//   3 sort     each group in the first-level cache: words of 32 further bits of the hash and 32 bits of the position in
//              the group, by a radix sort of the first 16 bits and an insertion sort of what remains, which is little,
//              as hashes are uniform. Where it is not little (keys chosen by an enemy), radix sort of all 64 bits
//   4 emit     a hash that differs from the one before is new
//
// 1 and 2 share the batch, 3 and 4 the groups; equal hashes never leave their order of occurrence, so nothing depends on
// the number of threads.

#include "route/key_batch.h"

#include <algorithm>
#include <bit>
#include <string>

#include "base/check.h"
#include "base/simd.h"
#include "route/sum.h"

namespace shoal {

namespace {

using Word = std::uint64_t;  // 32 bits of the hash, 32 bits of the position in the group
using Place = std::uint32_t;

constexpr unsigned kDigit = 8;
constexpr std::size_t kDigits = std::size_t{1} << kDigit;
constexpr std::size_t kBlock = 512;     // hashes mixed at a time: 4 KiB
constexpr std::size_t kLeast = 32768;   // keys worth a thread
constexpr std::size_t kNear = 48;       // groups up to here are sorted by insertion

constexpr Place position(Word word) noexcept { return static_cast<Place>(word); }

SHOAL_CLONES void mix_block(const std::uint64_t* keys, std::size_t n, std::uint64_t* hashes) noexcept {
  for (std::size_t i = 0; i < n; ++i) {
    hashes[i] = mix(keys[i]);
  }
}

// Where hashes come from: keys to be mixed, or hashes as they are.
class Source {
 public:
  Source(std::span<const std::uint64_t> given, bool mixed) noexcept : given_(given), mixed_(mixed) {}

  std::size_t size() const noexcept { return given_.size(); }

  // Calls use(hash, place) for the places from `begin` to `end`.
  template <class Use>
  void each(std::size_t begin, std::size_t end, const Use& use) const noexcept {
    std::uint64_t block[kBlock];
    for (std::size_t at = begin; at < end; at += kBlock) {
      const std::size_t n = std::min(kBlock, end - at);
      const std::uint64_t* hashes = given_.data() + at;
      if (!mixed_) {
        mix_block(hashes, n, block);
        hashes = block;
      }
      for (std::size_t i = 0; i < n; ++i) {
        use(hashes[i], static_cast<Place>(at + i));
      }
    }
  }

 private:
  std::span<const std::uint64_t> given_;
  bool mixed_;
};

// The top bits that make groups of 500 to 1000 hashes, so that a group's words fit the first-level cache; 2048 groups
// at most, or the scatter would miss the second-level cache at every step.
unsigned group_bits(std::size_t n) noexcept {
  const auto bits = static_cast<unsigned>(std::bit_width(n / 1024));
  return std::min(bits, 11U);
}

// A stable radix sort of n words by `digits` bytes from bit `shift` up, lowest byte first. `from` and `to` change roles;
// the result is where `from` points in the end.
template <unsigned digits>
void radix_sort(Word*& from, Word*& to, std::size_t n, unsigned shift) noexcept {
  std::uint32_t counts[digits][kDigits] = {};
  for (std::size_t i = 0; i < n; ++i) {
    for (unsigned d = 0; d < digits; ++d) {
      ++counts[d][(from[i] >> (shift + d * kDigit)) % kDigits];
    }
  }
  for (unsigned d = 0; d < digits; ++d) {
    const unsigned low = shift + d * kDigit;
    std::uint32_t* const next = counts[d];
    if (next[(from[0] >> low) % kDigits] == n) {
      continue;  // one digit for all
    }
    std::uint32_t sum = 0;
    for (std::size_t v = 0; v < kDigits; ++v) {
      const std::uint32_t count = next[v];
      next[v] = sum;
      sum += count;
    }
    for (std::size_t i = 0; i < n; ++i) {
      to[next[(from[i] >> low) % kDigits]++] = from[i];
    }
    std::swap(from, to);
  }
}

// Insertion sort; gives up after `moves` moves: false, and the words are still all there.
bool insertion_sort(Word* words, std::size_t n, std::size_t moves) noexcept {
  for (std::size_t i = 1; i < n; ++i) {
    const Word word = words[i];
    if (word >= words[i - 1]) {
      continue;
    }
    std::size_t j = i;
    do {
      words[j] = words[j - 1];
      --j;
    } while (j > 0 && words[j - 1] > word);
    words[j] = word;
    if (i - j > moves) {
      return false;
    }
    moves -= i - j;
  }
  return true;
}

// One group: hashes that share their top `bits`.
struct Group {
  std::uint64_t* hashes;
  Place* places;
  std::size_t n;
  unsigned bits;

  Word word(std::size_t i) const noexcept { return ((hashes[i] << bits) & ~Word{0xffffffffU}) | i; }

  // Positions by 48 bits of the hash and then by occurrence, or false.
  bool sort(Word*& words, Word*& spare) const noexcept {
    for (std::size_t i = 0; i < n; ++i) {
      words[i] = word(i);
    }
    if (n <= kNear) {
      return insertion_sort(words, n, kNear * kNear);
    }
    radix_sort<2>(words, spare, n, 48);
    return insertion_sort(words, n, 2 * n);
  }

  // Positions by the whole hash and then by occurrence, for groups that are not as random as they should be.
  void sort_all_bits(Word*& words, Word*& spare) const noexcept {
    for (std::size_t i = 0; i < n; ++i) {
      words[i] = (hashes[i] << 32U) | i;
    }
    radix_sort<4>(words, spare, n, 32);
    for (std::size_t i = 0; i < n; ++i) {
      const Place at = position(words[i]);
      words[i] = (hashes[at] & ~Word{0xffffffffU}) | at;
    }
    radix_sort<4>(words, spare, n, 32);
  }

  // Puts hashes and places into the order of the words, the hashes also into `sorted`; how many differ, or -1 if the order is wrong.
  bool arrange(const Word* words, std::uint64_t* sorted, Place* order, std::size_t& unique) const noexcept {
    std::uint64_t before = hashes[position(words[0])];
    std::size_t differing = 1;
    bool falls = false;
    for (std::size_t j = 0; j < n; ++j) {
      const Place at = position(words[j]);
      const std::uint64_t hash = hashes[at];
      sorted[j] = hash;
      order[j] = places[at];
      differing += hash != before ? 1U : 0U;
      falls |= hash < before;
      before = hash;
    }
    unique = differing;
    return !falls;
  }
};

}  // namespace

KeyBatch::KeyBatch(std::span<const std::uint64_t> keys, Slots slots, Pool& pool, KeyBatchScratch& scratch)
    : KeyBatch(keys, false, slots, pool, scratch) {}

KeyBatch::KeyBatch(std::span<const std::uint64_t> keys, Slots slots, Pool& pool, KeyBatchScratch&& scratch)
    : KeyBatch(keys, false, slots, pool, scratch) {}

KeyBatch KeyBatch::of_hashes(std::span<const std::uint64_t> hashes, Slots slots, Pool& pool,
                             KeyBatchScratch& scratch) {
  return {hashes, true, slots, pool, scratch};
}

KeyBatch::KeyBatch(std::span<const std::uint64_t> given, bool mixed, Slots slots, Pool& pool,
                   KeyBatchScratch& scratch)
    : slots_(slots) {
  const std::size_t n = given.size();
  SHOAL_CHECK(n <= kMostKeys, "a batch holds at most 2^32 - 1 keys, got " + std::to_string(n) + ": split it");
  const Source source(given, mixed);
  const unsigned bits = group_bits(n);
  const std::size_t groups = std::size_t{1} << bits;
  const auto group_of = [bits](std::uint64_t hash) { return bits == 0 ? 0 : hash >> (64U - bits); };

  inverse_ = Buffer<Place>(n);
  order_ = Buffer<Place>(n);
  begins_ = Buffer<std::uint64_t>(slots.count() + 1);
  std::uint64_t* const hashes = scratch.hashes.claim(n).data();
  Place* const places = scratch.places.claim(n).data();

  // 1 and 2. A piece's offset into a group follows the pieces before it: order of occurrence is kept.
  const Pieces pieces{n, parts_for(n, kLeast, pool.threads())};
  const std::span<std::size_t> cuts = scratch.cuts.claim(groups * (pieces.parts + 2) + 1);
  std::size_t* const begins = cuts.data();               // groups + 1: where a group begins
  std::size_t* const uniques = begins + groups + 1;      // groups: its differing hashes, later those before it
  std::size_t* const offsets = uniques + groups;         // groups for each piece
  pool.run(pieces.parts, [&](std::size_t p) {
    std::size_t* const counts = offsets + p * groups;
    std::fill_n(counts, groups, 0);
    source.each(pieces.begin(p), pieces.begin(p + 1), [&](std::uint64_t hash, Place) { ++counts[group_of(hash)]; });
  });
  std::size_t total = 0;
  for (std::size_t g = 0; g < groups; ++g) {
    begins[g] = total;
    for (std::size_t p = 0; p < pieces.parts; ++p) {
      const std::size_t count = offsets[p * groups + g];
      offsets[p * groups + g] = total;
      total += count;
    }
  }
  begins[groups] = total;
  pool.run(pieces.parts, [&](std::size_t p) {
    std::size_t* const next = offsets + p * groups;
    source.each(pieces.begin(p), pieces.begin(p + 1), [&](std::uint64_t hash, Place place) {
      const std::size_t to = next[group_of(hash)]++;
      hashes[to] = hash;
      places[to] = place;
    });
  });

  // 3. More parts than threads: hot keys make some groups large.
  const std::size_t parts = pieces.parts == 1 ? 1 : std::min(groups, 8 * pieces.parts);
  const Pieces shares{groups, parts};
  std::size_t room = 0;
  Buffer<std::size_t> rooms(parts + 1);
  for (std::size_t p = 0; p < parts; ++p) {
    rooms[p] = room;
    std::size_t largest = 0;
    for (std::size_t g = shares.begin(p); g < shares.begin(p + 1); ++g) {
      largest = std::max(largest, begins[g + 1] - begins[g]);
    }
    room += 2 * largest;
  }
  rooms[parts] = room;
  Word* const all_words = scratch.words.claim(room).data();
  pool.run(parts, [&](std::size_t p) {
    const std::size_t half = (rooms[p + 1] - rooms[p]) / 2;
    for (std::size_t g = shares.begin(p); g < shares.begin(p + 1); ++g) {
      const std::size_t begin = begins[g];
      const Group group{hashes + begin, places + begin, begins[g + 1] - begin, bits};
      uniques[g] = 0;
      if (group.n == 0) {
        continue;
      }
      Word* words = all_words + rooms[p];
      Word* spare = words + half;
      if (!group.sort(words, spare) || !group.arrange(words, spare, order_.data() + begin, uniques[g])) {
        group.sort_all_bits(words, spare);
        group.arrange(words, spare, order_.data() + begin, uniques[g]);
      }
      std::copy_n(spare, group.n, group.hashes);
    }
  });

  // 4.
  std::size_t unique = 0;
  for (std::size_t g = 0; g < groups; ++g) {
    const std::size_t count = uniques[g];
    uniques[g] = unique;
    unique += count;
  }
  hashes_ = Buffer<std::uint64_t>(unique);
  firsts_ = Buffer<Place>(unique + 1);
  firsts_[0] = 0;
  pool.run(parts, [&](std::size_t p) {
    for (std::size_t g = shares.begin(p); g < shares.begin(p + 1); ++g) {
      std::size_t u = uniques[g] - 1;  // wraps where nothing is before: the first hash is new
      std::uint64_t before = begins[g] == begins[g + 1] ? 0 : ~hashes[begins[g]];
      for (std::size_t j = begins[g]; j < begins[g + 1]; ++j) {
        u += hashes[j] != before ? 1U : 0U;
        before = hashes[j];
        hashes_[u] = before;
        firsts_[u + 1] = static_cast<Place>(j + 1);
        inverse_[order_[j]] = static_cast<Place>(u);
      }
    }
  });

  std::size_t slot = 0;
  for (std::size_t u = 0; u < unique; ++u) {
    for (const std::size_t to = index_of(slots.of(hashes_[u])); slot <= to; ++slot) {
      begins_[slot] = u;
    }
  }
  std::fill(begins_.begin() + slot, begins_.end(), unique);
  SHOAL_DCHECK(verify());
}

void KeyBatch::sum(std::span<const float> grads, std::size_t dim, std::span<float> out, Pool& pool) const {
  SHOAL_CHECK(dim > 0 && grads.size() == given() * dim,
              "grads must be keys x dim: " + std::to_string(given()) + " x " + std::to_string(dim) + ", got " +
                  std::to_string(grads.size()) + " numbers");
  SHOAL_CHECK(out.size() == size() * dim, "the sums need unique keys x dim: " + std::to_string(size()) + " x " +
                                              std::to_string(dim) + ", got room for " + std::to_string(out.size()));
  sum_rows(order(), firsts(), dim, [&](Place place) { return grads.data() + place * dim; }, out, pool);
}

void KeyBatch::counts(std::span<std::uint32_t> out) const {
  SHOAL_CHECK(out.size() == size(), "the counts need room for " + std::to_string(size()) + " unique keys, got " +
                                        std::to_string(out.size()));
  for (std::size_t u = 0; u < size(); ++u) {
    out[u] = firsts_[u + 1] - firsts_[u];
  }
}

bool KeyBatch::verify() const {
  const std::size_t n = given();
  const std::size_t m = size();
  for (std::size_t u = 1; u < m; ++u) {  // I1
    if (hashes_[u - 1] >= hashes_[u]) {
      return false;
    }
  }
  if (begins_.size() != slots_.count() + 1 || begins_[0] != 0 || begins_[slots_.count()] != m) {  // I3
    return false;
  }
  for (std::size_t s = 0; s < slots_.count(); ++s) {
    if (begins_[s] > begins_[s + 1]) {
      return false;
    }
    for (std::size_t u = begins_[s]; u < begins_[s + 1]; ++u) {
      if (index_of(slots_.of(hashes_[u])) != s) {
        return false;
      }
    }
  }
  if (order_.size() != n || firsts_.size() != m + 1 || firsts_[0] != 0 || firsts_[m] != n) {  // I2, I4
    return false;
  }
  // n places, each named by the hash that order puts it under: since inverse holds one number for each place, no place
  // is under two hashes, and as they rise within a hash none is there twice.
  for (std::size_t u = 0; u < m; ++u) {
    if (firsts_[u] >= firsts_[u + 1] || firsts_[u + 1] > n) {
      return false;
    }
    for (std::size_t j = firsts_[u]; j < firsts_[u + 1]; ++j) {
      if (order_[j] >= n || inverse_[order_[j]] != u || (j > firsts_[u] && order_[j - 1] >= order_[j])) {
        return false;
      }
    }
  }
  return true;
}

}  // namespace shoal

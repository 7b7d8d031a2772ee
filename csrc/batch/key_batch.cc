#include "batch/key_batch.h"

#include <algorithm>
#include <atomic>
#include <string>
#include <type_traits>

#include "base/check.h"
#include "base/known_dim.h"
#include "base/simd.h"
#include "batch/hash_order.h"
#include "batch/sum.h"

namespace shoal {

using hash_order::Position;

namespace {

// `inverse` is written in random order. Where it is much larger than the L1 cache the lines are prefetched: a
// store that misses it waits for its line, and with it all stores after it.
constexpr std::size_t kFarWrites = std::size_t{1} << 16U;  // keys: 256 KiB
constexpr std::size_t kWritesAhead = 64;

}  // namespace

KeyBatch::KeyBatch(std::span<const std::uint64_t> keys, Slots slots, ThreadPool& pool,
                   KeyBatchScratch& scratch, std::optional<std::uint64_t> last)
    : KeyBatch(keys, last, false, slots, pool, scratch) {}

KeyBatch::KeyBatch(std::span<const std::uint64_t> keys, Slots slots, ThreadPool& pool,
                   KeyBatchScratch&& scratch)
    : KeyBatch(keys, std::nullopt, false, slots, pool, scratch) {}

KeyBatch KeyBatch::of_hashes(std::span<const std::uint64_t> hashes, Slots slots, ThreadPool& pool,
                             KeyBatchScratch& scratch) {
  return {hashes, std::nullopt, true, slots, pool, scratch};
}

KeyBatch::KeyBatch(std::span<const std::uint64_t> given, std::optional<std::uint64_t> last, bool mixed,
                   Slots slots, ThreadPool& pool, KeyBatchScratch& scratch)
    : slots_(slots) {
  const hash_order::Source source(given, last, mixed);
  const std::size_t n = source.size();
  SHOAL_CHECK(n <= kMaxKeys, "a batch holds at most 2^32 - 1 keys, got " + std::to_string(n) + ": split it");

  // One allocation for all results: freed and allocated again, it is the same memory, without fresh pages.
  input_size_ = n;
  memory_ = Buffer<std::uint64_t>(n + slots.count() + 1 + (3 * n + 2) / 2);
  hashes_ = memory_.data();
  offsets_ = hashes_ + n;
  order_ = reinterpret_cast<Position*>(offsets_ + slots.count() + 1);
  inverse_ = order_ + n;
  group_offsets_ = inverse_ + n;

  group_offsets_[0] = 0;
  const auto sort = [&](auto far) {
    return hash_order::sort(source, slots, pool, scratch, hashes_, offsets_, order_, [this] {
      return [this](std::size_t j, std::size_t u, bool /*fresh*/) {
        if (decltype(far)::value && j + kWritesAhead < input_size_) {
          __builtin_prefetch(inverse_ + order_[j + kWritesAhead], 1);
        }
        group_offsets_[u + 1] = static_cast<Position>(j + 1);
        inverse_[order_[j]] = static_cast<Position>(u);
      };
    });
  };
  size_ = n >= kFarWrites ? sort(std::true_type()) : sort(std::false_type());
  SHOAL_DCHECK(verify());
}

void KeyBatch::sum(std::span<const float> grads, std::size_t dim, std::span<float> out, ThreadPool& pool,
                   Elements elements) const {
  SHOAL_CHECK(dim > 0 && grads.size() == input_size() * dim,
              "grads must be keys x dim: " + std::to_string(input_size()) + " x " + std::to_string(dim) +
                  ", got " + std::to_string(grads.size()) + " numbers");
  SHOAL_CHECK(out.size() == size() * dim, "the sums need unique keys x dim: " + std::to_string(size()) +
                                              " x " + std::to_string(dim) + ", got room for " +
                                              std::to_string(out.size()));
  check_pairs(dim, elements);
  const auto row_of = [&](Position position) { return grads.data() + position * dim; };
  if (elements == Elements::kInt64Pairs) {
    sum_rows(order(), group_offsets(), dim, row_of, out, pool, Integers());
  } else {
    sum_rows(order(), group_offsets(), dim, row_of, out, pool);
  }
}

namespace {

// The rows of the positions from `begin` to `end`.
void expand_rows(const float* rows, std::span<const std::uint32_t> inverse, std::size_t begin,
                 std::size_t end, std::size_t dim, float* out) noexcept {
  with_dim<1, 8, 16, 32, 64>(dim, [&](auto known) SHOAL_ALWAYS {
    constexpr std::size_t kAhead = 16;  // rows are read in random order: prefetch them
    const std::size_t width = known == 0 ? dim : known;
    for (std::size_t i = begin; i < end; ++i) {
      if (i + kAhead < end) {
        __builtin_prefetch(rows + inverse[i + kAhead] * width);
      }
      std::copy_n(rows + inverse[i] * width, width, out + i * width);
    }
  });
}

}  // namespace

void KeyBatch::expand(std::span<const float> rows, std::size_t dim, std::span<float> out,
                      ThreadPool& pool) const {
  SHOAL_CHECK(rows.size() == size() * dim, "rows must be len(unique keys) x dim");
  SHOAL_CHECK(out.size() == input_size() * dim, "out must be len(keys) x dim");
  const Partition partition{input_size(),
                            parts_for(input_size() * dim, std::size_t{1} << 16U, pool.threads())};
  pool.run(partition.parts, [&](std::size_t part) {
    expand_rows(rows.data(), inverse(), partition.begin(part), partition.begin(part + 1), dim, out.data());
  });
}

void KeyBatch::sum_some(std::size_t first, const float* grads, std::size_t dim, std::span<float> sums,
                        Elements elements) const noexcept {
  const auto row_of = [&](Position position) { return grads + position * dim; };
  const std::size_t end = first + sums.size() / dim;
  if (elements == Elements::kInt64Pairs) {
    sum_range(order(), group_offsets(), first, end, dim, row_of, Integers(), sums.data());
  } else {
    sum_range(order(), group_offsets(), first, end, dim, row_of, Unscaled(), sums.data());
  }
}

void KeyBatch::expand_some(std::size_t first, std::span<const float> rows, std::size_t dim,
                           float* out) const noexcept {
  with_dim<1, 8, 16, 32, 64>(dim, [&](auto known) SHOAL_ALWAYS {
    constexpr std::size_t kAhead = 24;  // rows are written in random order: prefetch their lines
    constexpr std::size_t kLineFloats = 16;
    const std::size_t width = known == 0 ? dim : known;
    const float* row = rows.data();
    std::size_t j = group_offsets_[first];
    for (std::size_t u = first; u < first + rows.size() / width; ++u, row += width) {
      for (; j < group_offsets_[u + 1]; ++j) {
        if (j + kAhead < input_size_) {
          const float* const ahead = out + order_[j + kAhead] * width;
          for (std::size_t e = 0; e < std::min(width, 4 * kLineFloats); e += kLineFloats) {
            __builtin_prefetch(ahead + e, 1);
          }
        }
        std::copy_n(row, width, out + order_[j] * width);
      }
    }
  });
}

void KeyBatch::counts(std::span<std::uint32_t> out) const {
  SHOAL_CHECK(out.size() == size(), "the counts need room for " + std::to_string(size()) +
                                        " unique keys, got " + std::to_string(out.size()));
  for (std::size_t u = 0; u < size(); ++u) {
    out[u] = group_offsets_[u + 1] - group_offsets_[u];
  }
}

bool KeyBatch::is_of(std::span<const std::uint64_t> keys, ThreadPool& pool) const {
  constexpr std::size_t kLook = 1024;  // different keys usually differ within the first few
  if (keys.size() != input_size()) {
    return false;
  }
  const auto agree = [&](std::size_t begin, std::size_t end) {
    bool same = true;
    for (std::size_t i = begin; i < end; ++i) {
      same &= hashes_[inverse_[i]] == mix(keys[i]);
    }
    return same;
  };
  if (!agree(0, std::min(input_size(), kLook))) {
    return false;
  }
  const Partition partition{input_size(), parts_for(input_size(), std::size_t{1} << 15U, pool.threads())};
  std::atomic<bool> same{true};
  pool.run(partition.parts, [&](std::size_t part) {
    if (!agree(partition.begin(part), partition.begin(part + 1))) {
      same.store(false, std::memory_order_relaxed);
    }
  });
  return same.load(std::memory_order_relaxed);
}

bool KeyBatch::verify() const {
  const std::size_t n = input_size();
  const std::size_t m = size();
  for (std::size_t u = 1; u < m; ++u) {  // I1
    if (hashes_[u - 1] >= hashes_[u]) {
      return false;
    }
  }
  if (offsets_[0] != 0 || offsets_[slots_.count()] != m) {  // I3
    return false;
  }
  for (std::size_t s = 0; s < slots_.count(); ++s) {
    if (offsets_[s] > offsets_[s + 1]) {
      return false;
    }
    for (std::size_t u = offsets_[s]; u < offsets_[s + 1]; ++u) {
      if (index_of(slots_.of(hashes_[u])) != s) {
        return false;
      }
    }
  }
  if (group_offsets_[0] != 0 || group_offsets_[m] != n) {  // I2, I4
    return false;
  }
  // I4: there are n positions, each with the hash that `order` gives it. inverse holds one hash per position,
  // so no position has two hashes; positions ascend within a hash, so none occurs twice.
  for (std::size_t u = 0; u < m; ++u) {
    if (group_offsets_[u] >= group_offsets_[u + 1] || group_offsets_[u + 1] > n) {
      return false;
    }
    for (std::size_t j = group_offsets_[u]; j < group_offsets_[u + 1]; ++j) {
      if (order_[j] >= n || inverse_[order_[j]] != u ||
          (j > group_offsets_[u] && order_[j - 1] >= order_[j])) {
        return false;
      }
    }
  }
  return true;
}

}  // namespace shoal

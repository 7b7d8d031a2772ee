// The peers of maps_bench: rows of FTRL in absl::flat_hash_map and boost::unordered_flat_map.
//
// Idea. Each gets the best that was found for it: memory in huge pages where the system grants them; the rows of a block
// of keys looked up before the first of their steps, so that their cache misses overlap; absl's prefetch kAhead keys
// ahead (boost 1.81 has none); vector code where a block's keys are unique. Steps round to nearest, which is less work
// than the store's stochastic rounding.
//
// Threads: a map for each, so that nothing is locked; a batch's keys are divided between them first, by all of them.

#pragma once

#include <absl/container/flat_hash_map.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <boost/unordered/unordered_flat_map.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <new>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#undef GUARDED_BY  // absl has a macro of the name of one in base/mutex.h

#include "base/mix.h"
#include "base/simd.h"
#include "base/threads.h"
#include "batch/key_batch.h"

namespace shoal {

inline constexpr std::size_t kAhead = 8;  // of 4, 8, 16, 24 and 32 the best
inline constexpr double kAlpha = 0.1;
inline constexpr double kBeta = 1.0;
inline constexpr double kL1 = 1.0;
inline constexpr double kL2 = 0.1;

// A batch with each key once in hash order, and its summed gradients.
struct UniqueBatch {
  KeyBatch keys;
  std::vector<std::uint64_t> unmixed;
  std::vector<float> grads;
};

// The weight that z and n stand for.
template <class Float>
SHOAL_INLINE Float weight(Float z, Float n) noexcept {
  const Float shrunk = std::abs(z) <= Float{kL1} ? Float{0} : std::copysign(Float{kL1}, z) - z;
  return shrunk / ((Float{kBeta} + std::sqrt(n)) * static_cast<Float>(1 / kAlpha) + static_cast<Float>(kL2));
}

// One step of FTRL (optim/ftrl.h), rounded to nearest.
template <class Float>
SHOAL_INLINE void step(Float g, Float& z, Float& n) noexcept {
  const Float w = weight(z, n);
  const Float next = n + g * g;
  const Float sum = std::sqrt(next) + std::sqrt(n);
  const Float sigma = sum > 0 ? (next - n) * static_cast<Float>(1 / kAlpha) / sum : Float{0};
  z += g - sigma * w;
  n = next;
}

SHOAL_CLONES inline void weights(std::size_t count, const float* z, const float* n, float* w) noexcept {
  for (std::size_t i = 0; i < count; ++i) {
    w[i] = weight(z[i], n[i]);
  }
}

SHOAL_CLONES inline void steps(std::size_t count, const float* g, float* z, float* n) noexcept {
  for (std::size_t i = 0; i < count; ++i) {
    step(g[i], z[i], n[i]);
  }
}

struct Row {
  float z = 0;
  float n = 0;
};

// What the maps have allocated: now and at most.
struct Account {
  static inline std::atomic<std::size_t> now{0};
  static inline std::atomic<std::size_t> peak{0};
  static inline bool huge = true;

  static void take(std::size_t bytes) {
    const std::size_t after = now.fetch_add(bytes) + bytes;
    std::size_t most = peak.load();
    while (most < after && !peak.compare_exchange_weak(most, after)) {
    }
  }
};

// Counts, and asks for huge pages, which the stock allocator does not.
template <class T>
struct CountingAllocator {
  using value_type = T;
  static constexpr std::size_t kHugePage = std::size_t{2} << 20U;

  CountingAllocator() = default;
  template <class U>
  CountingAllocator(const CountingAllocator<U>&) noexcept {}

  static bool large(std::size_t count) { return Account::huge && count * sizeof(T) >= 4 * kHugePage; }

  T* allocate(std::size_t count) {
    Account::take(count * sizeof(T));
    if (!large(count)) {
      return std::allocator<T>().allocate(count);
    }
    const std::size_t bytes = (count * sizeof(T) + kHugePage - 1) / kHugePage * kHugePage;
    void* const memory = std::aligned_alloc(kHugePage, bytes);
    if (memory == nullptr) {
      throw std::bad_alloc();
    }
    madvise(memory, bytes, MADV_HUGEPAGE);
    return static_cast<T*>(memory);
  }
  void deallocate(T* memory, std::size_t count) noexcept {
    Account::now.fetch_sub(count * sizeof(T));
    if (large(count)) {
      std::free(memory);
    } else {
      std::allocator<T>().deallocate(memory, count);
    }
  }

  friend bool operator==(const CountingAllocator&, const CountingAllocator&) { return true; }
};

using Entry = std::pair<const std::uint64_t, Row>;
using AbslMap =
    absl::flat_hash_map<std::uint64_t, Row, absl::container_internal::hash_default_hash<std::uint64_t>,
                        std::equal_to<>, CountingAllocator<Entry>>;
using BoostMap = boost::unordered_flat_map<std::uint64_t, Row, boost::hash<std::uint64_t>, std::equal_to<>,
                                           CountingAllocator<Entry>>;

inline void prefetch(const AbslMap& map, std::uint64_t key) { map.prefetch(key); }
inline void prefetch(const BoostMap&, std::uint64_t) {}

// How many keys are looked up before the first of their steps: of 1, 4, 8, 16, 32 and 64 the best.
template <class Map>
inline constexpr std::size_t kBlock = std::is_same_v<Map, AbslMap> ? 16 : 64;

// Keys and a gradient each.
struct Work {
  std::span<const std::uint64_t> keys;
  std::span<const float> grads;
};

// Finds a block's rows first and steps them afterwards, so that their cache misses overlap. `unique` keys may be stepped
// side by side.
template <class Map>
void step_rows(Map& map, const Work& work, bool unique) {
  constexpr std::size_t kMax = kBlock<Map>;
  const std::size_t n = work.keys.size();
  std::array<Row*, kMax> rows;
  std::array<float, kMax> z;
  std::array<float, kMax> squares;
  for (std::size_t i = 0; i < std::min(kAhead, n); ++i) {
    prefetch(map, work.keys[i]);
  }
  for (std::size_t begin = 0; begin < n; begin += kMax) {
    const std::size_t count = std::min(kMax, n - begin);
    bool all = true;
    for (std::size_t i = 0; i < count; ++i) {
      prefetch(map, work.keys[std::min(begin + i + kAhead, n - 1)]);
      const auto found = map.find(work.keys[begin + i]);
      const bool there = found != map.end();
      rows[i] = there ? &found->second : nullptr;
      all &= there;
    }
    const float* const g = work.grads.data() + begin;
    if (!all) {  // inserting may move every row
      for (std::size_t i = 0; i < count; ++i) {
        Row& row = map.try_emplace(work.keys[begin + i]).first->second;
        step(g[i], row.z, row.n);
      }
    } else if (unique) {
      for (std::size_t i = 0; i < count; ++i) {
        z[i] = rows[i]->z;
        squares[i] = rows[i]->n;
      }
      steps(count, g, z.data(), squares.data());
      for (std::size_t i = 0; i < count; ++i) {
        *rows[i] = {z[i], squares[i]};
      }
    } else {
      for (std::size_t i = 0; i < count; ++i) {
        step(g[i], rows[i]->z, rows[i]->n);
      }
    }
  }
}

// Reads the weights of keys, of rows that are not there as 0.
template <class Map>
void read_rows(const Map& map, std::span<const std::uint64_t> keys, float* out) {
  constexpr std::size_t kMax = kBlock<Map>;
  const std::size_t n = keys.size();
  std::array<float, kMax> z;
  std::array<float, kMax> squares;
  for (std::size_t i = 0; i < std::min(kAhead, n); ++i) {
    prefetch(map, keys[i]);
  }
  for (std::size_t begin = 0; begin < n; begin += kMax) {
    const std::size_t count = std::min(kMax, n - begin);
    for (std::size_t i = 0; i < count; ++i) {
      prefetch(map, keys[std::min(begin + i + kAhead, n - 1)]);
      const auto found = map.find(keys[begin + i]);
      const Row row = found == map.end() ? Row{} : found->second;
      z[i] = row.z;
      squares[i] = row.n;
    }
    weights(count, z.data(), squares.data(), out + begin);
  }
}

// A map for each thread: thread t's holds the t-th part of the hash space, and so no lock is needed.
template <class Map>
class Maps {
 public:
  explicit Maps(ThreadPool& pool)
      : pool_(pool), maps_(pool.threads()), divided_(pool.threads() * pool.threads()) {}

  std::size_t owner(std::uint64_t key) const { return scale(mix(key), maps_.size()); }

  void push_per_key(const Work& work) {
    if (maps_.size() == 1) {
      step_rows(maps_[0], work, false);
    } else {
      divide<false>(work);
      push_divided();
    }
  }

  // The weight of work.keys[i] to out[i], and then push_per_key.
  void step_given(const Work& work, std::span<float> out) {
    if (maps_.size() == 1) {
      read_rows(maps_[0], work.keys, out.data());
      step_rows(maps_[0], work, false);
      return;
    }
    divide<true>(work);
    pool_.run(maps_.size(), [&](std::size_t owner) {
      for (std::size_t part = 0; part < maps_.size(); ++part) {
        Divided& mine = divided_[part * maps_.size() + owner];
        read_rows(maps_[owner], mine.work().keys, mine.weights.data());
        for (std::size_t i = 0; i < mine.count; ++i) {
          out[mine.places[i]] = mine.weights[i];
        }
      }
    });
    push_divided();
  }

  void push_unique(const UniqueBatch& batch) {
    const std::size_t threads = maps_.size();
    const auto begin = [&](std::size_t t) {
      const auto hashes = batch.keys.hashes();
      return static_cast<std::size_t>(
          std::partition_point(hashes.begin(), hashes.end(),
                               [&](std::uint64_t hash) { return scale(hash, threads) < t; }) -
          hashes.begin());
    };
    pool_.run(threads, [&](std::size_t t) {
      const std::size_t first = begin(t);
      const std::size_t count = begin(t + 1) - first;
      step_rows(
          maps_[t],
          {std::span(batch.unmixed).subspan(first, count), std::span(batch.grads).subspan(first, count)},
          true);
    });
  }

  Row row(std::uint64_t key) const {
    const auto& map = maps_[owner(key)];
    const auto found = map.find(key);
    return found == map.end() ? Row{NAN, NAN} : found->second;
  }

  std::size_t size() const {
    std::size_t rows = 0;
    for (const auto& map : maps_) {
      rows += map.size();
    }
    return rows;
  }

 private:
  // The keys of one part of a batch that belong to one map.
  struct Divided {
    std::vector<std::uint64_t> keys;
    std::vector<float> grads;
    std::vector<std::uint32_t> places;
    std::vector<float> weights;
    std::size_t count = 0;

    void clear(std::size_t most) {
      if (keys.size() < most) {
        keys.resize(most);
        grads.resize(most);
        places.resize(most);
        weights.resize(most);
      }
      count = 0;
    }
    Work work() const { return {std::span(keys).first(count), std::span(grads).first(count)}; }
  };

  template <bool kPlaces>
  void divide(const Work& work) {
    const std::size_t threads = maps_.size();
    const Partition partition{work.keys.size(), threads};
    pool_.run(threads, [&](std::size_t part) {
      Divided* const mine = divided_.data() + part * threads;
      for (std::size_t t = 0; t < threads; ++t) {
        mine[t].clear(partition.begin(part + 1) - partition.begin(part));
      }
      for (std::size_t i = partition.begin(part); i < partition.begin(part + 1); ++i) {
        Divided& to = mine[owner(work.keys[i])];
        to.keys[to.count] = work.keys[i];
        to.grads[to.count] = work.grads[i];
        if constexpr (kPlaces) {
          to.places[to.count] = static_cast<std::uint32_t>(i);
        }
        ++to.count;
      }
    });
  }

  void push_divided() {
    pool_.run(maps_.size(), [&](std::size_t owner) {
      for (std::size_t part = 0; part < maps_.size(); ++part) {
        step_rows(maps_[owner], divided_[part * maps_.size() + owner].work(), false);
      }
    });
  }

  ThreadPool& pool_;
  std::vector<Map> maps_;
  std::vector<Divided> divided_;  // part x owner
};

}  // namespace shoal

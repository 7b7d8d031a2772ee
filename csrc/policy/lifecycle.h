// Lifecycle: which keys get a row, and which rows are given up. The rules of a table, as values.
//
//   admission   a key that has no row gets one
//     kAll           at its first sighting
//     kCount         at its n-th, by an exact count (policy/occurrence_counter.h)
//     kBloom         at its n-th, by a counting Bloom filter, which errs early only (policy/bloom.h)
//     kProbability   at each sighting with probability p
//   expiry      a sweep drops a row (shard/expiry.cc)
//     kTimeToLive    not sighted for more than `clocks` clocks
//     kDecayedScore  whose score, one for each sighting and times `decay` each clock, is below `floor`
//     kMinNorm       whose weights have a Euclidean norm below `floor`
//     kMaxRows       beyond the slot's share of `rows`, the least recently or the least frequently sighted first; a push
//                    holds to it as well
//
// A sighting is one occurrence of a key in a push (an assignment counts as one); a pull is none. A key that waits for
// its row reads the initial row, and what its pushes bring is dropped.
//
// RowMetadata. A row carries what the rules in force need to know of its sightings, and nothing else, four bytes each, in this
// order behind the optimizer's state:
//
//   count   u32   sightings since the row was made          kMaxRows by frequency
//   clock   u32   of the last sighting                      kTimeToLive, kDecayedScore, kMaxRows by recency
//   score   f32   decayed sightings, as of `clock`          kDecayedScore
//
// Clocks are counted modulo 2^32: an age is a difference, and one that seems negative is 0 (a late push of a slower
// worker). Scores are stepped in float64 and rounded once; powers of `decay` are made by multiplication alone, so every
// machine has the same bits.
//
// Threads: immutable.

#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/mix.h"
#include "base/simd.h"

namespace shoal {

// A rule as Python or a manifest names it.
struct NamedRule {
  std::string name;
  std::map<std::string, double> params;
};

struct Admission {
  enum class Kind : std::uint8_t { kAll, kCount, kBloom, kProbability };

  Kind kind = Kind::kAll;
  std::uint32_t n = 1;
  std::uint32_t within = 0;    // clocks after which a waiting key is forgotten; 0: never
  std::uint64_t capacity = 0;  // waiting keys of the whole table; 0: no bound (kCount)
  double error = 0;            // how often a full filter may err (kBloom)
  double probability = 1;
  std::uint64_t seed = 0;
};

struct Expiry {
  enum class Kind : std::uint8_t { kTimeToLive, kDecayedScore, kMinNorm, kMaxRows };
  static constexpr std::size_t kKinds = 4;

  Kind kind;
  std::uint32_t clocks = 0;
  double decay = 0;
  double floor = 0;
  std::uint64_t rows = 0;
  bool frequent = false;
};

// Clocks since `then`.
SHOAL_INLINE constexpr std::uint32_t age_at(std::uint32_t now, std::uint32_t then) noexcept {
  const std::uint32_t age = now - then;
  return std::bit_cast<std::int32_t>(age) < 0 ? 0 : age;
}

// What a slot has of a number for the whole table: nearly equal shares that add up to it.
inline std::size_t share_of(std::uint64_t total, Slots slots, Slot slot) noexcept {
  return total / slots.count() + (index_of(slot) < total % slots.count() ? 1 : 0);
}

// decay^clocks, by squaring.
double power(double decay, std::uint32_t clocks) noexcept;

// What rows remember of their sightings, and where it stands in a row.
class RowMetadata {
 public:
  static constexpr std::size_t kMaxColumns = 3;
  enum class Column : std::uint8_t { kCount, kClock, kScore };

  RowMetadata() = default;
  // `decay` 0: no score.
  RowMetadata(bool count, bool clock, double decay) noexcept
      : has_{count, clock || decay != 0, decay != 0}, decay_(decay) {}

  bool any() const noexcept { return has_[0] || has_[1]; }
  bool has(Column column) const noexcept { return has_[static_cast<std::size_t>(column)]; }
  std::size_t columns() const noexcept {
    return (has_[0] ? 1U : 0U) + (has_[1] ? 1U : 0U) + (has_[2] ? 1U : 0U);
  }
  // Of those that there are, in the order in which they stand.
  std::vector<std::string> names() const;
  double decay() const noexcept { return decay_; }
  // Where they stand in a row: set once by who lays rows out.
  void place(std::size_t offset) noexcept;

  std::uint32_t count(const std::byte* row) const noexcept { return load<std::uint32_t>(row + at_[0]); }
  std::uint32_t clock(const std::byte* row) const noexcept { return load<std::uint32_t>(row + at_[1]); }
  // As of its own clock, and as of another.
  float score(const std::byte* row) const noexcept { return load<float>(row + at_[2]); }
  double score(const std::byte* row, std::uint32_t now) const noexcept {
    return static_cast<double>(score(row)) * power(decay_, age_at(now, clock(row)));
  }

  // A row that has just been made, whose marks are all 0.
  void begin(std::byte* row, std::uint32_t now) const noexcept {
    if (has_[1]) {
      keep(row + at_[1], now);
    }
  }
  // `count` sightings. Returns how many clocks the row had not been seen for, 0 where that is not known.
  std::uint32_t see(std::byte* row, std::uint32_t count, std::uint32_t now) const noexcept;

 private:
  template <class T>
  static T load(const std::byte* from) noexcept {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
  }
  template <class T>
  static void keep(std::byte* at, T value) noexcept {
    std::memcpy(at, &value, sizeof value);
  }

  std::array<bool, kMaxColumns> has_{};
  std::array<std::size_t, kMaxColumns> at_{};
  double decay_ = 0;
};

class Lifecycle {
 public:
  static constexpr std::uint32_t kMaxSightings = 255;  // that a Bloom filter counts
  static constexpr std::uint32_t kMaxClocks = 0x7fffffffU;

  Lifecycle() = default;
  // Unknown names, unknown, missing or bad parameters, two rules of one kind: std::invalid_argument that names them.
  Lifecycle(const std::optional<NamedRule>& admit, const std::vector<NamedRule>& expire);
  // The same checks, for one rule alone.
  static Admission admission(const NamedRule& rule);
  static Expiry expiry(const NamedRule& rule);
  // Rules as they travel: three numbers each, the kind (1 TimeToLive, 2 DecayedScore, 3 MinNorm, 4 MaxRows) and its
  // parameters (clocks, 0; decay, floor; floor, 0; rows, frequent).
  static std::vector<Expiry> expiries(std::span<const double> numbers);

  const Admission& admit() const noexcept { return admit_; }
  const std::vector<Expiry>& expire() const noexcept { return expire_; }
  const RowMetadata& metadata() const noexcept { return metadata_; }

  bool admits_all() const noexcept { return admit_.kind == Admission::Kind::kAll; }
  // Whether it matters how often a key occurs in a push.
  bool needs_counts() const noexcept {
    return !admits_all() || metadata_.has(RowMetadata::Column::kCount) ||
           metadata_.has(RowMetadata::Column::kScore);
  }
  // Why a rule cannot be asked of rows with these marks, "" where it can.
  std::string unanswerable(const Expiry& rule) const;

 private:
  Admission admit_;
  std::vector<Expiry> expire_;
  RowMetadata metadata_;
};

}  // namespace shoal

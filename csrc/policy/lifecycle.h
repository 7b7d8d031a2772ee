// Lifecycle: a table's admission and expiry rules, as values. docs/lifecycle.md says what each rule does.
//
// RowMetadata. A row stores what the table's rules need to know of its occurrences, four bytes each, in this
// order, after the optimizer's state:
//
//   count   u32   occurrences since the row was created     kMaxRows by frequency
//   clock   u32   of the last occurrence                    kTimeToLive, kDecayedScore, kMaxRows by recency
//   score   f32   decayed occurrences, as of `clock`        kDecayedScore
//
// Clocks are counted modulo 2^32: an age is a difference, and a negative one counts as 0. Scores are computed
// in float64 and rounded once; powers of `decay` use multiplications only: the same bits on every machine.
//
// Threads: immutable.

#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/mix.h"
#include "base/simd.h"
#include "base/unaligned.h"

namespace shoal {

// A rule as named in Python or in a manifest.
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
  double error = 0;            // probability of early admission by a full filter (kBloom)
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

// The rule by name; Lifecycle::admission() and expiry() are the inverse. Not for Admission::Kind::kAll, which
// has no name.
NamedRule named(const Admission& rule);
NamedRule named(const Expiry& rule);

// Clocks since `then`.
SHOAL_INLINE constexpr std::uint32_t age_at(std::uint32_t now, std::uint32_t then) noexcept {
  const std::uint32_t age = now - then;
  return std::bit_cast<std::int32_t>(age) < 0 ? 0 : age;
}

// A slot's share of a number for the whole table: the shares are nearly equal and add up to it.
inline std::size_t share_of(std::uint64_t total, Slots slots, Slot slot) noexcept {
  return total / slots.count() + (index_of(slot) < total % slots.count() ? 1 : 0);
}

// decay^clocks, by squaring.
double power(double decay, std::uint32_t clocks) noexcept;

// The occurrence metadata of a row, and its offsets in the row.
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
  // Names of the columns present, in the order of storage.
  std::vector<std::string> names() const;
  double decay() const noexcept { return decay_; }
  // Sets the offset of the first column in a row; called once, by the row layout.
  void place(std::size_t offset) noexcept;

  std::uint32_t count(const std::byte* row) const noexcept { return load<std::uint32_t>(row + at_[0]); }
  std::uint32_t clock(const std::byte* row) const noexcept { return load<std::uint32_t>(row + at_[1]); }
  // The score as of the row's clock, and as of `now`.
  float score(const std::byte* row) const noexcept { return load<float>(row + at_[2]); }
  double score(const std::byte* row, std::uint32_t now) const noexcept {
    return static_cast<double>(score(row)) * power(decay_, age_at(now, clock(row)));
  }

  // Initializes the metadata of a new row, which is all zeros.
  void begin(std::byte* row, std::uint32_t now) const noexcept {
    if (has_[1]) {
      store(row + at_[1], now);
    }
  }
  // Records `count` occurrences. Returns the number of clocks since the previous one, 0 if the row keeps no
  // clock.
  std::uint32_t see(std::byte* row, std::uint32_t count, std::uint32_t now) const noexcept;

 private:
  std::array<bool, kMaxColumns> has_{};
  std::array<std::size_t, kMaxColumns> at_{};
  double decay_ = 0;
};

class Lifecycle {
 public:
  static constexpr std::uint32_t kMaxOccurrences = 255;  // the greatest count of a Bloom filter
  static constexpr std::uint32_t kMaxClocks = 0x7fffffffU;

  Lifecycle() = default;
  // Throws std::invalid_argument, with the names, for an unknown rule, an unknown, missing or invalid
  // parameter, or two rules of one kind.
  Lifecycle(const std::optional<NamedRule>& admit, const std::vector<NamedRule>& expire);
  // The same checks, for one rule alone.
  static Admission admission(const NamedRule& rule);
  static Expiry expiry(const NamedRule& rule);
  // Decodes rules from a message: three numbers each, the kind (1 TimeToLive, 2 DecayedScore, 3 MinNorm, 4
  // MaxRows) and its parameters (clocks, 0; decay, floor; floor, 0; rows, frequent).
  static std::vector<Expiry> expiries(std::span<const double> numbers);

  const Admission& admit() const noexcept { return admit_; }
  const std::vector<Expiry>& expire() const noexcept { return expire_; }
  const RowMetadata& metadata() const noexcept { return metadata_; }

  bool admits_all() const noexcept { return admit_.kind == Admission::Kind::kAll; }
  // True if the number of occurrences of a key in a push matters.
  bool needs_counts() const noexcept {
    return !admits_all() || metadata_.has(RowMetadata::Column::kCount) ||
           metadata_.has(RowMetadata::Column::kScore);
  }
  // The reason why a rule cannot be evaluated with this row metadata; "" if it can.
  std::string unanswerable(const Expiry& rule) const;

 private:
  Admission admit_;
  std::vector<Expiry> expire_;
  RowMetadata metadata_;
};

}  // namespace shoal

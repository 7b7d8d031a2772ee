#include "kernel/interactions.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <limits>
#include <string>

#include "base/check.h"

namespace shoal {

Interactions::Interactions(std::span<const std::uint64_t> pairs) {
  SHOAL_CHECK(pairs.size() % 2 == 0, "pairs must hold two fields each, got " + std::to_string(pairs.size()));
  fields_.assign(pairs.begin(), pairs.end());
  std::sort(fields_.begin(), fields_.end());
  fields_.erase(std::unique(fields_.begin(), fields_.end()), fields_.end());
  positions_.resize(fields_.size());
  const std::size_t cells = std::bit_ceil(2 * fields_.size() + 2);
  shift_ = 64U - static_cast<unsigned>(std::countr_zero(cells));
  cells_.assign(cells, kNone);
  for (std::size_t i = 0; i < fields_.size(); ++i) {
    std::size_t at = mix(fields_[i]) >> shift_;
    while (cells_[at] != kNone) {
      at = (at + 1) % cells;
    }
    cells_[at] = static_cast<std::uint32_t>(i);
  }
  for (std::size_t i = 0; i < pairs.size(); i += 2) {
    pairs_.emplace_back(find(pairs[i]), find(pairs[i + 1]));
  }
}

std::uint32_t Interactions::find(std::uint64_t field) const noexcept {
  std::size_t at = mix(field) >> shift_;
  while (cells_[at] != kNone && fields_[cells_[at]] != field) {
    at = (at + 1) % cells_.size();
  }
  return cells_[at];
}

void Interactions::count(const FieldedRows& rows, std::span<std::int64_t> indptr) {
  const auto& [ends, keys, values, fields] = rows;
  SHOAL_CHECK(!ends.empty() && ends.front() == 0, "indptr must begin with 0");
  SHOAL_CHECK(std::adjacent_find(ends.begin(), ends.end(), std::greater<>()) == ends.end(), "indptr falls");
  SHOAL_CHECK(static_cast<std::uint64_t>(ends.back()) == keys.size(),
              "indptr must end with the number of keys, " + std::to_string(keys.size()) + ", got " +
                  std::to_string(ends.back()));
  SHOAL_CHECK(fields.size() == keys.size(), "there must be a field for each of the " +
                                                std::to_string(keys.size()) + " keys, got " +
                                                std::to_string(fields.size()));
  SHOAL_CHECK(values.empty() || values.size() == keys.size(),
              "there must be a value for each of the " + std::to_string(keys.size()) + " keys, got " +
                  std::to_string(values.size()));
  SHOAL_CHECK(indptr.size() == ends.size(), "the new indptr must be as long as the old one");
  std::vector<std::uint64_t> counts(fields_.size());
  std::uint64_t total = 0;
  indptr[0] = 0;
  for (std::size_t row = 0; row + 1 < ends.size(); ++row) {
    std::fill(counts.begin(), counts.end(), 0);
    const auto begin = static_cast<std::size_t>(ends[row]);
    const auto end = static_cast<std::size_t>(ends[row + 1]);
    for (std::size_t i = begin; i < end; ++i) {
      if (const std::uint32_t field = find(fields[i]); field != kNone) {
        ++counts[field];
      }
    }
    // Compared with the limit in each step, so that no product of two counts overflows.
    const auto add = [&](std::uint64_t more) {
      total += more;
      SHOAL_CHECK(total <= kMax, "the interactions of row " + std::to_string(row) + " make more than " +
                                     std::to_string(kMax) +
                                     " features of a batch: pass smaller batches or fewer pairs");
    };
    add(end - begin);
    for (const auto& [first, second] : pairs_) {
      const std::uint64_t neighbours = first == second ? std::max<std::uint64_t>(counts[first], 1) - 1 : 0;
      add(first == second ? counts[first] * neighbours / 2 : counts[first] * counts[second]);
    }
    indptr[row + 1] = static_cast<std::int64_t>(total);
  }
}

template <class Own, class Pair>
void Interactions::each(const FieldedRows& rows, const Own& own, const Pair& pair) {
  const auto& ends = rows.indptr;
  for (std::size_t row = 0; row + 1 < ends.size(); ++row) {
    for (auto& positions : positions_) {
      positions.clear();
    }
    for (auto i = static_cast<std::size_t>(ends[row]); i < static_cast<std::size_t>(ends[row + 1]); ++i) {
      own(i);
      if (const std::uint32_t field = find(rows.fields[i]); field != kNone) {
        positions_[field].push_back(i);
      }
    }
    for (const auto& [first, second] : pairs_) {
      for (std::size_t n = 0; n < positions_[first].size(); ++n) {
        const std::size_t i = positions_[first][n];
        for (std::size_t m = first == second ? n + 1 : 0; m < positions_[second].size(); ++m) {
          const std::size_t j = positions_[second][m];
          if (first == second && rows.keys[j] < rows.keys[i]) {
            pair(j, i);
          } else {
            pair(i, j);
          }
        }
      }
    }
  }
}

void Interactions::write(const FieldedRows& rows, std::span<std::uint64_t> keys, std::span<float> values) {
  constexpr float kLargest = std::numeric_limits<float>::max();
  std::size_t at = 0;
  const auto put = [&](std::uint64_t key, float value) {
    keys[at] = key;
    if (!values.empty()) {
      values[at] = value;
    }
    ++at;
  };
  const auto value_of = [&](std::size_t i) { return rows.values.empty() ? 1.0F : rows.values[i]; };
  each(
      rows, [&](std::size_t i) { put(rows.keys[i], value_of(i)); },
      [&](std::size_t i, std::size_t j) {
        put(interaction_key(rows.keys[i], rows.keys[j]),
            std::clamp(value_of(i) * value_of(j), -kLargest, kLargest));
      });
}

void Interactions::write_parents(const FieldedRows& rows, std::span<std::uint64_t> first,
                                 std::span<std::uint64_t> second) {
  std::size_t at = 0;
  each(
      rows, [](std::size_t) {},
      [&](std::size_t i, std::size_t j) {
        first[at] = i;
        second[at++] = j;
      });
}

}  // namespace shoal

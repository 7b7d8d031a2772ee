#include "export/section_writer.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <string>

#include "base/check.h"

namespace shoal {

namespace {

constexpr double kLoad = 0.75;
// Hashes of a random table are seldom farther from home, so that all of its sections get one width, for which
// a lookup has a loop of its own.
constexpr std::uint64_t kUsualReach = 3;

// Assigns a line and a lane to each hash, in order: calls use(i, line, lane, home).
template <class Use>
void place_hashes(std::span<const std::uint64_t> hashes, const Homes& homes, std::size_t lanes,
                  const Use& use) {
  std::uint64_t line = 0;
  std::size_t lane = 0;
  for (std::size_t i = 0; i < hashes.size(); ++i) {
    const std::uint64_t home = homes.of(hashes[i]);
    if (home > line) {
      line = home;
      lane = 0;
    } else if (lane == lanes) {
      ++line;
      lane = 0;
    }
    use(i, line, lane, home);
    ++lane;
  }
}

SectionShape shape_of(const RowFormat& form, Slots slots, std::span<const std::uint64_t> hashes) {
  SectionShape shape{.rows = hashes.size()};
  for (;; ++shape.width) {
    const LineFormat line_form(form, shape.width);
    const double fit = static_cast<double>(line_form.lanes) * kLoad;
    shape.homes = std::max<std::uint64_t>(
        1, static_cast<std::uint64_t>(std::ceil(static_cast<double>(hashes.size()) / fit)));
    const Homes homes{slots, shape.homes};
    if (!homes.are_distinct(shape.width, kUsualReach)) {
      continue;
    }
    shape.reach = 0;
    shape.lines = shape.homes;
    place_hashes(hashes, homes, line_form.lanes,
                 [&](std::size_t, std::uint64_t line, std::size_t, std::uint64_t home) {
                   shape.reach = std::max(shape.reach, line - home);
                   shape.lines = std::max(shape.lines, line + 1);
                 });
    if (homes.are_distinct(shape.width, shape.reach)) {
      return shape;
    }
  }
}

class Errors {
 public:
  explicit Errors(PackedSection& of) : of_(of) {}
  void add(float original, float read) {
    const double error = std::abs(static_cast<double>(original) - static_cast<double>(read));
    of_.largest_error = std::max(of_.largest_error, error);
    of_.squared_errors += error * error;
    of_.squares += static_cast<double>(original) * static_cast<double>(original);
  }

 private:
  PackedSection& of_;
};

}  // namespace

bool reads_initial(const RowFormat& form, const Init& init, std::uint64_t hash, const float* weights,
                   std::span<float> scratch) {
  const std::size_t dim = form.dim();
  const auto initial = scratch.first(dim);
  const auto read = scratch.subspan(dim, dim);
  init.fill(hash, dim, initial.data());
  if (std::equal(initial.begin(), initial.end(), weights)) {
    return true;
  }
  if (form.code() != RowFormat::Code::kFloat16 && form.code() != RowFormat::Code::kBfloat16) {
    return false;
  }
  std::byte row[2 * 4096];
  form.encode(weights, row);
  form.decode(row, read.data());
  return std::equal(initial.begin(), initial.end(), read.begin());
}

PackedSection pack(const RowFormat& form, const Init& init, Slots slots, Slot slot,
                   std::span<const std::uint64_t> hashes, std::span<const float> weights) {
  const std::size_t dim = form.dim();
  SHOAL_CHECK(weights.size() == hashes.size() * dim, "weights must be len(hashes) x dim");
  for (std::size_t i = 0; i < hashes.size(); ++i) {
    SHOAL_CHECK(slots.of(hashes[i]) == slot && (i == 0 || hashes[i - 1] < hashes[i]),
                "hashes of slot " + std::to_string(index_of(slot)) + " must ascend and be of it");
  }
  PackedSection packed;
  Errors errors(packed);
  std::vector<float> scratch(2 * dim);

  std::vector<std::uint64_t> kept;
  std::vector<const float*> rows;
  kept.reserve(hashes.size());
  rows.reserve(hashes.size());
  for (std::size_t i = 0; i < hashes.size(); ++i) {
    const float* const row = weights.data() + i * dim;
    if (reads_initial(form, init, hashes[i], row, scratch)) {
      ++packed.dropped;
      for (std::size_t e = 0; e < dim; ++e) {
        errors.add(row[e], scratch[e]);
      }
      continue;
    }
    kept.push_back(hashes[i]);
    rows.push_back(row);
  }
  if (kept.empty()) {
    return packed;
  }

  packed.shape = shape_of(form, slots, kept);
  const SectionShape& shape = packed.shape;
  const LineFormat line_form(form, shape.width);
  packed.bytes.assign(shape.bytes(form), std::byte{0});
  std::byte* const lines = packed.bytes.data();
  std::byte* const wide = lines + shape.lines * kCacheLine;
  for (std::uint64_t b = 0; b < shape.lines; ++b) {
    lines[b * kCacheLine + LineFormat::kReach] = std::byte{LineFormat::kEmpty};
  }
  std::vector<float> read(dim);

  const auto put = [&](std::byte* line, std::size_t lane, std::size_t i) {
    const auto low = static_cast<std::uint32_t>(kept[i]);
    const auto high = static_cast<std::uint32_t>(kept[i] >> 32U);
    std::memcpy(line + 4 * lane, &low, sizeof low);
    std::memcpy(line + line_form.high_at(lane), &high, shape.width - 4);
  };
  const auto take_error = [&](std::size_t i, const std::byte* row, float scale) {
    if (!std::isnan(rows[i][0])) {
      form.decode(row, read.data(), scale);
      for (std::size_t e = 0; e < dim; ++e) {
        errors.add(rows[i][e], read[e]);
      }
    }
  };
  // Completes the line that holds the rows [first, end).
  const auto close = [&](std::byte* line, std::size_t first, std::size_t end) {
    float scale = 0.0F;
    if (form.shares_scale()) {
      for (std::size_t i = first; i < end; ++i) {
        scale = std::isnan(rows[i][0]) ? scale : std::max(scale, std::abs(rows[i][0]));
      }
      scale = RowFormat::scale_for(scale);
      const auto bits = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(scale) >> 16U);
      std::memcpy(line + LineFormat::kScale, &bits, sizeof bits);
    }
    if (!form.is_inline()) {
      const auto number = static_cast<std::uint32_t>(first);
      std::memcpy(line + LineFormat::kFirstRow, &number, sizeof number);
    }
    for (std::size_t lane = 0; lane < line_form.lanes; ++lane) {
      const std::size_t i = std::min(first + lane, end - 1);
      put(line, lane, i);
      std::byte* const row = form.is_inline() ? line + line_form.row_at(lane) : wide + i * form.bytes();
      if (!form.is_inline() && first + lane > i) {
        continue;  // the row is already written
      }
      if (std::isnan(rows[i][0])) {
        form.encode_removed(row);
      } else {
        form.encode(rows[i], row, scale);
      }
      if (first + lane == i) {
        take_error(i, row, scale);
      }
    }
  };

  SHOAL_CHECK(kept.size() <= UINT32_MAX, "a slot of an export takes at most 2^32 - 1 rows: use more slots");
  std::size_t first = 0;
  std::uint64_t open = 0;
  place_hashes(kept, Homes{slots, shape.homes}, line_form.lanes,
               [&](std::size_t i, std::uint64_t line, std::size_t lane, std::uint64_t home) {
                 if (lane == 0) {
                   if (i != 0) {
                     close(lines + open * kCacheLine, first, i);
                   }
                   first = i;
                   open = line;
                   std::byte& reach = lines[line * kCacheLine + LineFormat::kReach];
                   reach = std::byte{0};
                 }
                 lines[home * kCacheLine + LineFormat::kReach] =
                     static_cast<std::byte>(std::min<std::uint64_t>(line - home, LineFormat::kFar));
               });
  close(lines + open * kCacheLine, first, kept.size());
  return packed;
}

}  // namespace shoal

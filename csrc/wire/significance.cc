#include "wire/significance.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "base/check.h"
#include "base/noise.h"

namespace shoal {

namespace {

// Makes these random numbers independent of the noise that narrows the same message.
constexpr std::uint32_t kColumn = 1;

}  // namespace

void filter_significant(std::span<const float> values, std::span<const std::uint64_t> hashes, std::size_t dim,
                        double threshold, std::uint64_t seed, std::uint64_t call, std::span<float> out,
                        Significance& counts) {
  SHOAL_CHECK(std::isfinite(threshold) && threshold >= 0,
              "the threshold of significance must be a finite number >= 0, got " + std::to_string(threshold));
  SHOAL_CHECK(values.size() == hashes.size() * dim && out.size() == values.size(),
              std::to_string(values.size()) + " values, room for " + std::to_string(out.size()) + ", " +
                  std::to_string(hashes.size()) + " rows of " + std::to_string(dim));
  const std::uint64_t noise = step_noise(seed, call);
  for (std::size_t r = 0; r < hashes.size(); ++r) {
    const auto row = values.subspan(r * dim, dim);
    const auto to = out.subspan(r * dim, dim);
    double largest = 0;
    bool finite = true;
    for (const float value : row) {
      finite &= std::isfinite(value);
      largest = std::max(largest, std::abs(static_cast<double>(value)));
    }
    if (!finite || largest == 0 || largest >= threshold) {
      std::copy(row.begin(), row.end(), to.begin());
      continue;
    }
    const double chance = bits_for(row_noise(noise, hashes[r]), kColumn, 0) * 0x1p-32;  // [0, 1)
    const bool sent = chance * threshold < largest;
    const double scale = sent ? threshold / largest : 0.0;
    for (std::size_t i = 0; i < dim; ++i) {
      const auto original = static_cast<double>(row[i]);
      to[i] = sent ? static_cast<float>(original * scale) : 0.0F;
      const double error = static_cast<double>(to[i]) - original;
      counts.squared += error * error;
    }
    (sent ? counts.raised : counts.dropped) += 1;
  }
  counts.rows += hashes.size();
}

}  // namespace shoal

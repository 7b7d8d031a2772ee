// Initial weights: a pure function of (seed, hash of the key, element). Integer mixing and basic IEEE
// operations only, without library functions, so the bits are the same on every machine. An unseen key reads
// the row that it would be created with.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace shoal {

class Init {
 public:
  // Zeros (parameter unused), Constant (the value), Uniform (on [-parameter, parameter)), Normal (mean 0,
  // standard deviation parameter). Bad names and parameters: std::invalid_argument.
  Init(std::string_view name, double parameter, std::uint64_t seed);

  // A name and a parameter of an equal one: Zeros is Constant 0.
  std::string_view name() const noexcept;
  double parameter() const noexcept { return static_cast<double>(parameter_); }
  std::uint64_t seed() const noexcept { return seed_; }

  bool same_for_all() const noexcept { return kind_ == Kind::kConstant; }
  void fill(std::uint64_t hash, std::size_t dim, float* weights) const noexcept;

 private:
  enum class Kind : std::uint8_t { kConstant, kUniform, kNormal };

  Kind kind_;
  float parameter_;
  std::uint64_t seed_;
};

// The standard normal's inverse distribution function on (0, 1) to about 1e-15 (Wichura, Algorithm AS 241,
// Applied Statistics 37, 1988).
double normal_quantile(double p) noexcept;

}  // namespace shoal

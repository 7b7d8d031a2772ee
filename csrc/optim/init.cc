#include "optim/init.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <string>

#include "base/mix.h"

namespace shoal {

namespace {

// ln x for normal x > 0: x = 2^k * m with m near 1, and ln m = 2 atanh((m - 1) / (m + 1)) by its series.
double natural_log(double x) noexcept {
  const std::uint64_t bits = std::bit_cast<std::uint64_t>(x);
  auto exponent = static_cast<double>(static_cast<std::int64_t>(bits >> 52U) - 1023);
  double m = std::bit_cast<double>((bits & 0x000fffffffffffffU) | 0x3ff0000000000000U);
  if (m > 1.4142135623730951) {
    m *= 0.5;
    exponent += 1.0;
  }
  const double t = (m - 1.0) / (m + 1.0);  // |t| < 0.172, so the error after 12 terms is 1e-20
  const double square = t * t;
  double sum = 0.0;
  for (int k = 23; k >= 1; k -= 2) {
    sum = sum * square + 1.0 / k;
  }
  return exponent * 0.6931471805599453 + 2.0 * t * sum;
}

using Coefficients = std::array<double, 8>;

double polynomial(const Coefficients& c, double x) noexcept {
  double sum = 0.0;
  for (std::size_t k = c.size(); k-- > 0;) {
    sum = sum * x + c[k];
  }
  return sum;
}

double ratio(const Coefficients& above, const Coefficients& below, double x) noexcept {
  return polynomial(above, x) / polynomial(below, x);
}

}  // namespace

double normal_quantile(double p) noexcept {
  static constexpr Coefficients kA{3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3,
                                   1.3731693765509461125e4, 4.5921953931549871457e4, 6.7265770927008700853e4,
                                   3.3430575583588128105e4, 2.5090809287301226727e3};
  static constexpr Coefficients kB{1.0,
                                   4.2313330701600911252e1,
                                   6.8718700749205790830e2,
                                   5.3941960214247511077e3,
                                   2.1213794301586595867e4,
                                   3.9307895800092710610e4,
                                   2.8729085735721942674e4,
                                   5.2264952788528545610e3};
  static constexpr Coefficients kC{1.42343711074968357734e0,  4.63033784615654529590e0,
                                   5.76949722146069140550e0,  3.64784832476320460504e0,
                                   1.27045825245236838258e0,  2.41780725177450611770e-1,
                                   2.27238449892691845833e-2, 7.74545014278341407640e-4};
  static constexpr Coefficients kD{1.0,
                                   2.05319162663775882187e0,
                                   1.67638483018380384940e0,
                                   6.89767334985100004550e-1,
                                   1.48103976427480074590e-1,
                                   1.51986665636164571966e-2,
                                   5.47593808499534494600e-4,
                                   1.05075007164441684324e-9};
  static constexpr Coefficients kE{6.65790464350110377720e0,  5.46378491116411436990e0,
                                   1.78482653991729133580e0,  2.96560571828504891230e-1,
                                   2.65321895265761230930e-2, 1.24266094738807843860e-3,
                                   2.71155556874348757815e-5, 2.01033439929228813265e-7};
  static constexpr Coefficients kF{1.0,
                                   5.99832206555887937690e-1,
                                   1.36929880922735805310e-1,
                                   1.48753612908506148525e-2,
                                   7.86869131145613259100e-4,
                                   1.84631831751005468180e-5,
                                   1.42151175831644588870e-7,
                                   2.04426310338993978564e-15};
  const double q = p - 0.5;
  if (std::abs(q) <= 0.425) {
    return q * ratio(kA, kB, 0.180625 - q * q);
  }
  const double r = std::sqrt(-natural_log(q < 0.0 ? p : 1.0 - p));
  const double size = r <= 5.0 ? ratio(kC, kD, r - 1.6) : ratio(kE, kF, r - 5.0);
  return q < 0.0 ? -size : size;
}

Init::Init(std::string_view name, double parameter, std::uint64_t seed)
    : kind_(name == "Uniform" ? Kind::kUniform : (name == "Normal" ? Kind::kNormal : Kind::kConstant)),
      parameter_(name == "Zeros" ? 0.0F : static_cast<float>(parameter)),
      seed_(seed) {
  SHOAL_CHECK(name == "Zeros" || name == "Constant" || name == "Uniform" || name == "Normal",
              "no initializer " + std::string(name) + ": Zeros, Constant, Uniform or Normal");
  SHOAL_CHECK(std::isfinite(parameter_), std::string(name) + " needs a finite float32");
  SHOAL_CHECK(kind_ == Kind::kConstant || parameter_ >= 0.0F,
              std::string(name) + " needs a size >= 0, got " + std::to_string(parameter));
}

std::string_view Init::name() const noexcept {
  switch (kind_) {
    case Kind::kUniform:
      return "Uniform";
    case Kind::kNormal:
      return "Normal";
    case Kind::kConstant:
      break;
  }
  return "Constant";
}

void Init::fill(std::uint64_t hash, std::size_t dim, float* weights) const noexcept {
  if (kind_ == Kind::kConstant) {
    std::fill_n(weights, dim, parameter_);
    return;
  }
  const std::uint64_t row = mix(mix(seed_) ^ hash);
  for (std::size_t e = 0; e < dim; ++e) {
    const std::uint64_t bits = mix(row + e);
    if (kind_ == Kind::kUniform) {
      const auto fraction = static_cast<float>(bits >> 40U) * 0x1p-23F;  // [0, 2) in steps of 2^-23
      weights[e] = parameter_ * (fraction - 1.0F);
    } else {
      const double fraction = (static_cast<double>(bits >> 12U) + 0.5) * 0x1p-52;  // (0, 1)
      weights[e] = static_cast<float>(static_cast<double>(parameter_) * normal_quantile(fraction));
    }
  }
}

}  // namespace shoal

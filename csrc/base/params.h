// Params: the parameters of a rule by name, from a user or a manifest. Each rule takes its own, and errors
// name the parameter.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <map>
#include <string>
#include <utility>

#include "base/check.h"

namespace shoal {

class Params {
 public:
  Params(std::string rule, std::map<std::string, double> values)
      : rule_(std::move(rule)), values_(std::move(values)) {}

  const std::string& rule() const noexcept { return rule_; }

  // Each parameter is taken once; done() throws if some were not taken.
  double positive(const std::string& name) {
    const double value = take(name);
    SHOAL_CHECK(value > 0, rule_ + " needs " + name + " > 0, got " + std::to_string(value));
    return value;
  }
  double non_negative(const std::string& name) {
    const double value = take(name);
    SHOAL_CHECK(value >= 0, rule_ + " needs " + name + " >= 0, got " + std::to_string(value));
    return value;
  }
  double below_one(const std::string& name) {
    const double value = take(name);
    SHOAL_CHECK(value >= 0 && value < 1,
                rule_ + " needs 0 <= " + name + " < 1, got " + std::to_string(value));
    return value;
  }
  bool flag(const std::string& name) { return take(name) != 0; }
  double between(const std::string& name, double least, double most) {
    const double value = take(name);
    SHOAL_CHECK(value >= least && value <= most, rule_ + " needs " + name + " from " + shown(least) + " to " +
                                                     shown(most) + ", got " + shown(value));
    return value;
  }
  // A whole number; at most 2^53, up to which a double represents each exactly.
  std::uint64_t whole(const std::string& name, std::uint64_t least, std::uint64_t most = kMaxWhole) {
    const double value = take(name);
    SHOAL_CHECK(value == std::floor(value) && value >= static_cast<double>(least) &&
                    value <= static_cast<double>(most),
                rule_ + " needs a whole number from " + std::to_string(least) + " to " +
                    std::to_string(most) + " for " + name + ", got " + shown(value));
    return static_cast<std::uint64_t>(value);
  }
  // For optional parameters.
  bool has(const std::string& name) const { return values_.contains(name); }
  // Those that were not taken yet.
  const std::map<std::string, double>& left() const noexcept { return values_; }
  // The first parameter left whose name begins so; empty if there is none.
  std::string first_with(const std::string& prefix) const {
    const auto found = values_.lower_bound(prefix);
    return found != values_.end() && found->first.starts_with(prefix) ? found->first : std::string();
  }
  double any(const std::string& name) { return take(name); }

  static constexpr std::uint64_t kMaxWhole = std::uint64_t{1} << 53U;

  void done() const { SHOAL_CHECK(values_.empty(), rule_ + " has no parameter " + values_.begin()->first); }

 private:
  double take(const std::string& name) {
    const auto found = values_.find(name);
    SHOAL_CHECK(found != values_.end(), rule_ + " needs a parameter " + name);
    const double value = found->second;
    SHOAL_CHECK(std::isfinite(value) && std::abs(value) < 3.4e38,
                rule_ + " needs a finite float32 for " + name + ", got " + std::to_string(value));
    values_.erase(found);
    return value;
  }

  static std::string shown(double value) {
    char text[32];
    std::snprintf(text, sizeof text, "%.9g", value);
    return text;
  }

  std::string rule_;
  std::map<std::string, double> values_;
};

}  // namespace shoal

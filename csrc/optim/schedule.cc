#include "optim/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string_view>

#include "base/check.h"
#include "base/params.h"

namespace shoal {

namespace {

constexpr std::string_view kName = "schedule";
constexpr std::uint64_t kMaxClocks = std::uint64_t{1} << 32U;  // a clock has 32 bits

}  // namespace

Schedule Schedule::take(std::map<std::string, double>& params) {
  Schedule made;
  std::map<std::string, double> schedule_params;
  for (auto each = params.begin(); each != params.end();) {
    if (each->first.starts_with(kName)) {
      schedule_params.insert(params.extract(each++));
    } else {
      ++each;
    }
  }
  if (schedule_params.empty()) {
    return made;
  }
  Params parameters(std::string(kName), std::move(schedule_params));
  made.kind_ =
      static_cast<Kind>(parameters.whole("schedule", 1, static_cast<std::uint64_t>(Kind::kInverseRoot)));
  made.warmup_ = static_cast<double>(parameters.whole("schedule_warmup", 0, kMaxClocks));
  if (made.kind_ != Kind::kConstant) {
    made.clocks_ = static_cast<double>(parameters.whole("schedule_clocks", 1, kMaxClocks));
  }
  if (made.kind_ == Kind::kSteps) {
    made.level_ = parameters.between("schedule_factor", 0, 1);
  } else if (made.kind_ == Kind::kLinear || made.kind_ == Kind::kCosine) {
    made.level_ = parameters.between("schedule_floor", 0, 1);
  }
  parameters.done();
  return made;
}

float Schedule::at(std::uint32_t clock) const noexcept {
  if (clock < warmup_) {
    return static_cast<float>((clock + 1.0) / warmup_);
  }
  const double c = clock - warmup_;
  const double share = std::min(c, clocks_) / clocks_;
  switch (kind_) {
    case Kind::kSteps:
      return static_cast<float>(std::pow(level_, std::floor(c / clocks_)));
    case Kind::kLinear:
      return static_cast<float>(1.0 - (1.0 - level_) * share);
    case Kind::kCosine:
      return static_cast<float>(level_ + (1.0 - level_) * (1.0 + std::cos(std::numbers::pi * share)) / 2.0);
    case Kind::kInverseRoot:
      return static_cast<float>(1.0 / std::sqrt(1.0 + c / clocks_));
    case Kind::kNone:
    case Kind::kConstant:
      break;
  }
  return 1.0F;
}

}  // namespace shoal

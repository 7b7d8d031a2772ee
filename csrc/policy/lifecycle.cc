#include "policy/lifecycle.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/params.h"

namespace shoal {

double power(double decay, std::uint32_t clocks) noexcept {
  double result = 1;
  for (double square = decay; clocks != 0; clocks >>= 1U, square *= square) {
    if ((clocks & 1U) != 0) {
      result *= square;
    }
  }
  return result;
}

void RowMetadata::place(std::size_t offset) noexcept {
  for (std::size_t k = 0; k < kMaxColumns; ++k) {
    at_[k] = offset;
    offset += has_[k] ? sizeof(std::uint32_t) : 0;
  }
}

std::vector<std::string> RowMetadata::names() const {
  constexpr std::array<const char*, kMaxColumns> kNames{"count", "clock", "score"};
  std::vector<std::string> names;
  for (std::size_t k = 0; k < kMaxColumns; ++k) {
    if (has_[k]) {
      names.emplace_back(kNames[k]);
    }
  }
  return names;
}

std::uint32_t RowMetadata::see(std::byte* row, std::uint32_t count, std::uint32_t now) const noexcept {
  if (has_[0]) {
    const std::uint32_t before = this->count(row);
    store(row + at_[0], before + std::min(count, ~before));  // saturates
  }
  if (!has_[1]) {
    return 0;
  }
  const std::uint32_t age = age_at(now, clock(row));
  if (has_[2]) {
    const double before = static_cast<double>(score(row));
    store(row + at_[2],
          static_cast<float>((age == 0 ? before : before * power(decay_, age)) + static_cast<double>(count)));
  }
  if (age != 0) {
    store(row + at_[1], now);
  }
  return age;
}

Admission Lifecycle::admission(const NamedRule& rule) {
  Params params(rule.name, rule.params);
  Admission admit;
  const auto take_within = [&] {
    if (params.has("within")) {
      admit.within = static_cast<std::uint32_t>(params.whole("within", 1, kMaxClocks));
    }
  };
  if (rule.name == "AfterCount") {
    admit.kind = Admission::Kind::kCount;
    admit.n = static_cast<std::uint32_t>(params.whole("n", 1, 0xffffffffU));
    take_within();
    if (params.has("capacity")) {
      admit.capacity = params.whole("capacity", 1);
    }
  } else if (rule.name == "AfterBloom") {
    admit.kind = Admission::Kind::kBloom;
    admit.n = static_cast<std::uint32_t>(params.whole("n", 1, kMaxOccurrences));
    admit.capacity = params.whole("capacity", 1, std::uint64_t{1} << 40U);
    admit.error = params.between("error", 1e-6, 0.5);
    take_within();
  } else if (rule.name == "WithProbability") {
    admit.kind = Admission::Kind::kProbability;
    admit.probability = params.between("p", 1e-9, 1);
    admit.seed = params.whole("seed", 0);
  } else {
    SHOAL_CHECK(false,
                "there is no admission rule " + rule.name + ": AfterCount, AfterBloom, WithProbability");
  }
  params.done();
  return admit;
}

Expiry Lifecycle::expiry(const NamedRule& rule) {
  Params params(rule.name, rule.params);
  Expiry expire{};
  if (rule.name == "TimeToLive") {
    expire.kind = Expiry::Kind::kTimeToLive;
    expire.clocks = static_cast<std::uint32_t>(params.whole("clocks", 1, kMaxClocks));
  } else if (rule.name == "DecayedScore") {
    expire.kind = Expiry::Kind::kDecayedScore;
    expire.decay = params.between("decay", 1e-9, 1);
    expire.floor = params.positive("floor");
  } else if (rule.name == "MinNorm") {
    expire.kind = Expiry::Kind::kMinNorm;
    expire.floor = params.positive("floor");
  } else if (rule.name == "MaxRows") {
    expire.kind = Expiry::Kind::kMaxRows;
    expire.rows = params.whole("rows", 1);
    expire.frequent = params.flag("frequent");
  } else {
    SHOAL_CHECK(false,
                "there is no expiry rule " + rule.name + ": TimeToLive, DecayedScore, MinNorm, MaxRows");
  }
  params.done();
  return expire;
}

NamedRule named(const Admission& rule) {
  NamedRule made;
  const auto number = [](std::uint64_t value) { return static_cast<double>(value); };
  const auto add_if_any = [&](const char* name, std::uint64_t value) {
    if (value != 0) {
      made.params[name] = number(value);
    }
  };
  switch (rule.kind) {
    case Admission::Kind::kCount:
      made = {"AfterCount", {{"n", number(rule.n)}}};
      add_if_any("within", rule.within);
      add_if_any("capacity", rule.capacity);
      break;
    case Admission::Kind::kBloom:
      made = {"AfterBloom",
              {{"n", number(rule.n)}, {"capacity", number(rule.capacity)}, {"error", rule.error}}};
      add_if_any("within", rule.within);
      break;
    case Admission::Kind::kProbability:
      made = {"WithProbability", {{"p", rule.probability}, {"seed", number(rule.seed)}}};
      break;
    case Admission::Kind::kAll:
      SHOAL_DCHECK(false);
  }
  return made;
}

NamedRule named(const Expiry& rule) {
  switch (rule.kind) {
    case Expiry::Kind::kTimeToLive:
      return {"TimeToLive", {{"clocks", static_cast<double>(rule.clocks)}}};
    case Expiry::Kind::kDecayedScore:
      return {"DecayedScore", {{"decay", rule.decay}, {"floor", rule.floor}}};
    case Expiry::Kind::kMinNorm:
      return {"MinNorm", {{"floor", rule.floor}}};
    case Expiry::Kind::kMaxRows:
      break;
  }
  return {"MaxRows", {{"rows", static_cast<double>(rule.rows)}, {"frequent", rule.frequent ? 1.0 : 0.0}}};
}

std::vector<Expiry> Lifecycle::expiries(std::span<const double> numbers) {
  struct Form {
    const char* name;
    std::array<const char*, 2> params;  // unused ones are null
  };
  static constexpr std::array<Form, Expiry::kKinds> kForms = {{{"TimeToLive", {"clocks", nullptr}},
                                                               {"DecayedScore", {"decay", "floor"}},
                                                               {"MinNorm", {"floor", nullptr}},
                                                               {"MaxRows", {"rows", "frequent"}}}};
  constexpr std::size_t kNumbers = 3;
  SHOAL_CHECK(numbers.size() % kNumbers == 0,
              "an expiry rule is three numbers, got " + std::to_string(numbers.size()) + " in all");
  std::vector<Expiry> rules;
  for (std::size_t i = 0; i < numbers.size(); i += kNumbers) {
    SHOAL_CHECK(numbers[i] == 1 || numbers[i] == 2 || numbers[i] == 3 || numbers[i] == 4,
                "there is no expiry rule number " + std::to_string(numbers[i]) + ": 1 to 4");
    const Form& form = kForms[static_cast<std::size_t>(numbers[i]) - 1];
    NamedRule rule{form.name, {}};
    for (std::size_t k = 0; k < form.params.size(); ++k) {
      if (form.params[k] != nullptr) {
        rule.params[form.params[k]] = numbers[i + 1 + k];
      }
    }
    rules.push_back(expiry(rule));
  }
  return rules;
}

Lifecycle::Lifecycle(const std::optional<NamedRule>& admit, const std::vector<NamedRule>& expire) {
  if (admit) {
    admit_ = admission(*admit);
  }
  bool counts = false;
  bool clocks = false;
  double decay = 0;
  for (const NamedRule& named : expire) {
    const Expiry rule = expiry(named);
    SHOAL_CHECK(std::ranges::find(expire_, rule.kind, &Expiry::kind) == expire_.end(),
                "a table takes one " + named.name + ", got two");
    const bool recent = rule.kind == Expiry::Kind::kMaxRows && !rule.frequent;
    counts |= rule.kind == Expiry::Kind::kMaxRows && rule.frequent;
    clocks |= rule.kind == Expiry::Kind::kTimeToLive || recent;
    decay = rule.kind == Expiry::Kind::kDecayedScore ? rule.decay : decay;
    expire_.push_back(rule);
  }
  metadata_ = RowMetadata(counts, clocks, decay);
}

std::string Lifecycle::unanswerable(const Expiry& rule) const {
  using Column = RowMetadata::Column;
  switch (rule.kind) {
    case Expiry::Kind::kTimeToLive:
      return metadata_.has(Column::kClock) ? "" : "its rows keep no clock of their last occurrence";
    case Expiry::Kind::kDecayedScore:
      if (!metadata_.has(Column::kScore)) {
        return "its rows keep no score";
      }
      return rule.decay == metadata_.decay() ? ""
                                             : "its scores decay by " + std::to_string(metadata_.decay());
    case Expiry::Kind::kMaxRows:
      if (rule.frequent) {
        return metadata_.has(Column::kCount) ? "" : "its rows keep no count of their occurrences";
      }
      return metadata_.has(Column::kClock) ? "" : "its rows keep no clock of their last occurrence";
    case Expiry::Kind::kMinNorm:
      break;
  }
  return "";
}

}  // namespace shoal

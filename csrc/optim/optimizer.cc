#include "optim/optimizer.h"

#include <utility>

namespace shoal {

namespace {

float take_bound(std::map<std::string, double>& params, const char* name) {
  const auto found = params.find(name);
  if (found == params.end()) {
    return std::numeric_limits<float>::infinity();
  }
  const double bound = found->second;
  SHOAL_CHECK(bound > 0, std::string(name) + " must be > 0, got " + std::to_string(bound));
  params.erase(found);
  return static_cast<float>(bound);
}

Clip take_clip(std::map<std::string, double>& params) {
  return {.value = take_bound(params, "clip_value"), .norm = take_bound(params, "clip_norm")};
}

template <class One>
Rule made(Params params) {
  One rule(params);
  params.done();
  return rule;
}

Rule make_rule(std::string_view name, std::map<std::string, double> values) {
  Params params{std::string(name), std::move(values)};
  if (name == Sgd::kName) {
    return made<Sgd>(std::move(params));
  }
  if (name == Momentum::kName) {
    return made<Momentum>(std::move(params));
  }
  if (name == Adagrad::kName) {
    return made<Adagrad>(std::move(params));
  }
  if (name == RowWiseAdagrad::kName) {
    return made<RowWiseAdagrad>(std::move(params));
  }
  if (name == Ftrl::kName) {
    return made<Ftrl>(std::move(params));
  }
  if (name == GroupFtrl::kName) {
    return made<GroupFtrl>(std::move(params));
  }
  if (name == Proximal::kName) {
    return made<Proximal>(std::move(params));
  }
  if (name == UserRule::kName) {
    return made<UserRule>(std::move(params));
  }
  if (name == Add::kName) {
    return made<Add>(std::move(params));
  }
  SHOAL_CHECK(name == Adam::kName || name == Adam::kDecoupledName,
              "no optimizer " + std::string(name) +
                  ": SGD, Momentum, Adagrad, RowWiseAdagrad, FTRL, GroupFTRL, Adam, AdamW, Proximal or Add");
  return made<Adam>(std::move(params));
}

std::vector<std::string> columns_of(const Rule& rule) {
  return std::visit(
      []<class One>(const One& chosen) -> std::vector<std::string> {
        if constexpr (requires { One::kColumns; }) {
          return {One::kColumns.begin(), One::kColumns.end()};
        } else {
          return chosen.columns();
        }
      },
      rule);
}

}  // namespace

Optimizer::Optimizer(std::string_view name, std::map<std::string, double> params)
    : name_(name),
      params_(params),
      clip_(take_clip(params)),
      schedule_(Schedule::take(params)),
      rule_(make_rule(name, std::move(params))),  // in this order: rule_ takes the remaining parameters
      columns_(columns_of(rule_)) {
  SHOAL_CHECK(
      !schedule_.active() || has_rate(),
      std::string(name) + " takes no schedule: it has no learning rate that may change between two steps");
  SHOAL_CHECK((!pairs() && elements() == Elements::kFloat32) || !clip_.active(),
              std::string(name) + " takes no clip_value or clip_norm: what is pushed is not a gradient");
}

bool Optimizer::adds_up() const noexcept {
  return !schedule_.active() &&
         std::visit([](const auto& rule) { return requires { rule.kAddsUp; }; }, rule_);
}

bool Optimizer::has_rate() const noexcept {
  return std::visit([]<class One>(const One&) { return Scheduled<One>; }, rule_);
}

bool Optimizer::pairs() const noexcept {
  return std::visit([](const auto& rule) { return requires { rule.kPairs; }; }, rule_);
}

Elements Optimizer::elements() const noexcept {
  return std::holds_alternative<Add>(rule_) ? Elements::kInt64Pairs : Elements::kFloat32;
}

bool Optimizer::derives_weights() const noexcept {
  return std::visit([](const auto& rule) { return rule.kDerivesWeights; }, rule_);
}

std::string_view Optimizer::row_state() const noexcept {
  return std::visit([](const auto& rule) { return rule.row_state(); }, rule_);
}

}  // namespace shoal

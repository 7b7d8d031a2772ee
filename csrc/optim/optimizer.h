// Optimizer: one of the rules, chosen by name, preceded by clipping.
//
// A rule is a struct of float32 constants, formed from float64 hyper-parameters and rounded once, with
//   kName, kColumns    its names; columns[0] is w unless kDerivesWeights. UserRule has columns() instead
//   row_state()        the name of its number per row, or none
//   start(block)       columns[0] holds initial weights; makes them initial rows
//   step(block)        one step of every row
//   step(rows)         the same for wide rows where they are stored; not in a rule of pairs
//                      (optim/in_place.h)
//   kAddsUp            if present, a row's numbers are sums over its steps: what steps have changed in copies
//                      of a row may be added to it. State must then not be negative
//   kPairs             if present, a row has two elements, of which only the first is a weight
//   read, write, move  convert weights from and to columns, only with kDerivesWeights
//
// Threads: immutable. std::visit is called once per batch; loops over rows contain no dispatch.

#pragma once

#include <map>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/int64_pairs.h"
#include "optim/adagrad.h"
#include "optim/adam.h"
#include "optim/add.h"
#include "optim/clip.h"
#include "optim/ftrl.h"
#include "optim/group_ftrl.h"
#include "optim/momentum.h"
#include "optim/proximal.h"
#include "optim/rowwise_adagrad.h"
#include "optim/schedule.h"
#include "optim/sgd.h"
#include "optim/user_rule.h"

namespace shoal {

using Rule =
    std::variant<Sgd, Momentum, Adagrad, RowWiseAdagrad, Ftrl, GroupFtrl, Adam, Proximal, UserRule, Add>;

// Rules whose learning rate can follow a schedule. The weights of FTRL are derived from alpha, so another
// alpha would change all of them at once.
template <class One>
concept Scheduled = requires(One rule) { rule.lr; } && !requires { One::kPairs; };

// The rule with its learning rate multiplied by `part`.
template <class One>
One slowed(One rule, [[maybe_unused]] double part) noexcept {
  if constexpr (Scheduled<One>) {
    rule.lr = static_cast<decltype(rule.lr)>(static_cast<double>(rule.lr) * part);
  }
  return rule;
}

class Optimizer {
 public:
  // std::invalid_argument, which names the parameter: unknown names; unknown, missing or invalid parameters.
  // clip_value and clip_norm are optional parameters of every rule; those of a schedule are optional
  // parameters of rules with a learning rate.
  Optimizer(std::string_view name, std::map<std::string, double> params);

  // As it was constructed.
  const std::string& name() const noexcept { return name_; }
  const std::map<std::string, double>& params() const noexcept { return params_; }

  const Rule& rule() const noexcept { return rule_; }
  const Clip& clip() const noexcept { return clip_; }
  const Schedule& schedule() const noexcept { return schedule_; }

  std::span<const std::string> columns() const noexcept { return columns_; }
  bool derives_weights() const noexcept;
  std::string_view row_state() const noexcept;
  // Whether steps may be made in copies of a row, and what they have changed added to it: the rule's numbers
  // are sums, and its learning rate does not change.
  bool adds_up() const noexcept;
  // Whether it has a learning rate that may change between two steps.
  bool has_rate() const noexcept;
  // Whether a row is a weight and one more number: dim is 2, and only a step may change it.
  bool pairs() const noexcept;
  // Whether a row is floats, or whole numbers in pairs of floats: of Add.
  Elements elements() const noexcept;

 private:
  std::string name_;
  std::map<std::string, double> params_;
  Clip clip_;
  Schedule schedule_;
  Rule rule_;
  std::vector<std::string> columns_;
};

}  // namespace shoal

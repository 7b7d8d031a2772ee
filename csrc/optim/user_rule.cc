#include "optim/user_rule.h"

#include <algorithm>
#include <atomic>

#include "base/check.h"

namespace shoal {

namespace {

std::atomic<UserFunction> user_function{nullptr};
thread_local bool stepping = false;

}  // namespace

void set_user_function(UserFunction function) noexcept { user_function.store(function); }

bool is_stepping() noexcept { return stepping; }

InUserCode::InUserCode() noexcept { stepping = true; }
InUserCode::~InUserCode() { stepping = false; }

UserRule::UserRule(Params& given) : params(given.left()), row_steps(given.flag("row_steps")) {
  std::string found = given.first_with("class.");
  SHOAL_CHECK(!found.empty(), std::string(kName) + " needs the name of its class");
  given.whole(found, 1);
  while (!(found = given.first_with("param.")).empty()) {
    given.any(found);
  }
  std::string prefix = "state0.";
  for (found = given.first_with(prefix); !found.empty(); found = given.first_with(prefix)) {
    SHOAL_CHECK(states < kMaxStates, std::string(kName) + " has at most " + std::to_string(kMaxStates) +
                                         " state columns: remove " + found);
    SHOAL_CHECK(found.size() > prefix.size(), std::string(kName) + " needs a name for each state column");
    names[states] = found.substr(prefix.size());
    initial[states] = static_cast<float>(given.any(found));
    prefix = "state" + std::to_string(++states) + ".";
  }
}

std::vector<std::string> UserRule::columns() const {
  std::vector<std::string> columns{"w"};
  columns.insert(columns.end(), names.begin(), names.begin() + static_cast<std::ptrdiff_t>(states));
  return columns;
}

void UserRule::start(const Block& block) const noexcept {
  for (std::size_t k = 0; k < states; ++k) {
    std::fill_n(block.columns[k + 1], block.size(), initial[k]);
  }
  if (row_steps) {
    std::fill_n(block.row_state, block.rows, 0.0F);
  }
}

void UserRule::step(const Block& block, const std::shared_ptr<const void>& storage) const {
  const UserFunction function = user_function.load();
  if (function == nullptr) {
    throw UserStepError("this program has no function for it");
  }
  for (std::size_t r = 0; row_steps && r < block.rows; ++r) {
    block.row_state[r] += 1.0F;
  }
  const InUserCode while_it_runs;
  function({.params = params, .block = block, .states = states, .row_steps = row_steps, .storage = storage});
}

}  // namespace shoal

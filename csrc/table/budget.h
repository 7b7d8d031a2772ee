// What is thrown where rows would outgrow the memory that they may take: nothing has changed then.

#pragma once

#include <stdexcept>

namespace shoal {

struct MemoryBudgetExceeded : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace shoal

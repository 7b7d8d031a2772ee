#pragma once
#include <stdexcept>
namespace shoal {
struct MemoryBudgetExceeded : std::runtime_error {
  using std::runtime_error::runtime_error;
};
}  // namespace shoal

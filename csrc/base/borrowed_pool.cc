#include "base/borrowed_pool.h"

#include <utility>

#include "base/threads.h"

namespace shoal {

namespace {

struct Loan {
  ParallelRun team = nullptr;
  std::size_t threads = 0;
  std::size_t stamp = 0;  // of the process that borrowed it
};

thread_local Loan loan;

}  // namespace

void borrow(ParallelRun team, std::size_t threads) noexcept { loan = {team, threads, process_stamp()}; }

bool run_on_borrowed_threads(std::size_t pool, void (*member)(void* data), void* data) {
  if (loan.team == nullptr || loan.threads < 2 || 2 * loan.threads < pool || loan.stamp != process_stamp()) {
    return false;
  }
  const Loan lent = std::exchange(loan, {});  // nested calls must not use the team: it is running this one
  lent.team(member, data, 0, 0);
  loan = lent;
  return true;
}

}  // namespace shoal

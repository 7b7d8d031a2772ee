#include "base/thread_team.h"

#include <utility>

#include "base/threads.h"

namespace shoal {

namespace {

struct Team {
  ParallelRun run = nullptr;
  std::size_t threads = 0;
  std::size_t stamp = 0;  // of the process
};

thread_local Team team;

}  // namespace

void set_thread_team(ParallelRun run, std::size_t threads) noexcept {
  team = {run, threads, process_stamp()};
}

bool run_on_thread_team(std::size_t pool, void (*member)(void* data), void* data) {
  if (team.run == nullptr || team.threads < 2 || 2 * team.threads < pool || team.stamp != process_stamp()) {
    return false;
  }
  const Team used = std::exchange(team, {});  // nested calls must not use it: it is running this one
  used.run(member, data, 0, 0);
  team = used;
  return true;
}

}  // namespace shoal

// Threads that another runtime keeps for the calling thread, borrowed by that thread's pools: OpenMP's, say.
//
// Idea. OpenMP's threads do not sleep between two loops, they spin for milliseconds. Where a thread computes with such
// a team and calls a ThreadPool in between, the pool's own workers would have to be woken on cores that are spun on. So the
// thread lends the pool its team: parts are handed out to threads that are awake already.
//
// Invariants
//   I1  a loan holds for the thread that made it, in the process that made it: never in a child after fork, whose
//       team's threads are gone, and never for parts that run inside the team.
//   I2  a team much smaller than the pool (less than half) is not used: the pool's own workers are more.
//   I3  what parts compute does not depend on who runs them, as ever.
//
// Threads: borrow() and run_on_borrowed_threads() speak of the calling thread alone.

#pragma once

#include <cstddef>

namespace shoal {

// Calls member(data) once on every thread of the team, the caller's among them, and returns after the last: what GNU's
// runtime exports as GOMP_parallel, with 0 for "as many threads as this thread's loops have" and no flags.
using ParallelRun = void (*)(void (*member)(void* data), void* data, unsigned threads, unsigned flags);

// From now on, for the calling thread; null ends the loan. `threads`: how many the team has, the caller included.
void borrow(ParallelRun team, std::size_t threads) noexcept;

// Calls member(data) on the threads of the team that the calling thread has borrowed; false where there is none for a
// pool of so many threads. `member` must not throw.
bool run_on_borrowed_threads(std::size_t pool, void (*member)(void* data), void* data);

}  // namespace shoal

// Thread teams of another runtime, such as OpenMP's, borrowed by the ThreadPools of the calling thread.
//
// Why. OpenMP's threads do not sleep between two loops but spin for milliseconds. If a thread that computes with such a
// team calls a ThreadPool in between, the pool's own threads would compete for cores with the spinning ones. Therefore
// the thread lends its team to the pool, which runs its parts on these threads.
//
// Invariants
//   I1  a loan is valid for one thread of one process: not in a child after fork, in which the team's threads do not exist,
//       and not for parts that run inside the team.
//   I2  a team of less than half the pool's size is not used.
//   I3  results do not depend on the thread that runs a part.
//
// Threads: borrow() and run_on_borrowed_threads() concern the calling thread alone.

#pragma once

#include <cstddef>

namespace shoal {

// Calls member(data) once on each thread of the team, including the caller, and returns after the last call: what GNU's
// runtime exports as GOMP_parallel; its other arguments are 0: the default number of threads, and no flags.
using ParallelRun = void (*)(void (*member)(void* data), void* data, unsigned threads, unsigned flags);

// Lends a team to the pools of the calling thread; null ends the loan. `threads`: its size, including the caller.
void borrow(ParallelRun team, std::size_t threads) noexcept;

// Calls member(data) on the threads of the team that the calling thread has borrowed; false if it has none for a pool of this
// size. `member` must not throw.
bool run_on_borrowed_threads(std::size_t pool, void (*member)(void* data), void* data);

}  // namespace shoal

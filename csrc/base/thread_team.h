// Thread teams of another runtime, such as OpenMP's, in which the ThreadPools of a thread run.
//
// Why. OpenMP's threads do not sleep between two loops but spin for milliseconds: a pool's own threads would
// compete with them for cores. So a thread that computes with such a team has its pools use it.
//
// Invariants
//   I1  A team is used by the thread that has set it, in its process: not in a child after fork, in which the
//       team's threads do not exist, and not for parts that run inside the team.
//   I2  A team of less than half the pool's size is not used.
//   I3  Results do not depend on the thread that runs a part.
//
// Threads: both functions concern the calling thread alone.

#pragma once

#include <cstddef>

namespace shoal {

// Calls member(data) once on each thread of the team, including the caller, and returns after the last call:
// GNU's GOMP_parallel. Its other arguments are 0: the default number of threads, and no flags.
using ParallelRun = void (*)(void (*member)(void* data), void* data, unsigned threads, unsigned flags);

// Null: the pools of the calling thread use none. `threads`: its size, including the caller.
void set_thread_team(ParallelRun team, std::size_t threads) noexcept;

// Calls member(data) on the threads of the team; false if there is none for a pool of this size. `member`
// must not throw.
bool run_on_thread_team(std::size_t pool, void (*member)(void* data), void* data);

}  // namespace shoal

#include "base/threads.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "base/thread_team.h"
#include "check.h"

namespace shoal::threads_test {

namespace {

// Runs `parts` parts on the pool and returns whether each ran once.
bool runs_each_once(ThreadPool& pool, std::size_t parts) {
  std::vector<std::atomic<int>> ran(parts);
  pool.run(parts, [&](std::size_t i) { ++ran.at(i); });
  for (const auto& count : ran) {
    if (count != 1) {
      return false;
    }
  }
  return true;
}

}  // namespace

TEST(every_part_runs_exactly_once) {
  for (const std::size_t threads : {0U, 1U, 2U, 3U, 8U}) {
    ThreadPool pool(threads);
    CHECK_EQ(pool.threads(), threads == 0 ? 1 : threads);
    for (const std::size_t parts : {0U, 1U, 2U, 3U, 7U, 8U, 9U, 1000U}) {
      CHECK(runs_each_once(pool, parts));
    }
  }
}

TEST(a_pool_serves_many_small_jobs_in_a_row) {
  ThreadPool pool(3);
  for (int i = 0; i < 5000; ++i) {
    CHECK(runs_each_once(pool, 4));
  }
}

TEST(what_the_parts_wrote_is_seen_after_run) {
  ThreadPool pool(4);
  std::vector<std::size_t> numbers(1000);
  for (std::size_t round = 0; round < 200; ++round) {
    pool.run(numbers.size(), [&](std::size_t i) { numbers[i] += i; });
    CHECK_EQ(std::accumulate(numbers.begin(), numbers.end(), std::size_t{0}), (round + 1) * 999 * 1000 / 2);
  }
}

TEST(an_exception_is_carried_to_the_caller_after_the_other_parts_have_ended) {
  for (const std::size_t threads : {1U, 2U, 8U}) {
    ThreadPool pool(threads);
    for (int i = 0; i < 100; ++i) {
      std::atomic<int> ran{0};
      CHECK_THROWS(pool.run(20,
                            [&](std::size_t part) {
                              ++ran;
                              if (part == 11) {
                                throw std::runtime_error("part 11");
                              }
                            }),
                   "part 11");
      CHECK_EQ(ran, 20);
      CHECK(runs_each_once(pool, 20));  // and is forgotten
    }
  }
}

TEST(one_of_several_exceptions_is_carried) {
  ThreadPool pool(4);
  CHECK_THROWS(
      pool.run(8, [](std::size_t part) { throw std::runtime_error("part " + std::to_string(part)); }),
      "part ");
}

TEST(a_part_may_run_parts_on_the_same_pool) {
  ThreadPool pool(3);
  std::atomic<int> ran{0};
  pool.run(5, [&](std::size_t) {
    pool.run(7, [&](std::size_t) {
      CHECK(runs_each_once(pool, 3));
      ++ran;
    });
  });
  CHECK_EQ(ran, 35);
}

TEST(an_exception_of_a_nested_part_reaches_the_outer_caller) {
  ThreadPool pool(2);
  CHECK_THROWS(
      pool.run(4, [&](std::size_t) { pool.run(2, [](std::size_t) { throw std::runtime_error("inner"); }); }),
      "inner");
}

TEST(many_callers_share_a_pool_and_none_waits_for_another_s_parts) {
  ThreadPool pool(3);
  std::atomic<int> good{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 6; ++caller) {
    callers.emplace_back([&] {
      for (int i = 0; i < 300; ++i) {
        good += runs_each_once(pool, 9) ? 1 : 0;
      }
    });
  }
  for (auto& caller : callers) {
    caller.join();
  }
  CHECK_EQ(good, 6 * 300);
}

TEST(a_caller_gets_on_while_another_caller_s_part_takes_its_time) {
  ThreadPool pool(2);
  std::atomic<bool> inside{false}, release{false};
  std::thread slow([&] {
    pool.run(2, [&](std::size_t) {
      inside = true;
      while (!release) {
        std::this_thread::yield();
      }
    });
  });
  while (!inside) {
    std::this_thread::yield();
  }
  CHECK(runs_each_once(pool, 10));  // would hang here
  release = true;
  slow.join();
}

TEST(pools_come_and_go) {
  for (int i = 0; i < 200; ++i) {
    ThreadPool pool(4);
    if (i % 2 == 0) {
      CHECK(runs_each_once(pool, 4));
    }
  }
}

namespace {

// In a child: `body` must be true within the minute.
bool in_child(auto body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    _exit(body() ? 0 : 1);
  }
  int status = -1;
  return waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace

TEST(a_forked_child_works_with_its_copy_of_a_pool_and_ends_it) {
  auto pool = std::make_unique<ThreadPool>(3);
  CHECK(runs_each_once(*pool, 10));
  const std::size_t stamp = process_stamp();
  CHECK(in_child([&] {
    const bool good = process_stamp() != stamp && runs_each_once(*pool, 10);
    pool.reset();  // would wait for workers that are not there
    return good;
  }));
  CHECK_EQ(process_stamp(), stamp);
  CHECK(runs_each_once(*pool, 10));
}

TEST(a_child_forked_while_the_workers_are_busy_works) {
  ThreadPool pool(2);
  std::atomic<bool> inside{false}, release{false};
  std::thread other([&] {
    pool.run(2, [&](std::size_t) {
      inside = true;
      while (!release) {
        std::this_thread::yield();
      }
    });
  });
  while (!inside) {
    std::this_thread::yield();
  }
  const bool good = in_child([&] { return runs_each_once(pool, 10); });
  release = true;
  other.join();
  CHECK(good);
}

TEST(a_child_forked_between_jobs_whose_workers_are_still_waking_works) {
  // A worker that is late for a job holds the pool's lock briefly, and a fork may copy the held lock.
  ThreadPool pool(8);
  std::atomic<bool> stop{false};
  std::thread other([&] {
    while (!stop) {
      pool.run(2, [](std::size_t) {});
      std::this_thread::yield();
    }
  });
  bool good = true;
  for (int i = 0; i < 150 && good; ++i) {
    good = in_child([&] { return runs_each_once(pool, 10); });
  }
  stop = true;
  other.join();
  CHECK(good);
}

#ifndef __SANITIZE_THREAD__  // which cannot follow threads that start in a child
TEST(a_forked_child_may_start_a_pool_of_its_own) {
  if (check::is_emulated()) {
    return;
  }
  ThreadPool pool(2);
  CHECK(in_child([] {
    ThreadPool own(3);
    return runs_each_once(own, 10);
  }));
}
#endif

TEST(a_thread_runs_its_function_once_and_join_waits_for_the_end) {
  std::atomic<int> ran{0};
  Thread thread([&] { ++ran; });
  CHECK(thread.is_of_this_process());
  thread.join();
  CHECK_EQ(ran, 1);
  thread.join();
}

TEST(a_thread_s_end_waits_for_its_function) {
  std::atomic<bool> go{false}, done{false};
  std::thread other([&] { go = true; });
  {
    const Thread thread([&] {
      while (!go) {
        std::this_thread::yield();
      }
      done = true;
    });
  }
  CHECK(done);
  other.join();
}

TEST(a_thread_takes_no_signals) {
  sigset_t mask;
  sigemptyset(&mask);
  Thread([&] { pthread_sigmask(SIG_BLOCK, nullptr, &mask); }).join();
  CHECK_EQ(sigismember(&mask, SIGINT), 1);
  CHECK_EQ(sigismember(&mask, SIGTERM), 1);
  pthread_sigmask(SIG_BLOCK, nullptr, &mask);
  CHECK_EQ(sigismember(&mask, SIGINT), 0);
}

TEST(a_forked_child_does_not_wait_for_its_parent_s_thread) {
  std::atomic<bool> release{false};
  auto thread = std::make_unique<Thread>([&] {
    while (!release) {
      std::this_thread::yield();
    }
  });
  const bool good = in_child([&] {
    const bool elsewhere = !thread->is_of_this_process();
    thread->join();
    thread.reset();
    return elsewhere;
  });
  release = true;
  CHECK(good);
}

TEST(pieces_cover_everything_once_and_differ_by_little) {
  for (const std::size_t n : {0UL, 1UL, 7UL, 1000UL, 1UL << 40U, ~0UL}) {
    for (const std::size_t parts : {1U, 2U, 3U, 8U, 1000U}) {
      const Partition partition{n, parts};
      CHECK_EQ(partition.begin(0), 0);
      CHECK_EQ(partition.begin(parts), n);
      for (std::size_t i = 0; i < parts; ++i) {
        const std::size_t length = partition.begin(i + 1) - partition.begin(i);
        CHECK(length == n / parts || length == n / parts + 1);
      }
    }
  }
}

TEST(parts_are_one_for_each_thread_but_none_is_too_small) {
  CHECK_EQ(parts_for(0, 10, 4), 1);
  CHECK_EQ(parts_for(19, 10, 4), 1);
  CHECK_EQ(parts_for(20, 10, 4), 2);
  CHECK_EQ(parts_for(1000, 10, 4), 4);
}

namespace {

std::atomic<int> teamed{0};  // how often the team below was called

// A team of three, as OpenMP calls one.
void team_of_three(void (*member)(void*), void* data, unsigned threads, unsigned flags) {
  ++teamed;
  CHECK_EQ(threads, 0U);
  CHECK_EQ(flags, 0U);
  std::thread second(member, data), third(member, data);
  member(data);
  second.join();
  third.join();
}

// The team is used until the end of the test.
struct TeamGuard {
  explicit TeamGuard(std::size_t threads) {
    teamed = 0;
    set_thread_team(&team_of_three, threads);
  }
  ~TeamGuard() { set_thread_team(nullptr, 0); }
  TeamGuard(const TeamGuard&) = delete;
  TeamGuard& operator=(const TeamGuard&) = delete;
};

}  // namespace

TEST(a_team_of_another_runtime_runs_the_parts) {
  ThreadPool pool(2), alone(1);
  {
    const TeamGuard guard(3);
    for (const std::size_t parts : {2U, 3U, 1000U}) {
      CHECK(runs_each_once(pool, parts));
    }
    CHECK_EQ(teamed, 3);
    CHECK(runs_each_once(pool, 0));
    CHECK(runs_each_once(pool, 1));    // nothing to share
    CHECK(runs_each_once(alone, 10));  // without other threads
    CHECK_EQ(teamed, 3);
  }
  CHECK(runs_each_once(pool, 10));
  CHECK_EQ(teamed, 3);
}

TEST(a_team_of_less_than_half_of_the_pool_s_threads_is_left_alone) {
  for (const auto& [threads, team, used] : {std::tuple{2U, 1U, 0}, {5U, 2U, 0}, {4U, 2U, 1}, {2U, 0U, 0}}) {
    ThreadPool pool(threads);
    const TeamGuard guard(team);
    CHECK(runs_each_once(pool, 10));
    CHECK_EQ(teamed, used);
  }
}

TEST(a_team_carries_an_exception_and_is_used_still) {
  ThreadPool pool(2);
  const TeamGuard guard(3);
  std::atomic<int> ran{0};
  CHECK_THROWS(pool.run(20,
                        [&](std::size_t part) {
                          ++ran;
                          if (part == 11) {
                            throw std::runtime_error("part 11");
                          }
                        }),
               "part 11");
  CHECK_EQ(ran, 20);
  CHECK(runs_each_once(pool, 20));
  CHECK_EQ(teamed, 2);
}

TEST(parts_inside_a_team_and_other_threads_have_the_pool_s_own_workers) {
  ThreadPool pool(2);
  const TeamGuard guard(3);
  std::atomic<int> ran{0};
  pool.run(5, [&](std::size_t) { ran += runs_each_once(pool, 7) ? 1 : 0; });
  CHECK_EQ(ran, 5);
  CHECK_EQ(teamed, 1);
  std::thread([&] { CHECK(runs_each_once(pool, 7)); }).join();
  CHECK_EQ(teamed, 1);
}

TEST(a_forked_child_has_no_team) {
  ThreadPool pool(2);
  const TeamGuard guard(3);
  CHECK(runs_each_once(pool, 10));
  CHECK(in_child([&] { return runs_each_once(pool, 10) && teamed == 1; }));
}

}  // namespace shoal::threads_test

// Timers compared with a list that is searched.

#include "client/timers.h"

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "check.h"

namespace shoal::timers_test {

using namespace shoal::client;

TEST(what_is_due_comes_in_the_order_of_the_times_and_of_the_settings) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 100; ++round) {
    Timers timers;
    std::vector<Timer> all(1 + random() % 60);
    struct Entry {
      Seconds due;
      std::uint64_t order;
      Timer* timer;
    };
    std::vector<Entry> slow;
    const auto drop = [&](const Timer* timer) {
      std::erase_if(slow, [&](const Entry& entry) { return entry.timer == timer; });
    };
    const auto sooner = [](const Entry& a, const Entry& b) {
      return a.due < b.due || (a.due == b.due && a.order < b.order);
    };
    for (std::uint64_t step = 0; step < 400; ++step) {
      Timer& one = all[random() % all.size()];
      const auto now = static_cast<Seconds>(random() % 20);  // equal times are frequent
      switch (random() % 4) {
        case 0:
        case 1:
          timers.set(one, now);
          drop(&one);
          slow.push_back({now, step, &one});
          break;
        case 2:
          timers.unset(one);
          drop(&one);
          break;
        default: {
          const auto first = std::min_element(slow.begin(), slow.end(), sooner);
          Timer* const want = first == slow.end() || first->due > now ? nullptr : first->timer;
          CHECK(timers.take(now) == want);
          if (want != nullptr) drop(want);
        }
      }
      CHECK_EQ(timers.size(), slow.size());
      const auto first = std::min_element(slow.begin(), slow.end(), sooner);
      CHECK_EQ(timers.next(), first == slow.end() ? kNever : first->due);
    }
  }
}

}  // namespace shoal::timers_test

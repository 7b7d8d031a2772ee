// DurationHistograms: bounds of buckets, and counts that another thread reads.

#include "endpoint/duration_histograms.h"

#include <cstdint>
#include <random>
#include <thread>

#include "check.h"

namespace shoal::duration_histograms_test {
using Durations = DurationHistograms;

TEST(each_duration_is_within_the_bounds_of_its_bucket_which_are_a_quarter_apart) {
  CHECK_EQ(Durations::bucket(0), 0);
  CHECK_EQ(Durations::bucket(255), 0);
  CHECK_EQ(Durations::bucket(256), 1);
  CHECK_EQ(Durations::bucket(~std::uint64_t{0}), Durations::kBuckets - 1);
  std::mt19937_64 random(3);
  for (int i = 0; i < 100'000; ++i) {
    const std::uint64_t ns = random() >> (random() % 64);
    const std::size_t bucket = Durations::bucket(ns);
    CHECK(bucket < Durations::kBuckets);
    CHECK(Durations::lower_bound(bucket) <= ns);
    if (bucket + 1 < Durations::kBuckets) {
      const std::uint64_t next = Durations::lower_bound(bucket + 1);
      CHECK(ns < next);
      CHECK(bucket == 0 || 4 * next <= 5 * Durations::lower_bound(bucket));
      CHECK_EQ(Durations::bucket(next), bucket + 1);
    }
  }
}

TEST(a_reader_in_another_thread_sees_counts_that_rise) {
  Durations durations;
  std::thread writer([&] {
    for (std::uint64_t i = 0; i < 10'000; ++i) {
      durations.add(wire::Op::kPull, 300);
    }
    durations.add(static_cast<wire::Op>(200), 7);  // an op that no version has
  });
  std::uint64_t seen = 0;
  const auto pull = static_cast<std::size_t>(wire::Op::kPull);
  while (seen < 10'000) {
    const std::uint64_t now = durations.count(pull, 1);
    CHECK(now >= seen);
    seen = now;
    std::this_thread::yield();
  }
  writer.join();
  CHECK_EQ(durations.total_ns(pull), 3'000'000);
  CHECK_EQ(durations.count(0, 0), 1);
}

}  // namespace shoal::duration_histograms_test

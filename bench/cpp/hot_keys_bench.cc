// What counting hot keys costs a server: ns and, under callgrind, instructions per key that requests name.
//
//   hot_keys_bench [keys of a request] [requests]      prints one JSON object
//   valgrind --tool=callgrind --toggle-collect='*add_all*' hot_keys_bench 10000 1000
//
// Each request has sorted distinct hashes of 10 million keys, and one key that all of them have. The check: that key is the
// hottest, and about one key in kGap was sampled.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "endpoint/hot_keys.h"
#include "measure.h"

namespace shoal {
namespace {

[[gnu::noinline]] void add_all(HotKeys& hot, const std::vector<std::vector<std::uint64_t>>& requests) {
  for (const auto& request : requests) {
    hot.add(1, request);
  }
}

int run(std::size_t keys, std::size_t count) {
  constexpr std::size_t kRounds = 7;
  constexpr std::uint64_t kHot = 77;
  Random random;
  std::vector<std::vector<std::uint64_t>> requests(count);
  for (auto& request : requests) {
    request.push_back(mix(kHot));
    while (request.size() < keys) {
      request.push_back(mix(1000 + random.next() % 10'000'000));
    }
    std::ranges::sort(request);
  }
  HotKeys hot;
  Figures ns;
  for (std::size_t round = 0; round < kRounds; ++round) {
    const auto start = Clock::now();
    add_all(hot, requests);
    ns.add(seconds_since(start) * 1e9 / static_cast<double>(keys * count));
  }
  const double expected = static_cast<double>(kRounds * keys * count) / HotKeys::kGap;
  const auto sampled = static_cast<double>(hot.sampled());
  if (expected < static_cast<double>(HotKeys::kPeriod) && std::abs(sampled - expected) > 0.1 * expected) {
    fail("the sample has " + std::to_string(sampled) + " keys, not about " + std::to_string(expected));
  }
  if (hot.hottest(1).at(0).hash != mix(kHot)) {
    fail("another key is the hottest");
  }
  std::printf("{\"keys\": %zu, \"requests\": %zu, \"entries\": %zu, \"ns_per_key\": %s}\n", keys,
              kRounds * count, hot.size(), ns.json().c_str());
  return 0;
}

}  // namespace
}  // namespace shoal

int main(int argc, char** argv) {
  const auto number = [&](int i, std::size_t otherwise) {
    return argc > i ? static_cast<std::size_t>(std::strtoull(argv[i], nullptr, 10)) : otherwise;
  };
  return shoal::run(number(1, 1000), number(2, 10'000));
}

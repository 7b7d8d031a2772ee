// What the benchmarks share: clocks, figures, random numbers, and the end where a check fails.

#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "base/mix.h"

namespace shoal {

using Clock = std::chrono::steady_clock;

inline double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Of this process, in pages of 4 KiB as Linux counts.
inline std::size_t resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  std::size_t total = 0;
  std::size_t resident = 0;
  statm >> total >> resident;
  return resident * 4096;
}

[[noreturn]] inline void fail(const std::string& what) {
  std::fprintf(stderr, "the benchmark's own check failed: %s\n", what.c_str());
  std::exit(1);
}

// One figure a round; told as [median, least, most].
struct Figures {
  std::vector<double> values;

  void add(double value) { values.push_back(value); }
  std::string json() const {
    std::vector<double> sorted = values;
    std::sort(sorted.begin(), sorted.end());
    char text[128];
    std::snprintf(text, sizeof text, "[%.6g, %.6g, %.6g]", sorted[sorted.size() / 2], sorted.front(),
                  sorted.back());
    return text;
  }
};

class Random {
 public:
  std::uint64_t next() { return mix(state_++); }
  double unit() { return static_cast<double>(next() >> 11U) * 0x1p-53; }

 private:
  std::uint64_t state_ = 1;
};

}  // namespace shoal

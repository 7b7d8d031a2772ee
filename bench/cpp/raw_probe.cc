// The machine's raw limit beside another process's figures, moment by moment: bench/billion/watch.py asks for it.
//
//   raw_probe threads bytes...
//
// Takes a region for each number of bytes, touches it, and prints a line: GB touched a second. Then it answers every line
// on its input by one of its own: for each region millions of random lines read, and read and written, a second.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <string>
#include <vector>

#include "raw.h"

namespace shoal {
namespace {

constexpr std::size_t kLines = 4'000'000;

int run(std::size_t threads, const std::vector<std::size_t>& sizes) {
  ThreadPool pool(threads);
  std::vector<Region> regions;
  std::size_t total = 0;
  const auto start = Clock::now();
  for (const std::size_t bytes : sizes) {
    if (bytes < kCacheLine || bytes / kCacheLine >> 32U != 0) {
      fail("a region has from 64 bytes to 256 GiB, not " + std::to_string(bytes));
    }
    regions.emplace_back(bytes);
    total += bytes;
    const Partition partition{bytes, threads};
    pool.run(partition.parts, [&](std::size_t part) {
      std::memset(regions.back().data() + partition.begin(part), 1,
                  partition.begin(part + 1) - partition.begin(part));
    });
  }
  std::printf("%.4g\n", static_cast<double>(total) / seconds_since(start) / 1e9);
  std::fflush(stdout);
  Random random;
  std::vector<std::uint32_t> lines(kLines);
  for (std::string asked; std::getline(std::cin, asked);) {
    for (Region& region : regions) {
      draw_lines(region, random, lines);
      const double read = raw_rate(region, lines, false, pool);
      std::printf("%.6g %.6g ", read, raw_rate(region, lines, true, pool));
    }
    std::printf("\n");
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace
}  // namespace shoal

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: raw_probe threads bytes...\n");
    return 2;
  }
  std::vector<std::size_t> sizes;
  for (int i = 2; i < argc; ++i) {
    sizes.push_back(std::strtoull(argv[i], nullptr, 10));
  }
  return shoal::run(std::strtoull(argv[1], nullptr, 10), sizes);
}

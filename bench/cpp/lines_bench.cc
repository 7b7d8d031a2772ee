// Random lines of files, as fast as the machine reads them: the limit of lookups in a mapped export.
//
//   lines_bench THREADS READS CLOCK FILE...
//
// CLOCK is wall, or cpu: the seconds that its threads have computed, shared out among them.
//
// Maps the files one behind the other, read-only, as processes that share them do, and touches every page once. Then reads a line of standard input
// for every round, so that rounds of somebody else can take turns with these, and prints four rates, millions a second:
//
//   near    random cache lines, asked for 16 ahead into the nearest cache
//   lines   64 ahead into the second-level cache, as bench/cpp/raw.h does
//   far     128 ahead
//   pairs   a random line, then another one whose place depends on what stands in the first: both asked for 64 ahead

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <iostream>
#include <span>
#include <string>
#include <vector>

#include "base/memory.h"
#include "base/mix.h"
#include "base/threads.h"
#include "measure.h"

namespace shoal {
namespace {

constexpr std::size_t kAhead = 64;

struct Lines {
  const std::byte* base;
  std::size_t count;

  const std::byte* at(std::size_t line) const { return base + line * kCacheLine; }
};

std::uint64_t word(const std::byte* line, std::size_t offset) {
  std::uint64_t value;
  std::memcpy(&value, line + offset, sizeof value);
  return value;
}

// Both ends of each line, so that it is read whole.
template <std::size_t kFar, int kCache>
std::uint64_t read_lines(const Lines& lines, std::span<const std::uint32_t> numbers) {
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    __builtin_prefetch(lines.at(numbers[std::min(i + kFar, numbers.size() - 1)]), 0, kCache);
    sum += word(lines.at(numbers[i]), 0) + word(lines.at(numbers[i]), 56);
  }
  return sum;
}

std::uint64_t read_pairs(const Lines& lines, std::span<const std::uint32_t> numbers) {
  std::array<const std::byte*, kAhead> seconds{};
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < numbers.size() + kAhead; ++i) {
    const std::byte*& second = seconds[i % kAhead];
    if (i >= kAhead) {
      sum += word(second, 0) + word(second, 56);
    }
    if (i < numbers.size()) {
      __builtin_prefetch(lines.at(numbers[std::min(i + kAhead, numbers.size() - 1)]), 0, 2);
      second = lines.at(scale(mix(word(lines.at(numbers[i]), 0) + i), lines.count));
      __builtin_prefetch(second, 0, 2);
    }
  }
  return sum;
}

double cpu_seconds() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// The whole lines of files as one range of addresses.
Lines map(std::span<char* const> paths) {
  constexpr std::size_t kPage = 4096;
  struct File {
    int descriptor;
    std::size_t bytes;
  };
  std::vector<File> files;
  std::size_t total = 0;
  for (const char* const path : paths) {
    struct stat status{};
    const int descriptor = open(path, O_RDONLY);
    if (descriptor < 0 || fstat(descriptor, &status) != 0) {
      fail(std::string("cannot open ") + path);
    }
    files.push_back({descriptor, (static_cast<std::size_t>(status.st_size) + kPage - 1) / kPage * kPage});
    total += files.back().bytes;
  }
  void* const room = mmap(nullptr, total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) {
    fail("no room to map them");
  }
  auto* at = static_cast<std::byte*>(room);
  for (const File& file : files) {
    if (mmap(at, file.bytes, PROT_READ, MAP_SHARED | MAP_FIXED, file.descriptor, 0) == MAP_FAILED) {
      fail("cannot map it");
    }
#ifdef MADV_HUGEPAGE
    static_cast<void>(madvise(at, file.bytes, MADV_HUGEPAGE));
#endif
    at += file.bytes;
  }
  return {static_cast<const std::byte*>(room), total / kCacheLine};
}

int run(std::span<char* const> paths, std::size_t threads, std::size_t reads, bool by_cpu) {
  const Lines lines = map(paths);
  std::uint64_t touched = 0;
  for (std::size_t at = 0; at < lines.count * kCacheLine; at += 4096) {
    touched += std::to_integer<std::uint64_t>(lines.base[at]);
  }
  ThreadPool pool(threads);
  Random random;
  std::vector<std::uint32_t> numbers(reads);
  std::atomic<std::uint64_t> sink{touched};
  const auto rate = [&](const auto& read) {
    const auto start = Clock::now();
    const double computed = cpu_seconds();
    const Partition partition{numbers.size(), pool.threads()};
    pool.run(partition.parts, [&](std::size_t part) {
      const std::size_t begin = partition.begin(part);
      sink.fetch_add(read(
          lines, std::span<const std::uint32_t>(numbers).subspan(begin, partition.begin(part + 1) - begin)));
    });
    const double seconds =
        by_cpu ? (cpu_seconds() - computed) / static_cast<double>(threads) : seconds_since(start);
    return sink.load() == 1 ? 0.0 : static_cast<double>(reads) / seconds / 1e6;
  };
  std::string go;
  while (std::getline(std::cin, go)) {
    for (std::uint32_t& number : numbers) {
      number = static_cast<std::uint32_t>(scale(random.next(), lines.count));
    }
    const double near = rate(&read_lines<16, 3>);
    const double singles = rate(&read_lines<kAhead, 2>);
    const double far = rate(&read_lines<2 * kAhead, 2>);
    const double pairs = rate(&read_pairs);
    std::printf("%.6g %.6g %.6g %.6g\n", near, singles, far, pairs);
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace
}  // namespace shoal

int main(int argc, char** argv) {
  if (argc < 5) {
    std::fprintf(stderr, "usage: lines_bench THREADS READS wall|cpu FILE...\n");
    return 2;
  }
  return shoal::run({argv + 4, static_cast<std::size_t>(argc - 4)}, std::strtoull(argv[1], nullptr, 10),
                    std::strtoull(argv[2], nullptr, 10), std::strcmp(argv[3], "cpu") == 0);
}

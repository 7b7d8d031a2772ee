// Random reads of a disk, as many a second as it gives: bench/bench_tiered.py compares a tiered table with it.
//
//   read_probe directory bytes page threads seconds
//
// Writes a file without a name, and reads random pages of it around the page cache, each thread with ReadQueue::kDepth in flight. Then
// prints: reads a second, MB written a second, whether io_uring and O_DIRECT are used.

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "base/threads.h"
#include "tier/page_file.h"

namespace shoal {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

void run(const std::string& directory, std::size_t bytes, std::size_t page_bytes, std::size_t threads,
         double seconds) {
  PageFile file(directory, page_bytes);
  const std::size_t pages = bytes / page_bytes;
  std::vector<std::uint32_t> chunks((pages + file.chunk_pages() - 1) / file.chunk_pages());
  for (std::uint32_t& chunk : chunks) {
    chunk = file.allocate();
  }
  const auto writing = Clock::now();
  {
    const PageFile::Lent memory = file.lend();
    std::mt19937_64 random(1);
    for (std::size_t at = 0; at < memory.pages() * page_bytes; at += sizeof(std::uint64_t)) {
      const std::uint64_t number = random();
      std::memcpy(memory.page(0) + at, &number, sizeof number);
    }
    for (std::size_t page = 0; page < pages; page += memory.pages()) {
      file.write(page * page_bytes, {memory.page(0), std::min(memory.pages(), pages - page) * page_bytes});
    }
  }
  const double written = static_cast<double>(bytes) / seconds_since(writing);
  ThreadPool pool(threads);
  std::vector<std::size_t> reads(threads);
  const auto start = Clock::now();
  pool.run(threads, [&](std::size_t thread) {
    std::mt19937_64 random(thread + 7);
    const PageFile::Lent memory = file.lend();
    std::vector<ReadQueue::Read> some(memory.pages());
    while (seconds_since(start) < seconds) {
      for (std::size_t i = 0; i < some.size(); ++i) {
        some[i] = {.offset = random() % pages * page_bytes,
                   .to = memory.page(i),
                   .bytes = static_cast<std::uint32_t>(page_bytes)};
      }
      memory.read(some, [](std::size_t) {});
      reads[thread] += some.size();
    }
  });
  const double took = seconds_since(start);
  std::size_t all = 0;
  for (const std::size_t some : reads) {
    all += some;
  }
  std::printf("%.0f %.1f %d %d\n", static_cast<double>(all) / took, written / 1e6, file.is_async() ? 1 : 0,
              file.is_direct() ? 1 : 0);
}

}  // namespace
}  // namespace shoal

int main(int argc, char** argv) {
  if (argc != 6) {
    std::fprintf(stderr, "usage: read_probe directory bytes page threads seconds\n");
    return 2;
  }
  shoal::run(argv[1], std::strtoull(argv[2], nullptr, 10), std::strtoull(argv[3], nullptr, 10),
             std::strtoull(argv[4], nullptr, 10), std::strtod(argv[5], nullptr));
  return 0;
}

// ReadQueue: reads of a file, many in flight at a time, from one thread.
//
// Why. A disk answers random reads of 4 KiB in about 100 us, and only with dozens of them in flight does it
// answer as many in a second as it can. io_uring keeps them in flight with a system call for several reads; a
// thread for each read in flight would cost two context switches for each.
//
//   io_uring   where the kernel has it and lets this process use it
//   threads    elsewhere: kThreads threads, each in a pread (base/threads.h)
//
// Threads: one caller at a time.

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "base/threads.h"

namespace shoal {

class ReadQueue {
 public:
  static constexpr unsigned kDepth = 128;
  static constexpr std::size_t kThreads = 32;

  struct Read {
    std::uint64_t offset;
    std::byte* to;
    std::uint32_t bytes;
  };
  enum class Engine : std::uint8_t { kBest, kThreads };

  explicit ReadQueue(Engine engine = Engine::kBest);
  ~ReadQueue();
  ReadQueue(const ReadQueue&) = delete;
  ReadQueue& operator=(const ReadQueue&) = delete;

  bool is_async() const noexcept { return ring_ != nullptr; }

  // Completes all reads, and calls use(i) in this thread for each one that is complete, in any order. Returns
  // 0, or the error number of one that failed: ENODATA if the file ends before it. When it returns or throws,
  // no read is in flight.
  int run(int file, std::span<const Read> reads, const std::function<void(std::size_t)>& use);

 private:
  class Ring;
  std::unique_ptr<Ring> ring_;
  std::unique_ptr<ThreadPool> pool_;
};

}  // namespace shoal

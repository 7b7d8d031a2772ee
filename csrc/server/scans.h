// Scans: functions of all rows that change none, computed by a thread of their own: no request waits for them.
//
// A slot is locked while its rows are read, and pushes go on between two slots: a result is not that of one moment.
//
// Threads: any. `done` is called by the scans' thread, which the first scan starts and the destructor ends, after the scan in progress.
// Fork: a child's copy waits for no thread.

#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include "base/threads.h"
#include "server/reply_queue.h"
#include "wire/wire.h"

namespace shoal {

struct Scan {
  Peer peer;
  wire::Header header;
  std::uint64_t received_ns = 0;
  std::function<void(Scan&)> work{};  // computes the results; it may throw
  std::vector<double> numbers{};
  std::vector<std::uint64_t> words{};
  std::exception_ptr failure{};
};

class Scans {
 public:
  static constexpr std::size_t kMost = 16;  // waiting or in progress

  // `done` must not throw.
  explicit Scans(std::function<void(const Scan&)> done) noexcept;
  ~Scans();
  Scans(const Scans&) = delete;
  Scans& operator=(const Scans&) = delete;

  // Whether a request is waiting or in progress; then its result goes to this peer.
  bool has(const wire::Header& header, std::string_view peer);
  // False if there are too many. Throws if the thread cannot be started.
  bool add(Scan&& scan);

 private:
  struct Queue;

  std::function<void(const Scan&)> done_;
  std::unique_ptr<Queue> queue_;
  std::unique_ptr<Thread> thread_;  // last: it uses the others
};

}  // namespace shoal

// Scans: functions of all rows that change none, computed by a thread of their own: no request waits for
// them.
//
// A slot is locked while its rows are read, and pushes go on between two slots: a result is not that of one
// moment.
//
// Threads: has() and add() by one at a time; `done` is called by the thread of the scans. The destructor
// waits for the scan in progress.

#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <string_view>
#include <utility>
#include <vector>

#include "base/work_queue.h"
#include "endpoint/reply_queue.h"
#include "wire/wire.h"

namespace shoal {

struct Scan {
  Peer peer{};
  wire::Header header{};
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
  explicit Scans(std::function<void(Scan&)> done);

  // Whether a request is waiting or in progress; then its result goes to this peer.
  bool has(const wire::Header& header, std::string_view peer);
  // False if there are too many. Throws if there is no memory or thread.
  bool add(Scan&& scan) { return queue_.add(std::move(scan), kMost); }

 private:
  WorkQueue<Scan> queue_;
};

}  // namespace shoal

// HttpCounters: what a server has answered and closed, and how long its predictions took.
//
//   closed     connections that were closed at a limit, by reason
//   requests   predictions (HttpOptions::predictions), by status; 499: the client left before it had sent one
//   seconds    of predictions, from the complete body to the answer, in buckets as Prometheus has them
//
// Invariants
//   I1  The buckets of seconds add up to the predictions that arrived completely and were answered.
//
// Threads: written by the I/O thread; the numbers that others read may be one request apart. No
// read-modify-write, no fence.

#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace shoal {

enum class Closed : std::uint8_t {
  kSilent,   // no request, or no further one, for the request time
  kSlow,     // a request did not arrive in the request time
  kStalled,  // the client did not take its answer
  kFull,     // it made room for another one, or there was no room for it
  kHead,     // the headers were too large
  kBad,      // not HTTP
};
inline constexpr std::array<std::string_view, 6> kClosedNames{"silent", "slow", "stalled",
                                                              "full",   "head", "bad"};

class HttpCounters {
 public:
  static constexpr std::array<double, 13> kBounds{0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02,
                                                  0.05,   0.1,    0.2,   0.5,   1.0,   2.0};
  static constexpr std::size_t kStatuses = 600;

  void closed(Closed reason) noexcept { increase(closed_[static_cast<std::size_t>(reason)]); }
  void request(int status) noexcept {
    const auto at = static_cast<std::size_t>(status);
    increase(requests_[at < kStatuses ? at : 0]);
  }
  void seconds(std::uint64_t ns) noexcept {
    const double taken = static_cast<double>(ns) * 1e-9;
    const auto bound = std::ranges::lower_bound(kBounds, taken);
    increase(buckets_[static_cast<std::size_t>(bound - kBounds.begin())]);
    increase(total_ns_, ns);
  }
  // No descriptors were left for a connection.
  void no_descriptor(int error) noexcept {
    error_.store(error, std::memory_order_relaxed);
    increase(no_descriptors_);
  }

  std::uint64_t closed_at(std::size_t reason) const noexcept { return read(closed_[reason]); }
  std::uint64_t requests_of(std::size_t status) const noexcept { return read(requests_[status]); }
  // Of durations up to kBounds[at] and above the bound before; the last one: above all bounds.
  std::uint64_t bucket(std::size_t at) const noexcept { return read(buckets_[at]); }
  std::uint64_t total_ns() const noexcept { return read(total_ns_); }
  std::uint64_t no_descriptors() const noexcept { return read(no_descriptors_); }
  int descriptor_error() const noexcept { return error_.load(std::memory_order_relaxed); }

 private:
  using Count = std::atomic<std::uint64_t>;
  static std::uint64_t read(const Count& count) noexcept { return count.load(std::memory_order_relaxed); }
  static void increase(Count& count, std::uint64_t n = 1) noexcept {
    count.store(read(count) + n, std::memory_order_relaxed);
  }

  std::array<Count, kClosedNames.size()> closed_{};
  std::array<Count, kStatuses> requests_{};
  std::array<Count, kBounds.size() + 1> buckets_{};
  Count total_ns_{0};
  Count no_descriptors_{0};
  std::atomic<int> error_{0};  // errno of the last of them
};

}  // namespace shoal

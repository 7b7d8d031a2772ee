// WorkerId: a worker of a job. LastTick: what is known of its last clock. Mode: the consistency of a job.

#pragma once

#include <cstdint>
#include <vector>

namespace shoal {

enum class Mode : std::uint8_t { kBsp, kSsp, kAsp };

// A job's number in orders that mean the default job, whatever its number is.
inline constexpr std::uint32_t kDefaultJob = 0;

// A worker: a rank of a job.
struct WorkerId {
  std::uint32_t job = 0;
  std::uint32_t rank = 0;

  bool operator==(const WorkerId&) const = default;
};

// The last tick of a worker: its clock, and the tables that it named (under BSP).
struct LastTick {
  std::uint32_t clock = 0;
  std::vector<std::uint32_t> tables{};
};

}  // namespace shoal

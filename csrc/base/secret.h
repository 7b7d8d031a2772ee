// A secret of the process: random bits, drawn once, that are unknown outside it.
//
// Used where an adversary who chooses keys must not be able to make them collide (table/slot_table.h). No
// result, file or message may depend on it: results are the same in every process.
//
// Threads: any.

#pragma once

#include <cstdint>

namespace shoal {

// Never 0.
std::uint64_t process_secret() noexcept;

}  // namespace shoal

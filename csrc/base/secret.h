// A secret of the process: random bits that nobody outside can know, drawn once.
//
// For placing things so that an adversary who chooses keys cannot make them collide (table/slot_table.h). Nothing that is
// computed, saved or sent may depend on it: results are the same in every process.
//
// Threads: any.

#pragma once

#include <cstdint>

namespace shoal {

// Never 0.
std::uint64_t process_secret() noexcept;

}  // namespace shoal

// Allocations that fail. The test binary replaces operator new.

#pragma once

namespace shoal::check {

// How many allocations of this thread succeed until one fails; negative: none fails.
extern thread_local long allocations_left;

}  // namespace shoal::check

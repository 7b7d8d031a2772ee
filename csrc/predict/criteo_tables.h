// The buckets of Criteo's integer columns (docs/readers.md), for the parser of its lines.
//
// A bucket is an interval of integers: floor(ln(v)^2) >= b if and only if v >= e^sqrt(b), which is never a whole
// number for b >= 1. The bounds are computed with 113 bits.
//
// Threads: made once, by the first caller; immutable.

#pragma once

#include "text/criteo.h"

namespace shoal::predict {

const text::CriteoTables& criteo_tables();

}  // namespace shoal::predict

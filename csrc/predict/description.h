// The description of a model in an export's manifest, read for `Model` (docs/export-format.md).
//
// Threads: pure functions.

#pragma once

#include "predict/json.h"
#include "predict/model.h"

namespace shoal::predict {

// std::invalid_argument: it is of a kind that is not made of tables alone, or a part is missing or wrong.
ModelDescription read_description(const json::object& model);
// std::invalid_argument: it is of a kind that is not known, or wrong.
Calibration read_calibration(const json::object& model);

}  // namespace shoal::predict

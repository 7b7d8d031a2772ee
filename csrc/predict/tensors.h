// Tensors: the inputs of a request by columns, to examples.
//
//   TensorFlow Serving   {"inputs": {"site": ["a.com", "b.com"], "price": [0.5, 2]}}
//   Open Inference       {"inputs": [{"name": "site", "shape": [2], "datatype": "BYTES", "data": [...]}]}, and raw data
//
// docs/serving.md says which tensors make which examples.
//
// Threads: pure functions.

#pragma once

#include <string>
#include <string_view>

#include "predict/example_builder.h"
#include "predict/json.h"

namespace shoal::predict {

// Throw BadBody, BadExample, TooLarge. The object must outlive the call only.
void read_columns(const json::value& columns, ExampleBuilder& into);
// `raw`: the data behind the JSON.
void read_tensors(const json::array& inputs, std::string_view raw, const InputSchema& schema,
                  ExampleBuilder& into);

}  // namespace shoal::predict

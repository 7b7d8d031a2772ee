// Vowpal Wabbit's text: [label [importance]] [tag]|namespace[:scale] name[:value] ... |namespace ...
//
// target.h states what a parse does. values and weights are needed. A namespace is a token of field 0, and
// its key the field of its names (docs/readers.md).

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "text/target.h"

namespace shoal::text {

Stop parse_vw(std::span<const std::uint8_t> block, std::size_t start, Target& out, bool skip) noexcept;

}  // namespace shoal::text

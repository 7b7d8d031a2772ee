// libsvm: label key:value key:value ...           libffm: label field:key:value field:key:value ...
//
// target.h states what a parse does. values are needed. A line ends at '#', a blank one is no example, and a
// "qid:" is checked and left out. Lines of a target that is not labelled may begin with a label all the same.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "text/target.h"

namespace shoal::text {

Stop parse_libsvm(std::span<const std::uint8_t> block, std::size_t start, Target& out, bool skip) noexcept;
Stop parse_libffm(std::span<const std::uint8_t> block, std::size_t start, Target& out, bool skip) noexcept;

}  // namespace shoal::text

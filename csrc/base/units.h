// Units of bytes: 64 * MiB.

#pragma once

#include <cstddef>

namespace shoal {

inline constexpr std::size_t KiB = std::size_t{1} << 10U;
inline constexpr std::size_t MiB = std::size_t{1} << 20U;
inline constexpr std::size_t GiB = std::size_t{1} << 30U;

}  // namespace shoal

// Cells of a column, one after the other: cell i is data[offsets[i]] to data[offsets[i + 1] - 1]. cell.h says
// what is done with each.
//
// The offsets are one more than the cells, do not fall and stay within the data: the caller has checked it.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "text/fault.h"

namespace shoal::text {

// The key of each cell.
void hash_cells(std::span<const std::uint8_t> data, std::span<const std::int64_t> offsets,
                std::uint64_t field, std::span<std::uint64_t> keys) noexcept;

// The texts of numbers; `ends` gets their offsets.
std::vector<std::uint8_t> number_texts(std::span<const double> numbers, std::span<std::int64_t> ends);

// The texts of decimal numbers without exponents and needless zeros; other texts, and numbers of too many
// digits, as they are. `ends` gets their offsets.
std::vector<std::uint8_t> plain_texts(std::span<const std::uint8_t> data,
                                      std::span<const std::int64_t> offsets, std::span<std::int64_t> ends);

// The number in each cell that is there, NaN for the others, up to the first that holds none.
struct NumbersRead {
  std::size_t count;  // of the cells before that one
  Fault fault;        // of that one
};
NumbersRead read_numbers(std::span<const std::uint8_t> data, std::span<const std::int64_t> offsets,
                         std::span<const std::uint8_t> there, std::span<float> numbers);

}  // namespace shoal::text

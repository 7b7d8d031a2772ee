#include "predict/criteo_tables.h"

#include <algorithm>
#include <boost/multiprecision/cpp_bin_float.hpp>
#include <string>
#include <vector>

#include "text/token_key.h"

namespace shoal::predict {

namespace {

constexpr std::uint64_t kIntegers = std::uint64_t{1} << 63U;  // one more than the largest

struct Made {
  std::vector<std::uint64_t> floors{0, 1, 2};
  std::vector<std::uint16_t> cells;
  std::vector<std::uint8_t> small;
  std::vector<std::uint64_t> numbers;
  text::CriteoTables tables;

  std::size_t bucket_of(std::uint64_t v) const noexcept {
    return static_cast<std::size_t>(std::upper_bound(floors.begin(), floors.end(), v) - floors.begin()) - 1;
  }

  Made() {
    using Number = boost::multiprecision::cpp_bin_float_quad;
    std::vector<std::string> tokens{"SP0", "SP1", "SP2"};
    for (unsigned b = 1;; ++b) {
      const Number bound = ceil(exp(sqrt(Number(b))));
      if (bound >= Number(kIntegers)) {
        break;
      }
      floors.push_back(bound.convert_to<std::uint64_t>());
      tokens.push_back(std::to_string(b));
    }
    floors.push_back(~std::uint64_t{0});
    using Tables = text::CriteoTables;
    cells.resize(Tables::kCells);
    for (std::uint64_t v = 0; v < 256; ++v) {
      cells[v] = static_cast<std::uint16_t>(bucket_of(v));
    }
    for (unsigned shift = 1; shift < 63 - 7; ++shift) {
      for (std::uint64_t top = 128; top < 256; ++top) {
        cells[text::criteo_cell(top << shift)] = static_cast<std::uint16_t>(bucket_of(top << shift));
      }
    }
    small.resize(Tables::kSmallIntegers);
    for (std::size_t v = 0; v < small.size(); ++v) {
      small[v] = static_cast<std::uint8_t>(bucket_of(v));
    }
    for (std::uint64_t column = 1; column <= Tables::kIntegers; ++column) {
      for (const std::string& token : tokens) {
        const auto* const p = reinterpret_cast<const std::uint8_t*>(token.data());
        numbers.push_back(text::token_key(text::field_seed(column), p, token.size(), p + token.size()));
      }
    }
    tables = {.floors = floors, .cells = cells, .small = small, .numbers = numbers};
  }
};

}  // namespace

const text::CriteoTables& criteo_tables() {
  static const Made made;
  return made.tables;
}

}  // namespace shoal::predict

#include "text/cells.h"

#include <limits>

#include "text/cell.h"

namespace shoal::text {

namespace {

std::span<const std::uint8_t> cell_at(std::span<const std::uint8_t> data,
                                      std::span<const std::int64_t> offsets, std::size_t i) noexcept {
  return data.subspan(static_cast<std::size_t>(offsets[i]),
                      static_cast<std::size_t>(offsets[i + 1] - offsets[i]));
}

}  // namespace

void hash_cells(std::span<const std::uint8_t> data, std::span<const std::int64_t> offsets,
                std::uint64_t field, std::span<std::uint64_t> keys) noexcept {
  const std::uint64_t seed = field_seed(field);
  const Cursor text = data.data();
  const Cursor end = text + data.size();
  std::int64_t begin = offsets[0];
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const std::int64_t next = offsets[i + 1];
    keys[i] = cell_key(seed, text + begin, static_cast<std::size_t>(next - begin), end);
    begin = next;
  }
}

std::vector<std::uint8_t> number_texts(std::span<const double> numbers, std::span<std::int64_t> ends) {
  std::vector<std::uint8_t> texts;
  NumberRoom text;
  ends[0] = 0;
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    const std::size_t size = number_text(numbers[i], text);
    texts.insert(texts.end(), text.data(), text.data() + size);
    ends[i + 1] = static_cast<std::int64_t>(texts.size());
  }
  return texts;
}

std::vector<std::uint8_t> plain_texts(std::span<const std::uint8_t> data,
                                      std::span<const std::int64_t> offsets, std::span<std::int64_t> ends) {
  std::vector<std::uint8_t> texts;
  NumberRoom text;
  ends[0] = 0;
  for (std::size_t i = 0; i + 1 < ends.size(); ++i) {
    const auto cell = cell_at(data, offsets, i);
    if (const std::size_t size = plain_text(cell.data(), cell.size(), text); size > 0) {
      texts.insert(texts.end(), text.data(), text.data() + size);
    } else {
      texts.insert(texts.end(), cell.begin(), cell.end());
    }
    ends[i + 1] = static_cast<std::int64_t>(texts.size());
  }
  return texts;
}

NumbersRead read_numbers(std::span<const std::uint8_t> data, std::span<const std::int64_t> offsets,
                         std::span<const std::uint8_t> there, std::span<float> numbers) {
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    numbers[i] = std::numeric_limits<float>::quiet_NaN();
    if (there[i] == 0) {
      continue;
    }
    const Fault fault = read_number_of(cell_at(data, offsets, i), numbers[i]);
    if (fault != Fault::kGood) {
      return {i, fault};
    }
  }
  return {numbers.size(), Fault::kGood};
}

}  // namespace shoal::text

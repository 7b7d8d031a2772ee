#include "base/line_scan.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "check.h"

namespace shoal::line_scan_test {

namespace {

using Lines = std::vector<std::vector<std::size_t>>;  // the ends of the cells of each line

Lines slowly(std::span<const std::uint8_t> text, std::uint8_t separator) {
  Lines lines;
  std::vector<std::size_t> cells;
  for (std::size_t i = 0; i < std::min(text.size(), LineScan::kBytes); ++i) {
    if (text[i] == separator || text[i] == '\n') {
      cells.push_back(i);
    }
    if (text[i] == '\n') {
      lines.push_back(cells);
      cells.clear();
    }
  }
  return lines;
}

Lines lines_of(const LineScan& scan) {
  Lines lines;
  CHECK_EQ(scan.first_stop[0], 0);
  for (std::size_t i = 0; i < scan.lines; ++i) {
    CHECK(scan.first_stop[i] < scan.first_stop[i + 1]);
    lines.emplace_back(scan.stops.begin() + scan.first_stop[i], scan.stops.begin() + scan.first_stop[i + 1]);
  }
  return lines;
}

// Copies the text to memory of its own size at this offset from a cache line: a read beyond it is found by
// the sanitizer.
void check_scans(const std::vector<std::uint8_t>& text, std::uint8_t separator, std::size_t offset = 0) {
  const auto memory = std::make_unique<std::uint8_t[]>(text.size() + offset);
  std::copy(text.begin(), text.end(), memory.get() + offset);
  const std::span<const std::uint8_t> block(memory.get() + offset, text.size());
  const Lines want = slowly(block, separator);
  const auto scan = std::make_unique<LineScan>();
  for (const LineScanner scanner : line_scanners()) {
    if (scanner != nullptr) {
      scanner(block, separator, *scan);
      CHECK(lines_of(*scan) == want);
    }
  }
}

std::vector<std::uint8_t> bytes(const std::string& text) { return {text.begin(), text.end()}; }

}  // namespace

TEST(the_worked_example_of_the_header) {
  const auto scan = std::make_unique<LineScan>();
  const auto text = bytes("1\t5\t\n0\n1");
  scan_lines(text.data(), text.size(), '\t', *scan);
  CHECK_EQ(scan->lines, 2);
  CHECK(lines_of(*scan) == (Lines{{1, 3, 4}, {6}}));
  check_scans(text, '\t');
}

TEST(a_separator_and_a_newline_are_found_at_every_position_of_blocks_and_at_every_alignment) {
  for (std::size_t size = 1; size <= 200; ++size) {
    for (std::size_t at = 0; at < size; ++at) {
      std::vector<std::uint8_t> text(size, 'x');
      text.back() = '\n';
      text[at] = '\t';
      check_scans(text, '\t', (size + at) % 64);
      text[at] = '\n';
      check_scans(text, '\t', (size * 3 + at) % 64);
    }
  }
}

TEST(random_text_of_any_density_is_scanned_as_byte_by_byte) {
  std::mt19937 random(1);
  for (int round = 0; round < 3000; ++round) {
    const std::size_t size = random() % (round % 10 == 0 ? 20000 : 300);
    const std::uint8_t separator = std::vector<std::uint8_t>{'\t', ',', 0, 255, '\v', 0x89}[random() % 6];
    const std::size_t separators = random() % 256;
    const std::size_t newlines = random() % (round % 2 == 0 ? 8 : 256);
    std::vector<std::uint8_t> text(size);
    for (std::uint8_t& byte : text) {
      byte = random() % 256 < separators ? separator
             : random() % 256 < newlines ? std::uint8_t{'\n'}
                                         : static_cast<std::uint8_t>(random());
    }
    check_scans(text, separator, random() % 64);
  }
}

TEST(every_byte_may_be_an_end_of_a_cell) {
  for (const std::size_t size :
       {std::size_t{1}, std::size_t{64}, std::size_t{65}, LineScan::kBytes, LineScan::kBytes + 1}) {
    check_scans(std::vector<std::uint8_t>(size, '\n'), ',');
    std::vector<std::uint8_t> text(size, ',');
    check_scans(text, ',');
    text.back() = '\n';
    check_scans(text, ',');
  }
}

TEST(a_line_that_does_not_end_in_the_scanned_bytes_is_not_listed) {
  std::vector<std::uint8_t> text(LineScan::kBytes + 1, 'x');
  text.back() = '\n';
  check_scans(text, ',');
  text[LineScan::kBytes - 1] = '\n';
  check_scans(text, ',');
  text[10] = '\n';
  check_scans(text, ',');
  check_scans({}, ',');
}

}  // namespace shoal::line_scan_test

// Replays the corpus of the wire and service fuzzers, and the golden messages: tests/fuzz/README.md.

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "check.h"
#include "service_input.h"
#include "wire_input.h"

namespace shoal::wire {
namespace {

namespace fs = std::filesystem;

std::vector<std::byte> read(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> chars{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  const auto bytes = std::as_bytes(std::span(chars));
  return {bytes.begin(), bytes.end()};
}

// How many of a folder's messages are taken, and how many not.
std::pair<int, int> replay(const fs::path& folder) {
  int good = 0;
  int bad = 0;
  for (const auto& entry : fs::directory_iterator(folder)) {
    bool taken = false;
    const std::string broken = check_input(read(entry.path()), taken);
    CHECK_EQ(entry.path().filename().string() + broken, entry.path().filename().string());
    (taken ? good : bad) += 1;
  }
  return {good, bad};
}

TEST(every_message_of_version_2_is_still_read) {
  const auto [good, bad] = replay(fs::path(SHOAL_TESTS_DIR) / "golden" / "wire-v2");
  CHECK(good >= 60);
  CHECK_EQ(bad, 0);
}

TEST(the_corpus_breaks_no_promise) {
  const auto [good, bad] = replay(fs::path(SHOAL_TESTS_DIR) / "fuzz" / "wire" / "corpus");
  CHECK(good >= 10 && bad >= 10);
}

TEST(whatever_a_server_is_asked_in_whatever_order_it_stays_whole) {
  int lives = 0;
  for (const auto& entry :
       fs::directory_iterator(fs::path(SHOAL_TESTS_DIR) / "fuzz" / "service" / "corpus")) {
    const std::vector<std::byte> bytes = read(entry.path());
    service_input::check({reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size()});
    ++lives;
  }
  CHECK(lives >= 50);
}

}  // namespace
}  // namespace shoal::wire

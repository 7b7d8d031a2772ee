// Replays the corpora of the fuzzers of messages, and the golden messages: tests/fuzz/README.md.

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <span>
#include <string>
#include <vector>

#include "check.h"
#include "copies_input.h"
#include "service_input.h"
#include "wire_input.h"

namespace shoal::wire::wire_corpus_test {
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

// Passes every file of a corpus to check; returns how many there are.
int replay(const std::string& name, void (*check)(std::span<const std::uint8_t>)) {
  int lives = 0;
  for (const auto& entry : fs::directory_iterator(fs::path(SHOAL_TESTS_DIR) / "fuzz" / name / "corpus")) {
    const std::vector<std::byte> bytes = read(entry.path());
    check({reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size()});
    ++lives;
  }
  return lives;
}

TEST(whatever_a_server_is_asked_in_whatever_order_it_stays_whole) {
  CHECK(replay("service", &service_input::check) >= 50);
}

TEST(whatever_a_backup_receives_it_stays_whole) { CHECK(replay("copies", &copies_input::check) >= 50); }

}  // namespace
}  // namespace shoal::wire::wire_corpus_test

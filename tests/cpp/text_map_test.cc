// Texts by key: each key's first one, whatever the order and the number of calls.

#include "names/text_map.h"

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "check.h"

namespace shoal::text_map_test {
namespace {

using Keys = std::vector<std::uint64_t>;

std::span<const std::uint8_t> bytes_of(const std::string& text) {
  return {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()};
}

std::string found(const TextMap& map, std::uint64_t key) {
  const auto text = map.find(key);
  return text ? std::string(text->begin(), text->end()) : "none";
}

TEST(each_key_has_its_first_text_among_many_calls) {
  std::mt19937_64 random(7);
  TextMap map;
  std::map<std::uint64_t, std::string> expected;
  Keys in_order;
  for (int call = 0; call < 60; ++call) {
    Keys keys(random() % 2000);
    std::string text;
    std::vector<std::uint64_t> ends;
    for (std::uint64_t& key : keys) {
      // Half of them come again; 0 and 2^64 - 1 too.
      key = random() % 2 == 0 ? random() % 5000 - 2500 : random();
      text.append(random() % 30, static_cast<char>('a' + random() % 26));
      ends.push_back(text.size());
    }
    Keys missing;
    for (std::uint32_t i : map.missing(keys)) {
      missing.push_back(i);
    }
    Keys expected_missing;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      if (!expected.contains(keys[i])) {
        expected_missing.push_back(i);
      }
    }
    CHECK(missing == expected_missing);
    map.add(keys, {bytes_of(text), ends});
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const std::size_t begin = i == 0 ? 0 : ends[i - 1];
      if (expected.emplace(keys[i], text.substr(begin, ends[i] - begin)).second) {
        in_order.push_back(keys[i]);
      }
    }
  }
  CHECK_EQ(map.size(), expected.size());
  CHECK(std::ranges::equal(map.keys(), in_order));
  for (const auto& [key, text] : expected) {
    CHECK(found(map, key) == text);
  }
  CHECK(found(map, 123456789) == "none");
  const TextMap::Sorted all = map.sorted();
  std::size_t i = 0;
  std::size_t begin = 0;
  for (const auto& [key, text] : expected) {
    CHECK_EQ(all.keys[i], key);
    CHECK(std::string(reinterpret_cast<const char*>(all.texts.bytes.data()) + begin,
                      all.texts.ends[i] - begin) == text);
    begin = all.texts.ends[i++];
  }
  CHECK_EQ(begin, all.texts.bytes.size());
  CHECK(map.texts_of(all.keys).bytes == all.texts.bytes);
  CHECK(map.differing(all.keys, all.texts.view()).empty());
  TextMap again;
  again.add(all.keys, all.texts.view());
  CHECK(again.sorted().texts.bytes == all.texts.bytes);
  CHECK(again.bytes() < 40 * again.size() + all.texts.bytes.size() + 64 * 4096);
}

TEST(texts_end_at_the_limit_and_a_wrong_list_of_ends_adds_nothing) {
  TextMap map;
  const Keys keys = {0, ~std::uint64_t{0}, 0, 5};
  const std::string text = "abcd";
  map.add(keys, {bytes_of(text), Keys{1, 2, 3, 4}}, 2);
  CHECK_EQ(map.size(), 2);
  CHECK(found(map, 0) == "a");
  CHECK(found(map, ~std::uint64_t{0}) == "b");
  CHECK(found(map, 5) == "none");
  CHECK_THROWS(map.add(keys, {bytes_of(text), Keys{1, 2, 3}}), "4 keys need as many texts, got 3");
  CHECK_THROWS(map.add(keys, {bytes_of(text), Keys{1, 2, 1, 4}}), "must not fall");
  CHECK_THROWS(map.add(keys, {bytes_of(text), Keys{1, 2, 3, 5}}), "the 4 bytes");
  CHECK_EQ(map.size(), 2);
  map.add({}, {{}, {}});
  CHECK(map.missing({}).empty());
  const auto digits = map.texts_of(Keys{0, 77, ~std::uint64_t{0}});
  CHECK(std::string(reinterpret_cast<const char*>(digits.bytes.data()), digits.bytes.size()) == "a77b");
  CHECK((map.differing(keys, {bytes_of("aaaa"), Keys{1, 2, 4, 4}}) == std::vector<std::uint32_t>{1, 2}));
  const Keys empty_text = {9};
  map.add(empty_text, {{}, Keys{0}});
  CHECK(found(map, 9).empty());
}

}  // namespace
}  // namespace shoal::text_map_test

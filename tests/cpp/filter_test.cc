// Filters of a client: what is named, what is counted, and what does not depend on how a call was cut.

#include "client/filter.h"

#include <algorithm>
#include <cstring>
#include <list>
#include <random>
#include <span>
#include <vector>

#include "check.h"

namespace shoal::filter_test {
using namespace shoal::client;

namespace {

template <class T>
SharedFrame frame(const std::vector<T>& values, std::size_t begin, std::size_t end) {
  return {.bytes = std::as_bytes(std::span(values).subspan(begin, end - begin)), .owner = nullptr};
}

template <class T>
SharedFrame frame(const std::vector<T>& values) {
  return frame(values, 0, values.size());
}

std::vector<std::uint64_t> hashes_of(std::size_t n, std::uint64_t first = 0) {
  std::vector<std::uint64_t> hashes(n);
  for (std::size_t i = 0; i < n; ++i) hashes[i] = (first + i) * 0x9e3779b97f4a7c15U;
  return hashes;
}

Digest digest_of(std::uint64_t number) { return digest(std::vector<std::uint64_t>{number}, 1); }

}  // namespace

TEST(known_lists_forget_the_least_recently_used_one) {
  std::mt19937_64 random(3);
  KnownLists lists;
  std::list<std::uint64_t> slow;  // the most recent one last
  for (int step = 0; step < 9000; ++step) {
    const bool is_full = step >= static_cast<int>(KnownLists::kMost);
    const std::uint64_t number =
        is_full ? random() % (KnownLists::kMost + 200) : static_cast<std::uint64_t>(step);
    if (is_full && random() % 50 == 0) {
      lists.remove(digest_of(number));
      slow.remove(number);
    } else {
      lists.add(digest_of(number));
      slow.remove(number);
      slow.push_back(number);
      if (slow.size() > KnownLists::kMost) slow.pop_front();
    }
  }
  std::vector<bool> is_known(KnownLists::kMost + 200);
  for (const std::uint64_t number : slow) is_known[number] = true;
  for (std::uint64_t number = 0; number < is_known.size(); ++number) {
    CHECK_EQ(lists.contains(digest_of(number)), static_cast<bool>(is_known[number]));
  }
}

TEST(a_list_is_named_once_its_server_has_it_unless_it_is_short) {
  for (const std::size_t n : {Filter::kMinKeys - 1, Filter::kMinKeys, std::size_t{100}}) {
    Filter filter({.key_caching = true, .job = 9});
    KnownLists known;
    const auto hashes = hashes_of(n);
    const EncodedPayload first = filter.pull(frame(hashes), known);
    const bool is_named = n >= Filter::kMinKeys;
    CHECK_EQ(first.keep, is_named);
    CHECK_EQ(first.digest.has_value(), is_named);
    CHECK_EQ(first.payload.frames[0].bytes.size(), 8 * n);
    if (!is_named) continue;
    CHECK(*first.digest == digest(hashes, 9));
    known.add(*first.digest);
    const EncodedPayload again = filter.prefetch(frame(hashes), known);
    CHECK(!again.keep);
    CHECK_EQ(again.payload.frames[0].bytes.size(), Digest::kBytes);
    CHECK_EQ(filter.counts().key_bytes_saved, 8 * n - Digest::kBytes);
    filter.lost(8 * n);
    CHECK_EQ(filter.counts().key_bytes_saved, -static_cast<std::int64_t>(Digest::kBytes));
    CHECK_EQ(filter.counts().lists_lost, 1);
  }
}

TEST(a_part_of_a_push_has_the_bytes_that_the_whole_would) {
  std::mt19937_64 random(5);
  std::normal_distribution<float> normal;
  const FilterOptions options{.gradients = wire::Dtype::kBfloat16, .threshold = 0.8, .seed = 77};
  const std::size_t n = 200;
  const std::size_t dim = 3;
  const auto hashes = hashes_of(n);
  std::vector<float> grads(n * dim);
  for (float& grad : grads) grad = normal(random) / 3;
  const auto bytes_of = [&](std::size_t begin, std::size_t end, std::uint64_t sequence) {
    Filter filter(options);
    const EncodedPayload sent = filter.push(frame(hashes, begin, end), frame(grads, begin * dim, end * dim),
                                            dim, sequence, {}, false);
    const auto bytes = sent.payload.frames[1].bytes;
    CHECK_EQ(bytes.size(), 2 * dim * (end - begin));
    CHECK_EQ(filter.counts().gradient_bytes_saved, 2 * dim * (end - begin));
    return std::vector<std::byte>(bytes.begin(), bytes.end());
  };
  const auto whole = bytes_of(0, n, 4);
  auto parts = bytes_of(0, 70, 4);
  const auto rest = bytes_of(70, n, 4);
  parts.insert(parts.end(), rest.begin(), rest.end());
  CHECK(parts == whole);
  CHECK(bytes_of(0, n, 5) != whole);
}

TEST(zeros_are_left_out_where_that_is_shorter) {
  const auto hashes = hashes_of(100);
  for (const std::size_t zeros : {0U, 3U, 4U, 100U}) {
    std::vector<float> grads(100, 1.5F);
    std::fill_n(grads.begin(), zeros, 0.0F);
    Filter filter({.zeros = true});
    const EncodedPayload sent = filter.push(frame(hashes), frame(grads), 1, 1, {}, false);
    CHECK_EQ(sent.is_packed, 13 + 4 * (100 - zeros) < 400);  // a bit for each gradient
    CHECK_EQ(sent.payload.count, sent.is_packed ? 3 : 2);
    const wire::Frame last = sent.payload.frames.at(sent.payload.count - 1).bytes;
    std::vector<float> kept(last.size() / sizeof(float));
    std::ranges::copy(last, std::as_writable_bytes(std::span(kept)).begin());
    CHECK(kept == std::vector<float>(grads.begin() + static_cast<std::ptrdiff_t>(sent.is_packed ? zeros : 0),
                                     grads.end()));
  }
}

TEST(whole_rows_pass_no_threshold) {
  const auto hashes = hashes_of(20);
  const std::vector<float> grads(20, 0.01F);
  Filter filter({.threshold = 1.0});
  const EncodedPayload sent = filter.push(frame(hashes), frame(grads), 1, 1, {}, true);
  CHECK(std::memcmp(sent.payload.frames[1].bytes.data(), grads.data(), 80) == 0);
  CHECK_EQ(filter.counts().rows_dropped + filter.counts().rows_raised, 0);
  static_cast<void>(filter.push(frame(hashes), frame(grads), 1, 1, {}, false));
  CHECK_EQ(filter.counts().rows_dropped + filter.counts().rows_raised, 20);
}

}  // namespace shoal::filter_test

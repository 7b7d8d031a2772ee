// Admission: candidates and Bloom filters, alone and with their saved state.

#include "policy/admission.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <vector>

#include "check.h"

namespace shoal::admission_test {
namespace {

Admission after_count(std::uint32_t n, std::uint32_t within = 0, std::uint64_t capacity = 0) {
  return {.kind = Admission::Kind::kCount, .n = n, .within = within, .capacity = capacity};
}

Admission after_bloom(std::uint32_t n, std::uint64_t capacity, double error = 0.01) {
  return {.kind = Admission::Kind::kBloom, .n = n, .capacity = capacity, .error = error};
}

std::vector<std::uint64_t> hashes_of(Slots slots, Slot slot, std::size_t n, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::uint64_t> hashes;
  while (hashes.size() < n) {
    hashes.push_back(slots.first_hash(slot) | (random() >> slots.bits()));
  }
  return hashes;
}

TEST(candidates_are_a_map_of_counts) {
  const Slots slots(4);
  const Slot slot{2};
  const AdmissionConfig config(after_count(5, 10), slots);
  AdmissionFilter filter(config, slot);
  std::map<std::uint64_t, std::pair<std::uint32_t, std::uint32_t>> expected;
  std::mt19937_64 random(7);
  const auto pool = hashes_of(slots, slot, 300, 1);
  for (std::uint32_t step = 0; step < 20000; ++step) {
    const std::uint64_t hash = pool[random() % pool.size()];
    const auto count = static_cast<std::uint32_t>(1 + random() % 2);
    const std::uint32_t clock = step / 100;
    filter.make_room(1);
    filter.prefetch(hash);
    auto& [before, last] = expected.try_emplace(hash, 0, clock).first->second;
    before = clock - last > 10 ? count : before + count;
    last = clock;
    const bool admitted = before >= 5;
    CHECK_EQ(filter.ask(hash, count, {clock, step}), admitted);
    if (admitted) {
      expected.erase(hash);
    }
    CHECK_EQ(filter.waiting(), expected.size());
  }
  const std::size_t stale = static_cast<std::size_t>(
      std::ranges::count_if(expected, [](const auto& one) { return 205 - one.second.second > 10; }));
  CHECK_EQ(filter.sweep(205), stale);
  CHECK_EQ(filter.waiting(), expected.size() - stale);
}

TEST(a_full_slot_of_candidates_forgets_the_eighth_that_was_sighted_longest_ago) {
  const Slots slots(2);
  const AdmissionConfig config(after_count(3, 0, 32), slots);  // 16 a slot
  AdmissionFilter filter(config, Slot{0});
  const auto hashes = hashes_of(slots, Slot{0}, 17, 2);
  for (std::uint32_t i = 0; i < 16; ++i) {
    filter.make_room(1);
    CHECK(!filter.ask(hashes[i], 2, {i, 0}));
  }
  filter.make_room(1);
  CHECK(!filter.ask(hashes[16], 2, {16, 0}));
  CHECK_EQ(filter.waiting(), 15);
  filter.make_room(3);
  CHECK(!filter.ask(hashes[0], 1, {17, 0}));  // forgotten
  CHECK(!filter.ask(hashes[1], 1, {17, 0}));  // in whose place hashes 2 and 3 go
  CHECK(!filter.ask(hashes[3], 1, {17, 0}));
  CHECK(filter.ask(hashes[4], 1, {17, 0}));
}

TEST(a_bloom_filter_admits_early_at_times_and_never_late) {
  const Slots slots(16);
  const Slot slot{5};
  for (const std::uint32_t n : {1U, 2U, 7U, 15U, 16U, 255U}) {
    const AdmissionConfig config(after_bloom(n, 16000), slots);  // 1000 a slot
    AdmissionFilter filter(config, slot);
    const auto hashes = hashes_of(slots, slot, 1000, 3);
    std::size_t early = 0;
    for (std::uint32_t occurrence = 1; occurrence <= n; ++occurrence) {
      for (const std::uint64_t hash : hashes) {
        filter.make_room(1);
        const bool admitted = filter.ask(hash, 1, {});
        CHECK(admitted || occurrence < n);
        early += admitted && occurrence + 1 == n ? 1U : 0U;
      }
    }
    CHECK(early <= 40);
    CHECK_EQ(filter.bytes(), config.bloom()->slot_bytes(slots));
  }
}

TEST(what_waits_is_cut_anew_exactly) {
  for (const Admission& rule : {after_count(4), after_bloom(4, 100000), after_bloom(40, 3000)}) {
    const Slots coarse(4);
    const Slots fine(32);
    const AdmissionConfig from(rule, coarse);
    const AdmissionConfig to(rule, fine);
    AdmissionFilter whole(from, Slot{1});
    std::vector<AdmissionFilter> pieces;
    for (std::uint32_t s = 0; s < 32; ++s) {
      pieces.emplace_back(to, Slot{s});
    }
    const auto hashes = hashes_of(coarse, Slot{1}, 500, 4);
    for (const std::uint64_t hash : hashes) {
      whole.make_room(1);
      whole.ask(hash, 1 + static_cast<std::uint32_t>(hash % 3), {9, 0});
    }
    std::vector<std::byte> saved;
    whole.save(saved);
    CHECK(!saved.empty());
    for (AdmissionFilter& piece : pieces) {
      piece.restore(coarse, Slot{1}, saved);
    }
    AdmissionFilter back(from, Slot{1});
    std::vector<std::byte> bytes;
    for (std::uint32_t s = 0; s < 32; ++s) {
      pieces[s].save(bytes);
      back.restore(fine, Slot{s}, bytes);
    }
    back.save(bytes);
    CHECK(bytes == saved);
    saved.pop_back();
    CHECK_THROWS(back.restore(coarse, Slot{1}, saved), "bytes long");
  }
}

TEST(a_coin_is_the_same_whoever_tosses_it) {
  const AdmissionConfig config({.kind = Admission::Kind::kProbability, .probability = 0.25, .seed = 5},
                               Slots(8));
  AdmissionFilter filter(config, Slot{3});
  std::size_t heads = 0;
  for (std::uint64_t step = 0; step < 4000; ++step) {
    const bool admitted = filter.ask(0x600000000000abcd, 1, {0, step});
    CHECK_EQ(AdmissionFilter(config, Slot{3}).ask(0x600000000000abcd, 1, {7, step}), admitted);
    heads += admitted ? 1U : 0U;
  }
  CHECK(heads > 860 && heads < 1140);
}

}  // namespace
}  // namespace shoal::admission_test

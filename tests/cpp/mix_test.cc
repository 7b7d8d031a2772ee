// The order of hashes: mix is fixed for ever, with the properties that follow.

#include "base/mix.h"

#include <algorithm>
#include <cstdint>
#include <random>
#include <utility>

#include "check.h"

namespace shoal::mix_test {

namespace {

constexpr std::uint64_t kGreatest = ~std::uint64_t{0};

constexpr std::pair<std::uint64_t, std::uint64_t> kGolden[] = {
    // The first three outputs of SplitMix64 from state 0, as published.
    {0x0000000000000000, 0xe220a8397b1dcdaf},
    {0x9e3779b97f4a7c15, 0x6e789e6aa1b965f4},
    {0x3c6ef372fe94f82a, 0x06c45d188009454f},
    // Evaluated in integers of unlimited size.
    {0x0000000000000001, 0x910a2dec89025cc1},
    {0x0000000000000002, 0x975835de1c9756ce},
    {0xffffffffffffffff, 0xe4d971771b652c20},
    {0xfffffffffffffffe, 0xf3203e9039f4a821},
    {0x8000000000000000, 0x481ec0a212a9f3db},
    {0x00000000075bcd15, 0x223c74d93deb7679},
    {0x0123456789abcdef, 0x157a3807a48faa9d},
    {0x61c8864680b583eb, 0x0000000000000000},
};

}  // namespace

TEST(mix_is_what_it_was_when_the_first_checkpoint_was_written) {
  for (const auto& [key, hash] : kGolden) {
    CHECK_EQ(mix(key), hash);
    CHECK_EQ(unmix(hash), key);
  }
}

TEST(unmix_undoes_mix_and_mix_undoes_unmix) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 100'000; ++i) {
    const std::uint64_t x = random() >> (random() % 64U);
    CHECK_EQ(unmix(mix(x)), x);
    CHECK_EQ(mix(unmix(x)), x);
    CHECK_EQ(unmix(mix(kGreatest - x)), kGreatest - x);
  }
}

TEST(every_bit_of_a_key_reaches_the_slot) {
  const Slots slots(Slots::kMax);
  for (unsigned bit = 0; bit < 64; ++bit) {
    CHECK(slots.of(mix(0)) != slots.of(mix(std::uint64_t{1} << bit)));
  }
}

TEST(slots_are_a_power_of_two_from_2_to_16384) {
  for (const std::size_t bad : {0UL, 1UL, 3UL, 1000UL, 16383UL, 16385UL, 32768UL, 1UL << 32U, ~0UL}) {
    CHECK_THROWS(Slots(bad), "power of two");
    CHECK_THROWS(Slots(bad), std::to_string(bad));
  }
  for (std::size_t count = Slots::kMin; count <= Slots::kMax; count *= 2) {
    const Slots slots(count);
    CHECK_EQ(slots.count(), count);
    CHECK_EQ(std::size_t{1} << slots.bits(), count);
  }
}

TEST(a_slot_begins_with_its_first_hash_and_ends_before_the_next) {
  for (const std::size_t count : {2U, 1024U, 16384U}) {
    const Slots slots(count);
    CHECK_EQ(index_of(slots.of(0)), 0);
    CHECK_EQ(index_of(slots.of(kGreatest)), count - 1);
    for (std::uint32_t s = 1; s < count; ++s) {
      const std::uint64_t first = slots.first_hash(Slot{s});
      CHECK_EQ(index_of(slots.of(first)), s);
      CHECK_EQ(index_of(slots.of(first - 1)), s - 1);
    }
  }
}

TEST(scale_is_a_fraction_of_n_and_never_falls) {
  CHECK_EQ(scale(0, 1000), 0);
  CHECK_EQ(scale(kGreatest, 1000), 999);
  CHECK_EQ(scale(kGreatest / 2 + 1, 1000), 500);
  CHECK_EQ(scale(kGreatest, kGreatest), kGreatest - 1);
  CHECK_EQ(scale(kGreatest, 0), 0);
  std::mt19937_64 random(2);
  for (int i = 0; i < 10'000; ++i) {
    const std::uint64_t n = random() >> (random() % 64U);
    const auto [low, high] = std::minmax({random(), random()});
    CHECK(scale(low, n) <= scale(high, n));
  }
}

}  // namespace shoal::mix_test

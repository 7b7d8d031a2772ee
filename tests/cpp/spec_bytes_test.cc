// A table's description as bytes.

#include "shard/spec_bytes.h"

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "shard/shard.h"

namespace shoal::spec_bytes_test {
namespace {

using Params = std::map<std::string, double>;

std::vector<TableSpec> specs() {
  const auto with = [](std::string_view name, Params params, Dtype dtype = Dtype::kFloat32,
                       std::size_t dim = 4) {
    return TableSpec{.dim = dim,
                     .dtype = dtype,
                     .optimizer = Optimizer(name, std::move(params)),
                     .init = Init("Zeros", 0, 0),
                     .seed = 1,
                     .lifecycle = {}};
  };
  std::vector<TableSpec> all{
      with("SGD", {{"lr", 0.5}, {"weight_decay", 0.0}}),
      with("SGD", {{"lr", 0.5},
                   {"weight_decay", 0.0},
                   {"clip_norm", 2.0},
                   {"schedule", 2},
                   {"schedule_warmup", 3},
                   {"schedule_clocks", 10},
                   {"schedule_factor", 0.3}}),
      with("FTRL", {{"alpha", 0.1}, {"beta", 1}, {"l1", 0.7}, {"l2", 0.01}, {"n0", 0}}, Dtype::kFloat32, 1),
      with("SGD", {{"lr", 0.1}, {"weight_decay", 0.0}}, Dtype::kBfloat16, Rows::kMaxDim),
  };
  const std::vector<Init> inits{Init("Constant", 0.1, 0), Init("Uniform", 0.3, 7),
                                Init("Normal", 1.5, ~0ULL)};
  for (const Init& init : inits) {
    all.push_back(all[0]);
    all.back().init = init;
    all.back().seed = 0xfedcba9876543210ULL;
  }
  const std::vector<NamedRule> admissions{
      {"AfterCount", {{"n", 4294967295.0}}},
      {"AfterCount", {{"n", 3}, {"within", 9}, {"capacity", 5000}}},
      {"AfterBloom", {{"n", 200}, {"capacity", 1e6}, {"error", 0.013}}},
      {"AfterBloom", {{"n", 2}, {"capacity", 1e6}, {"error", 0.013}, {"within", 4}}},
      {"WithProbability", {{"p", 0.3}, {"seed", 9007199254740991.0}}}};
  const std::vector<NamedRule> expiries{{"MaxRows", {{"rows", 1e6}, {"frequent", 1}}},
                                        {"TimeToLive", {{"clocks", 2147483647.0}}},
                                        {"DecayedScore", {{"decay", 0.97}, {"floor", 0.2}}},
                                        {"MinNorm", {{"floor", 1e-3}}}};
  for (const NamedRule& admit : admissions) {
    all.push_back(all[0]);
    all.back().lifecycle = Lifecycle(admit, {expiries[all.size() % 4]});
  }
  all.push_back(all[0]);
  all.back().lifecycle = Lifecycle(std::nullopt, expiries);
  return all;
}

TEST(a_description_that_was_sent_has_the_same_bytes_again) {
  std::vector<std::vector<std::byte>> seen;
  for (const TableSpec& spec : specs()) {
    const auto bytes = encode(spec);
    const TableSpec copy = decode_spec(bytes);
    CHECK(encode(copy) == bytes);
    CHECK_EQ(copy.dim, spec.dim);
    CHECK(copy.dtype == spec.dtype);
    CHECK_EQ(copy.seed, spec.seed);
    CHECK(copy.optimizer.params() == spec.optimizer.params());
    std::vector<float> a(spec.dim);
    std::vector<float> b(spec.dim);
    spec.init.fill(12345, spec.dim, a.data());
    copy.init.fill(12345, spec.dim, b.data());
    CHECK(a == b);
    for (const auto& other : seen) {
      CHECK(other != bytes);
    }
    seen.push_back(bytes);
  }
}

TEST(a_table_made_from_a_sent_description_learns_the_same) {
  ThreadPool pool{1};
  for (const TableSpec& spec : specs()) {
    if (spec.dim == Rows::kMaxDim) {
      continue;
    }
    Shard one(spec, Slots(4), pool);
    Shard other(decode_spec(encode(spec)), Slots(4), pool);
    std::mt19937_64 random(3);
    std::vector<std::uint64_t> hashes(64);
    for (auto& hash : hashes) {
      hash = random();
    }
    std::ranges::sort(hashes);
    std::vector<std::uint64_t> offsets{0};
    for (std::uint32_t s = 1; s <= 4; ++s) {
      offsets.push_back(static_cast<std::uint64_t>(std::ranges::count_if(
          hashes, [&](std::uint64_t hash) { return index_of(Slots(4).of(hash)) < s; })));
    }
    std::vector<float> grads(hashes.size() * spec.dim, 0.25F);
    for (std::uint32_t clock = 0; clock < 5; ++clock) {
      for (Shard* shard : {&one, &other}) {
        shard->push({hashes, offsets}, grads, {.counts = {}, .clock = clock});
      }
    }
    CHECK_EQ(one.size(), other.size());
    for (std::uint32_t s = 0; s < 4; ++s) {
      CHECK(one.digest(Slot{s}) == other.digest(Slot{s}));
    }
  }
}

TEST(bytes_that_are_no_description_are_refused_by_name) {
  const auto whole = encode(specs()[1]);
  const auto changed = [&](std::size_t at, std::uint8_t value) {
    auto bytes = whole;
    bytes[at] = std::byte{value};
    return bytes;
  };
  CHECK_THROWS(decode_spec({}), "version");
  CHECK_THROWS(decode_spec(changed(0, 9)), "version is 9, and this server reads 1");
  CHECK_THROWS(decode_spec(changed(3, 1)), "dim");
  CHECK_THROWS(decode_spec(changed(5, 3)), "dtype");
  CHECK_THROWS(decode_spec(changed(10, 'X')), "no optimizer XGD");
  auto longer = whole;
  longer.push_back(std::byte{0});
  CHECK_THROWS(decode_spec(longer), "followed by 1 bytes");
  for (std::size_t size = 0; size < whole.size(); ++size) {
    CHECK_THROWS(decode_spec(std::span(whole).first(size)), "a table's description");
  }
}

TEST(damaged_descriptions_never_do_more_than_throw) {
  std::mt19937_64 random(11);
  std::size_t refused = 0;
  for (const TableSpec& spec : specs()) {
    const auto whole = encode(spec);
    for (int i = 0; i < 3000; ++i) {
      auto bytes = whole;
      for (std::size_t n = 1 + random() % 3; n != 0; --n) {
        bytes[random() % bytes.size()] = static_cast<std::byte>(random());
      }
      try {
        CHECK(encode(decode_spec(bytes)).size() == bytes.size());
      } catch (const std::invalid_argument&) {
        ++refused;
      }
    }
  }
  CHECK(refused > 1000);
}

}  // namespace
}  // namespace shoal::spec_bytes_test

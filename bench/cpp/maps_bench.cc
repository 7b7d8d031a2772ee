// shoal's store beside two hash maps that programs keep such rows in: the same FTRL steps on the same keys in
// absl::flat_hash_map and boost::unordered_flat_map, in one process and in turns.
//
//   maps_bench keys threads [rounds] [huge|stock]
//
// Fills the three with the same keys, then measures three kinds of work in every round:
//
//   given    keys as they come, in no order and with duplicates, a gradient each. The store does what Table.push of the
//            Python package does, by the same classes: SummedBatch (sort, unique, sum of the gradients), Shard::push. The
//            maps make a step for every key given, as they come; with two threads each has a map of its own, and the
//            keys are divided first.
//   step     what a step of training asks for: the weight of every key given, in the order given, and then `given`. The
//            store sorts once for both, the maps divide once for both.
//   unique   the batches of `given`, sorted, each key once and divided already: the steps alone. Nothing but Shard::push for
//            the store.
//
// maps.h says what the maps are given. `stock` leaves their memory to the stock allocator, without huge pages.
//
// Checked: the number of rows, and z and n of a thousand sampled keys of each against a float64 twin that follows what
// each was asked to do: one step a batch from the summed gradient, or one step for every key given. Prints one JSON
// object; rates are millions of keys a second, [median, least, most] of the rounds.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/threads.h"
#include "batch/key_batch.h"
#include "batch/summed_batch.h"
#include "maps.h"
#include "measure.h"
#include "shard/shard.h"

namespace shoal {
namespace {

// ---- the store ---------------------------------------------------------------------------------------------------

class Store {
 public:
  explicit Store(ThreadPool& pool)
      : pool_(pool),
        slots_(1024),
        shard_({.dim = 1,
                .dtype = Dtype::kFloat32,
                .optimizer = Optimizer(
                    "FTRL", {{"alpha", kAlpha}, {"beta", kBeta}, {"l1", kL1}, {"l2", kL2}, {"n0", 0.0}}),
                .init = Init("Zeros", 0, 0),
                .seed = 1},
               slots_, pool) {}

  void push_per_key(const Work& work) {
    const SummedBatch batch(work.keys, work.grads, 1, slots_, pool_, scratch_);
    shard_.push({batch.hashes(), batch.offsets()}, batch.sums());
  }

  void step_given(const Work& work, std::span<float> out) {
    const KeyBatch batch(work.keys, slots_, pool_, scratch_);
    sums_.resize(std::max(sums_.size(), batch.size()));
    const auto unique = std::span(sums_).first(batch.size());
    shard_.pull({batch.hashes(), batch.offsets()}, unique);
    batch.expand(unique, 1, out, pool_);
    batch.sum(work.grads, 1, unique, pool_);
    shard_.push({batch.hashes(), batch.offsets()}, unique);
  }

  void push_unique(const UniqueBatch& batch) {
    shard_.push({batch.keys.hashes(), batch.keys.offsets()}, batch.grads);
  }

  UniqueBatch unique(const Work& work) {
    UniqueBatch made{KeyBatch(work.keys, slots_, pool_, scratch_), {}, {}};
    made.grads.resize(made.keys.size());
    made.keys.sum(work.grads, 1, made.grads, pool_);
    for (const std::uint64_t hash : made.keys.hashes()) {
      made.unmixed.push_back(unmix(hash));
    }
    return made;
  }

  Row row(std::uint64_t key) {
    const KeyBatch batch({&key, 1}, slots_, pool_, scratch_);
    Row row;
    shard_.state({batch.hashes(), batch.offsets()}, 0, {&row.z, 1});
    shard_.state({batch.hashes(), batch.offsets()}, 1, {&row.n, 1});
    return row;
  }

  std::size_t size() const { return shard_.size(); }
  std::size_t bytes() const { return shard_.stats().bytes; }
  std::string verify() const { return shard_.verify(); }

 private:
  ThreadPool& pool_;
  Slots slots_;
  KeyBatchScratch scratch_;
  std::vector<float> sums_;
  Shard shard_;
};

// ---- what is pushed ----------------------------------------------------------------------------------------------

// Key number i, of 64 random-looking bits as hashed features are.
constexpr std::uint64_t key_of(std::uint64_t index) { return mix(~index); }

// Ranks 0..n-1 with probabilities as (rank + 1)^-s, exactly, by rejection-inversion (Hörmann and Derflinger, "Rejection-
// inversion to generate variates from monotone discrete distributions", ACM TOMACS 6(3), 1996).
class Zipf {
 public:
  Zipf(double s, std::size_t n)
      : s_(s), n_(static_cast<double>(n)), low_(area(1.5) - 1), high_(area(n_ + 0.5)) {}

  std::uint64_t draw(Random& random) const {
    for (;;) {
      const double u = high_ + random.unit() * (low_ - high_);
      const double x = std::pow(1 + u * (1 - s_), 1 / (1 - s_));
      const double k = std::clamp(std::floor(x + 0.5), 1.0, n_);
      if (u >= area(k + 0.5) - std::pow(k, -s_)) {
        return static_cast<std::uint64_t>(k) - 1;
      }
    }
  }

 private:
  double area(double x) const { return (std::pow(x, 1 - s_) - 1) / (1 - s_); }

  double s_;
  double n_;
  double low_;
  double high_;
};

struct GivenBatch {
  std::vector<std::uint64_t> keys;
  std::vector<float> grads;
  Work work() const { return {keys, grads}; }
};

// ---- the twin ----------------------------------------------------------------------------------------------------

// z and n of some keys in float64, as the store makes them (a step a batch) and as the maps do (a step a key given).
class Twin {
 public:
  explicit Twin(std::size_t keys) {
    const std::size_t stride = std::max<std::size_t>(1, keys / 1000);
    for (std::size_t index = 0; index < keys; index += stride) {
      rows_.emplace(key_of(index), Sample{});
    }
  }

  // `by_occurrence`: the maps have seen the batch's keys one by one; else all have seen it as the store does.
  void follow(const Work& work, bool by_occurrence) {
    for (std::size_t i = 0; i < work.keys.size(); ++i) {
      const auto found = rows_.find(work.keys[i]);
      if (found == rows_.end()) {
        continue;
      }
      Sample& sample = found->second;
      if (sample.pending == 0) {
        touched_.push_back(&sample);
      }
      ++sample.pending;
      sample.sum += static_cast<double>(work.grads[i]);
      if (by_occurrence) {
        sample.maps.move(static_cast<double>(work.grads[i]));
      }
    }
    for (Sample* sample : touched_) {
      const auto sum = static_cast<double>(static_cast<float>(sample->sum));
      sample->store.move(sum);
      if (!by_occurrence) {
        sample->maps.move(sum);
      }
      sample->sum = 0;
      sample->pending = 0;
    }
    touched_.clear();
  }

  template <class Table>
  void check(Table& table, const char* name, bool store) const {
    for (const auto& [key, sample] : rows_) {
      const Wide& want = store ? sample.store : sample.maps;
      const Row got = table.row(key);
      // Each step rounds z and n once; z goes up and down, by at most a few units each time.
      const double slack = 1e-5 + 0x1p-23 * want.steps;
      if (!(std::abs(static_cast<double>(got.n) - want.n) <= slack * want.n) ||
          !(std::abs(static_cast<double>(got.z) - want.z) <= slack * (10 + std::abs(want.z)))) {
        char text[200];
        std::snprintf(text, sizeof text,
                      "%s has z %.9g, n %.9g for a key whose twin, after %.0f steps, has %.9g and %.9g", name,
                      static_cast<double>(got.z), static_cast<double>(got.n), want.steps, want.z, want.n);
        fail(text);
      }
    }
  }

 private:
  struct Wide {
    double z = 0;
    double n = 0;
    double steps = 0;
    void move(double g) {
      step(g, z, n);
      ++steps;
    }
  };
  struct Sample {
    Wide store;
    Wide maps;
    double sum = 0;
    std::size_t pending = 0;
  };

  std::unordered_map<std::uint64_t, Sample> rows_;
  std::vector<Sample*> touched_;
};

// ---- the measurement ---------------------------------------------------------------------------------------------

struct Filling {
  double rate;
  double allocated;
  double peak;
  double resident;
  std::string json() const {
    char text[200];
    std::snprintf(
        text, sizeof text,
        "{\"insert\": %.4g, \"bytes_per_key\": %.2f, \"peak_per_key\": %.2f, \"resident_per_key\": %.2f}",
        rate, allocated, peak, resident);
    return text;
  }
};

constexpr std::size_t kFillBatch = 65536;

// Pushes each key once, batch by batch. `peak` reads the most bytes so far, called after every batch.
template <class Push, class Bytes, class Peak>
Filling fill(std::size_t keys, const Push& push, const Bytes& bytes, const Peak& peak, Twin* twin) {
  const std::size_t before = resident_bytes();
  double seconds = 0;
  std::size_t most = 0;
  GivenBatch batch;
  for (std::size_t begin = 0; begin < keys; begin += kFillBatch) {
    batch.keys.clear();
    batch.grads.clear();
    for (std::size_t i = begin; i < std::min(begin + kFillBatch, keys); ++i) {
      batch.keys.push_back(key_of(i));
      batch.grads.push_back(static_cast<float>(i % 29) * 0.125F - 1.75F);
    }
    const auto start = Clock::now();
    push(batch.work());
    seconds += seconds_since(start);
    most = std::max(most, peak());
    if (twin != nullptr) {
      twin->follow(batch.work(), true);
    }
  }
  const auto n = static_cast<double>(keys);
  return {n / seconds / 1e6, static_cast<double>(bytes()) / n, static_cast<double>(most) / n,
          static_cast<double>(resident_bytes() - before) / n};
}

constexpr std::array<const char*, 3> kKinds{"given", "step", "unique"};
constexpr std::size_t kGiven = 0;
constexpr std::size_t kStep = 1;
constexpr std::size_t kUnique = 2;

// The weights of some of a batch's keys, as they are now.
constexpr std::size_t kSampled = 4096;  // one in so many
template <class Table>
std::vector<float> weights_before(Table& table, const Work& work) {
  std::vector<float> read;
  for (std::size_t i = 0; i < work.keys.size(); i += kSampled) {
    const Row row = table.row(work.keys[i]);
    read.push_back(weight(row.z, row.n));
  }
  return read;
}

template <class Map>
Filling fill_maps(std::size_t keys, Maps<Map>& maps) {
  Account::peak = Account::now.load();
  const std::size_t before = Account::now;
  return fill(
      keys, [&](const Work& work) { maps.push_per_key(work); }, [&] { return Account::now - before; },
      [&] { return Account::peak - before; }, nullptr);
}

int run(std::size_t keys, std::size_t threads, std::size_t rounds) {
  ThreadPool pool(threads);
  Twin twin(keys);
  Store store(pool);
  Maps<AbslMap> absl_maps(pool);
  Maps<BoostMap> boost_maps(pool);
  const Filling store_filling = fill(
      keys, [&](const Work& work) { store.push_per_key(work); }, [&] { return store.bytes(); },
      [&] { return store.bytes(); }, &twin);
  const Filling absl_filling = fill_maps(keys, absl_maps);
  const Filling boost_filling = fill_maps(keys, boost_maps);
  std::printf("{\"keys\": %zu, \"threads\": %zu, \"huge\": %s,\n", keys, threads,
              Account::huge ? "true" : "false");
  std::printf(" \"fill\": {\"shoal\": %s,\n  \"absl\": %s,\n  \"boost\": %s},\n \"pushes\": [",
              store_filling.json().c_str(), absl_filling.json().c_str(), boost_filling.json().c_str());

  Random random;
  const Zipf zipf(1.05, keys);
  const char* comma = "";
  for (const bool skewed : {false, true}) {
    for (const std::size_t batch_size : {std::size_t{65536}, std::size_t{1048576}}) {
      const std::size_t batches = std::max<std::size_t>(1, (std::size_t{1} << 21U) / batch_size);
      std::vector<GivenBatch> given(batches);
      std::vector<UniqueBatch> unique;
      std::array<std::array<Figures, 3>, kKinds.size()> rates;   // kind x contender
      std::array<std::array<Figures, 2>, kKinds.size()> ratios;  // kind x peer
      std::vector<float> out(batch_size);
      double distinct = 0;
      for (std::size_t round = 0; round < rounds + 1; ++round) {
        unique.clear();
        distinct = 0;
        for (auto& batch : given) {
          batch.keys.resize(batch_size);
          batch.grads.resize(batch_size);
          for (std::size_t i = 0; i < batch_size; ++i) {
            batch.keys[i] = key_of(skewed ? zipf.draw(random) : scale(random.next(), keys));
            batch.grads[i] = static_cast<float>(random.next() % 29) * 0.125F - 1.75F;
          }
          unique.push_back(store.unique(batch.work()));
          distinct += static_cast<double>(unique.back().keys.size());
        }
        const double total = static_cast<double>(batches * batch_size);
        for (std::size_t kind = 0; kind < kKinds.size(); ++kind) {
          const auto push = [&](auto& table) {
            double seconds = 0;
            for (std::size_t b = 0; b < batches; ++b) {
              const Work work = given[b].work();
              std::vector<float> before;
              if (kind == kStep) {
                before = weights_before(table, work);
              }
              const auto start = Clock::now();
              if (kind == kGiven) {
                table.push_per_key(work);
              } else if (kind == kStep) {
                table.step_given(work, out);
              } else {
                table.push_unique(unique[b]);
              }
              seconds += seconds_since(start);
              for (std::size_t i = 0; i < before.size(); ++i) {
                if (!(std::abs(out[i * kSampled] - before[i]) <= 1e-5F * (1 + std::abs(before[i])))) {
                  fail("a weight was not read as it is");
                }
              }
            }
            return (kind == kUnique ? distinct : total) / seconds / 1e6;
          };
          std::array<double, 3> rate{};
          for (std::size_t turn = 0; turn < 3; ++turn) {
            const std::size_t contender = (turn + round) % 3;
            rate[contender] = contender == 0   ? push(store)
                              : contender == 1 ? push(absl_maps)
                                               : push(boost_maps);
          }
          for (const auto& batch : given) {
            twin.follow(batch.work(), kind != kUnique);
          }
          if (round == 0) {
            continue;  // warms up
          }
          for (std::size_t contender = 0; contender < 3; ++contender) {
            rates[kind][contender].add(rate[contender]);
          }
          ratios[kind][0].add(rate[0] / rate[1]);
          ratios[kind][1].add(rate[0] / rate[2]);
        }
      }
      for (std::size_t kind = 0; kind < kKinds.size(); ++kind) {
        std::printf("%s\n  {\"draw\": \"%s\", \"batch\": %zu, \"distinct\": %.3f, \"kind\": \"%s\", ", comma,
                    skewed ? "Zipf 1.05" : "uniform", batch_size,
                    distinct / static_cast<double>(batches * batch_size), kKinds[kind]);
        std::printf("\"shoal\": %s, \"absl\": %s, \"boost\": %s, \"beside_absl\": %s, \"beside_boost\": %s}",
                    rates[kind][0].json().c_str(), rates[kind][1].json().c_str(),
                    rates[kind][2].json().c_str(), ratios[kind][0].json().c_str(),
                    ratios[kind][1].json().c_str());
        comma = ",";
      }
    }
  }
  std::printf("]}\n");

  for (const std::size_t rows : {store.size(), absl_maps.size(), boost_maps.size()}) {
    if (rows != keys) {
      fail("there are " + std::to_string(rows) + " rows, not " + std::to_string(keys));
    }
  }
  twin.check(store, "the store", true);
  twin.check(absl_maps, "absl", false);
  twin.check(boost_maps, "boost", false);
  if (const std::string broken = store.verify(); !broken.empty()) {
    fail(broken);
  }
  return 0;
}

}  // namespace
}  // namespace shoal

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: maps_bench keys threads [rounds] [huge|stock]\n");
    return 2;
  }
  const auto number = [&](int i) { return static_cast<std::size_t>(std::strtoull(argv[i], nullptr, 10)); };
  shoal::Account::huge = argc <= 4 || std::string(argv[4]) != "stock";
  return shoal::run(number(1), number(2), argc > 3 ? number(3) : 7);
}

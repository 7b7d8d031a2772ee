// One lock per slot beside one lock for all slots: what a pull and a push of a small batch cost, in lockstep.
//
//   locks_bench [keys] [batch] [pairs]       pairs of calls in one process; prints one JSON object
//   locks_bench by-slot|one [keys] [batch] [calls]      one of them alone, to count instructions:
//
//     valgrind --tool=callgrind --toggle-collect='*pull_calls*' locks_bench by-slot
//
// Two tables of the same rows, FTRL at dim 1, 1024 slots, one thread. Each batch goes to both tables, in alternating order:
// ns a key of each, and the median of the ratios one lock / lock per slot. The rows of both are equal at the end.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "base/threads.h"
#include "batch/key_batch.h"
#include "measure.h"
#include "shard/shard.h"

namespace shoal {
namespace {

constexpr std::size_t kSlots = 1024;

class Bench {
 public:
  Bench(Locks locks, std::size_t keys, std::size_t batch)
      : shard_({.dim = 1,
                .dtype = Dtype::kFloat32,
                .optimizer =
                    Optimizer("FTRL", {{"alpha", 0.1}, {"beta", 1.0}, {"l1", 1.0}, {"l2", 0.1}, {"n0", 0.0}}),
                .init = Init("Zeros", 0, 0),
                .seed = 1},
               Slots(kSlots), pool_, locks),
        rows_(batch, 0.5F) {
    for (std::size_t begin = 0; begin < keys; begin += batch) {
      std::vector<std::uint64_t> some(std::min(batch, keys - begin));
      for (std::size_t i = 0; i < some.size(); ++i) {
        some[i] = begin + i;
      }
      push(KeyBatch(some, Slots(kSlots), pool_, scratch_));
    }
  }

  void push(const KeyBatch& batch) {
    const std::vector<float> grads(batch.size(), 0.25F);
    shard_.push({batch.hashes(), batch.offsets()}, grads);
  }
  void pull(const KeyBatch& batch) {
    shard_.pull({batch.hashes(), batch.offsets()}, std::span(rows_).first(batch.size()));
  }
  const std::vector<float>& rows() const { return rows_; }

 private:
  ThreadPool pool_{1};
  KeyBatchScratch scratch_;
  Shard shard_;
  std::vector<float> rows_;
};

std::vector<std::uint64_t> draw(Random& random, std::size_t keys, std::size_t batch) {
  std::vector<std::uint64_t> drawn(batch);
  std::ranges::generate(drawn, [&] { return random.next() % keys; });
  return drawn;
}

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

// Not inlined: callgrind collects within these.
[[gnu::noinline]] void pull_calls(Bench& bench, const std::vector<KeyBatch>& batches) {
  for (const KeyBatch& batch : batches) {
    bench.pull(batch);
  }
}

[[gnu::noinline]] void push_calls(Bench& bench, const std::vector<KeyBatch>& batches) {
  for (const KeyBatch& batch : batches) {
    bench.push(batch);
  }
}

int run_pairs(std::size_t keys, std::size_t batch_size, std::size_t pairs) {
  Bench by_slot(Locks::kBySlot, keys, batch_size);
  Bench one(Locks::kOne, keys, batch_size);
  ThreadPool pool(1);
  KeyBatchScratch scratch;
  Random random;
  std::printf("{\"keys\": %zu, \"batch\": %zu, \"pairs\": %zu", keys, batch_size, pairs);
  for (const bool pushes : {false, true}) {
    std::vector<double> ratios, by_slot_ns, one_ns;
    for (std::size_t pair = 0; pair < pairs; ++pair) {
      const KeyBatch batch(draw(random, keys, batch_size), Slots(kSlots), pool, scratch);
      double ns[2];
      for (std::size_t k = 0; k < 2; ++k) {
        const bool is_one = (k + pair) % 2 == 0;
        Bench& bench = is_one ? one : by_slot;
        const auto start = Clock::now();
        pushes ? bench.push(batch) : bench.pull(batch);
        ns[is_one ? 1 : 0] = seconds_since(start) * 1e9 / static_cast<double>(batch.size());
      }
      by_slot_ns.push_back(ns[0]);
      one_ns.push_back(ns[1]);
      ratios.push_back(ns[1] / ns[0]);
    }
    std::printf(", \"%s\": {\"by_slot_ns\": %.1f, \"one_ns\": %.1f, \"ratio\": %.3f}",
                pushes ? "push" : "pull", median(by_slot_ns), median(one_ns), median(ratios));
  }
  const KeyBatch batch(draw(random, keys, batch_size), Slots(kSlots), pool, scratch);
  by_slot.pull(batch);
  one.pull(batch);
  if (by_slot.rows() != one.rows()) {
    fail("the rows differ");
  }
  std::printf("}\n");
  return 0;
}

int run_alone(Locks locks, std::size_t keys, std::size_t batch_size, std::size_t calls) {
  Bench bench(locks, keys, batch_size);
  ThreadPool pool(1);
  KeyBatchScratch scratch;
  Random random;
  std::vector<KeyBatch> batches;
  std::size_t unique = 0;
  for (std::size_t call = 0; call < calls; ++call) {
    batches.emplace_back(draw(random, keys, batch_size), Slots(kSlots), pool, scratch);
    unique += batches.back().size();
  }
  pull_calls(bench, batches);
  push_calls(bench, batches);
  std::printf("{\"calls\": %zu, \"unique_keys\": %zu}\n", calls, unique);
  return 0;
}

}  // namespace
}  // namespace shoal

int main(int argc, char** argv) {
  const std::string first = argc > 1 ? argv[1] : "";
  const bool alone = first == "by-slot" || first == "one";
  const auto number = [&](int i, std::size_t otherwise) {
    return argc > i ? static_cast<std::size_t>(std::strtoull(argv[i], nullptr, 10)) : otherwise;
  };
  const int at = alone ? 2 : 1;
  const std::size_t keys = number(at, 1'000'000);
  const std::size_t batch = number(at + 1, 1000);
  if (alone) {
    return shoal::run_alone(first == "one" ? shoal::Locks::kOne : shoal::Locks::kBySlot, keys, batch,
                            number(at + 2, 200));
  }
  return shoal::run_pairs(keys, batch, number(at + 1 + 1, 2000));
}

// The table beside the machine's raw limit, in one process: what one pull and one push cost per key, interleaved with
// random reads and read-modify-writes of cache lines.
//
//   shoal_bench keys threads batch dim optimizer [rounds]
//
// Prints one JSON object. Fills a table with keys 0..keys-1, then in every round measures, in this order: raw reads and
// raw updates of random lines in a region of the table's size and in one of 4 GiB, a batch's sort, pull, and push, the
// last two on different batches of resident keys drawn uniformly. Results are checked: the number of rows, the table's
// invariants, no row dropped, and rows pulled in a batch against the same rows pulled one by one.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "base/memory.h"
#include "base/threads.h"
#include "batch/key_batch.h"
#include "measure.h"
#include "raw.h"
#include "shard/shard.h"

namespace shoal {
namespace {

std::map<std::string, double> params_of(const std::string& optimizer) {
  if (optimizer == "FTRL") {
    return {{"alpha", 0.1}, {"beta", 1.0}, {"l1", 1.0}, {"l2", 0.1}, {"n0", 0.0}};
  }
  if (optimizer == "Adagrad") {
    return {{"lr", 0.01}, {"eps", 1e-10}, {"n0", 0.0}, {"weight_decay", 0.0}};
  }
  return {{"lr", 0.01}, {"eps", 1e-8}, {"weight_decay", 0.0}, {"decoupled", 0.0}};
}

int run(std::size_t keys, std::size_t threads, std::size_t batch_size, std::size_t dim,
        const std::string& optimizer, std::size_t rounds) {
  ThreadPool pool(threads);
  const Slots slots(1024);
  const TableSpec spec{.dim = dim,
                       .dtype = Dtype::kFloat32,
                       .optimizer = Optimizer(optimizer, params_of(optimizer)),
                       .init = Init("Zeros", 0, 0),
                       .seed = 1};
  KeyBatchScratch scratch;
  std::vector<std::uint64_t> batch(batch_size);
  std::vector<float> grads(batch_size * dim);
  std::vector<float> weights(batch_size * dim);
  for (std::size_t i = 0; i < grads.size(); ++i) {
    grads[i] = static_cast<float>(i * 7919 % 13) * 0.05F - 0.3F;
  }
  for (std::size_t i = 0; i < batch_size; ++i) {
    batch[i] = i;
  }
  {
    const KeyBatch warm(batch, slots, pool, scratch);
  }  // the batch's own memory is no memory of the table

  const std::size_t before = resident_bytes();
  Shard shard(spec, slots, pool);
  double peak = 0;     // bytes per key, from a tenth of the keys on
  double slowest = 0;  // of the pushes that insert
  double inserting = 0;
  std::size_t filled = 0;
  while (filled < keys) {
    batch.resize(std::min(batch_size, keys - filled));
    for (auto& key : batch) {
      key = filled++;
    }
    const KeyBatch sorted(batch, slots, pool, scratch);
    const auto start = Clock::now();
    shard.push({sorted.hashes(), sorted.offsets()}, std::span(grads).first(sorted.size() * dim));
    const double seconds = seconds_since(start);
    slowest = std::max(slowest, seconds);
    inserting += seconds;
    if (filled >= keys / 2) {
      peak = std::max(peak, static_cast<double>(resident_bytes() - before) / static_cast<double>(filled));
    }
  }
  const double resident = static_cast<double>(resident_bytes() - before) / static_cast<double>(keys);
  if (shard.size() != keys) {
    fail("rows are missing");
  }
  const ShardStats stats = shard.stats();

  batch.resize(batch_size);
  Region same(stats.bytes);
  std::memset(same.data(), 1, same.bytes());
  Region large;
  if (stats.bytes < std::size_t{12} << 30U) {  // beside the largest tables there is no room for it
    large = Region(std::size_t{4} << 30U);
    std::memset(large.data(), 1, large.bytes());
  }
  Random random;
  const std::size_t batches = std::max<std::size_t>(1, 2'000'000 / batch_size);
  std::vector<std::uint32_t> lines(batches * batch_size);
  const auto draw_batch = [&] {
    for (auto& key : batch) {
      key = scale(random.next(), keys);
    }
  };

  Figures raw_read, raw_update, large_read, large_update, sorts, pulls, pushes, pull_ratio, push_ratio,
      pull_ratio_large, push_ratio_large;
  for (std::size_t round = 0; round < rounds + 1; ++round) {
    draw_lines(same, random, lines);
    const double read = raw_rate(same, lines, false, pool);
    const double update = raw_rate(same, lines, true, pool);
    double read_large = 0;
    double update_large = 0;
    if (large.bytes() != 0) {
      draw_lines(large, random, lines);
      read_large = raw_rate(large, lines, false, pool);
      update_large = raw_rate(large, lines, true, pool);
    }
    double sorting = 0;
    double pulling = 0;
    double pushing = 0;
    double pulled = 0;
    double pushed = 0;
    for (std::size_t b = 0; b < batches; ++b) {
      draw_batch();
      auto start = Clock::now();
      const KeyBatch sorted(batch, slots, pool, scratch);
      sorting += seconds_since(start);
      start = Clock::now();
      shard.pull({sorted.hashes(), sorted.offsets()}, std::span(weights).first(sorted.size() * dim));
      pulling += seconds_since(start);
      pulled += static_cast<double>(sorted.size());
    }
    for (std::size_t b = 0; b < batches; ++b) {
      draw_batch();
      const KeyBatch sorted(batch, slots, pool, scratch);
      const auto start = Clock::now();
      shard.push({sorted.hashes(), sorted.offsets()}, std::span(grads).first(sorted.size() * dim));
      pushing += seconds_since(start);
      pushed += static_cast<double>(sorted.size());
    }
    if (round == 0) {
      continue;  // warms up
    }
    raw_read.add(read);
    raw_update.add(update);
    large_read.add(read_large);
    large_update.add(update_large);
    sorts.add(static_cast<double>(batches * batch_size) / sorting / 1e6);
    pulls.add(pulled / pulling / 1e6);
    pushes.add(pushed / pushing / 1e6);
    pull_ratio.add(pulls.values.back() / read);
    push_ratio.add(pushes.values.back() / update);
    if (large.bytes() != 0) {
      pull_ratio_large.add(pulls.values.back() / read_large);
      push_ratio_large.add(pushes.values.back() / update_large);
    }
  }

  // The check: rows pulled in a batch against the same rows pulled one by one.
  draw_batch();
  const KeyBatch sorted(batch, slots, pool, scratch);
  const std::span<float> all = std::span(weights).first(sorted.size() * dim);
  shard.pull({sorted.hashes(), sorted.offsets()}, all);
  for (std::size_t i = 0; i < sorted.size(); i += std::max<std::size_t>(1, sorted.size() / 100)) {
    const std::uint64_t key = unmix(sorted.hashes()[i]);
    const KeyBatch one({&key, 1}, slots, pool, scratch);
    std::vector<float> row(dim);
    shard.pull({one.hashes(), one.offsets()}, row);
    if (std::memcmp(row.data(), all.data() + i * dim, dim * sizeof(float)) != 0) {
      fail("a row pulled alone differs from the row pulled in a batch");
    }
  }
  if (shard.size() != keys || !shard.verify().empty() || shard.stats().nonfinite_rows != 0) {
    fail("the table is not as it should be");
  }

  std::printf("{\"keys\": %zu, \"threads\": %zu, \"batch\": %zu, \"dim\": %zu, \"optimizer\": \"%s\",\n",
              keys, threads, batch_size, dim, optimizer.c_str());
  std::printf(
      " \"bytes_per_key\": %.2f, \"resident_per_key\": %.2f, \"peak_per_key\": %.2f, \"load\": %.3f,\n",
      static_cast<double>(stats.bytes) / static_cast<double>(keys), resident, peak,
      static_cast<double>(stats.rows) / static_cast<double>(stats.cells));
  std::printf(" \"insert\": %.4g, \"slowest_insert_ms\": %.3g,\n",
              static_cast<double>(keys) / inserting / 1e6, slowest * 1e3);
  std::printf(" \"raw_read\": %s, \"raw_update\": %s,\n", raw_read.json().c_str(), raw_update.json().c_str());
  if (large.bytes() != 0) {
    std::printf(" \"raw_read_4g\": %s, \"raw_update_4g\": %s,\n", large_read.json().c_str(),
                large_update.json().c_str());
    std::printf(" \"pull_ratio_4g\": %s, \"push_ratio_4g\": %s,\n", pull_ratio_large.json().c_str(),
                push_ratio_large.json().c_str());
  }
  std::printf(" \"sort\": %s, \"pull\": %s, \"push\": %s, \"pull_ratio\": %s, \"push_ratio\": %s}\n",
              sorts.json().c_str(), pulls.json().c_str(), pushes.json().c_str(), pull_ratio.json().c_str(),
              push_ratio.json().c_str());
  return 0;
}

}  // namespace
}  // namespace shoal

int main(int argc, char** argv) {
  if (argc < 6) {
    std::fprintf(stderr, "usage: shoal_bench keys threads batch dim FTRL|Adagrad|RowWiseAdagrad [rounds]\n");
    return 2;
  }
  const auto number = [&](int i) { return static_cast<std::size_t>(std::strtoull(argv[i], nullptr, 10)); };
  return shoal::run(number(1), number(2), number(3), number(4), argv[5], argc > 6 ? number(6) : 7);
}

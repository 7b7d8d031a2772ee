// RocksDB as the store of embedding rows, for bench/bench_tiered.py: a value is 16 weights and 16 squares of Adagrad.
//
//   rocksdb_bench directory rows memory batch seconds zipf
//
// Writes all rows once, then steps: MultiGet of the batch's keys by 32 threads, Adagrad, WriteBatch. Memory is divided into a
// cache of blocks and write buffers; reads, flushes and compactions bypass the page cache; filters of 10 bits a key; no
// compression, and no log, because a tier is no checkpoint. `zipf` 0: uniform keys. Prints: rows loaded a second, rows a
// second, p50 and p99 of a step in ms, hits of the cache, bytes written to files in the steps, bytes of files, rows.

#include <rocksdb/cache.h>
#include <rocksdb/db.h>
#include <rocksdb/filter_policy.h>
#include <rocksdb/statistics.h>
#include <rocksdb/table.h>
#include <rocksdb/write_batch.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "base/mix.h"
#include "base/threads.h"

namespace shoal {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::size_t kDim = 16;
constexpr std::size_t kThreads =
    32;  // each in a MultiGet of its part of the batch, or the disk would have one read at a time
using Row = std::array<float, 2 * kDim>;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Keys in the order of their bytes are in that of the hashes.
std::uint64_t big_endian(std::uint64_t hash) { return __builtin_bswap64(hash); }

void check(const rocksdb::Status& status) {
  if (!status.ok()) {
    std::fprintf(stderr, "%s\n", status.ToString().c_str());
    std::exit(1);
  }
}

void step(Row& row, float grad) {
  for (std::size_t e = 0; e < kDim; ++e) {
    row[kDim + e] += grad * grad;
    row[e] -= 0.1F * grad / (std::sqrt(row[kDim + e]) + 1e-8F);
  }
}

void run(const std::string& directory, std::uint64_t rows, std::size_t memory, std::size_t batch,
         double seconds, double zipf) {
  rocksdb::Options options;
  options.create_if_missing = true;
  options.error_if_exists = true;
  options.compression = rocksdb::kNoCompression;
  options.use_direct_reads = true;
  options.use_direct_io_for_flush_and_compaction = true;
  options.write_buffer_size = memory / 8;
  options.max_write_buffer_number = 2;
  options.max_background_jobs = 2;
  options.max_open_files = -1;
  options.statistics = rocksdb::CreateDBStatistics();
  rocksdb::BlockBasedTableOptions table;
  table.block_cache = rocksdb::NewLRUCache(memory / 4 * 3);
  table.cache_index_and_filter_blocks = true;
  table.cache_index_and_filter_blocks_with_high_priority = true;
  table.filter_policy.reset(rocksdb::NewBloomFilterPolicy(10));
  options.table_factory.reset(rocksdb::NewBlockBasedTableFactory(table));
  rocksdb::DB* opened = nullptr;
  check(rocksdb::DB::Open(options, directory, &opened));
  const std::unique_ptr<rocksdb::DB> db(opened);
  rocksdb::WriteOptions unlogged;
  unlogged.disableWAL = true;
  const auto slice = [](const std::uint64_t& hash) {
    return rocksdb::Slice(reinterpret_cast<const char*>(&hash), sizeof hash);
  };

  const auto loading = Clock::now();
  for (std::uint64_t first = 0; first < rows; first += 65536) {
    rocksdb::WriteBatch writes;
    for (std::uint64_t key = first; key < std::min(rows, first + 65536); ++key) {
      Row row{};
      step(row, 1.0F);
      const std::uint64_t hash = big_endian(mix(key));
      writes.Put(slice(hash), rocksdb::Slice(reinterpret_cast<const char*>(row.data()), sizeof row));
    }
    check(db->Write(unlogged, &writes));
  }
  check(db->Flush({}));
  const double loaded = static_cast<double>(rows) / seconds_since(loading);

  std::vector<double> weights;
  if (zipf != 0) {
    weights.resize(rows);
    for (std::uint64_t r = 0; r < rows; ++r) {
      weights[r] = std::pow(static_cast<double>(r + 1), -zipf);
    }
    std::partial_sum(weights.begin(), weights.end(), weights.begin());
  }
  ThreadPool pool(kThreads);
  std::mt19937_64 random(1);
  const auto draw = [&]() -> std::uint64_t {
    if (zipf == 0) {
      return random() % rows;
    }
    const double at = std::uniform_real_distribution<double>(0, weights.back())(random);
    return static_cast<std::uint64_t>(std::upper_bound(weights.begin(), weights.end(), at) - weights.begin());
  };
  check(options.statistics->Reset());
  std::vector<double> took;
  std::size_t stepped = 0;
  const auto start = Clock::now();
  std::vector<std::uint64_t> hashes(batch);
  while (seconds_since(start) < seconds) {
    hashes.resize(batch);
    for (std::uint64_t& hash : hashes) {
      hash = mix(draw());
    }
    const auto begun = Clock::now();
    std::sort(hashes.begin(), hashes.end());
    hashes.erase(std::unique(hashes.begin(), hashes.end()), hashes.end());
    std::ranges::transform(hashes, hashes.begin(), big_endian);
    std::vector<rocksdb::Slice> keys(hashes.size());
    std::transform(hashes.begin(), hashes.end(), keys.begin(), slice);
    std::vector<rocksdb::PinnableSlice> values(keys.size());
    std::vector<rocksdb::Status> statuses(keys.size());
    const Partition partition{keys.size(), parts_for(keys.size(), 16, kThreads)};
    pool.run(partition.parts, [&](std::size_t part) {
      const std::size_t first = partition.begin(part);
      db->MultiGet({}, db->DefaultColumnFamily(), partition.begin(part + 1) - first, &keys[first],
                   &values[first], &statuses[first], true);
    });
    rocksdb::WriteBatch writes;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      check(statuses[i]);
      Row row;
      std::memcpy(row.data(), values[i].data(), sizeof row);
      step(row, 0.5F);
      writes.Put(keys[i], rocksdb::Slice(reinterpret_cast<const char*>(row.data()), sizeof row));
    }
    values.clear();
    check(db->Write(unlogged, &writes));
    took.push_back(seconds_since(begun));
    stepped += keys.size();
  }
  const double all = seconds_since(start);
  std::sort(took.begin(), took.end());
  const rocksdb::Statistics& counted = *options.statistics;
  std::uint64_t files = 0;
  db->GetIntProperty("rocksdb.total-sst-files-size", &files);
  const auto hits = static_cast<double>(counted.getTickerCount(rocksdb::BLOCK_CACHE_DATA_HIT));
  const auto misses = static_cast<double>(counted.getTickerCount(rocksdb::BLOCK_CACHE_DATA_MISS));
  std::printf("%.0f %.0f %.1f %.1f %.3f %llu %llu %zu\n", loaded, static_cast<double>(stepped) / all,
              took[took.size() / 2] * 1e3, took[took.size() * 99 / 100] * 1e3, hits / (hits + misses),
              static_cast<unsigned long long>(counted.getTickerCount(rocksdb::FLUSH_WRITE_BYTES) +
                                              counted.getTickerCount(rocksdb::COMPACT_WRITE_BYTES)),
              static_cast<unsigned long long>(files), stepped);
}

}  // namespace
}  // namespace shoal

int main(int argc, char** argv) {
  if (argc != 7) {
    std::fprintf(stderr, "usage: rocksdb_bench directory rows memory batch seconds zipf\n");
    return 2;
  }
  shoal::run(argv[1], std::strtoull(argv[2], nullptr, 10), std::strtoull(argv[3], nullptr, 10),
             std::strtoull(argv[4], nullptr, 10), std::strtod(argv[5], nullptr),
             std::strtod(argv[6], nullptr));
  return 0;
}

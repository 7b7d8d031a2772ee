// The bindings, one function per folder of the engine, and their shared parts.

#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "base/threads.h"
#include "batch/key_batch.h"
#include "cache/row_cache.h"
#include "kernel/logistic.h"
#include "shard/shard.h"
#include "shard/snapshot.h"

namespace shoal::bind {

// A pool with working memory that its callers share. A caller that finds it in use allocates its own.
class PoolWithScratch {
 public:
  explicit PoolWithScratch(std::size_t count) : threads(count) {}

  template <class Work>
  auto with_scratch(const Work& work) {
    if (in_use_.try_lock()) {
      const MutexLock lock(in_use_, std::adopt_lock);
      return work(key_scratch_, gradient_scratch_);
    }
    KeyBatchScratch keys;
    GradientScratch gradients;
    return work(keys, gradients);
  }

  ThreadPool threads;

 private:
  Mutex in_use_;
  KeyBatchScratch key_scratch_ GUARDED_BY(in_use_);
  GradientScratch gradient_scratch_ GUARDED_BY(in_use_);
};

// By the names that Python uses.
Purpose purpose_of(const std::string& name);
Snapshot::Kind kind_of(const std::string& name);

// Adds the statistics of a struct to a dict, their names after a prefix.
template <class Table, class Struct>
void add_to(pybind11::dict& named, const Table& table, const Struct& stats, const std::string& prefix = "") {
  for (const auto& statistic : table) {
    named[pybind11::str(prefix + statistic.name)] = statistic.of(stats);
  }
}

template <class Table, class Struct>
pybind11::dict dict_of(const Table& table, const Struct& stats) {
  pybind11::dict named;
  add_to(named, table, stats);
  return named;
}

// Names of the stored columns, without metadata.
std::vector<std::string> columns_of(const Shard& shard);

// A slot in a snapshot: (rows, the section's bytes, the filter's bytes).
pybind11::tuple section_of(Snapshot::Piece&& piece);
// The changes of a slot: (rows, the section's bytes, the filter's bytes or None if those of the base are
// still valid, bits, ranges, their bytes).
pybind11::tuple changes_of(Snapshot::Piece&& piece);

// The rows of a table that a worker keeps.
std::unique_ptr<RowCache> make_cache(const TableSpec& spec, std::size_t rows, bool local_steps);

void add_build(pybind11::module_& module);
void add_base(pybind11::module_& module);
void add_batch(pybind11::module_& module);
void add_cache(pybind11::module_& module);
void add_kernel(pybind11::module_& module);
void add_names(pybind11::module_& module);
void add_table_spec(pybind11::module_& module);
void add_shard(pybind11::module_& module);
void add_tier(pybind11::module_& module);
void add_user_step(pybind11::module_& module);
void add_user_function(pybind11::module_& module);
void add_wire(pybind11::module_& module);
void add_requests(pybind11::module_& module);
void add_client(pybind11::module_& module);
void add_cached_rows(pybind11::module_& module);
void add_endpoint(pybind11::module_& module);
void add_data_loop(pybind11::module_& module);
void add_export(pybind11::module_& module);
void add_http(pybind11::module_& module);
void add_predict(pybind11::module_& module);
void add_serve(pybind11::module_& module);

}  // namespace shoal::bind

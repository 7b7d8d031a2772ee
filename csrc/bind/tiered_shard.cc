#include "tier/tiered_shard.h"

#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "batch/summed_batch.h"
#include "bind/array.h"
#include "bind/bind.h"
#include "tier/storage_error.h"

namespace shoal::bind {

namespace {

using Locations = RowLocations*;

template <class Batch>
SlotSlices slices(const Batch& batch) {
  return {batch.hashes(), batch.offsets()};
}

Slot slot_of(std::size_t slot, const Shard& shard) {
  SHOAL_CHECK(slot < shard.slots().count(), "there is no slot " + std::to_string(slot));
  return Slot{static_cast<std::uint32_t>(slot)};
}

std::unique_ptr<TieredShard> make_tiered(std::size_t dim, const std::string& dtype,
                                         const std::string& optimizer, std::map<std::string, double> params,
                                         const std::string& init, double init_parameter,
                                         std::uint64_t init_seed, std::uint64_t seed, std::size_t slots,
                                         PoolWithScratch& pool, const std::string& directory,
                                         std::size_t memory, const std::optional<NamedForm>& admit,
                                         const std::vector<NamedForm>& expire, bool async) {
  auto shard = std::make_unique<Shard>(make_spec(dim, dtype, optimizer, std::move(params), init,
                                                 init_parameter, init_seed, seed, admit, expire),
                                       Slots(slots), pool.threads);
  return std::make_unique<TieredShard>(std::move(shard), directory, memory,
                                       async ? ReadQueue::Engine::kBest : ReadQueue::Engine::kThreads);
}

void pull(TieredShard& shard, const KeyBatch& batch, Array<float>& rows, Locations locations) {
  const auto to = out(rows);
  const py::gil_scoped_release nogil;
  shard.pull(slices(batch), to, locations);
}

void pull_per_key(TieredShard& shard, const KeyBatch& batch, Array<float>& rows, Locations locations) {
  const auto to = out(rows);
  const py::gil_scoped_release nogil;
  shard.pull_per_key(batch, to, locations);
}

void locate(TieredShard& shard, const KeyBatch& batch, RowLocations& locations) {
  const py::gil_scoped_release nogil;
  shard.locate(slices(batch), locations);
}

void prefetch(TieredShard& shard, const KeyBatch& batch, Locations locations) {
  const py::gil_scoped_release nogil;
  shard.prefetch(slices(batch), locations);
}

OccurrenceCounts occurrences_of(const std::optional<Array<std::uint32_t>>& counts, std::uint32_t clock) {
  return {.counts = counts ? in(*counts) : std::span<const std::uint32_t>(), .clock = clock};
}

template <class Batch>
std::uint64_t push(TieredShard& shard, const Batch& batch, const Array<float>& grads,
                   const std::optional<Array<std::uint32_t>>& counts, std::uint32_t clock,
                   Locations locations) {
  const auto from = in(grads);
  SHOAL_CHECK(from.size() == batch.size() * shard.shard().rows().dim(), "grads must be len(keys) x dim");
  const OccurrenceCounts occurrences = occurrences_of(counts, clock);
  const py::gil_scoped_release nogil;
  return shard.push(slices(batch), from, occurrences, locations);
}

std::uint64_t push_per_key(TieredShard& shard, const KeyBatch& batch, const Array<float>& grads,
                           const std::optional<Array<std::uint32_t>>& counts, std::uint32_t clock,
                           Locations locations) {
  const auto from = in(grads);
  const OccurrenceCounts occurrences = occurrences_of(counts, clock);
  const py::gil_scoped_release nogil;
  return shard.push_per_key(batch, from, occurrences, locations);
}

void assign(TieredShard& shard, const KeyBatch& batch, const Array<float>& rows, std::uint32_t clock) {
  const auto from = in(rows);
  const py::gil_scoped_release nogil;
  shard.assign(slices(batch), from, clock);
}

std::size_t erase(TieredShard& shard, const KeyBatch& batch) {
  const py::gil_scoped_release nogil;
  return shard.erase(slices(batch));
}

Array<std::uint8_t> contains(TieredShard& shard, const KeyBatch& batch) {
  Array<std::uint8_t> there = fresh<std::uint8_t>(batch.size());
  const auto to = out(there);
  const py::gil_scoped_release nogil;
  shard.contains(slices(batch), to);
  return there;
}

Array<float> state(TieredShard& shard, const KeyBatch& batch, std::size_t column) {
  const Rows& form = shard.shard().rows();
  Array<float> values = fresh<float>(batch.size(), column == form.columns() ? 1 : form.dim());
  const auto to = out(values);
  const py::gil_scoped_release nogil;
  shard.state(slices(batch), column, to);
  return values;
}

Array<std::uint32_t> metadata(TieredShard& shard, const KeyBatch& batch, std::size_t k) {
  Array<std::uint32_t> values = fresh<std::uint32_t>(batch.size());
  const auto to = out(values);
  const py::gil_scoped_release nogil;
  shard.metadata(slices(batch), k, to);
  return values;
}

// (rows, the section's bytes, the filter's bytes)
py::tuple section(TieredShard& shard, std::size_t number) {
  const Slot slot = slot_of(number, shard.shard());
  std::vector<std::byte> bytes;
  std::vector<std::byte> filter;
  std::size_t rows = 0;
  {
    const py::gil_scoped_release nogil;
    rows = shard.section(slot, bytes);
    shard.shard().filter(slot, filter);
  }
  return py::make_tuple(rows, owned(std::move(bytes)), owned(std::move(filter)));
}

std::size_t restore(TieredShard& shard, std::size_t rows, const Array<std::uint8_t>& section) {
  const auto bytes = std::as_bytes(in(section));
  const py::gil_scoped_release nogil;
  return shard.restore(rows, bytes);
}

void restore_filter(TieredShard& shard, std::size_t cut, std::size_t slot,
                    const Array<std::uint8_t>& filter) {
  const auto bytes = std::as_bytes(in(filter));
  const py::gil_scoped_release nogil;
  shard.shard().restore_filter(Slots(cut), Slot{static_cast<std::uint32_t>(slot)}, bytes);
}

// (hashes, weights) of one slot of a table or a snapshot.
template <class Source>
py::tuple read_slot(Source& source, Slot slot, std::size_t dim) {
  std::vector<std::uint64_t> hashes;
  std::vector<float> weights;
  {
    const py::gil_scoped_release nogil;
    source.read_slot(slot, hashes, weights);
  }
  return rows_of(hashes, weights, dim);
}

// (hashes, weights, bits, count, ranges) of a delta.
py::tuple read_changes(TieredSnapshot& snapshot, std::size_t slot) {
  std::vector<std::uint64_t> hashes;
  std::vector<float> weights;
  Snapshot::Ranges ranges;
  {
    const py::gil_scoped_release nogil;
    ranges = snapshot.read_changes(Slot{static_cast<std::uint32_t>(slot)}, hashes, weights);
  }
  const py::tuple rows = rows_of(hashes, weights, snapshot.inner().dim());
  return py::make_tuple(rows[0], rows[1], ranges.bits, ranges.count, owned(std::move(ranges.bytes)));
}

Array<double> reduced(TieredShard& shard, std::uint32_t function, const Array<double>& parameters) {
  const auto from = in(parameters);
  std::vector<double> answers;
  {
    const py::gil_scoped_release nogil;
    answers = shard.reduce(Function{function}, from);
  }
  return copied(answers);
}

Array<std::uint64_t> sweep(TieredShard& shard, const Array<double>& rules, std::uint32_t clock,
                           bool dry_run) {
  const std::vector<Expiry> asked = Lifecycle::expiries(in(rules));
  std::vector<std::uint64_t> words;
  {
    const py::gil_scoped_release nogil;
    words = shard.sweep(clock, asked, dry_run);
  }
  return copied(words);
}

py::object snapshot(const py::object& self, std::uint32_t clock, const std::string& kind, std::size_t most,
                    const std::string& purpose) {
  auto made = std::make_unique<TieredSnapshot>(self.cast<TieredShard&>(), clock, kind_of(kind), most,
                                               purpose_of(purpose));
  py::object held = py::cast(std::move(made));
  py::detail::keep_alive_impl(held, self);
  return held;
}

Snapshot::Piece take(TieredSnapshot& snapshot, std::size_t slot) {
  const py::gil_scoped_release nogil;
  return snapshot.take(Slot{static_cast<std::uint32_t>(slot)});
}

py::dict stats(TieredShard& shard) {
  const ShardStats stats = [&] {
    const py::gil_scoped_release nogil;
    return shard.stats();
  }();
  return dict_of(stats);
}

py::dict tier_stats(TieredShard& shard) {
  const TierStats stats = [&] {
    const py::gil_scoped_release nogil;
    return shard.tier_stats();
  }();
  py::dict all;
  all["rows_in_memory"] = stats.rows_in_memory;
  all["rows_on_disk"] = stats.rows_on_disk;
  all["memory_bytes"] = stats.memory_bytes;
  all["index_bytes"] = stats.index_bytes;
  all["disk_bytes"] = stats.disk_bytes;
  all["hits"] = stats.hits;
  all["misses"] = stats.misses;
  all["prefetched"] = stats.prefetched;
  all["absent"] = stats.absent;
  all["absent_reads"] = stats.absent_reads;
  all["reads"] = stats.reads;
  all["merges"] = stats.merges;
  all["merged_bytes_read"] = stats.merged_bytes_read;
  all["bytes_written"] = stats.bytes_written;
  all["rows_changed"] = stats.rows_changed;
  all["is_direct"] = stats.is_direct;
  all["is_async"] = stats.is_async;
  return all;
}

// The exceptions that users catch are classes of Python.
void translate(std::exception_ptr thrown) {
  const auto raise = [](const char* name, const std::exception& error) {
    const py::object type = py::module_::import("shoal.errors").attr(name);
    PyErr_SetString(type.ptr(), error.what());
  };
  try {
    if (thrown) {
      std::rethrow_exception(thrown);
    }
  } catch (const TierStorageError& error) {
    raise("StorageError", error);
  } catch (const TierCorruptionError& error) {
    raise("CorruptionError", error);
  }
}

}  // namespace

void add_tiered_shard(py::module_& module) {
  py::register_exception_translator(&translate);
  py::class_<TieredShard>(module, "TieredShard")
      .def(py::init(&make_tiered), py::arg("dim"), py::arg("dtype"), py::arg("optimizer"), py::arg("params"),
           py::arg("init"), py::arg("init_parameter"), py::arg("init_seed"), py::arg("seed"),
           py::arg("slots"), py::arg("pool"), py::arg("directory"), py::arg("memory"),
           py::arg("admit") = py::none(), py::arg("expire") = py::list(), py::arg("use_async") = true,
           py::keep_alive<1, 11>())
      .def("pull", &pull, py::arg("batch"), py::arg("rows").noconvert(), py::arg("locations") = py::none())
      .def("pull_per_key", &pull_per_key, py::arg("batch"), py::arg("rows").noconvert(),
           py::arg("locations") = py::none())
      .def("locate", &locate, py::arg("batch"), py::arg("locations"))
      .def("prefetch", &prefetch, py::arg("batch"), py::arg("locations") = py::none())
      .def("push", &push<KeyBatch>, py::arg("batch"), py::arg("grads").noconvert(),
           py::arg("counts").noconvert() = py::none(), py::arg("clock") = 0,
           py::arg("locations") = py::none())
      .def("push", &push<SummedBatch>, py::arg("batch"), py::arg("grads").noconvert(),
           py::arg("counts").noconvert() = py::none(), py::arg("clock") = 0,
           py::arg("locations") = py::none())
      .def("push_per_key", &push_per_key, py::arg("batch"), py::arg("grads").noconvert(),
           py::arg("counts").noconvert() = py::none(), py::arg("clock") = 0,
           py::arg("locations") = py::none())
      .def("assign", &assign, py::arg("batch"), py::arg("rows").noconvert(), py::arg("clock") = 0)
      .def("erase", &erase, py::arg("batch"))
      .def("contains", &contains, py::arg("batch"))
      .def("columns", [](const TieredShard& shard) { return columns_of(shard.shard()); })
      .def("state", &state, py::arg("batch"), py::arg("column"))
      .def("metadata_names", [](const TieredShard& shard) { return shard.shard().rows().metadata().names(); })
      .def("metadata", &metadata, py::arg("batch"), py::arg("k"))
      .def("section", &section, py::arg("slot"))
      .def("restore", &restore, py::arg("rows"), py::arg("section").noconvert())
      .def(
          "read_slot",
          [](TieredShard& shard, std::size_t slot) {
            return read_slot(shard, slot_of(slot, shard.shard()), shard.shard().rows().dim());
          },
          py::arg("slot"))
      .def("reduce", &reduced, py::arg("function"), py::arg("parameters").noconvert())
      .def("sweep", &sweep, py::arg("rules").noconvert(), py::arg("clock") = 0, py::kw_only(),
           py::arg("dry_run"))
      .def("restore_filter", &restore_filter, py::arg("cut"), py::arg("slot"), py::arg("filter").noconvert())
      .def("snapshot", &snapshot, py::arg("clock") = 0, py::arg("kind") = "plain", py::arg("most") = 0,
           py::arg("purpose") = "save")
      .def(
          "base",
          [](const TieredShard& shard, const std::string& purpose) {
            return shard.shard().base(purpose_of(purpose));
          },
          py::arg("purpose") = "save")
      .def(
          "track", [](TieredShard& shard, std::string base) { shard.shard().track(std::move(base)); },
          py::arg("base"), py::call_guard<py::gil_scoped_release>())
      .def("pause_writers", &TieredShard::pause_writers, py::call_guard<py::gil_scoped_release>())
      .def("resume_writers", &TieredShard::resume_writers)
      .def(
          "table_clock",
          [](const TieredShard& shard, std::uint32_t clock) { return shard.shard().table_clock(clock); },
          py::arg("store_clock"))
      .def(
          "set_clock",
          [](TieredShard& shard, std::uint32_t table_clock, std::uint32_t store_clock) {
            shard.shard().set_clock(table_clock, store_clock);
          },
          py::arg("table_clock"), py::arg("store_clock"))
      .def_property(
          "step", [](const TieredShard& shard) { return shard.shard().step(); },
          [](TieredShard& shard, std::uint64_t step) { shard.shard().set_step(step); })
      .def("__len__", &TieredShard::size, py::call_guard<py::gil_scoped_release>())
      .def("stats", &stats)
      .def("tier_stats", &tier_stats)
      .def("verify", &TieredShard::verify, py::call_guard<py::gil_scoped_release>());
  py::class_<TieredSnapshot>(module, "TieredSnapshot")
      .def(
          "section",
          [](TieredSnapshot& snapshot, std::size_t slot) { return section_of(take(snapshot, slot)); },
          py::arg("slot"))
      .def(
          "changes",
          [](TieredSnapshot& snapshot, std::size_t slot) { return changes_of(take(snapshot, slot)); },
          py::arg("slot"))
      .def(
          "read_slot",
          [](TieredSnapshot& snapshot, std::size_t slot) {
            return read_slot(snapshot, Slot{static_cast<std::uint32_t>(slot)}, snapshot.inner().dim());
          },
          py::arg("slot"))
      .def("read_changes", &read_changes, py::arg("slot"))
      .def(
          "done", [](TieredSnapshot& snapshot, std::string name) { snapshot.inner().done(std::move(name)); },
          py::arg("name"))
      .def(
          "close", [](TieredSnapshot& snapshot) { snapshot.inner().close(); },
          py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("step", [](const TieredSnapshot& snapshot) { return snapshot.inner().step(); })
      .def_property_readonly("table_clock",
                             [](const TieredSnapshot& snapshot) { return snapshot.inner().table_clock(); })
      .def_property_readonly("rows", &TieredSnapshot::rows)
      .def_property_readonly("bytes", &TieredSnapshot::bytes);
}

}  // namespace shoal::bind

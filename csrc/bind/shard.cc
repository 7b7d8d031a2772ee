#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "batch/summed_batch.h"
#include "bind/array.h"
#include "bind/bind.h"
#include "shard/reductions.h"
#include "shard/section_codec.h"
#include "shard/shard.h"
#include "shard/snapshot.h"
#include "tier/tier.h"

namespace shoal::bind {

namespace {

template <class Batch>
SlotSlices slices(const Batch& batch) {
  return {batch.hashes(), batch.offsets()};
}

std::unique_ptr<Shard> make_shard(const TableSpec& spec, std::size_t slots, PoolWithScratch& pool,
                                  Budget* budget,
                                  const std::optional<std::pair<std::string, std::size_t>>& tier) {
  auto shard = std::make_unique<Shard>(spec, Slots(slots), pool.threads, Locks::kBySlot, budget);
  if (tier) {
    const auto& [directory, memory] = *tier;
    shard->set_source(std::make_unique<Tier>(*shard, directory, memory));
  }
  return shard;
}

void pull_rows(const Shard& shard, const KeyBatch& batch, Array<float>& rows, RowLocations* locations) {
  const auto to = out(rows);
  const py::gil_scoped_release nogil;
  shard.pull(slices(batch), to, locations);
}

void pull_rows_per_key(const Shard& shard, const KeyBatch& batch, Array<float>& rows,
                       RowLocations* locations) {
  const auto to = out(rows);
  const py::gil_scoped_release nogil;
  shard.pull_per_key(batch, to, locations);
}

void prefetch(const Shard& shard, const KeyBatch& batch, RowLocations* locations) {
  const py::gil_scoped_release nogil;
  shard.prefetch(slices(batch), locations);
}

py::object tier_stats(const Shard& shard) {
  const std::optional<TierStats> stats = [&] {
    const py::gil_scoped_release nogil;
    return shard.tier_stats();
  }();
  return stats ? py::object(dict_of(kTierStatistics, *stats)) : py::none();
}

std::uint64_t push_rows_per_key(Shard& shard, const KeyBatch& batch, const Array<float>& grads,
                                const std::optional<Array<std::uint32_t>>& counts, std::uint32_t clock,
                                RowLocations* locations) {
  const auto from = in(grads);
  const OccurrenceCounts occurrences{.counts = counts ? in(*counts) : std::span<const std::uint32_t>(),
                                     .clock = clock};
  const py::gil_scoped_release nogil;
  return shard.push_per_key(batch, from, occurrences, locations);
}

template <class Batch>
std::uint64_t push_rows(Shard& shard, const Batch& batch, const Array<float>& grads,
                        const std::optional<Array<std::uint32_t>>& counts, std::uint32_t clock,
                        RowLocations* locations) {
  const auto from = in(grads);
  SHOAL_CHECK(from.size() == batch.size() * shard.rows().dim(), "grads must be len(keys) x dim");
  const OccurrenceCounts occurrences{.counts = counts ? in(*counts) : std::span<const std::uint32_t>(),
                                     .clock = clock};
  const py::gil_scoped_release nogil;
  return shard.push(slices(batch), from, occurrences, nullptr, locations);
}

void assign(Shard& shard, const KeyBatch& batch, const Array<float>& rows, std::uint32_t clock) {
  const auto from = in(rows);
  const py::gil_scoped_release nogil;
  shard.assign(slices(batch), from, clock);
}

std::size_t erase(Shard& shard, const KeyBatch& batch) {
  const py::gil_scoped_release nogil;
  return shard.erase(slices(batch));
}

Array<std::uint8_t> contains(const Shard& shard, const KeyBatch& batch) {
  Array<std::uint8_t> there = fresh<std::uint8_t>(batch.size());
  const auto to = out(there);
  const py::gil_scoped_release nogil;
  shard.contains(slices(batch), to);
  return there;
}

Array<float> state(const Shard& shard, const KeyBatch& batch, std::size_t column) {
  Array<float> values = fresh<float>(batch.size(), column == shard.rows().columns() ? 1 : shard.rows().dim());
  const auto to = out(values);
  const py::gil_scoped_release nogil;
  shard.state(slices(batch), column, to);
  return values;
}

Array<std::uint32_t> metadata(const Shard& shard, const KeyBatch& batch, std::size_t k) {
  Array<std::uint32_t> values = fresh<std::uint32_t>(batch.size());
  const auto to = out(values);
  const py::gil_scoped_release nogil;
  shard.metadata(slices(batch), k, to);
  return values;
}

void check_slot(const Shard& shard, std::size_t slot) {
  SHOAL_CHECK(slot < shard.slots().count(), "there is no slot " + std::to_string(slot));
}

// (rows, the section's bytes, the filter's bytes)
py::tuple section(const Shard& shard, std::size_t slot) {
  check_slot(shard, slot);
  std::vector<std::byte> bytes;
  std::vector<std::byte> filter;
  std::size_t rows = 0;
  {
    const py::gil_scoped_release nogil;
    rows = shard.section(Slot{static_cast<std::uint32_t>(slot)}, bytes);
    shard.filter(Slot{static_cast<std::uint32_t>(slot)}, filter);
  }
  return py::make_tuple(rows, owned(std::move(bytes)), owned(std::move(filter)));
}

// Keeps the shard alive as long as the result. Done by hand: keep_alive<0, 1> also inspects the result of a
// call whose arguments did not match, which is null, and crashes (pybind11 3.1).
py::object snapshot(const py::object& self, std::uint32_t clock, const std::string& kind, std::size_t most,
                    const std::string& purpose) {
  auto made =
      std::make_unique<Snapshot>(self.cast<Shard&>(), clock, kind_of(kind), most, purpose_of(purpose));
  py::object held = py::cast(std::move(made));
  py::detail::keep_alive_impl(held, self);
  return held;
}

Snapshot::Piece take(Snapshot& snapshot, std::size_t slot) {
  const py::gil_scoped_release nogil;
  return snapshot.take(Slot{static_cast<std::uint32_t>(slot)});
}

// (rows, the section's bytes) of a base with a delta applied to it.
py::tuple merge(const Shard& shard, std::size_t cut, std::size_t base_rows, const Array<std::uint8_t>& base,
                std::size_t delta_rows, const Array<std::uint8_t>& delta, unsigned bits, std::size_t count,
                const Array<std::uint8_t>& ranges) {
  const auto from = std::as_bytes(in(base));
  const auto over = std::as_bytes(in(delta));
  const auto saved = std::as_bytes(in(ranges));
  std::vector<std::byte> merged;
  std::size_t rows = 0;
  {
    const py::gil_scoped_release nogil;
    rows = SectionCodec(shard.rows())
               .merge(base_rows, from, delta_rows, over, DirtyRanges(Slots(cut), bits, count, saved), merged);
  }
  return py::make_tuple(rows, owned(std::move(merged)));
}

std::size_t restore(Shard& shard, std::size_t rows, const Array<std::uint8_t>& section) {
  const auto bytes = std::as_bytes(in(section));
  const py::gil_scoped_release nogil;
  return shard.restore(rows, bytes);
}

void reserve(Shard& shard, const std::vector<std::size_t>& rows) {
  const py::gil_scoped_release nogil;
  shard.reserve(Slots(rows.size()), rows);
}

// (hashes, weights) of one slot.
py::tuple read_slot(const Shard& shard, std::size_t slot) {
  check_slot(shard, slot);
  std::vector<std::uint64_t> hashes;
  std::vector<float> weights;
  {
    const py::gil_scoped_release nogil;
    shard.read_slot(Slot{static_cast<std::uint32_t>(slot)}, hashes, weights);
  }
  return rows_of(hashes, weights, shard.rows().dim());
}

// The same for a snapshot.
py::tuple read_slot_then(Snapshot& snapshot, std::size_t slot) {
  std::vector<std::uint64_t> hashes;
  std::vector<float> weights;
  {
    const py::gil_scoped_release nogil;
    snapshot.read_slot(Slot{static_cast<std::uint32_t>(slot)}, hashes, weights);
  }
  return rows_of(hashes, weights, snapshot.dim());
}

// (hashes, weights, bits, count, ranges) of a delta.
py::tuple read_changes(Snapshot& snapshot, std::size_t slot) {
  std::vector<std::uint64_t> hashes;
  std::vector<float> weights;
  Snapshot::Ranges ranges;
  {
    const py::gil_scoped_release nogil;
    ranges = snapshot.read_changes(Slot{static_cast<std::uint32_t>(slot)}, hashes, weights);
  }
  const py::tuple rows = rows_of(hashes, weights, snapshot.dim());
  return py::make_tuple(rows[0], rows[1], ranges.bits, ranges.count, owned(std::move(ranges.bytes)));
}

// The results of all slots, concatenated (shard/reductions.h).
Array<double> reduced(Shard& shard, std::uint32_t function, const Array<double>& parameters) {
  const auto from = in(parameters);
  std::vector<double> answers;
  {
    const py::gil_scoped_release nogil;
    answers = reduce(shard, Function{function}, from, 0, shard.slots().count());
  }
  return copied(answers);
}

// Words; see Shard::sweep.
Array<std::uint64_t> sweep(Shard& shard, const Array<double>& rules, std::uint32_t clock, bool dry_run) {
  const std::vector<Expiry> asked = Lifecycle::expiries(in(rules));
  std::vector<std::uint64_t> words;
  {
    const py::gil_scoped_release nogil;
    words = shard.sweep(0, shard.slots().count(), clock, asked, dry_run);
  }
  return copied(words);
}

Array<std::uint8_t> filter(const Shard& shard, std::size_t slot) {
  check_slot(shard, slot);
  std::vector<std::byte> bytes;
  {
    const py::gil_scoped_release nogil;
    shard.filter(Slot{static_cast<std::uint32_t>(slot)}, bytes);
  }
  return Array<std::uint8_t>(static_cast<py::ssize_t>(bytes.size()),
                             reinterpret_cast<const std::uint8_t*>(bytes.data()));
}

void restore_filter(Shard& shard, std::size_t cut, std::size_t slot, const Array<std::uint8_t>& filter) {
  const auto bytes = std::as_bytes(in(filter));
  const py::gil_scoped_release nogil;
  shard.restore_filter(Slots(cut), Slot{static_cast<std::uint32_t>(slot)}, bytes);
}

py::dict stats(const Shard& shard) {
  const ShardStats stats = [&] {
    const py::gil_scoped_release nogil;  // a tier waits for its turn
    return shard.stats();
  }();
  py::dict result = dict_of(kShardStatistics, stats);
  add_to(result, kGrowthStatistics, stats.growth);
  return result;
}

}  // namespace

Purpose purpose_of(const std::string& name) {
  SHOAL_CHECK(name == "save" || name == "export", "there is no purpose " + name);
  return name == "save" ? Purpose::kSave : Purpose::kExport;
}

Snapshot::Kind kind_of(const std::string& name) {
  SHOAL_CHECK(name == "plain" || name == "base" || name == "delta", "there is no snapshot " + name);
  return name == "plain"  ? Snapshot::Kind::kPlain
         : name == "base" ? Snapshot::Kind::kBase
                          : Snapshot::Kind::kDelta;
}

std::vector<std::string> columns_of(const Shard& shard) {
  const auto names = shard.spec().optimizer.columns();
  std::vector<std::string> result(names.begin(), names.end());
  if (shard.rows().has_row_state()) {
    result.emplace_back(shard.spec().optimizer.row_state());
  }
  return result;
}

py::tuple section_of(Snapshot::Piece&& piece) {
  return py::make_tuple(piece.rows, owned(std::move(piece.section)), owned(std::move(piece.filter)));
}

py::tuple changes_of(Snapshot::Piece&& piece) {
  const py::object filter = piece.has_filter ? py::object(owned(std::move(piece.filter))) : py::none();
  return py::make_tuple(piece.rows, owned(std::move(piece.section)), filter, piece.ranges.bits,
                        piece.ranges.count, owned(std::move(piece.ranges.bytes)));
}

void add_shard(py::module_& module) {
  static const py::exception<void> shoal_error(module, "ShoalError");
  py::register_exception<WrongProcessError>(module, "WrongProcessError", shoal_error.ptr());
  py::register_exception<MemoryBudgetExceededError>(module, "MemoryBudgetExceededError", shoal_error.ptr());
  py::class_<Budget>(module, "Budget")
      .def(py::init([](std::size_t slots, std::uint64_t bytes) {
             return std::make_unique<Budget>(Slots(slots), bytes);
           }),
           py::arg("slots"), py::arg("bytes"));
  // Descriptions are validated at construction: an invalid one is a ValueError that names the parameter.
  module.def(
      "check_optimizer",
      [](const std::string& name, std::map<std::string, double> params) {
        Optimizer(name, std::move(params));
      },
      py::arg("name"), py::arg("params"));
  module.def(
      "schedule_at",
      [](std::map<std::string, double> params, std::uint32_t clock) {
        return Schedule::take(params).at(clock);
      },
      py::arg("params"), py::arg("clock"));
  module.def(
      "check_init", [](const std::string& name, double parameter) { Init(name, parameter, 0); },
      py::arg("name"), py::arg("parameter"));
  module.def(
      "check_admission",
      [](const std::string& name, std::map<std::string, double> params) {
        Lifecycle::admission({name, std::move(params)});
      },
      py::arg("name"), py::arg("params"));
  module.def(
      "check_expiry",
      [](const std::string& name, std::map<std::string, double> params) {
        Lifecycle::expiry({name, std::move(params)});
      },
      py::arg("name"), py::arg("params"));
  py::class_<RowLocations>(module, "RowLocations")
      .def(py::init([](const KeyBatch& batch) { return std::make_unique<RowLocations>(batch.hashes()); }),
           py::arg("batch"), py::keep_alive<1, 2>());
  py::class_<Shard>(module, "Shard")
      .def(py::init(&make_shard), py::arg("spec"), py::arg("slots"), py::arg("pool"),
           py::arg("budget") = py::none(), py::arg("tier") = py::none(), py::keep_alive<1, 4>(),
           py::keep_alive<1, 5>())
      .def("pull", &pull_rows, py::arg("batch"), py::arg("rows").noconvert(),
           py::arg("locations") = py::none())
      .def("pull_per_key", &pull_rows_per_key, py::arg("batch"), py::arg("rows").noconvert(),
           py::arg("locations") = py::none())
      .def("prefetch", &prefetch, py::arg("batch"), py::arg("locations") = py::none())
      .def("reads_ahead", &Shard::has_source)
      .def("push", &push_rows<KeyBatch>, py::arg("batch"), py::arg("grads").noconvert(),
           py::arg("counts").noconvert() = py::none(), py::arg("clock") = 0,
           py::arg("locations") = py::none())
      .def("push", &push_rows<SummedBatch>, py::arg("batch"), py::arg("grads").noconvert(),
           py::arg("counts").noconvert() = py::none(), py::arg("clock") = 0,
           py::arg("locations") = py::none())
      .def("push_per_key", &push_rows_per_key, py::arg("batch"), py::arg("grads").noconvert(),
           py::arg("counts").noconvert() = py::none(), py::arg("clock") = 0,
           py::arg("locations") = py::none())
      .def("assign", &assign, py::arg("batch"), py::arg("rows").noconvert(), py::arg("clock") = 0)
      .def("erase", &erase, py::arg("batch"))
      .def("contains", &contains, py::arg("batch"))
      .def("columns", &columns_of)
      .def("state", &state, py::arg("batch"), py::arg("column"))
      .def("metadata_names", [](const Shard& shard) { return shard.rows().metadata().names(); })
      .def("metadata", &metadata, py::arg("batch"), py::arg("k"))
      .def("section", &section, py::arg("slot"))
      .def("restore", &restore, py::arg("rows"), py::arg("section").noconvert())
      .def("reserve", &reserve, py::arg("rows"))
      .def("read_slot", &read_slot, py::arg("slot"))
      .def("reduce", &reduced, py::arg("function"), py::arg("parameters").noconvert())
      .def("sweep", &sweep, py::arg("rules").noconvert(), py::arg("clock") = 0, py::kw_only(),
           py::arg("dry_run"))
      .def("filter", &filter, py::arg("slot"))
      .def("restore_filter", &restore_filter, py::arg("cut"), py::arg("slot"), py::arg("filter").noconvert())
      .def("snapshot", &snapshot, py::arg("clock") = 0, py::arg("kind") = "plain", py::arg("most") = 0,
           py::arg("purpose") = "save")
      .def(
          "base",
          [](const Shard& shard, const std::string& purpose) {
            return shard.changes().base(purpose_of(purpose));
          },
          py::arg("purpose") = "save")
      .def(
          "track", [](Shard& shard, const std::string& base) { shard.changes().track(base); },
          py::arg("base"), py::call_guard<py::gil_scoped_release>())
      .def("merge", &merge, py::arg("cut"), py::arg("base_rows"), py::arg("base").noconvert(),
           py::arg("delta_rows"), py::arg("delta").noconvert(), py::arg("bits"), py::arg("count"),
           py::arg("ranges").noconvert())
      .def_property_readonly("is_being_saved",
                             [](const Shard& shard) { return shard.changes().has_snapshot(); })
      .def("adopt_after_fork", &Shard::adopt_after_fork)
      .def("pause_writers", &Shard::pause_writers, py::call_guard<py::gil_scoped_release>())
      .def("resume_writers", &Shard::resume_writers)
      .def("table_clock", &Shard::table_clock, py::arg("store_clock"))
      .def("set_clock", &Shard::set_clock, py::arg("table_clock"), py::arg("store_clock"))
      .def_property("step", &Shard::step, &Shard::set_step)
      .def_property_readonly("row_bytes", [](const Shard& shard) { return shard.rows().bytes(); })
      .def("bytes_at", &Shard::bytes_at, py::arg("rows"))
      .def(
          "saved_bytes_at",
          [](const Shard& shard, std::size_t rows) {
            return SectionCodec(shard.rows()).bytes(shard.slots(), rows);
          },
          py::arg("rows"))
      .def("__len__", &Shard::size, py::call_guard<py::gil_scoped_release>())
      .def("stats", &stats)
      .def("tier_stats", &tier_stats)
      .def("verify", &Shard::verify, py::call_guard<py::gil_scoped_release>());
  py::register_exception<SnapshotLostError>(module, "SnapshotLostError", shoal_error.ptr());
  py::class_<Snapshot>(module, "Snapshot")
      .def(
          "section", [](Snapshot& snapshot, std::size_t slot) { return section_of(take(snapshot, slot)); },
          py::arg("slot"))
      .def(
          "changes", [](Snapshot& snapshot, std::size_t slot) { return changes_of(take(snapshot, slot)); },
          py::arg("slot"))
      .def("read_slot", &read_slot_then, py::arg("slot"))
      .def("read_changes", &read_changes, py::arg("slot"))
      .def("done", &Snapshot::done, py::arg("name"))
      .def("close", &Snapshot::close, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("step", &Snapshot::step)
      .def_property_readonly("table_clock", &Snapshot::table_clock)
      .def_property_readonly("rows", &Snapshot::rows)
      .def_property_readonly("bytes", &Snapshot::bytes);
}

}  // namespace shoal::bind

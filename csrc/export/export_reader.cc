#include "export/export_reader.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/half.h"
#include "base/mix_block.h"

namespace shoal {

namespace {

constexpr std::size_t kMinKeysPerPart = 4096;  // keys per thread, at least

constexpr std::array<std::byte, kCacheLine> make_empty_line() {
  std::array<std::byte, kCacheLine> line{};
  line[LineFormat::kReach] = std::byte{LineFormat::kEmpty};
  return line;
}
alignas(kCacheLine) constexpr std::array<std::byte, kCacheLine> kEmptyLine = make_empty_line();

// What a key without a row reads: its initial row, if that is the same for all keys and the dtype has it,
// else a row that is marked as removed, which is replaced by the initial one.
std::vector<std::byte> row_of_absent(const RowFormat& form, const Init& init) {
  std::vector<std::byte> row(form.bytes());
  std::vector<float> initial(form.dim());
  std::vector<float> read(form.dim());
  init.fill(0, form.dim(), initial.data());
  form.encode(initial.data(), row.data());
  form.decode(row.data(), read.data());
  const bool is_exact = std::memcmp(initial.data(), read.data(), form.dim() * sizeof(float)) == 0;
  if (!init.same_for_all() || !is_exact || form.is_removed(row.data())) {
    form.encode_removed(row.data());
  }
  return row;
}

// Reads the hashes of keys, a run at a time.
class KeyLoader {
 public:
  KeyLoader(std::span<const std::uint64_t> keys, ExportReader::KeyKind by) : keys_(keys), by_(by) {}

  std::size_t runs() const noexcept { return ProbeRun::count(keys_.size()); }
  void operator()(std::size_t r, ProbeRun& run) const noexcept {
    const std::size_t first = r * ProbeRun::kMaxSize;
    run.size = std::min(ProbeRun::kMaxSize, keys_.size() - first);
    const std::uint64_t* const from = keys_.data() + first;
    prefetch_later(first);
    if (by_ == ExportReader::KeyKind::kKey) {
      mix_block(from, run.size, run.hashes.data());
    } else {
      std::copy_n(from, run.size, run.hashes.data());
    }
  }

 private:
  static constexpr std::size_t kAhead = 8 * ProbeRun::kMaxSize;

  // The hardware prefetches a sequence of keys as well, but too late between so many other lines.
  void prefetch_later(std::size_t first) const noexcept {
    constexpr std::size_t kKeysOfLine = kCacheLine / sizeof(std::uint64_t);
    for (std::size_t k = first + kAhead; k < std::min(first + kAhead + ProbeRun::kMaxSize, keys_.size());
         k += kKeysOfLine) {
      __builtin_prefetch(keys_.data() + k);
    }
  }

  std::span<const std::uint64_t> keys_;
  ExportReader::KeyKind by_;
};

// Lookups of weights in a single layer (ExportReader::pipeline).
template <class Fill>
struct PullStages {
  const IndexProbe& by;
  const RowFormat& form;
  std::size_t width;
  IndexProbe::Widen widen;  // null if there is none
  float* weights;
  const Fill& fill;  // replaces the row of a hash

  float* weights_of(std::size_t r) const noexcept { return weights + r * ProbeRun::kMaxSize * form.dim(); }
  void probe(std::size_t, ProbeRun& run, const ProbeRun& later) const noexcept {
    by.probe(width, run, later);
  }
  void resolve(std::size_t, ProbeRun& run) const noexcept { by.resolve(width, run); }
  bool probe_and_use(ProbeRun& run, const ProbeRun& later, std::size_t r,
                     const ProbeRun& ready) const noexcept {
    if (widen == nullptr) {
      return false;
    }
    for (std::uint32_t removed = widen(by, run, later, ready, weights_of(r)); removed != 0;
         removed &= removed - 1) {
      const auto i = static_cast<std::size_t>(std::countr_zero(removed));
      fill(ready.hashes[i], weights_of(r) + i * form.dim());
    }
    return true;
  }
  void use(std::size_t r, const ProbeRun& run) const noexcept {
    std::array<std::uint16_t, ProbeRun::kMaxSize> removed;
    const std::size_t count =
        form.decode_rows(std::span(run.rows).first(run.size), weights_of(r), removed.data());
    for (std::size_t k = 0; k < count; ++k) {
      fill(run.hashes[removed[k]], weights_of(r) + removed[k] * form.dim());
    }
  }
};

}  // namespace

ExportReader::ExportReader(const RowFormat& form, const Init& init, Slots slots)
    : form_(form), init_(init), slots_(slots), probe_(form, slots, row_of_absent(form, init)) {}

Section ExportReader::empty_section() noexcept {
  return {.lines = kEmptyLine.data(),
          .homes = 1,
          .count = 1,
          .rows_count = 0,
          .reach = 0,
          .width = LineFormat::kMaxDim};
}

void ExportReader::add_layer() {
  layers_.push_back(
      {.indexes = std::vector<SlotIndexView>(slots_.count(), {kEmptyLine.data(), 1, 1}),
       .row_arrays = std::vector<RowArrayView>(slots_.count(), {probe_.no_row(), 0, LineFormat::kMaxDim}),
       .sections = std::vector<Section>(slots_.count(), empty_section())});
}

void ExportReader::add(Slot slot, const SectionShape& shape, std::span<const std::byte> bytes) {
  const std::string where = "slot " + std::to_string(index_of(slot)) + ": ";
  SHOAL_CHECK(!layers_.empty() && index_of(slot) < slots_.count(), where + "there is no such slot");
  SHOAL_CHECK(shape.width >= LineFormat::kMinRowBytes && shape.width <= LineFormat::kMaxDim,
              where + "hashes of " + std::to_string(shape.width) + " bytes instead of 5 to 8");
  SHOAL_CHECK(shape.homes >= 1 && shape.homes <= shape.lines && shape.lines <= bytes.size() / kCacheLine &&
                  shape.rows <= bytes.size() && shape.reach < shape.lines &&
                  std::max(shape.lines, shape.rows) <= UINT32_MAX && bytes.size() == shape.bytes(form_),
              where + std::to_string(bytes.size()) + " bytes are not " + std::to_string(shape.lines) +
                  " lines and " + std::to_string(shape.rows) + " rows");
  SHOAL_CHECK(reinterpret_cast<std::uintptr_t>(bytes.data()) % kCacheLine == 0,
              where + "its section does not start at a cache line");
  SHOAL_CHECK((Homes{slots_, shape.homes}.are_distinct(shape.width, shape.reach)),
              where + std::to_string(shape.width) + " bytes do not distinguish the hashes of a line");
  const auto small = [](std::uint64_t number) { return static_cast<std::uint32_t>(number); };
  Layer& layer = layers_.back();
  layer.width = layer.empty || layer.width == shape.width ? shape.width : 0;
  layer.empty = false;
  layer.indexes[index_of(slot)] = {bytes.data(), small(shape.homes), small(shape.lines)};
  layer.sections[index_of(slot)] = {.lines = bytes.data(),
                                    .homes = small(shape.homes),
                                    .count = small(shape.lines),
                                    .rows_count = small(shape.rows),
                                    .reach = small(shape.reach),
                                    .width = small(shape.width)};
  layer.row_arrays[index_of(slot)] = {
      shape.rows != 0 ? layer.sections[index_of(slot)].rows() : probe_.no_row(), small(shape.rows),
      small(shape.width)};
}

// --- lookups -----------------------------------------------------------------------------------------------

// Calls load(r, run) for each run, then stages.probe(r, run, later), stages.resolve(r, run) and stages.use(r,
// run), or stages.probe_and_use(run, later, ready, ready_run) for a run and one that is ready to be used,
// which returns whether it did. Each stage is some runs behind the one before it, so that what it reads has
// been prefetched (export/index_probe.h).
template <class Load, class Stages>
void ExportReader::pipeline(const Layer& layer, std::size_t runs, const Load& load,
                            const Stages& stages) const {
  static_assert(ProbeRun::kRing > 3 * ProbeRun::kStage);
  std::array<ProbeRun, ProbeRun::kRing> ring;
  const auto run_of = [&](std::size_t r) -> ProbeRun& { return ring[r % ring.size()]; };
  for (std::size_t now = 0; now < runs + 3 * ProbeRun::kStage; ++now) {
    if (now < runs) {
      load(now, run_of(now));
      if (now < ProbeRun::kStage) {
        probe_.prepare<true>(layer.view(), run_of(now));
      } else {
        probe_.prepare<false>(layer.view(), run_of(now));
      }
    }
    // The number of a stage that has not begun wraps around, and is not below `runs`.
    const std::size_t ready = now - 3 * ProbeRun::kStage;
    bool used = false;
    if (const std::size_t r = now - ProbeRun::kStage; r < runs) {
      const ProbeRun& later = run_of(now < runs ? now : r);
      used = ready < runs && stages.probe_and_use(run_of(r), later, ready, run_of(ready));
      if (!used) {
        stages.probe(r, run_of(r), later);
      }
    }
    if (const std::size_t r = now - 2 * ProbeRun::kStage; r < runs) {
      stages.resolve(r, run_of(r));
    }
    if (ready < runs && !used) {
      stages.use(ready, run_of(ready));
    }
  }
}

// Calls use(r, run) for each run, once run.rows are those of the layer.
template <class Load, class Use>
void ExportReader::find_rows(const Layer& layer, std::size_t runs, const Load& load, const Use& use) const {
  struct Stages {
    const IndexProbe& by;
    std::size_t width;
    const Use& use_rows;

    void probe(std::size_t, ProbeRun& run, const ProbeRun& later) const noexcept {
      by.probe(width, run, later);
    }
    void resolve(std::size_t, ProbeRun& run) const noexcept { by.resolve(width, run); }
    bool probe_and_use(ProbeRun&, const ProbeRun&, std::size_t, const ProbeRun&) const noexcept {
      return false;
    }
    void use(std::size_t r, const ProbeRun& run) const { use_rows(r, run); }
  };
  pipeline(layer, runs, load, Stages{.by = probe_, .width = layer.width, .use_rows = use});
}

// Looks up the open hashes of a block in the older layers, one after the other; calls use(position, row) for
// each layer.
template <class Use>
void ExportReader::find_in_older_layers(Block& block, const Use& use) const {
  for (auto layer = layers_.rbegin() + 1; layer < layers_.rend() && block.open != 0; ++layer) {
    const std::size_t runs = ProbeRun::count(block.open);
    // A run is loaded before it is used, so those that stay open are moved over what has been read.
    const KeyLoader load({block.open_hashes.data(), std::exchange(block.open, 0)}, KeyKind::kHash);
    find_rows(*layer, runs, load, [&](std::size_t r, const ProbeRun& run) {
      for (std::size_t i = 0; i < run.size; ++i) {
        const std::uint16_t position = block.positions[r * ProbeRun::kMaxSize + i];
        use(position, run.rows[i]);
        block.add(run.hashes[i], position, run.is_absent(i));
      }
    });
  }
}

// Calls use(first, count) for the keys of each thread.
template <class Use>
void ExportReader::for_each_part(std::size_t keys, ThreadPool& pool, const Use& use) {
  const Partition partition{keys, parts_for(keys, kMinKeysPerPart, pool.threads())};
  const auto part = [&](std::size_t p) {
    use(partition.begin(p), partition.begin(p + 1) - partition.begin(p));
  };
  if (partition.parts == 1) {
    part(0);
  } else {
    pool.run(partition.parts, part);
  }
}

// Calls use(first, hashes, rows) for some keys at a time, at most Block::kMaxSize; `first` is the index of
// the first one.
template <class Use>
void ExportReader::for_each_rows(std::span<const std::uint64_t> keys, KeyKind by, ThreadPool& pool,
                                 const Use& use) const {
  const auto whole = [&](std::size_t begin, std::size_t count) {
    const KeyLoader load(keys.subspan(begin, count), by);
    find_rows(layers_.back(), load.runs(), load, [&](std::size_t r, const ProbeRun& run) {
      use(begin + r * ProbeRun::kMaxSize, std::span(run.hashes).first(run.size),
          std::span(run.rows).first(run.size));
    });
  };
  const auto by_layer = [&](std::size_t begin, std::size_t count) {
    Block block;
    for (std::size_t first = begin; first < begin + count; first += Block::kMaxSize) {
      const std::size_t size = std::min(Block::kMaxSize, begin + count - first);
      const KeyLoader load(keys.subspan(first, size), by);
      block.open = 0;
      find_rows(layers_.back(), load.runs(), load, [&](std::size_t r, const ProbeRun& run) {
        for (std::size_t i = 0; i < run.size; ++i) {
          const std::size_t position = r * ProbeRun::kMaxSize + i;
          block.hashes[position] = run.hashes[i];
          block.rows[position] = run.rows[i];
          block.add(run.hashes[i], static_cast<std::uint16_t>(position), run.is_absent(i));
        }
      });
      find_in_older_layers(block,
                           [&](std::size_t position, const std::byte* row) { block.rows[position] = row; });
      use(first, std::span(block.hashes).first(size), std::span(block.rows).first(size));
    }
  };
  SHOAL_DCHECK(!layers_.empty());
  if (layers_.size() == 1) {
    for_each_part(keys.size(), pool, whole);
  } else {
    for_each_part(keys.size(), pool, by_layer);
  }
}

// Rows of one weight: most are read from the line that holds their hash.
void ExportReader::pull_scalars(std::span<const std::uint64_t> keys, KeyKind by, std::span<float> weights,
                                ThreadPool& pool) const {
  // Calls resolved(r, run) once the weights of a run are known, apart from those that this layer does not
  // have.
  const auto find_weights = [&](const Layer& layer, const KeyLoader& load, float* to, const auto& resolved) {
    struct Stages {
      const IndexProbe& by;
      std::size_t width;
      float* to;
      decltype(resolved) done;

      void probe(std::size_t r, ProbeRun& run, const ProbeRun& later) const noexcept {
        by.probe_scalars(width, run, later, to + r * ProbeRun::kMaxSize);
      }
      void resolve(std::size_t r, ProbeRun& run) const noexcept {
        by.resolve_scalars(width, run, to + r * ProbeRun::kMaxSize);
        done(r, run);
      }
      bool probe_and_use(ProbeRun&, const ProbeRun&, std::size_t, const ProbeRun&) const noexcept {
        return false;
      }
      void use(std::size_t, const ProbeRun&) const noexcept {}
    };
    pipeline(layer, load.runs(), load,
             Stages{.by = probe_, .width = layer.width, .to = to, .done = resolved});
  };
  float initial;
  init_.fill(0, 1, &initial);
  // Replaces each NaN.
  const auto fill = [&](std::span<const std::uint64_t> hashes, float* to) {
    if (init_.same_for_all()) {
      for (std::size_t i = 0; i < hashes.size(); ++i) {  // without a branch
        const auto bits = std::bit_cast<std::uint32_t>(to[i]);
        const std::uint32_t none = 0U - ((bits << 1U) > 0xff000000U ? 1U : 0U);
        to[i] = std::bit_cast<float>((bits & ~none) | (std::bit_cast<std::uint32_t>(initial) & none));
      }
      return;
    }
    for (std::size_t i = 0; i < hashes.size(); ++i) {
      if (std::isnan(to[i])) {
        init_.fill(hashes[i], 1, to + i);
      }
    }
  };
  const auto whole = [&](std::size_t begin, std::size_t count) {
    float* const to = weights.data() + begin;
    find_weights(layers_.back(), {keys.subspan(begin, count), by}, to,
                 [&](std::size_t r, const ProbeRun& run) {
                   fill(std::span(run.hashes).first(run.size), to + r * ProbeRun::kMaxSize);
                 });
  };
  const auto by_layer = [&](std::size_t begin, std::size_t count) {
    Block block;
    for (std::size_t first = begin; first < begin + count; first += Block::kMaxSize) {
      const std::size_t size = std::min(Block::kMaxSize, begin + count - first);
      float* const to = weights.data() + first;
      block.open = 0;
      find_weights(layers_.back(), {keys.subspan(first, size), by}, to,
                   [&](std::size_t r, const ProbeRun& run) {
                     for (std::size_t i = 0; i < run.size; ++i) {
                       const std::size_t position = r * ProbeRun::kMaxSize + i;
                       block.hashes[position] = run.hashes[i];
                       block.add(run.hashes[i], static_cast<std::uint16_t>(position),
                                 IndexProbe::absent(to[position]));
                     }
                   });
      find_in_older_layers(block, [&](std::size_t position, const std::byte* row) {
        if (!is_missing(row)) {
          form_.decode(row, to + position, scale_of(row));
        }
      });
      fill(std::span(block.hashes).first(size), to);
    }
  };
  if (layers_.size() == 1) {
    for_each_part(keys.size(), pool, whole);
  } else {
    for_each_part(keys.size(), pool, by_layer);
  }
}

float ExportReader::scale_of(const std::byte* row) const noexcept {
  if (!form_.shares_scale()) {
    return 0.0F;
  }
  const std::byte* const line = row - reinterpret_cast<std::uintptr_t>(row) % kCacheLine;
  std::uint16_t bits;
  std::memcpy(&bits, line + LineFormat::kScale, sizeof bits);
  return from_bfloat16(bits);
}

void ExportReader::pull(std::span<const std::uint64_t> keys, KeyKind by, std::span<float> weights,
                        ThreadPool& pool) const {
  const std::size_t dim = form_.dim();
  SHOAL_CHECK(weights.size() == keys.size() * dim, "weights must be len(keys) x dim");
  if (layers_.empty()) {
    for (std::size_t i = 0; i < keys.size(); ++i) {
      init_.fill(by == KeyKind::kKey ? mix(keys[i]) : keys[i], dim, weights.data() + i * dim);
    }
    return;
  }
  if (dim == 1) {
    return pull_scalars(keys, by, weights, pool);
  }
  const auto fill = [&](std::uint64_t hash, float* to) { init_.fill(hash, dim, to); };
  if (layers_.size() == 1) {
    return for_each_part(keys.size(), pool, [&](std::size_t begin, std::size_t count) {
      const KeyLoader load(keys.subspan(begin, count), by);
      pipeline(layers_.back(), load.runs(), load,
               PullStages<decltype(fill)>{.by = probe_,
                                          .form = form_,
                                          .width = layers_.back().width,
                                          .widen = probe_.widens(layers_.back().width),
                                          .weights = weights.data() + begin * dim,
                                          .fill = fill});
    });
  }
  for_each_rows(keys, by, pool, [&](std::size_t first, auto hashes, auto rows) {
    float* const to = weights.data() + first * dim;
    std::array<std::uint16_t, Block::kMaxSize> removed;
    const std::size_t count = form_.decode_rows(rows, to, removed.data());
    for (std::size_t k = 0; k < count; ++k) {
      fill(hashes[removed[k]], to + removed[k] * dim);
    }
  });
}

void ExportReader::contains(std::span<const std::uint64_t> keys, KeyKind by, std::span<std::uint8_t> there,
                            ThreadPool& pool) const {
  SHOAL_CHECK(there.size() == keys.size(), "there must be one answer for each key");
  if (layers_.empty()) {
    std::fill(there.begin(), there.end(), std::uint8_t{0});
    return;
  }
  for_each_rows(keys, by, pool, [&](std::size_t first, auto, auto rows) {
    for (std::size_t i = 0; i < rows.size(); ++i) {
      there[first + i] = is_missing(rows[i]) ? 0 : 1;
    }
  });
}

// --- by slot -----------------------------------------------------------------------------------------------

// The rows of one layer in ascending order of hash.
void ExportReader::entries_of(const Section& section, Slot slot, std::span<const HashRange> within,
                              std::vector<Entry>& found) const {
  found.clear();
  const Homes homes{slots_, section.homes};
  const LineFormat& form = probe_.form_of(section);
  auto range = within.begin();
  std::uint64_t last = slots_.first_hash(slot);  // the previous hash
  bool any = false;
  for (std::uint64_t b = 0; b < section.count && range != within.end(); ++b) {
    // The hashes of a range are in the lines from the home of its first hash to `reach` lines after that of
    // its last.
    for (; range != within.end() && b > scale(range->last, section.homes) + section.reach; ++range) {
    }
    if (range == within.end()) {
      break;
    }
    b = std::max(b, scale(range->first, section.homes));
    const std::byte* const line = section.lines + b * kCacheLine;
    if (line[LineFormat::kReach] == std::byte{LineFormat::kEmpty}) {
      continue;
    }
    const std::uint64_t least = homes.least(slot, b, section.reach);
    std::uint64_t before = 0;
    for (std::size_t lane = 0; lane < form.lanes; ++lane) {
      const std::uint64_t stored = form.stored(line, lane);
      if (lane != 0 && stored == before) {
        break;  // unused lanes
      }
      before = stored;
      const std::uint64_t hash = Homes::hash(least, section.width, stored);
      const std::byte* const row = probe_.row_of(section, line, static_cast<unsigned>(lane));
      SHOAL_CHECK(row != nullptr && (!any || last < hash) && slots_.of(hash) == slot,
                  "line " + std::to_string(b) + " of slot " + std::to_string(index_of(slot)) +
                      " has no ascending hashes with rows");
      last = hash;
      any = true;
      const std::uint64_t place = hash << slots_.bits();
      auto in = range;
      for (; in != within.end() && in->last < place; ++in) {
      }
      if (in != within.end() && in->first <= place) {
        found.push_back({hash, row});
      }
    }
  }
}

// The rows of a slot in ascending order of hash, for each hash the newest, including rows that are marked as
// removed.
void ExportReader::entries(Slot slot, std::span<const HashRange> within, std::vector<Entry>& found) const {
  found.clear();
  std::vector<Entry> fresh;
  std::vector<Entry> merged;
  for (const Layer& layer : layers_) {
    entries_of(layer.sections[index_of(slot)], slot, within, fresh);
    if (found.empty()) {
      found.swap(fresh);
      continue;
    }
    merged.clear();
    auto old = found.begin();
    for (const Entry& entry : fresh) {
      for (; old != found.end() && old->hash < entry.hash; ++old) {
        merged.push_back(*old);
      }
      old += old != found.end() && old->hash == entry.hash ? 1 : 0;
      merged.push_back(entry);
    }
    merged.insert(merged.end(), old, found.end());
    found.swap(merged);
  }
}

void ExportReader::read_slot(Slot slot, std::vector<std::uint64_t>& hashes,
                             std::vector<float>& weights) const {
  std::vector<Entry> found;
  entries(slot, kAll, found);
  std::erase_if(found, [&](const Entry& entry) { return form_.is_removed(entry.row); });
  hashes.resize(found.size());
  weights.resize(found.size() * form_.dim());
  for (std::size_t i = 0; i < found.size(); ++i) {
    hashes[i] = found[i].hash;
    form_.decode(found[i].row, weights.data() + i * form_.dim(), scale_of(found[i].row));
  }
}

void ExportReader::difference(Slot slot, std::span<const std::uint64_t> hashes,
                              std::span<const float> weights, std::vector<std::uint64_t>& changed,
                              std::vector<float>& rows, std::span<const HashRange> within) const {
  const std::size_t dim = form_.dim();
  SHOAL_CHECK(weights.size() == hashes.size() * dim, "weights must be len(hashes) x dim");
  std::vector<Entry> found;
  entries(slot, within, found);
  std::erase_if(found, [&](const Entry& entry) { return form_.is_removed(entry.row); });
  std::vector<float> scratch(2 * dim);
  std::vector<float> read(dim);
  std::vector<std::byte> encoded(form_.bytes());
  changed.clear();
  rows.clear();
  const auto put = [&](std::uint64_t hash, const float* row) {
    changed.push_back(hash);
    rows.insert(rows.end(), row, row + dim);
  };
  const auto remove = [&](std::uint64_t hash) {
    changed.push_back(hash);
    rows.insert(rows.end(), dim, std::numeric_limits<float>::quiet_NaN());
  };
  const auto same = [&](const Entry& old, const float* row) {
    if (form_.code() == RowFormat::Code::kInt8) {
      const float scale = scale_of(old.row);
      // Slightly more than half a step: an exported weight is off by up to exactly half a step.
      const float bound = form_.half_step(old.row, scale) * (1.0F + 0x1p-20F);
      form_.decode(old.row, read.data(), scale);
      for (std::size_t e = 0; e < dim; ++e) {
        if (std::abs(read[e] - row[e]) > bound) {
          return false;
        }
      }
      return true;
    }
    form_.encode(row, encoded.data());
    return std::memcmp(encoded.data(), old.row, form_.bytes()) == 0;
  };
  auto old = found.begin();
  for (std::size_t i = 0; i < hashes.size(); ++i) {
    for (; old != found.end() && old->hash < hashes[i]; ++old) {
      remove(old->hash);
    }
    const float* const row = weights.data() + i * dim;
    const bool had = old != found.end() && old->hash == hashes[i];
    if (reads_initial(form_, init_, hashes[i], row, scratch)) {
      if (had) {
        remove(hashes[i]);
      }
    } else if (!had || !same(*old, row)) {
      put(hashes[i], row);
    }
    old += had ? 1 : 0;
  }
  for (; old != found.end(); ++old) {
    remove(old->hash);
  }
}

}  // namespace shoal

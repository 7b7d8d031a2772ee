#include "export/export_reader.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

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

}  // namespace

ExportReader::ExportReader(const RowFormat& form, const Init& init, Slots slots)
    : form_(form), init_(init), slots_(slots), probe_(form, slots) {}

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
      {.indexes = std::vector<SlotIndexView>(slots_.count(), {kEmptyLine.data(), 1, LineFormat::kMaxDim}),
       .row_arrays = std::vector<RowArrayView>(slots_.count(), {kEmptyLine.data(), 0}),
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
  layer.indexes[index_of(slot)] = {bytes.data(), small(shape.homes), small(shape.width)};
  layer.sections[index_of(slot)] = {.lines = bytes.data(),
                                    .homes = small(shape.homes),
                                    .count = small(shape.lines),
                                    .rows_count = small(shape.rows),
                                    .reach = small(shape.reach),
                                    .width = small(shape.width)};
  layer.row_arrays[index_of(slot)] = {layer.sections[index_of(slot)].rows(), shape.rows};
}

// --- lookups --------------------------------------------------------------------------------------------------------

// Looks up in the older layers the hashes that the newest one does not have, those at the positions `open`.
void ExportReader::probe_older_layers(Run& run, std::span<const std::uint16_t> open,
                                      Run& scratch) const noexcept {
  std::array<std::uint16_t, Run::kMaxSize> positions;
  std::copy(open.begin(), open.end(), positions.begin());
  std::size_t count = open.size();
  for (auto layer = layers_.rbegin() + 1; layer != layers_.rend() && count != 0; ++layer) {
    scratch.size = count;
    for (std::size_t k = 0; k < count; ++k) {
      scratch.hashes[k] = run.hashes[positions[k]];
    }
    probe_.prepare(layer->view(), scratch);
    scratch.prefetch();
    scratch.set_next_lines({});
    probe_.probe(layer->width, scratch);
    probe_.resolve(layer->width, scratch);
    std::size_t left = 0;
    for (std::size_t k = 0; k < count; ++k) {
      run.rows[positions[k]] = scratch.rows[k];
      positions[left] = positions[k];
      left += scratch.rows[k] == nullptr ? 1U : 0U;
    }
    count = left;
  }
}

// Calls visitor.probe(newest, run, first), visitor.resolve(newest, run, first) and visitor.use(run, first) for each run of
// keys, whose first key has the index `first`. Each stage is one run behind the stage before it, so that what it reads has
// been prefetched.
template <class Visitor>
void ExportReader::for_each_run(std::span<const std::uint64_t> keys, KeyKind by, ThreadPool& pool,
                                const Visitor& visitor) const {
  const Partition partition{keys.size(), parts_for(keys.size(), kMinKeysPerPart, pool.threads())};
  const Layer* const newest = layers_.empty() ? nullptr : &layers_.back();
  const auto part = [&](std::size_t p) {
    const std::size_t begin = partition.begin(p);
    const std::size_t end = partition.begin(p + 1);
    const std::size_t runs = (end - begin + Run::kMaxSize - 1) / Run::kMaxSize;
    std::array<Run, 4> ring;
    const auto run_of = [&](std::size_t r) -> Run& { return ring[r % ring.size()]; };
    const auto first_of = [&](std::size_t r) { return begin + r * Run::kMaxSize; };
    const auto prepare = [&](std::size_t r) {
      Run& run = run_of(r);
      const std::size_t first = first_of(r);
      run.size = r < runs ? std::min(Run::kMaxSize, end - first) : 0;
      const auto some = keys.subspan(std::min(first, end), run.size);
      if (by == KeyKind::kKey) {
        mix_block(some.data(), some.size(), run.hashes.data());
      } else {
        std::copy(some.begin(), some.end(), run.hashes.begin());
      }
      if (newest != nullptr) {
        probe_.prepare(newest->view(), run);
      }
    };
    prepare(0);
    if (newest != nullptr) {
      run_of(0).prefetch();
    }
    for (std::size_t r = 0; r < runs + 2; ++r) {
      prepare(r + 1);
      if (r < runs) {
        if (newest != nullptr) {
          run_of(r).set_next_lines(run_of(r + 1).homes());
        }
        visitor.probe(newest, run_of(r), first_of(r));
      }
      if (r >= 1 && r <= runs) {
        visitor.resolve(newest, run_of(r - 1), first_of(r - 1));
      }
      if (r >= 2) {
        visitor.use(run_of(r - 2), first_of(r - 2));
      }
    }
  };
  if (partition.parts == 1) {
    part(0);
  } else {
    pool.run(partition.parts, part);
  }
}

// Calls use(run, first) once run.rows are known.
template <class Use>
void ExportReader::for_each_run_of_rows(std::span<const std::uint64_t> keys, KeyKind by, ThreadPool& pool,
                                        const Use& use) const {
  struct Visitor {
    const ExportReader& of;
    const Use& use_rows;

    void probe(const Layer* newest, Run& run, std::size_t) const noexcept {
      if (newest != nullptr) {
        of.probe_.probe(newest->width, run);
      } else {
        run.rows.fill(nullptr);
      }
    }
    void resolve(const Layer* newest, Run& run, std::size_t) const noexcept {
      if (newest == nullptr) {
        return;
      }
      of.probe_.resolve(newest->width, run);
      if (of.layers_.size() == 1) {
        return;
      }
      std::array<std::uint16_t, Run::kMaxSize + 1> open;
      std::size_t count = 0;
      for (std::size_t i = 0; i < run.size; ++i) {
        open[count] = static_cast<std::uint16_t>(i);
        count += run.rows[i] == nullptr ? 1U : 0U;
      }
      Run scratch;
      of.probe_older_layers(run, {open.data(), count}, scratch);
    }
    void use(const Run& run, std::size_t first) const { use_rows(run, first); }
  };
  for_each_run(keys, by, pool, Visitor{*this, use});
}

// Rows of one weight: most are read from the line that holds their hash.
void ExportReader::pull_scalars(std::span<const std::uint64_t> keys, KeyKind by, std::span<float> weights,
                                ThreadPool& pool) const {
  struct Visitor {
    const ExportReader& of;
    float* weights;
    float initial;

    void probe(const Layer* newest, Run& run, std::size_t first) const noexcept {
      if (newest != nullptr) {
        of.probe_.probe_scalars(newest->width, run, weights + first);
        return;
      }
      run.rows.fill(nullptr);
      run.missing_count = run.size;
      for (std::size_t i = 0; i < run.size; ++i) {
        run.missing[i] = static_cast<std::uint16_t>(i);
        weights[first + i] = std::numeric_limits<float>::quiet_NaN();
      }
    }
    // The hashes that the homes of the newest layer do not have.
    void resolve(const Layer* newest, Run& run, std::size_t first) const noexcept {
      if (newest != nullptr) {
        of.probe_.resolve_scalars(newest->width, run, weights + first);
      }
      if (of.layers_.size() > 1) {
        probe_older_layers(run, first);
      }
      std::size_t count = 0;
      for (std::size_t k = 0; k < run.missing_count; ++k) {
        const std::uint16_t i = run.missing[k];  // which is written at `count`, at most k
        const float weight = weights[first + i];
        const bool none = std::isnan(weight);
        weights[first + i] = none ? initial : weight;
        run.missing[count] = i;
        count += none ? 1U : 0U;
      }
      for (std::size_t k = 0; k < count && !of.init_.same_for_all(); ++k) {
        const std::uint16_t i = run.missing[k];
        of.init_.fill(run.hashes[i], 1, &weights[first + i]);
      }
    }
    void probe_older_layers(Run& run, std::size_t first) const noexcept {
      std::array<std::uint16_t, Run::kMaxSize + 1> open;
      std::size_t count = 0;
      for (const std::uint16_t i : std::span(run.missing).first(run.missing_count)) {
        open[count] = i;
        count += IndexProbe::absent(weights[first + i]) ? 1U : 0U;
      }
      Run scratch;
      of.probe_older_layers(run, {open.data(), count}, scratch);
      for (const std::uint16_t i : std::span(open).first(count)) {
        if (!of.is_missing(run.rows[i])) {
          of.form_.decode(run.rows[i], &weights[first + i], of.scale_of(run.rows[i]));
        }
      }
    }
    void use(const Run&, std::size_t) const noexcept {}
  };
  float initial;
  init_.fill(0, 1, &initial);
  for_each_run(keys, by, pool, Visitor{*this, weights.data(), initial});
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
  if (dim == 1) {
    return pull_scalars(keys, by, weights, pool);
  }
  for_each_run_of_rows(keys, by, pool, [&](const Run& run, std::size_t first) {
    float* const to = weights.data() + first * dim;
    std::array<std::uint16_t, Run::kMaxSize> none;
    const std::size_t count = form_.decode_rows({run.rows.data(), run.size}, to, none.data());
    for (std::size_t k = 0; k < count; ++k) {
      init_.fill(run.hashes[none[k]], dim, to + none[k] * dim);
    }
  });
}

void ExportReader::contains(std::span<const std::uint64_t> keys, KeyKind by, std::span<std::uint8_t> there,
                            ThreadPool& pool) const {
  SHOAL_CHECK(there.size() == keys.size(), "there must be one answer for each key");
  for_each_run_of_rows(keys, by, pool, [&](const Run& run, std::size_t first) {
    for (std::size_t i = 0; i < run.size; ++i) {
      there[first + i] = is_missing(run.rows[i]) ? 0 : 1;
    }
  });
}

// --- by slot --------------------------------------------------------------------------------------------------------

// The rows of one layer in ascending order of hash.
void ExportReader::entries_of(const Section& section, Slot slot, std::span<const HashRange> within,
                              std::vector<Entry>& all) const {
  all.clear();
  const Homes homes{slots_, section.homes};
  const LineFormat& form = probe_.form_of(section);
  auto range = within.begin();
  std::uint64_t last = slots_.first_hash(slot);  // the previous hash
  bool any = false;
  for (std::uint64_t b = 0; b < section.count && range != within.end(); ++b) {
    // The hashes of a range are in the lines from the home of its first hash to `reach` lines after that of its last.
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
        all.push_back({hash, row});
      }
    }
  }
}

// The rows of a slot in ascending order of hash, for each hash the newest, including rows that are marked as removed.
void ExportReader::entries(Slot slot, std::span<const HashRange> within, std::vector<Entry>& all) const {
  all.clear();
  std::vector<Entry> fresh;
  std::vector<Entry> merged;
  for (const Layer& layer : layers_) {
    entries_of(layer.sections[index_of(slot)], slot, within, fresh);
    if (all.empty()) {
      all.swap(fresh);
      continue;
    }
    merged.clear();
    auto old = all.begin();
    for (const Entry& entry : fresh) {
      for (; old != all.end() && old->hash < entry.hash; ++old) {
        merged.push_back(*old);
      }
      old += old != all.end() && old->hash == entry.hash ? 1 : 0;
      merged.push_back(entry);
    }
    merged.insert(merged.end(), old, all.end());
    all.swap(merged);
  }
}

void ExportReader::read_slot(Slot slot, std::vector<std::uint64_t>& hashes,
                             std::vector<float>& weights) const {
  std::vector<Entry> all;
  entries(slot, kAll, all);
  std::erase_if(all, [&](const Entry& entry) { return form_.is_removed(entry.row); });
  hashes.resize(all.size());
  weights.resize(all.size() * form_.dim());
  for (std::size_t i = 0; i < all.size(); ++i) {
    hashes[i] = all[i].hash;
    form_.decode(all[i].row, weights.data() + i * form_.dim(), scale_of(all[i].row));
  }
}

void ExportReader::difference(Slot slot, std::span<const std::uint64_t> hashes,
                              std::span<const float> weights, std::vector<std::uint64_t>& changed,
                              std::vector<float>& rows, std::span<const HashRange> within) const {
  const std::size_t dim = form_.dim();
  SHOAL_CHECK(weights.size() == hashes.size() * dim, "weights must be len(hashes) x dim");
  std::vector<Entry> all;
  entries(slot, within, all);
  std::erase_if(all, [&](const Entry& entry) { return form_.is_removed(entry.row); });
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
  auto old = all.begin();
  for (std::size_t i = 0; i < hashes.size(); ++i) {
    for (; old != all.end() && old->hash < hashes[i]; ++old) {
      remove(old->hash);
    }
    const float* const row = weights.data() + i * dim;
    const bool had = old != all.end() && old->hash == hashes[i];
    if (reads_initial(form_, init_, hashes[i], row, scratch)) {
      if (had) {
        remove(hashes[i]);
      }
    } else if (!had || !same(*old, row)) {
      put(hashes[i], row);
    }
    old += had ? 1 : 0;
  }
  for (; old != all.end(); ++old) {
    remove(old->hash);
  }
}

}  // namespace shoal

#include "shard/user_function.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/units.h"
#include "shard/shard.h"
#include "shard/workspace.h"

namespace shoal {

namespace {

constexpr std::uint64_t kApplySeed = 0x6170706c79ULL;  // separates its rounding noise from that of pushes
constexpr std::size_t kMaxWords = 64 * MiB / sizeof(double);  // of all results

std::atomic<RowsFunction> rows_function{nullptr};

// The parameters of a call, checked: they may come from a peer.
struct UserCall {
  std::span<const std::byte> description;
  std::vector<std::uint64_t> hashes;
  bool has_hashes = false;
};

UserCall parsed(std::span<const double> parameters) {
  constexpr std::size_t kHead = 2;
  SHOAL_CHECK(parameters.size() >= kHead, "a function of a user has a description");
  const double bytes = parameters[0];
  const std::size_t left = parameters.size() - kHead;
  SHOAL_CHECK(bytes >= 0 && bytes <= static_cast<double>(left * sizeof(double)),
              "the description of a function of a user has another size than its parameters");
  const auto size = static_cast<std::size_t>(bytes);
  const std::size_t words = (size + sizeof(double) - 1) / sizeof(double);
  UserCall call{.description = std::as_bytes(parameters.subspan(kHead, words)).first(size),
                .hashes = {},
                .has_hashes = parameters[1] != 0};
  for (const double word : parameters.subspan(kHead + words)) {
    call.hashes.push_back(std::bit_cast<std::uint64_t>(word));
  }
  SHOAL_CHECK(std::ranges::adjacent_find(call.hashes, std::greater_equal<>()) == call.hashes.end(),
              "the hashes of a function of a user must ascend");
  return call;
}

// The arrays of a slot, in one piece of memory: columns, row state, derived weights; then, if they may
// change, all of that as it was, and two flags for each row.
struct SlotArrays {
  SlotArrays(const Rows& rows, std::size_t size, bool derives, bool writes)
      : n(size),
        dim(rows.dim()),
        columns(rows.columns()),
        row_state_at(columns * n * dim),
        weights_at(derives ? row_state_at + (rows.has_row_state() ? n : 0) : 0),
        floats_count(row_state_at + (rows.has_row_state() ? n : 0) + (derives ? n * dim : 0)),
        bytes(sizeof(float) * (writes ? 2 * floats_count + 2 * n : floats_count)) {}

  Block block(std::size_t first, std::size_t count) const noexcept {
    Block block{.rows = count,
                .dim = dim,
                .grads = nullptr,
                .columns = {},
                .row_state = floats + row_state_at + first,
                .noise = nullptr,
                .step = 0};
    for (std::size_t k = 0; k < columns; ++k) {
      block.columns[k] = floats + (k * n + first) * dim;
    }
    return block;
  }
  float* weights() const noexcept { return floats + weights_at; }
  float* before() const noexcept { return floats + floats_count; }
  std::uint32_t* moves() const noexcept { return reinterpret_cast<std::uint32_t*>(before() + floats_count); }
  std::uint32_t* finite() const noexcept { return moves() + n; }

  // Flags the rows whose columns or row state have other bits than before.
  void mark_changed(bool has_row_state) const noexcept {
    std::fill_n(moves(), n, 0U);
    for (std::size_t r = 0; r < n; ++r) {
      const auto differs = [&](std::size_t at, std::size_t count) {
        return std::memcmp(floats + at, before() + at, count * sizeof(float)) != 0;
      };
      bool changed = has_row_state && differs(row_state_at + r, 1);
      for (std::size_t k = 0; k < columns && !changed; ++k) {
        changed = differs((k * n + r) * dim, dim);
      }
      moves()[r] = changed ? 1U : 0U;
    }
  }

  std::size_t n;
  std::size_t dim;
  std::size_t columns;
  std::size_t row_state_at;
  std::size_t weights_at;
  std::size_t floats_count;
  std::size_t bytes;
  float* floats = nullptr;
};

}  // namespace

bool user_function_failed(std::span<const double> results) noexcept {
  constexpr std::size_t kHead = 2;  // the slot, and the number of words
  bool failed = false;
  for (std::size_t at = 0; at + kHead < results.size();
       at += kHead + static_cast<std::size_t>(results[at + 1])) {
    failed = results[at + kHead] == kUserFailed;
  }
  return failed;
}

void set_rows_function(RowsFunction function) noexcept { rows_function.store(function); }

std::vector<double> run_user_function(Shard& shard, bool writes, std::span<const double> parameters,
                                      std::size_t first, std::size_t end) {
  ShardCore& core = shard.core();
  core.owner.check();
  core.check_slots(first, end);
  const UserCall call = parsed(parameters);
  const RowsFunction function = rows_function.load();
  SHOAL_CHECK(function != nullptr, "this process has no functions of users");
  SHOAL_CHECK(!writes || !core.spec.optimizer.pairs(),
              "rows of this table are a weight and its gradient: only a step may change them");
  const bool derives = core.spec.optimizer.derives_weights();
  std::unique_lock<std::shared_mutex> alone;
  if (writes) {
    alone = core.writers.enter_alone();
  }
  const std::uint64_t shared = step_noise(core.spec.seed ^ kApplySeed, shard.step());
  Workspace work(core.rows);
  std::shared_ptr<Buffer<std::byte>> storage;
  std::vector<std::uint64_t> hashes;
  std::vector<std::byte*> rows;
  std::vector<double> results;
  std::vector<double> words;

  const auto find_rows = [&](std::size_t s, SlotState& state) {
    hashes.clear();
    rows.clear();
    if (!call.has_hashes) {
      for (const SlotTable::Entry& entry : state.table.entries()) {
        hashes.push_back(entry.hash);
        rows.push_back(const_cast<std::byte*>(entry.row));
      }
      return;
    }
    auto at =
        std::ranges::lower_bound(call.hashes, core.slots.first_hash(Slot{static_cast<std::uint32_t>(s)}));
    for (; at != call.hashes.end() && index_of(core.slots.of(*at)) == s; ++at) {
      if (std::byte* const row = state.table.find_one(*at); row != nullptr) {
        hashes.push_back(*at);
        rows.push_back(row);
      }
    }
  };
  const auto each_run = [&](std::size_t n, const auto& act) {
    for (std::size_t r = 0; r < n; r += work.most) {
      act(r, std::min(work.most, n - r));
    }
  };

  for (std::size_t s = first; s < end; ++s) {
    SlotState& state = *core.states[s - core.first];
    if (writes) {
      core.wait_in_slots(call.has_hashes ? call.hashes.size() : state.table.size());
    }
    std::shared_lock reading(state.lock);
    find_rows(s, state);
    const std::size_t n = rows.size();
    if (n == 0) {
      continue;
    }
    if (storage == nullptr || storage.use_count() != 1) {  // arrays of an earlier call are still in use
      storage = std::make_shared<Buffer<std::byte>>();
    }
    SlotArrays all(core.rows, n, derives, writes);
    all.floats = reinterpret_cast<float*>(storage->claim(all.bytes).data());
    PrefetchCursor none;
    each_run(n, [&](std::size_t r, std::size_t count) {
      core.rows.gather(std::span(rows).subspan(r, count), all.block(r, count), none);
    });
    reading.unlock();
    const Block block = all.block(0, n);
    std::visit(
        [&](const auto& rule) {
          if constexpr (std::remove_cvref_t<decltype(rule)>::kDerivesWeights) {
            rule.read(block, all.weights());
          }
        },
        core.spec.optimizer.rule());
    if (writes) {
      std::memcpy(all.before(), all.floats, all.floats_count * sizeof(float));
    }

    words.clear();
    bool succeeded = false;
    {
      const InUserCode marks;
      succeeded = function({.description = call.description,
                            .writes = writes,
                            .hashes = hashes,
                            .block = block,
                            .weights = all.weights(),
                            .columns = core.spec.optimizer.columns(),
                            .elements = core.spec.optimizer.elements(),
                            .derives_weights = derives,
                            .row_state = core.spec.optimizer.row_state(),
                            .storage = storage},
                           words);
    }
    if (writes && succeeded) {
      std::visit(
          [&](const auto& rule) {
            if constexpr (std::remove_cvref_t<decltype(rule)>::kDerivesWeights) {
              rule.move(block, all.before() + all.weights_at, all.weights());
            }
          },
          core.spec.optimizer.rule());
      all.mark_changed(core.rows.has_row_state());
      std::fill_n(all.finite(), n, 1U);
      if (core.spec.optimizer.elements() == Elements::kFloat32) {
        mark_finite(all.weights(), n, all.dim, all.finite());
        for (std::size_t k = 0; k < all.columns; ++k) {
          mark_finite(block.columns[k], n, all.dim, all.finite());
        }
      }
      if (core.rows.has_row_state()) {
        mark_finite(block.row_state, n, 1, all.finite());
      }
      std::vector<std::uint64_t> changed;
      std::uint64_t dropped = 0;
      for (std::size_t r = 0; r < n; ++r) {
        dropped += all.finite()[r] == 0 ? 1U : 0U;
        all.moves()[r] &= all.finite()[r];
        if (all.moves()[r] != 0) {
          changed.push_back(hashes[r]);
        }
      }
      const std::unique_lock writing(state.lock);
      core.changes.before_change(state, changed);
      each_run(n, [&](std::size_t r, std::size_t count) {
        Block some = all.block(r, count);
        some.noise = work.noise;
        fill_noise(std::span(hashes).subspan(r, count), all.dim, shared, work.noise);
        core.rows.scatter(some, {all.moves() + r, count}, std::span(rows).subspan(r, count), none);
      });
      core.counters.nonfinite_rows.fetch_add(dropped, std::memory_order_relaxed);
      words = {0, static_cast<double>(changed.size())};
    }
    SHOAL_CHECK(
        results.size() + words.size() <= kMaxWords,
        "the function's values have more than 64 MiB in all: return smaller ones, or take fewer keys");
    results.push_back(static_cast<double>(s));
    results.push_back(static_cast<double>(words.size()));
    results.insert(results.end(), words.begin(), words.end());
    if (!succeeded) {
      break;
    }
  }
  return results;
}

}  // namespace shoal

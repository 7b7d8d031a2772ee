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
#include "shard/user_arrays.h"
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

// Flags in `moves` the rows whose columns or row state have other bits than those `back` floats behind them.
void mark_changed(const Rows& rows, const Block& block, std::size_t back, std::uint32_t* moves) noexcept {
  const auto differs = [&](const float* at, std::size_t count) {
    return std::memcmp(at, at + back, count * sizeof(float)) != 0;
  };
  for (std::size_t r = 0; r < block.rows; ++r) {
    bool changed = rows.has_row_state() && differs(block.row_state + r, 1);
    for (std::size_t k = 0; k < rows.columns() && !changed; ++k) {
      changed = differs(block.columns[k] + r * block.dim, block.dim);
    }
    moves[r] = changed ? 1U : 0U;
  }
}

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
    for (std::size_t r = 0; r < n; r += work.max_rows) {
      act(r, std::min(work.max_rows, n - r));
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
    const std::size_t dim = core.rows.dim();
    const std::size_t derived = derives ? n * dim : 0;
    const std::size_t numbers = n * core.rows.floats() + derived;
    UserArrays arrays(core.rows, n, derived + (writes ? numbers : 0));  // and a copy of all numbers
    arrays.claim(storage);
    float* const weights = derives ? arrays.extra() : arrays.floats();
    PrefetchCursor none;
    each_run(n, [&](std::size_t r, std::size_t count) {
      core.rows.gather(std::span(rows).subspan(r, count), arrays.block(r, count), none);
    });
    reading.unlock();
    const Block block = arrays.block(0, n);
    std::visit(
        [&](const auto& rule) {
          if constexpr (std::remove_cvref_t<decltype(rule)>::kDerivesWeights) {
            rule.read(block, weights);
          }
        },
        core.spec.optimizer.rule());
    if (writes) {
      std::memcpy(arrays.floats() + numbers, arrays.floats(), numbers * sizeof(float));
    }

    words.clear();
    bool succeeded = false;
    {
      const InUserCode marks;
      succeeded = function({.description = call.description,
                            .writes = writes,
                            .hashes = hashes,
                            .block = block,
                            .weights = weights,
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
              rule.move(block, weights + numbers, weights);
            }
          },
          core.spec.optimizer.rule());
      mark_changed(core.rows, block, numbers, arrays.moves());
      std::fill_n(arrays.finite(), n, 1U);
      if (core.spec.optimizer.elements() == Elements::kFloat32) {
        mark_finite(weights, n, dim, arrays.finite());
        for (std::size_t k = 0; k < core.rows.columns(); ++k) {
          mark_finite(block.columns[k], n, dim, arrays.finite());
        }
      }
      if (core.rows.has_row_state()) {
        mark_finite(block.row_state, n, 1, arrays.finite());
      }
      std::vector<std::uint64_t> changed;
      std::uint64_t dropped = 0;
      for (std::size_t r = 0; r < n; ++r) {
        dropped += arrays.finite()[r] == 0 ? 1U : 0U;
        arrays.moves()[r] &= arrays.finite()[r];
        if (arrays.moves()[r] != 0) {
          changed.push_back(hashes[r]);
        }
      }
      const std::unique_lock writing(state.lock);
      core.changes.before_change(state, changed);
      each_run(n, [&](std::size_t r, std::size_t count) {
        Block run = arrays.block(r, count);
        run.noise = work.noise;
        fill_noise(std::span(hashes).subspan(r, count), dim, shared, work.noise);
        core.rows.scatter(run, {arrays.moves() + r, count}, std::span(rows).subspan(r, count), none);
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

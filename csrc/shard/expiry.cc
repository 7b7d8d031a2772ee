// Expiry and eviction of a Shard's rows, and its memory budget.
//
// Under a budget, a call makes room for everything that it may need before it changes anything:
//   1  for every slot of the batch: count the keys without a row, and check that the slot may allocate memory
//      for them, or has as many rows outside the batch and a rule by which to evict them; else throw
//      MemoryBudgetExceededError
//   2  for every slot: evict rows, or allocate memory and record it
//   3  the call then never runs out of room
// Keys that admission will refuse are counted as rows: some rows are evicted slightly early.

#include "shard/expiry.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "policy/eviction_candidates.h"
#include "shard/shard.h"

namespace shoal {

namespace {

using Kind = Expiry::Kind;

constexpr std::size_t kMinKeys = 4096;  // below it, waking another thread costs more than it saves

constexpr double kImpression = 0x1p20;  // units in one

std::uint64_t units(double impressions) noexcept {
  return static_cast<std::uint64_t>(std::min(impressions * kImpression, 0x1p62));
}

// The class of an age or count; see Shard::sweep.
std::size_t class_of(std::uint32_t number) noexcept {
  return static_cast<std::size_t>(std::bit_width(number));
}

std::size_t class_of(double number) noexcept {
  return number > 0 ? static_cast<std::size_t>(std::clamp(32 + std::ilogb(number), 0, 63)) : 0;
}

// The properties of a row that rules use.
struct RowView {
  std::uint64_t hash;
  const std::byte* bytes;
  double norm;
};

// Applies one list of rules to rows, at one clock.
class ExpiryEvaluator {
 public:
  ExpiryEvaluator(const ShardCore& core, std::span<const Expiry> rules, std::uint32_t now)
      : core_(core), metadata_(core.rows.metadata()), rules_(rules), now_(now) {
    for (const Expiry& rule : rules) {
      const std::string why = core.spec.lifecycle.unanswerable(rule);
      SHOAL_CHECK(why.empty(), "the table cannot be swept by this rule: " + why +
                                   "; name the rule where the table is made");
      needs_norms_ |= rule.kind == Kind::kMinNorm;
    }
  }

  // Calls use(row) for all rows of a slot. The slot is locked.
  template <class Use>
  void each_row(SlotTable& table, const Use& use) const {
    if (!needs_norms_) {
      table.each_row([&](std::uint64_t hash, const std::byte* row) { use(RowView{hash, row, 0}); });
      return;
    }
    constexpr std::size_t kTogether = 1024;
    const std::size_t dim = core_.rows.dim();
    const std::size_t width =
        core_.spec.optimizer.pairs() ? 1 : dim;  // how many elements of a row are weights
    std::vector<std::uint64_t> hashes;
    std::vector<std::byte*> rows;
    std::vector<float> weights(kTogether * dim);
    const auto flush = [&] {
      core_.weights_of(rows, weights.data());
      for (std::size_t r = 0; r < rows.size(); ++r) {
        double squares = 0;
        for (std::size_t e = r * dim; e < r * dim + width; ++e) {
          squares += static_cast<double>(weights[e]) * static_cast<double>(weights[e]);
        }
        use(RowView{hashes[r], rows[r], std::sqrt(squares)});
      }
      hashes.clear();
      rows.clear();
    };
    table.each_row([&](std::uint64_t hash, std::byte* row) {
      hashes.push_back(hash);
      rows.push_back(row);
      if (rows.size() == kTogether) {
        flush();
      }
    });
    flush();
  }

  std::span<const Expiry> rules() const noexcept { return rules_; }

  double impressions(const RowView& row) const noexcept {
    if (metadata_.has(RowMetadata::Column::kScore)) {
      return metadata_.score(row.bytes, now_);
    }
    return metadata_.has(RowMetadata::Column::kCount) ? metadata_.count(row.bytes) : 0;
  }

  std::size_t class_in(const Expiry& rule, const RowView& row) const noexcept {
    switch (rule.kind) {
      case Kind::kDecayedScore:
        return class_of(metadata_.score(row.bytes, now_));
      case Kind::kMinNorm:
        return class_of(row.norm);
      case Kind::kMaxRows:
        if (rule.frequent) {
          return class_of(metadata_.count(row.bytes));
        }
        [[fallthrough]];
      case Kind::kTimeToLive:
        break;
    }
    return class_of(age_at(now_, metadata_.clock(row.bytes)));
  }

  // True if a rule on single rows removes this one.
  bool drops(const Expiry& rule, const RowView& row) const noexcept {
    switch (rule.kind) {
      case Kind::kTimeToLive:
        return age_at(now_, metadata_.clock(row.bytes)) > rule.clocks;
      case Kind::kDecayedScore:
        return metadata_.score(row.bytes, now_) < rule.floor;
      case Kind::kMinNorm:
        return row.norm < rule.floor;
      case Kind::kMaxRows:
        break;
    }
    return false;
  }

  // Rows of lower rank are evicted first.
  std::uint64_t rank(const Expiry& rule, const RowView& row) const noexcept {
    switch (rule.kind) {
      case Kind::kDecayedScore:
        return rank_of(metadata_.score(row.bytes, now_));
      case Kind::kMinNorm:
        return rank_of(row.norm);
      case Kind::kMaxRows:
        if (rule.frequent) {
          return metadata_.count(row.bytes);
        }
        [[fallthrough]];
      case Kind::kTimeToLive:
        break;
    }
    return ~std::uint64_t{age_at(now_, metadata_.clock(row.bytes))};
  }

 private:
  const ShardCore& core_;
  const RowMetadata& metadata_;
  std::span<const Expiry> rules_;
  std::uint32_t now_;
  bool needs_norms_ = false;
};

// Evicts the `count` lowest-ranked rows of a slot by the first rule of `evaluator`, but none of those in
// `spared`, which ascend. Returns the number of evicted rows; std::bad_alloc changes nothing.
std::size_t evict(ChangeLog& changes, SlotState& slot, const ExpiryEvaluator& evaluator, std::size_t count,
                  std::span<const std::uint64_t> spared) {
  EvictionCandidates::begin(slot.table.size());
  evaluator.each_row(slot.table, [&](const RowView& row) {
    if (!std::ranges::binary_search(spared, row.hash)) {
      EvictionCandidates::add(evaluator.rank(evaluator.rules()[0], row), row.hash);
    }
  });
  const auto victims = EvictionCandidates::take(count);
  if (slot.watched) {
    std::vector<std::uint64_t> hashes(victims.size());
    std::ranges::transform(victims, hashes.begin(), &EvictionCandidates::Victim::hash);
    changes.before_change(slot, hashes);
  }
  for (const auto& victim : victims) {
    slot.table.erase(victim.hash);
  }
  return victims.size();
}

}  // namespace

std::vector<std::uint64_t> Shard::sweep(std::size_t first, std::size_t end, std::uint32_t store_clock,
                                        std::span<const Expiry> rules, bool dry_run) {
  core_.owner.check();
  core_.check_slots(first, end);
  const std::uint32_t now = table_clock(store_clock);
  const std::vector<Expiry> own = core_.spec.lifecycle.expire();
  rules = rules.empty() ? std::span<const Expiry>(own) : rules;
  const ExpiryEvaluator evaluator(core_, rules, now);
  const std::size_t classes = kSweepHead + 2 * rules.size();
  const std::size_t words = classes + (dry_run ? 2 * kClasses * rules.size() : 0);
  const bool holds = std::ranges::find(rules, Kind::kMaxRows, &Expiry::kind) != rules.end();

  const auto sweep_slot = [&](std::size_t s, std::vector<std::uint64_t>& total, std::vector<RowView>& kept,
                              std::vector<std::uint64_t>& dropped) {
    SlotState& slot = *core_.states[s - core_.first];
    if (!dry_run) {
      core_.wait_in_slots(dropped.size());  // of the previous slot
    }
    const std::unique_lock lock(slot.lock);
    const auto bytes = [&] { return slot.bytes(); };
    const auto drop = [&](std::size_t k, const RowView& row) {
      ++total[kSweepHead + 2 * k];
      total[kSweepHead + 2 * k + 1] += units(evaluator.impressions(row));
      dropped.push_back(row.hash);
    };
    total[0] += slot.table.size();
    total[1] += bytes();
    kept.clear();
    dropped.clear();
    evaluator.each_row(slot.table, [&](const RowView& row) {
      const std::uint64_t impressions = units(evaluator.impressions(row));
      total[3] += impressions;
      if (dry_run) {
        for (std::size_t k = 0; k < rules.size(); ++k) {
          const std::size_t at = classes + 2 * (k * kClasses + evaluator.class_in(rules[k], row));
          ++total[at];
          total[at + 1] += impressions;
        }
      }
      for (std::size_t k = 0; k < rules.size(); ++k) {
        if (evaluator.drops(rules[k], row)) {
          return drop(k, row);
        }
      }
      if (holds) {
        kept.push_back(row);
      }
    });
    for (std::size_t k = 0; k < rules.size(); ++k) {
      const Slot number{static_cast<std::uint32_t>(s)};
      if (rules[k].kind != Kind::kMaxRows || kept.size() <= share_of(rules[k].rows, core_.slots, number)) {
        continue;
      }
      const auto excess =
          static_cast<std::ptrdiff_t>(kept.size() - share_of(rules[k].rows, core_.slots, number));
      std::nth_element(kept.begin(), kept.begin() + excess, kept.end(),
                       [&](const RowView& a, const RowView& b) {
                         return std::pair(evaluator.rank(rules[k], a), a.hash) <
                                std::pair(evaluator.rank(rules[k], b), b.hash);
                       });
      std::for_each(kept.begin(), kept.begin() + excess, [&](const RowView& row) { drop(k, row); });
      kept.erase(kept.begin(), kept.begin() + excess);
    }
    if (!dry_run) {
      core_.changes.before_change(slot, dropped);
      for (const std::uint64_t hash : dropped) {
        slot.table.erase(hash);
      }
      slot.table.give_back(true);
      total[4] += slot.filter != nullptr ? slot.filter->sweep(now) : 0;
      core_.budget.note(s - core_.first);
    }
    total[2] += bytes();
  };

  std::vector<std::uint64_t> total(words);
  core_.with_slots(first, end, !dry_run, [&](std::size_t from, std::size_t to) {
    const auto writing = dry_run ? std::shared_lock<std::shared_mutex>() : core_.writers.enter();
    const auto budget_lock = dry_run ? std::unique_lock<std::mutex>() : core_.budget.lock();
    const Partition partition{
        to - from, parts_for(to - from, 1, core_.pool.threads() == 1 ? 1 : 4 * core_.pool.threads())};
    std::vector<std::vector<std::uint64_t>> totals(partition.parts, std::vector<std::uint64_t>(words));
    core_.pool.run(partition.parts, [&](std::size_t part) {
      std::vector<RowView> kept;
      std::vector<std::uint64_t> dropped;
      for (std::size_t s = partition.begin(part); s < partition.begin(part + 1); ++s) {
        sweep_slot(from + s, totals[part], kept, dropped);
      }
    });
    for (const auto& part : totals) {
      std::transform(part.begin(), part.end(), total.begin(), total.begin(), std::plus<>());
      for (std::size_t k = 0; k < rules.size() && !dry_run; ++k) {
        core_.counters.expired[static_cast<std::size_t>(rules[k].kind)].fetch_add(part[kSweepHead + 2 * k]);
      }
    }
    return true;
  });
  for (std::size_t age = 0; age < kAges; ++age) {
    total[5 + age] = dry_run ? core_.counters.returns[age].load() : core_.counters.returns[age].exchange(0);
  }
  return total;
}

void enforce_max_rows(ShardCore& core, const SlotSlices& batch, std::uint32_t now) {
  const auto& rules = core.spec.lifecycle.expire();
  const auto rule = std::ranges::find(rules, Kind::kMaxRows, &Expiry::kind);
  if (rule == rules.end()) {
    return;
  }
  const ExpiryEvaluator evaluator(core, {&*rule, 1}, now);
  std::atomic<std::uint64_t> evicted{0};
  const Partition partition{core.states.size(), batch.hashes.size() < kMinKeys ? 1 : core.pool.threads()};
  core.pool.run(partition.parts, [&](std::size_t part) {
    for (std::size_t s = partition.begin(part); s < partition.begin(part + 1); ++s) {
      if (batch.offsets[s] == batch.offsets[s + 1]) {
        continue;
      }
      const std::unique_lock lock(core.states[s]->lock);
      SlotTable& table = core.states[s]->table;
      const std::size_t share =
          share_of(rule->rows, core.slots, Slot{static_cast<std::uint32_t>(core.first + s)});
      if (table.size() > share) {
        try {
          evicted.fetch_add(
              evict(core.changes, *core.states[s], evaluator, table.size() - (share - share / 8), {}));
        } catch (const std::bad_alloc&) {
          // No memory for the selection. The push is done; rows are evicted by the next one.
        }
      }
    }
  });
  core.counters.expired[static_cast<std::size_t>(Kind::kMaxRows)].fetch_add(evicted.load());
}

void make_room(ShardCore& core, const SlotSlices& batch, const InsertTerms& terms) {
  if (!core.budget.is_limited()) {
    return;
  }
  enum class Action : std::uint8_t { kNone, kGrow, kReserve, kEvict };
  struct Plan {
    Action action = Action::kNone;
    std::size_t missing = 0;
    std::size_t evict = 0;
  };
  std::vector<Plan> plans(core.states.size());
  const auto& rules = core.spec.lifecycle.expire();
  const ExpiryEvaluator evaluator(core, std::span(rules).first(rules.empty() ? 0 : 1), terms.now.clock);
  const Partition partition{core.states.size(), batch.hashes.size() < kMinKeys ? 1 : core.pool.threads()};
  const auto each_slot = [&](const auto& use) {
    core.pool.run(partition.parts, [&](std::size_t part) {
      std::vector<std::byte*> rows;
      for (std::size_t s = partition.begin(part); s < partition.begin(part + 1); ++s) {
        if (batch.offsets[s] != batch.offsets[s + 1]) {
          use(s, *core.states[s], batch.of(s), rows);
        }
      }
    });
  };
  each_slot([&](std::size_t s, SlotState& slot, std::span<const std::uint64_t> hashes,
                std::vector<std::byte*>& rows) {
    const std::shared_lock lock(slot.lock);
    rows.resize(hashes.size());
    slot.table.find(hashes, rows);
    Plan& plan = plans[s];
    plan.missing = static_cast<std::size_t>(std::ranges::count(rows, nullptr));
    if (plan.missing == 0) {
      return;
    }
    const std::size_t filter = terms.asks ? slot.filter->least_bytes() - slot.filter->bytes() : 0;
    const std::size_t other_bytes = slot.bytes() - slot.table.bytes() + filter;
    const std::size_t other_rows = slot.table.size() - (hashes.size() - plan.missing);
    if (other_bytes + slot.table.bytes_with(plan.missing, false) <= core.budget.allowed(s)) {
      plan.action = Action::kGrow;
    } else if (other_bytes + slot.table.bytes_with(plan.missing, true) <= core.budget.allowed(s)) {
      plan.action = Action::kReserve;
    } else if (!rules.empty() && other_rows >= plan.missing &&
               other_bytes + slot.table.bytes() <= core.budget.allowed(s)) {
      plan.action = Action::kEvict;
      plan.evict = std::min(other_rows, std::max(plan.missing, slot.table.size() / 8));
    } else {
      core.budget.throw_over(s, plan.missing);
    }
  });
  std::atomic<std::uint64_t> evicted{0};
  each_slot([&](std::size_t s, SlotState& slot, std::span<const std::uint64_t> hashes,
                std::vector<std::byte*>&) {
    const Plan& plan = plans[s];
    if (plan.action == Action::kNone) {
      return;
    }
    const std::unique_lock lock(slot.lock);
    // Records the slot's bytes even if an exception is thrown.
    struct Noted {
      ShardBudget& budget;
      std::size_t place;
      ~Noted() { budget.note(place); }
    } const noted{core.budget, s};
    if (plan.action == Action::kEvict) {
      evicted.fetch_add(evict(core.changes, slot, evaluator, plan.evict, hashes), std::memory_order_relaxed);
    } else if (plan.action == Action::kGrow) {
      slot.table.make_room(plan.missing);
    } else {
      slot.table.reserve(slot.table.size() + plan.missing);
    }
    if (terms.asks) {
      // Waiting keys may use at most a quarter of the slot's share, and at most what remains.
      const std::size_t rest = core.budget.allowed(s) - (slot.bytes() - slot.filter->bytes());
      slot.filter->make_room(plan.missing, std::min(rest, core.budget.share() / 4));
    }
  });
  if (evicted.load() != 0) {
    core.counters.expired[static_cast<std::size_t>(rules[0].kind)].fetch_add(evicted.load());
  }
}

}  // namespace shoal

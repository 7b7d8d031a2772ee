// Snapshot: the slots are those at the time of the snapshot, bit for bit, for any changes while they are
// taken.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "batch/key_batch.h"
#include "check.h"
#include "shard/reductions.h"
#include "shard/section_codec.h"
#include "shard/shard.h"
#include "shard/shard_copy.h"
#include "shard/snapshot.h"
#include "table/dirty_ranges.h"

namespace shoal::snapshot_test {
namespace {

using Bytes = std::vector<std::byte>;

struct Kind {
  std::string name;
  TableSpec spec;
  std::size_t budget = 0;
};

TableSpec spec_of(std::size_t dim, const char* optimizer, std::map<std::string, double> params,
                  const std::optional<NamedRule>& admit = {}, const std::vector<NamedRule>& expire = {}) {
  return {.dim = dim,
          .dtype = Dtype::kFloat32,
          .optimizer = Optimizer(optimizer, std::move(params)),
          .init = Init("Uniform", 0.5, 4),
          .seed = 1,
          .lifecycle = Lifecycle(admit, expire)};
}

std::vector<Kind> kinds() {
  const std::map<std::string, double> ftrl{
      {"alpha", 0.1}, {"beta", 1.0}, {"l1", 0.1}, {"l2", 0.1}, {"n0", 0.0}};
  const std::map<std::string, double> sgd{{"lr", 0.25}, {"weight_decay", 0.0}};
  const NamedRule ttl{"TimeToLive", {{"clocks", 3}}};
  const NamedRule most{"MaxRows", {{"rows", 1500}, {"frequent", 0}}};
  return {
      {"narrow", spec_of(1, "FTRL", ftrl)},
      {"wide", spec_of(24, "SGD", sgd)},
      {"counted",
       spec_of(2, "SGD", sgd, NamedRule{"AfterCount", {{"n", 3}, {"within", 2}, {"capacity", 400}}}, {ttl})},
      {"bloom",
       spec_of(1, "FTRL", ftrl,
               NamedRule{"AfterBloom", {{"n", 3}, {"within", 2}, {"capacity", 4000}, {"error", 0.01}}},
               {ttl})},
      {"chance", spec_of(1, "FTRL", ftrl, NamedRule{"WithProbability", {{"p", 0.3}, {"seed", 5}}}, {ttl})},
      {"bounded", spec_of(2, "SGD", sgd, {}, {most})},
      {"budget", spec_of(24, "SGD", sgd, {}, {ttl}), 1'000'000},
  };
}

struct Store {
  Store(const Kind& kind, std::size_t slots, std::size_t threads, Locks locks = Locks::kBySlot)
      : pool(threads), cut(slots) {
    if (kind.budget != 0) {
      budget.emplace(cut, kind.budget);
    }
    shard.emplace(kind.spec, cut, pool, locks, budget ? &*budget : nullptr);
  }

  // One random change, of any kind that a shard has.
  void change(std::mt19937_64& random, std::uint64_t among, std::uint32_t clock) {
    ThreadPool one(1);
    const auto draw = [&](std::size_t n) {
      std::vector<std::uint64_t> keys(n);
      for (auto& key : keys) {
        const std::uint64_t drawn = random() % among;
        key = drawn == 1 ? ~std::uint64_t{0} : drawn % 5 == 2 ? unmix(~std::uint64_t{0} - drawn) : drawn;
      }
      return KeyBatch(keys, cut, one);
    };
    const std::size_t dim = shard->rows().dim();
    const auto values = [&](std::size_t n) {
      std::vector<float> all(n * dim);
      for (auto& value : all) {
        value = static_cast<float>(random() % 7) - 3;
      }
      return all;
    };
    const auto what = random() % 16;
    const KeyBatch batch = draw(1 + random() % (what < 2 ? 4000 : 700));
    const SlotSlices slices{batch.hashes(), batch.offsets()};
    try {
      if (what < 9) {
        shard->push(slices, values(batch.size()), {.counts = {}, .clock = clock});
      } else if (what < 11) {
        shard->assign(slices, values(batch.size()), clock);
      } else if (what < 14) {
        shard->erase(slices);
      } else if (what < 15) {
        if (!shard->spec().lifecycle.expire().empty()) {
          shard->sweep(0, cut.count(), clock, {}, false);
        }
      } else {
        const double factor = 0.75;
        reduce(*shard, Function::kDecay, {&factor, 1}, 0, cut.count());
      }
    } catch (const MemoryBudgetExceededError&) {
    }
  }

  ThreadPool pool;
  Slots cut;
  std::optional<Budget> budget;
  std::optional<Shard> shard;
};

// Clocks go on now and then.
std::uint32_t step(std::mt19937_64& random) { return random() % 3 == 0 ? 1 : 0; }

struct Whole {
  explicit Whole(const Shard& shard)
      : sections(shard.slots().count()), filters(sections.size()), rows(sections.size()) {
    for (std::uint32_t s = 0; s < sections.size(); ++s) {
      rows[s] = shard.section(Slot{s}, sections[s]);
      shard.filter(Slot{s}, filters[s]);
    }
  }
  void take(Snapshot& snapshot, std::uint32_t slot) {
    Snapshot::Piece piece = snapshot.take(Slot{slot});
    sections[slot] = std::move(piece.section);
    filters[slot] = std::move(piece.filter);
  }
  // A delta's slot over that of its base.
  void take_delta(const Shard& shard, Snapshot& snapshot, std::uint32_t slot) {
    const Snapshot::Piece piece = snapshot.take(Slot{slot});
    if (piece.ranges.count != 0) {
      const DirtyRanges ranges(shard.slots(), piece.ranges.bits, piece.ranges.count, piece.ranges.bytes);
      rows[slot] =
          SectionCodec(shard.rows())
              .merge(rows[slot], Bytes(sections[slot]), piece.rows, piece.section, ranges, sections[slot]);
    }
    if (piece.has_filter) {
      filters[slot] = piece.filter;
    }
    changed += piece.rows;
  }

  std::vector<Bytes> sections;
  std::vector<Bytes> filters;
  std::vector<std::size_t> rows;
  std::size_t changed = 0;
};

std::size_t differing_slots(const Whole& a, const Whole& b) {
  std::size_t count = 0;
  for (std::size_t s = 0; s < a.sections.size(); ++s) {
    count += a.sections[s] != b.sections[s] || a.filters[s] != b.filters[s] ? 1U : 0U;
  }
  return count;
}

TEST_OF_ONE_THREAD(slots_are_taken_as_they_were_at_the_moment_whatever_comes_between) {
  for (const Kind& kind : kinds()) {
    for (const std::size_t slots : {2UL, 16UL, 128UL}) {
      for (const Locks locks : {Locks::kBySlot, Locks::kOne}) {
        Store store(kind, slots, 2, locks);
        std::mt19937_64 random(slots + kind.name.size());
        std::uint32_t clock = 0;
        std::size_t differed = 0;
        for (int round = 0; round < 4; ++round) {
          for (int i = 0; i < 6; ++i) {
            store.change(random, 3000, clock += step(random));
          }
          const Whole expected(*store.shard);
          store.shard->pause_writers();
          Snapshot snapshot(*store.shard, clock);
          store.shard->resume_writers();
          CHECK_EQ(snapshot.rows(), store.shard->size());
          CHECK_EQ(snapshot.step(), store.shard->step());
          CHECK_THROWS(Snapshot(*store.shard), "one save at a time");
          std::vector<std::uint32_t> order(slots);
          for (std::uint32_t s = 0; s < slots; ++s) {
            order[s] = s;
          }
          std::ranges::shuffle(order, random);
          Whole taken(*store.shard);
          for (std::size_t k = 0; k < slots; ++k) {
            if (k % std::max<std::size_t>(1, slots / 8) == 0) {
              // More keys than before: tables grow, and shrink when many are erased.
              store.change(random, 3000 + 3000 * static_cast<std::uint64_t>(round), clock += step(random));
            }
            taken.take(snapshot, order[k]);
          }
          CHECK_THROWS(snapshot.take(Slot{1}), "taken already");
          differed += differing_slots(expected, Whole(*store.shard));
          CHECK_EQ(differing_slots(expected, taken), 0U);
          CHECK_EQ(store.shard->verify(), "");
        }
        CHECK(differed > slots);  // or nothing was tested
      }
    }
  }
}

// The whole state as a ShardCopy takes it, slot after slot; `between` is called before each.
template <class Between>
std::vector<Bytes> copied(Shard& shard, const Between& between) {
  ShardCopy copy(std::shared_ptr<Shard>(std::shared_ptr<Shard>(), &shard));
  std::vector<Bytes> all{copy.table()};
  for (std::uint32_t s = 0; s < shard.slots().count(); ++s) {
    between();
    ByteWriter out;
    copy.take(Slot{s}, out);
    all.push_back(out.take());
  }
  return all;
}

TEST_OF_ONE_THREAD(a_copy_is_the_whole_state_of_the_moment_whatever_comes_between) {
  for (const Kind& kind : kinds()) {
    for (const std::size_t slots : {2UL, 16UL, 128UL}) {
      Store store(kind, slots, 1, Locks::kOne);
      std::mt19937_64 random(slots);
      std::uint32_t clock = 0;
      for (int round = 0; round < check::rounds(4); ++round) {
        const auto change = [&] { store.change(random, 4000, clock += step(random)); };
        for (int i = 0; i < 4; ++i) {
          change();
        }
        if (round == 2) {
          Snapshot base(*store.shard, clock, Snapshot::Kind::kBase);
          base.done("base");
          base.close();
          change();
        }
        const auto expected = copied(*store.shard, [] {});
        CHECK(copied(*store.shard, change) == expected);
        const auto later = copied(*store.shard, [] {});
        CHECK(later != expected);
        Store other(kind, slots, 1, Locks::kOne);
        for (std::size_t i = 0; i < expected.size(); ++i) {
          ByteReader in(expected[i], "a copy");
          if (i == 0) {
            ShardCopy::restore(*other.shard, in);
          } else {
            ShardCopy::restore(*other.shard, Slot{static_cast<std::uint32_t>(i - 1)}, in);
          }
          in.done();
        }
        CHECK(copied(*other.shard, [] {}) == expected);
        CHECK_EQ(store.shard->verify(), "");
      }
    }
  }
}

TEST_OF_ONE_THREAD(a_first_save_that_was_given_up_leaves_no_mark) {
  for (const Kind& kind : kinds()) {
    Store saved(kind, 16, 1, Locks::kOne);
    Store plain(kind, 16, 1, Locks::kOne);
    for (Store* const store : {&saved, &plain}) {
      if (store == &saved) {
        store->shard->changes().begin_base();
      }
      std::mt19937_64 random(3);
      for (int i = 0; i < 8; ++i) {
        store->change(random, 3000, 1);
      }
    }
    saved.shard->changes().end_base({});
    CHECK(copied(*saved.shard, [] {}) == copied(*plain.shard, [] {}));
  }
}

TEST_OF_ONE_THREAD(what_is_not_taken_is_let_go_and_the_next_snapshot_is_whole) {
  for (const Kind& kind : kinds()) {
    Store store(kind, 16, 1);
    std::mt19937_64 random(3);
    for (int i = 0; i < 8; ++i) {
      store.change(random, 3000, 1);
    }
    {
      Snapshot given_up(*store.shard);
      store.change(random, 3000, 2);
      given_up.take(Slot{3});
      store.change(random, 3000, 3);
    }
    const Whole expected(*store.shard);
    Snapshot snapshot(*store.shard);
    store.change(random, 5000, 4);
    Whole taken(*store.shard);
    for (std::uint32_t s = 0; s < 16; ++s) {
      taken.take(snapshot, s);
    }
    CHECK_EQ(differing_slots(expected, taken), 0U);
    snapshot.close();
    CHECK_THROWS(snapshot.take(Slot{3}), "taken already");
  }
}

TEST_OF_ONE_THREAD(the_weights_of_slots_are_those_of_the_moment) {
  for (const Kind& kind : kinds()) {
    Store store(kind, 16, 2);
    std::mt19937_64 random(3);
    for (int i = 0; i < 20; ++i) {
      store.change(random, 3000, 0);
    }
    std::vector<std::vector<std::uint64_t>> hashes(16);
    std::vector<std::vector<float>> weights(16);
    for (std::uint32_t s = 0; s < 16; ++s) {
      store.shard->read_slot(Slot{s}, hashes[s], weights[s]);
    }
    Snapshot snapshot(*store.shard);
    std::vector<std::uint64_t> hashes_then;
    std::vector<float> weights_then;
    for (std::uint32_t s = 0; s < 16; ++s) {
      store.change(random, 3000, s);
      snapshot.read_slot(Slot{s}, hashes_then, weights_then);
      CHECK(hashes_then == hashes[s]);
      CHECK(weights_then == weights[s]);
    }
    CHECK_THROWS(snapshot.take(Slot{3}), "taken already");
    CHECK_THROWS(snapshot.read_slot(Slot{3}, hashes_then, weights_then), "taken already");
    snapshot.close();
    Snapshot base(*store.shard, 0, Snapshot::Kind::kBase);
    base.done("base");
    base.close();
    Snapshot delta(*store.shard, 0, Snapshot::Kind::kDelta);
    CHECK_THROWS(delta.read_slot(Slot{3}, hashes_then, weights_then), "not all rows");
    delta.close();
    Snapshot whole(*store.shard);
    CHECK_THROWS(whole.read_changes(Slot{3}, hashes_then, weights_then), "does not record changes");
  }
}

TEST(threads_that_change_rows_while_others_take_slots_do_not_show) {
  for (const Kind& kind : kinds()) {
    for (const Locks locks : {Locks::kBySlot, Locks::kOne}) {
      Store store(kind, 32, 2, locks);
      std::atomic<bool> ends{false};
      std::vector<std::thread> threads;
      for (std::uint64_t t = 0; t < 2; ++t) {
        threads.emplace_back([&, t] {
          std::mt19937_64 random(t);
          for (std::uint32_t clock = 0; !ends.load(); clock += step(random)) {
            store.change(random, 4000, clock);
          }
        });
      }
      for (int round = 0; round < 5; ++round) {
        store.shard->pause_writers();
        const Whole expected(*store.shard);
        Snapshot snapshot(*store.shard);
        store.shard->resume_writers();
        Whole taken(expected);
        std::atomic<std::uint32_t> next{0};
        const auto take = [&] {
          for (std::uint32_t s = next++; s < 32; s = next++) {
            taken.take(snapshot, s);
          }
        };
        std::thread other(take);
        take();
        other.join();
        CHECK_EQ(differing_slots(expected, taken), 0U);
      }
      ends = true;
      for (auto& thread : threads) {
        thread.join();
      }
      CHECK_EQ(store.shard->verify(), "");
    }
  }
}

TEST(a_save_that_falls_behind_makes_pushes_wait_and_is_lost_before_memory_is) {
  Store store(kinds()[1], 16, 1);
  std::mt19937_64 random(5);
  for (int i = 0; i < 20; ++i) {
    store.change(random, 20'000, 0);
  }
  {
    Snapshot snapshot(*store.shard, 0, Snapshot::Kind::kPlain, 2000);  // bytes: two dozen rows
    for (int i = 0; i < 8; ++i) {
      store.change(random, 20'000, 0);
    }
    CHECK_THROWS(snapshot.take(Slot{1}), "rows changed faster than they were written");
  }
  // A waiting push continues as soon as taking a slot frees memory.
  const Whole expected(*store.shard);
  Snapshot snapshot(*store.shard, 0, Snapshot::Kind::kPlain, 100'000);
  std::atomic<bool> done{false};
  std::thread pusher([&] {
    std::mt19937_64 other(6);
    for (int i = 0; i < 12; ++i) {
      store.change(other, 20'000, 0);
    }
    done = true;
  });
  Whole taken(expected);
  for (std::uint32_t s = 0; s < 16; ++s) {
    taken.take(snapshot, s);
  }
  pusher.join();
  CHECK(done.load());
  CHECK_EQ(differing_slots(expected, taken), 0U);
}

TEST_OF_ONE_THREAD(a_chain_of_deltas_is_what_the_shard_was_at_each_moment) {
  for (const Kind& kind : kinds()) {
    for (const std::size_t slots : {2UL, 64UL}) {
      Store store(kind, slots, 2);
      std::mt19937_64 random(slots + kind.name.size());
      std::uint32_t clock = 0;
      for (int i = 0; i < 8; ++i) {
        store.change(random, 3000, clock += step(random));
      }
      CHECK_EQ(store.shard->changes().base(), "");
      CHECK_THROWS(Snapshot(*store.shard, 0, Snapshot::Kind::kDelta), "save all rows first");
      Whole chain(*store.shard);
      {
        Snapshot base(*store.shard, clock, Snapshot::Kind::kBase);
        for (std::uint32_t s = 0; s < slots; ++s) {
          chain.take(base, s);
          store.change(random, 3000, clock += step(random));
        }
        base.done("base");
      }
      for (int round = 0; round < 6; ++round) {
        // Few changes or many: all of a table, some, none.
        for (int i = 0; i < round % 3 * 3; ++i) {
          store.change(random, round == 5 ? 30'000 : 3000, clock += step(random));
        }
        if (round % 2 == 1) {  // a cancelled save is not a base, and no change is lost
          Snapshot given_up(*store.shard, clock, round == 3 ? Snapshot::Kind::kBase : Snapshot::Kind::kDelta);
          store.change(random, 3000, clock);
          given_up.take(Slot{1});
        }
        {  // and one that is not tracked changes nothing
          Snapshot plain(*store.shard, clock);
          plain.take(Slot{0});
        }
        const Whole expected(*store.shard);
        store.shard->pause_writers();
        Snapshot delta(*store.shard, clock, Snapshot::Kind::kDelta);
        store.shard->resume_writers();
        for (std::uint32_t s = 0; s < slots; ++s) {
          if (s % std::max<std::size_t>(1, slots / 4) == 0 && round % 3 != 0) {
            store.change(random, 3000, clock += step(random));
          }
          chain.take_delta(*store.shard, delta, s);
        }
        CHECK_EQ(differing_slots(expected, chain), 0U);
        CHECK_EQ(chain.rows, expected.rows);
        delta.done(std::to_string(round));
        delta.close();
        CHECK_EQ(store.shard->changes().base(), std::to_string(round));
      }
    }
  }
}

// The weights of all rows, and a delta's laid over them.
using Weights = std::map<std::uint64_t, std::vector<float>>;

Weights weights_of(const Shard& shard) {
  Weights all;
  const std::size_t dim = shard.rows().dim();
  std::vector<std::uint64_t> hashes;
  std::vector<float> weights;
  for (std::uint32_t s = 0; s < shard.slots().count(); ++s) {
    shard.read_slot(Slot{s}, hashes, weights);
    for (std::size_t i = 0; i < hashes.size(); ++i) {
      all[hashes[i]].assign(weights.data() + i * dim, weights.data() + (i + 1) * dim);
    }
  }
  return all;
}

void lay_over(Weights& base, const Shard& shard, Snapshot& delta, std::uint32_t slot) {
  std::vector<std::uint64_t> hashes;
  std::vector<float> weights;
  const Snapshot::Ranges saved = delta.read_changes(Slot{slot}, hashes, weights);
  CHECK(saved.count != 0 || hashes.empty());
  if (saved.count == 0) {
    return;
  }
  const DirtyRanges ranges(shard.slots(), saved.bits, saved.count, saved.bytes);
  std::erase_if(base, [&](const auto& row) {
    return shard.slots().of(row.first) == Slot{slot} && ranges.has(row.first);
  });
  CHECK(std::ranges::is_sorted(hashes));
  const std::size_t dim = shard.rows().dim();
  for (std::size_t i = 0; i < hashes.size(); ++i) {
    CHECK(ranges.has(hashes[i]));
    base[hashes[i]].assign(weights.data() + i * dim, weights.data() + (i + 1) * dim);
  }
}

TEST_OF_ONE_THREAD(saves_and_exports_know_each_what_has_changed_since_their_own_last_one) {
  for (const Kind& kind : kinds()) {
    for (const std::size_t slots : {2UL, 64UL}) {
      Store store(kind, slots, 2);
      std::mt19937_64 random(slots + kind.name.size());
      std::uint32_t clock = 0;
      const auto change = [&](int times) {
        for (int i = 0; i < times; ++i) {
          store.change(random, random() % 4 == 0 ? 30'000 : 3000, clock += step(random));
        }
      };
      const auto few = [&] {  // so few that rows are picked
        ThreadPool one(1);
        const std::vector<std::uint64_t> keys{random() % 3000, random() % 3000, random()};
        const KeyBatch batch(keys, store.cut, one);
        const SlotSlices slices{batch.hashes(), batch.offsets()};
        try {
          store.shard->assign(slices, std::vector<float>(batch.size() * store.shard->rows().dim(), 2.0F),
                              clock);
        } catch (const MemoryBudgetExceededError&) {
        }
      };
      change(8);
      Weights exported = weights_of(*store.shard);
      {
        Snapshot base(*store.shard, clock, Snapshot::Kind::kBase, 0, Purpose::kExport);
        change(2);
        base.done("exported");
      }
      CHECK_EQ(store.shard->changes().base(), "");
      CHECK_EQ(store.shard->changes().base(Purpose::kExport), "exported");
      CHECK_THROWS(Snapshot(*store.shard, 0, Snapshot::Kind::kDelta), "save all rows first");
      change(2);
      Whole saved(*store.shard);
      {
        Snapshot base(*store.shard, clock, Snapshot::Kind::kBase);
        change(1);
        base.done("saved");
      }
      for (int round = 0; round < check::rounds(12); ++round) {
        if (round % 3 == 1) {
          change(3);
        } else {
          few();
        }
        if (random() % 3 == 0) {  // a save that is cancelled, or not tracked, changes nothing
          Snapshot other(*store.shard, clock,
                         random() % 2 == 0 ? Snapshot::Kind::kDelta : Snapshot::Kind::kPlain, 0,
                         random() % 2 == 0 ? Purpose::kSave : Purpose::kExport);
          few();
        }
        if (random() % 2 == 0) {
          const Weights expected = weights_of(*store.shard);
          Snapshot delta(*store.shard, clock, Snapshot::Kind::kDelta, 0, Purpose::kExport);
          CHECK_THROWS(delta.take(Slot{0}), "has no sections");
          for (std::uint32_t s = 0; s < slots; ++s) {
            if (s % std::max<std::size_t>(1, slots / 4) == 0) {
              change(1);
            }
            lay_over(exported, *store.shard, delta, s);
          }
          CHECK(exported == expected);
          delta.done("exported");
        } else {
          const Whole expected(*store.shard);
          Snapshot delta(*store.shard, clock, Snapshot::Kind::kDelta);
          for (std::uint32_t s = 0; s < slots; ++s) {
            if (s % std::max<std::size_t>(1, slots / 4) == 0) {
              few();
            }
            saved.take_delta(*store.shard, delta, s);
          }
          CHECK_EQ(differing_slots(expected, saved), 0U);
          delta.done("saved");
        }
      }
    }
  }
}

TEST_OF_ONE_THREAD(a_delta_holds_little_more_than_what_has_changed) {
  Store store(kinds()[0], 16, 1);
  std::vector<std::uint64_t> keys(100'000);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    keys[i] = i;
  }
  const auto assign = [&](std::size_t first, std::size_t end) {
    ThreadPool one(1);
    const std::span<const std::uint64_t> all = keys;
    const KeyBatch batch(all.subspan(first, end - first), store.cut, one);
    store.shard->assign({batch.hashes(), batch.offsets()}, std::vector<float>(batch.size(), 1.0F));
  };
  assign(0, keys.size());
  store.shard->changes().track("base");
  const auto changed = [&](const char* name) {
    Whole whole(*store.shard);
    Snapshot delta(*store.shard, 0, Snapshot::Kind::kDelta);
    std::size_t bytes = 0;
    for (std::uint32_t s = 0; s < 16; ++s) {
      const Snapshot::Piece piece = delta.take(Slot{s});
      whole.changed += piece.rows;
      bytes += piece.ranges.bytes.size();
    }
    delta.done(name);
    CHECK(bytes <= std::max<std::size_t>(keys.size() / 4, 4 * whole.changed));
    return whole.changed;
  };
  CHECK_EQ(changed("nothing"), 0U);
  assign(0, 1000);
  const std::size_t few = changed("few");
  CHECK(few >= 1000);
  CHECK(few <= 4000);
  assign(0, keys.size());
  CHECK_EQ(changed("all"), keys.size());
}

TEST_OF_ONE_THREAD(ranges_are_saved_as_a_list_or_as_bits_and_nothing_else_is_taken_for_them) {
  const Slots cut(8);
  std::mt19937_64 random(2);
  for (const std::size_t rows : {1UL, 1000UL, 100'000UL}) {
    for (const std::size_t hits : {0UL, 1UL, 20UL, 100'000UL}) {
      DirtyRanges changed(cut);
      std::vector<std::uint64_t> hashes(hits);
      for (auto& hash : hashes) {
        hash = random() >> 3U | std::uint64_t{5} << 61U;
      }
      for (std::size_t first = 0; first < hits; first += 5000) {
        const auto some = std::span(hashes).subspan(first, std::min<std::size_t>(5000, hits - first));
        changed.add(some, rows * std::min(hits, first + 5000) / hits);
      }
      Bytes saved;
      changed.save(saved);
      CHECK_EQ(saved.size(), DirtyRanges::saved_bytes(changed.bits(), changed.count()));
      const DirtyRanges back(cut, changed.bits(), changed.count(), saved);
      CHECK_EQ(back.count(), changed.count());
      for (const std::uint64_t hash : hashes) {
        CHECK(changed.has(hash));
        CHECK(back.has(hash));
      }
      // Runs are the ranges that are named, neighbours put together.
      std::size_t ranges = 0;
      std::optional<std::uint64_t> last;
      changed.each_run([&](std::uint64_t from, std::uint64_t to) {
        CHECK(!last || from > *last + 1);
        last = to;
        CHECK(changed.has(from >> 3U | std::uint64_t{5} << 61U));
        CHECK(changed.has(to >> 3U | std::uint64_t{5} << 61U));
        CHECK(to == ~std::uint64_t{0} || !changed.has((to + 1) >> 3U | std::uint64_t{5} << 61U));
        ranges += static_cast<std::size_t>(((to - from) >> (64U - changed.bits())) + 1);
      });
      CHECK_EQ(ranges, changed.count());
      DirtyRanges merged(cut);
      const std::span<const std::uint64_t> all = hashes;
      merged.add(all.first(std::min<std::size_t>(1, hits)), 1);
      merged.add(changed);
      DirtyRanges other(cut);
      other.add({}, 10 * rows);
      other.add(changed);
      for (const std::uint64_t hash : hashes) {
        CHECK(merged.has(hash));
        CHECK(other.has(hash));
      }
      CHECK_THROWS(DirtyRanges(cut, changed.bits(), changed.count() + 1, saved), "");
      CHECK_THROWS(DirtyRanges(cut, changed.bits() + 40, changed.count(), saved), "bits");
      Bytes longer = saved;
      longer.push_back(std::byte{0});
      CHECK_THROWS(DirtyRanges(cut, changed.bits(), changed.count(), longer), "do not name");
    }
  }
  const auto bytes_of = [](const std::vector<std::uint32_t>& ranges) {
    return std::as_bytes(std::span(ranges));
  };
  const std::vector<std::uint32_t> wrong{64};
  CHECK_THROWS(DirtyRanges(cut, 6, 1, bytes_of(wrong)), "of 6 bits");
  const std::vector<std::uint32_t> falling{5, 5};
  CHECK_THROWS(DirtyRanges(cut, 12, 2, bytes_of(falling)), "must ascend");
}

TEST_OF_ONE_THREAD(a_merge_refuses_rows_outside_of_their_ranges_and_sections_of_a_wrong_size) {
  Store store(kinds()[0], 2, 1);
  std::mt19937_64 random(4);
  for (int i = 0; i < 6; ++i) {
    store.change(random, 3000, 0);
  }
  Whole whole(*store.shard);
  const DirtyRanges none(store.cut);
  Bytes merged;
  CHECK_EQ(SectionCodec(store.shard->rows()).merge(whole.rows[0], whole.sections[0], 0, {}, none, merged),
           whole.rows[0]);
  CHECK(merged == whole.sections[0]);
  CHECK_THROWS(SectionCodec(store.shard->rows()).merge(0, {}, whole.rows[0], whole.sections[0], none, merged),
               "none of its ranges");
  CHECK_THROWS(SectionCodec(store.shard->rows()).merge(1, whole.sections[0], 0, {}, none, merged),
               "does not hold 1 rows");
  CHECK_THROWS(
      SectionCodec(store.shard->rows()).merge(0, {}, ~std::size_t{0}, whole.sections[0], none, merged),
      "does not hold");
}

}  // namespace
}  // namespace shoal::snapshot_test

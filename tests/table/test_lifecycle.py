"""Rules of a table's lifecycle: what they promise one by one. Sequences of calls are test_lifecycle_machine's."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

import shoal
from oracle.hashing import LAST_KEY, neighbours
from shoal.lifecycle import RuleRecord, make_admission, make_expiry
from shoal.table.spec import TableRecord
from tiers import rounds

ADMISSIONS = (
    shoal.AfterCount(3),
    shoal.AfterCount(2, within=7, capacity=5000),
    shoal.AfterBloom(3, capacity=100_000),
    shoal.AfterBloom(40, capacity=10, error=0.1, within=5),
    shoal.WithProbability(0.25, seed=9),
)
EXPIRIES = (
    shoal.TimeToLive(12),
    shoal.DecayedScore(0.9, floor=0.1),
    shoal.MinNorm(1e-4),
    shoal.MaxRows(5000),
    shoal.MaxRows(5000, keep="frequent"),
)


def keys_at_random(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**64, n, dtype=np.uint64)


def push(table: shoal.Table, keys: np.ndarray) -> None:
    table.push(keys, np.ones((len(keys), table.dim), np.float32)).result()


def kept(table: shoal.Table, slots: int) -> tuple[bytes, ...]:
    """Return what a checkpoint keeps of rows and waiting keys."""
    shard = table.shard
    return tuple(shard.section(slot)[1].tobytes() + shard.filter(slot).tobytes() for slot in range(slots))


# --- descriptions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ADMISSIONS, ids=str)
def test_an_admission_rule_comes_back_from_its_plain_form(rule):
    form = msgspec.json.decode(msgspec.json.encode(rule.record()), type=RuleRecord)
    assert make_admission(form) == rule


@pytest.mark.parametrize("rule", EXPIRIES, ids=str)
def test_an_expiry_rule_comes_back_from_its_plain_form(rule):
    form = msgspec.json.decode(msgspec.json.encode(rule.record()), type=RuleRecord)
    assert make_expiry(form) == rule


def test_a_description_with_rules_comes_back_and_one_without_reads_as_ever():
    with shoal.local() as store:
        ruled = store.table("ruled", admit=ADMISSIONS[0], expire=EXPIRIES[:4]).spec
        plain = store.table("plain").spec
    assert msgspec.json.decode(msgspec.json.encode(TableRecord.of(ruled)), type=TableRecord).spec() == ruled
    assert b"admit" not in msgspec.json.encode(TableRecord.of(plain))
    assert hash(ruled) != hash(plain)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: shoal.AfterCount(0), "whole number from 1"),
        (lambda: shoal.AfterCount(1.5), "n is 1.5: pass a whole number"),
        (lambda: shoal.AfterCount("3"), "n is '3': pass a whole number"),
        (lambda: shoal.AfterCount(3, within=0), "for within"),
        (lambda: shoal.AfterBloom(256, capacity=10), "from 1 to 255"),
        (lambda: shoal.AfterBloom(3, capacity=10, error=0.9), "error from"),
        (lambda: shoal.WithProbability(0.0), "p from"),
        (lambda: shoal.WithProbability(0.5, seed=2**60), "for seed"),
        (lambda: shoal.TimeToLive(0), "for clocks"),
        (lambda: shoal.DecayedScore(1.5, floor=1), "decay from"),
        (lambda: shoal.DecayedScore(0.5, floor=0), "floor > 0"),
        (lambda: shoal.MinNorm(math.nan), "finite"),
        (lambda: shoal.MaxRows(0), "for rows"),
        (lambda: shoal.MaxRows(10, keep="best"), '"recent" or "frequent"'),
        (lambda: make_admission(RuleRecord("TimeToLive", {"clocks": 1})), "no admission rule"),
        (lambda: make_expiry(RuleRecord("AfterCount", {"n": 1})), "no expiry rule"),
        (lambda: make_admission(RuleRecord("AfterCount", {"n": 2, "m": 1})), "m"),
    ],
)
def test_a_bad_rule_is_refused_where_it_is_made(make, says):
    with pytest.raises((ValueError, TypeError), match=says):
        make()


def test_a_table_takes_rules_of_the_right_sort_and_one_of_a_kind():
    with shoal.local(slots=64) as store:
        for rules, says in (
            ({"admit": shoal.TimeToLive(3)}, "admits by a rule"),
            ({"expire": shoal.AfterCount(3)}, "expires rows by rules|not iterable"),
            ({"expire": [shoal.TimeToLive(3), shoal.TimeToLive(4)]}, "one TimeToLive, got 2"),
            ({"expire": shoal.MaxRows(63)}, "at least one row a slot"),
            ({"admit": shoal.AfterCount(2, capacity=63)}, "at least one key a slot"),
        ):
            with pytest.raises((ValueError, TypeError), match=says):
                store.table("t", **rules)
        assert not store.tables
        table = store.table("t", expire=shoal.TimeToLive(3))
        assert store.table("t", expire=[shoal.TimeToLive(3)]) is table
        with pytest.raises(ValueError, match="expire"):
            store.table("t", expire=shoal.TimeToLive(4))


def test_rows_grow_by_what_the_rules_must_know_and_not_more():
    with shoal.local(slots=2) as store:
        widths = {}
        for name, rules in {
            "none": (),
            "norm": (shoal.MinNorm(0.1),),
            "clock": (shoal.TimeToLive(3), shoal.MaxRows(10)),
            "score": (shoal.DecayedScore(0.5, 0.1), shoal.TimeToLive(3)),
            "all": (shoal.DecayedScore(0.5, 0.1), shoal.MaxRows(10, keep="frequent")),
        }.items():
            table = store.table(name, dim=2, optimizer=shoal.SGD(), expire=rules)
            push(table, np.array([7], np.uint64))
            sections = [table.shard.section(slot) for slot in (0, 1)]
            (section,) = [section for rows, section, *_ in sections if rows]
            widths[name] = len(section) // 64 - 1  # of one row each column has 64 bytes, as its hash has
        assert widths == {"none": 1, "norm": 1, "clock": 2, "score": 3, "all": 4}


def test_counts_are_checked_and_change_nothing():
    with shoal.local() as store:
        table = store.table("t", admit=shoal.AfterCount(2))
        batch = store.key_batch(np.array([7, 9], np.uint64))
        grads = np.ones((2, 1), np.float32)
        for counts in (np.ones(3, np.uint32), np.array([1, 0]), np.ones(2, np.float32), np.array([1, 2**32])):
            with pytest.raises(ValueError, match="counts"):
                table.push_unique(batch, grads, counts=counts)
        assert table.stats().pushes == 0


# --- admission ----------------------------------------------------------------------------------------------------


def test_the_push_that_brings_the_last_occurrence_makes_the_row_and_is_applied():
    keys = np.array([0, LAST_KEY, 5], np.uint64)
    with shoal.local() as store:
        table = store.table("t", optimizer=shoal.SGD(lr=1.0), init=shoal.Constant(9.0), admit=shoal.AfterCount(3))
        for occurrence in range(4):
            assert table.pull(keys).ravel().tolist() == [9.0] * 3 if occurrence < 3 else [8.0] * 3
            push(table, keys)
        assert table.pull(keys).ravel().tolist() == [7.0] * 3
        push(table, np.array([1, 1, 1], np.uint64))
        assert table.pull(np.array([1], np.uint64)).item() == 6.0  # one push has three occurrences
        assert table.stats().refused == 6
        assert table.stats().rows_created == 4


def test_an_assignment_makes_a_row_for_a_key_that_waits():
    key = np.array([3], np.uint64)
    with shoal.local() as store:
        table = store.table("t", admit=shoal.AfterCount(5))
        push(table, key)
        assert table.stats().waiting == 1
        table.assign(key, np.ones(1, np.float32))
        assert table.contains(key).item()
        assert table.stats().waiting == 0


@pytest.mark.parametrize("n", [1, 2, 3, 15, 16, 200])
def test_a_bloom_filter_never_admits_late(n):
    keys = np.concatenate([keys_at_random(3000), neighbours(40), np.array([0, LAST_KEY], np.uint64)])
    with shoal.local(slots=16) as store:
        table = store.table("t", admit=shoal.AfterBloom(n, capacity=4000))
        push(table, np.repeat(keys, n - 1))
        early = len(table)
        assert early <= 0.02 * len(keys)
        push(table, keys)
        assert table.contains(keys).all()


@pytest.mark.parametrize("error", [0.2, 0.01, 1e-4])
def test_a_bloom_filter_errs_about_as_often_as_it_was_made_to(error):
    capacity = 40_000
    seen, new = np.split(keys_at_random(capacity + 200_000), [capacity])
    with shoal.local() as store:
        table = store.table("t", admit=shoal.AfterBloom(2, capacity=capacity, error=error))
        push(table, seen)
        # The first occurrences of new keys, in pushes so small that the filter holds about its capacity throughout.
        before = len(table)
        push(table, new[: capacity // 8])
        early = (len(table) - before) / (capacity // 8)
        assert early < 2 * error + 5 / (capacity // 8)


def test_a_bloom_filter_takes_the_memory_that_was_said():
    with shoal.local() as store:
        table = store.table("t", admit=shoal.AfterBloom(2, capacity=1_000_000))
        push(table, keys_at_random(20_000))  # every slot has been asked
        filled = table.stats().bytes
        push(table, keys_at_random(200_000, seed=1))
        assert filled < 8_000_000
        assert table.stats().bytes < filled + 100_000  # but for the rows of a few early ones


def test_a_filter_with_a_window_starts_anew():
    keys = keys_at_random(500)
    with shoal.local() as store:
        table = store.table("t", admit=shoal.AfterBloom(2, capacity=1000, within=3))
        push(table, keys[:100])
        for _ in range(3):
            store.tick()
        push(table, keys[:100])
        assert len(table) == 0
        push(table, keys[:100])
        assert len(table) == 100


def test_a_coin_admits_as_often_as_it_says_and_waits_for_nobody():
    keys = keys_at_random(20_000)
    with shoal.local() as store:
        table = store.table("t", admit=shoal.WithProbability(0.1, seed=3))
        push(table, keys)
        assert abs(len(table) - 2000) < 5 * math.sqrt(2000)
        push(table, np.repeat(keys, 7))
        assert abs(len(table) - 20_000 * (1 - 0.9**8)) < 5 * math.sqrt(20_000 / 4)
        assert table.stats().waiting == 0


@settings(max_examples=rounds(15), deadline=None)
@given(seed=st.integers(0, 2**20), admit=st.sampled_from(ADMISSIONS), expire=st.sampled_from(EXPIRIES))
def test_bits_depend_on_no_thread(seed, admit, expire):
    rng = np.random.default_rng(seed)
    pushes = [rng.zipf(1.3, int(rng.integers(0, 20_000))).astype(np.uint64) for _ in range(6)]
    found = set()
    for threads in (1, 2, 4):
        with shoal.local(threads=threads, slots=32) as store:
            table = store.table("t", optimizer=shoal.SGD(lr=0.1), admit=admit, expire=expire)
            for keys in pushes:
                push(table, keys)
                store.tick()
            report = str(store.sweep(dry_run=True)) + str(store.sweep())
            sections = [
                (table.shard.section(slot)[1].tobytes(), table.shard.filter(slot).tobytes()) for slot in range(32)
            ]
            found.add((report, tuple(sections), tuple(table.stats().expired.items()), table.stats().refused))
    assert len(found) == 1


@pytest.mark.parametrize("admit", ADMISSIONS, ids=str)
def test_who_is_admitted_depends_on_no_slot(admit):
    """But for a capacity that is shared among the slots, and these keys do not fill it."""
    pushes = [np.random.default_rng(k).zipf(1.4, 3000).astype(np.uint64) for k in range(4)]
    found = set()
    for slots in (2, 64, 1024):
        with shoal.local(slots=slots) as store:
            table = store.table("t", admit=admit)
            for keys in pushes:
                push(table, keys)
            found.add(tuple(sorted(int(key) for keys, _ in table.items() for key in keys)))
    assert len(found) == 1


# --- expiry -------------------------------------------------------------------------------------------------------


def test_a_late_push_of_an_older_clock_does_not_make_a_row_older():
    with shoal.local(slots=2) as store:
        table = store.table("t", expire=shoal.TimeToLive(3))
        batch = store.key_batch(np.array([7], np.uint64))
        grads = np.ones((1, 1), np.float32)
        for clock in (10, 4, 2**32 - 1):
            table.shard.push(batch.native, grads, None, clock)
        none = np.empty(0, np.float64)
        assert table.shard.sweep(none, 13, dry_run=True)[38] == 0
        assert table.shard.sweep(none, 14, dry_run=True)[38] == 1


def test_clocks_go_on_over_their_end_and_where_a_checkpoint_left_them():
    with shoal.local(slots=2) as store:
        table = store.table("t", expire=shoal.TimeToLive(3))
        table.shard.set_clock(2**32 - 2, 0)
        push(table, np.array([7], np.uint64))
        for _ in range(3):
            store.tick()
        assert table.shard.table_clock(store.clock) == 1
        assert store.sweep().rows_dropped == 0
        store.tick()
        assert store.sweep().rows_dropped == 1


def test_a_sweep_gives_memory_back():
    keys = keys_at_random(60_000)
    for dim in (1, 16):
        with shoal.local(slots=64) as store:
            table = store.table("t", dim=dim, expire=shoal.TimeToLive(1))
            push(table, keys[:20_000])
            alone = table.stats().bytes
            push(table, keys)
            full = table.stats().bytes
            store.tick()
            store.tick()
            push(table, keys[:20_000])
            report = store.sweep()
            assert report.rows_dropped == 40_000
            assert report.bytes_given_back == full - table.stats().bytes
            assert table.stats().bytes < 1.3 * alone
            assert table.shard.verify() == ""
            assert table.contains(keys[:20_000]).all()


def test_max_rows_are_never_exceeded_and_nearly_reached():
    with shoal.local(slots=16) as store:
        table = store.table("t", expire=shoal.MaxRows(2000))
        for k in range(30):
            push(table, keys_at_random(500, seed=k))
            store.tick()
            assert len(table) <= 2000
        assert len(table) > 1700
        last = keys_at_random(500, seed=29)
        assert table.contains(last).mean() > 0.99
        assert table.stats().expired["MaxRows"] == 30 * 500 - len(table)


def test_a_forecast_drops_nothing_and_tells_the_thresholds():
    old, new = keys_at_random(1000), keys_at_random(3000, seed=1)
    with shoal.local(slots=16) as store:
        table = store.table("t", expire=[shoal.TimeToLive(5), shoal.DecayedScore(0.5, floor=1e-3)])
        push(table, np.repeat(old, 2))
        for _ in range(8):
            store.tick()
        push(table, new)
        forecast = table.sweep(dry_run=True)
        assert len(table) == 4000
        assert [dropped.rows for dropped in forecast.dropped] == [1000, 0]
        # Old rows have 2 * 2**-8 points each, new ones 1.
        assert forecast.dropped[0].share == pytest.approx(1000 * 2**-7 / (1000 * 2**-7 + 3000), rel=1e-6)
        by_clocks = {dropped.rule.clocks: dropped.rows for dropped in forecast.thresholds[0]}
        assert by_clocks == {1: 1000, 3: 1000, 7: 1000, 15: 0}
        by_floor = {dropped.rule.floor: dropped.rows for dropped in forecast.thresholds[1]}
        assert by_floor == {2.0**-k: 1000 for k in range(6, -1, -1)} | {2.0: 4000}
        assert table.sweep(shoal.TimeToLive(7), shoal.MinNorm(1e9), dry_run=True).dropped[1].rows == 3000
        assert "of recent impressions" in str(forecast)
        with pytest.raises(ValueError, match="keep no count"):
            table.sweep(shoal.MaxRows(10, keep="frequent"), dry_run=True)
        with pytest.raises(ValueError, match=r"decay by 0\.5"):
            table.sweep(shoal.DecayedScore(0.25, floor=1e-3), dry_run=True)
        with pytest.raises(TypeError, match="TimeToLive"):
            table.sweep(3, dry_run=True)
        assert store.sweep().rows_dropped == 1000


def test_the_share_of_a_time_to_live_is_what_came_back_later_than_that():
    with shoal.local(slots=4) as store:
        table = store.table("t", expire=shoal.TimeToLive(3))
        often, seldom = keys_at_random(30), keys_at_random(10, seed=1)
        push(table, seldom)
        for _ in range(6):
            push(table, often)
            store.tick()
        push(table, seldom)  # after six clocks: the rule would have given these up
        assert table.sweep(dry_run=True).dropped[0].share == pytest.approx(10 / (20 + 6 * 30))
        assert math.isnan(store.table("other", expire=shoal.TimeToLive(3)).sweep(dry_run=True).dropped[0].share)
        store.sweep()
        assert math.isnan(table.sweep(dry_run=True).dropped[0].share)  # counted anew


def test_rules_answer_for_rows_of_every_optimizer():
    keys = keys_at_random(300)
    for optimizer in (shoal.FTRL(), shoal.Adam(per_row_step=True), shoal.RowWiseAdagrad(), shoal.GroupFTRL()):
        with shoal.local(slots=4) as store:
            for dtype in ("float32", "bfloat16"):
                if dtype == "bfloat16" and isinstance(optimizer, (shoal.FTRL, shoal.GroupFTRL)):
                    continue
                table = store.table(
                    dtype,
                    dim=5,
                    dtype=dtype,
                    optimizer=optimizer,
                    admit=shoal.AfterCount(2),
                    expire=[shoal.MinNorm(1e-6), shoal.DecayedScore(0.5, 0.4), shoal.MaxRows(250, keep="frequent")],
                )
                push(table, keys[:200])
                push(table, keys)
                assert len(table) == 200
                assert [dropped.rows for dropped in table.sweep(dry_run=True).dropped] == [0, 0, 0]
                store.tick()
                store.tick()
                assert [dropped.rows for dropped in table.sweep(dry_run=True).dropped] == [0, 200, 0]
                norms = np.linalg.norm(table.pull(keys[:200]).astype(np.float64), axis=1)
                floor = float(np.median(norms))
                assert table.sweep(shoal.MinNorm(floor), dry_run=True).dropped[0].rows == np.sum(norms < floor)


# --- the memory budget --------------------------------------------------------------------------------------------


def resident() -> int:
    """Bytes of memory that this process holds."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.slow
@pytest.mark.combined
@pytest.mark.parametrize("dim", [1, 24])
@pytest.mark.parametrize("admit", [None, shoal.AfterCount(2), shoal.AfterBloom(2, capacity=20_000)], ids=str)
def test_a_budget_is_never_exceeded_and_rows_that_were_sighted_stay(dim, admit):
    memory = 8 << 20
    with shoal.local(slots=32, memory=memory) as store:
        table = store.table("t", dim=dim, admit=admit, expire=shoal.TimeToLive(10**6))
        other = store.table("other", dim=3, expire=shoal.MaxRows(10**6, keep="frequent"))
        hot = keys_at_random(300, seed=99)
        for k in range(60):
            new = keys_at_random(12_000 // (1 + dim // 8), seed=k)
            push(table, np.concatenate([hot, new]))
            if k % 3 == 0:
                push(table, new)
                push(other, new[:500])
            store.tick()
            assert table.stats().bytes + other.stats().bytes <= memory
            assert table.contains(hot).all() or (admit is not None and k == 0)
        assert table.shard.verify() == ""
        assert table.stats().expired["TimeToLive"] > 0
        assert table.stats().bytes > memory // 2


def test_without_a_rule_a_push_beyond_the_budget_changes_nothing():
    memory = 2 << 20
    with shoal.local(slots=16, memory=memory) as store:
        table = store.table("t", dim=4, optimizer=shoal.SGD(lr=1.0), admit=shoal.AfterCount(1))
        pushed = []

        def push_until_full():
            for k in range(1000):
                push(table, keys_at_random(1000, seed=k))
                pushed.append(k)

        with pytest.raises(shoal.MemoryBudgetExceededError, match=r"slot \d+.*bytes that each of 16 slots has"):
            push_until_full()
        assert 5 < len(pushed) < 1000
        step, before = table.stats().step, kept(table, 16)
        mixed = np.concatenate([keys_at_random(1000, seed=0), keys_at_random(50_000, seed=5000)])
        for _ in range(2):
            with pytest.raises(shoal.MemoryBudgetExceededError):
                push(table, mixed)
            with pytest.raises(shoal.MemoryBudgetExceededError):
                table.assign(np.unique(mixed), np.ones((51_000, 4), np.float32))
        assert kept(table, 16) == before
        assert (table.stats().step, table.stats().refused) == (step, 0)
        assert table.stats().bytes <= memory
        with pytest.raises(shoal.MemoryBudgetExceededError):
            store.table("another", admit=shoal.AfterBloom(2, capacity=10**7)).push(
                keys_at_random(1000), np.ones(1000, np.float32)
            )
        # Rows that are there can be pushed, and what is erased makes room.
        push(table, keys_at_random(1000, seed=0))
        assert table.erase(keys_at_random(1000, seed=0)) == 1000
        push(table, keys_at_random(500, seed=7777))


def test_a_push_that_is_larger_than_a_slot_is_refused_even_where_rows_may_go():
    with shoal.local(slots=2, memory=64 << 10) as store:
        table = store.table("t", expire=shoal.TimeToLive(5))
        push(table, keys_at_random(500))
        before = kept(table, 2)
        with pytest.raises(shoal.MemoryBudgetExceededError):
            push(table, keys_at_random(50_000, seed=1))
        assert kept(table, 2) == before


def test_closing_a_table_gives_its_share_back_and_a_bad_budget_is_refused():
    with pytest.raises(ValueError, match="1024 slots"):
        shoal.local(slots=1024, memory=1000)
    for memory in (0, -5, 1.5, True):
        with pytest.raises(ValueError, match="number of bytes"):
            shoal.local(memory=memory)
    with shoal.local(slots=2, memory=4096) as store:
        for k in range(4):
            store.table(str(k))
        with pytest.raises(shoal.MemoryBudgetExceededError):
            [store.table(str(k)) for k in range(4, 20)]


@pytest.mark.slow
@pytest.mark.parametrize("dim", [1, 16])
def test_the_process_grows_by_no_more_than_the_budget(dim):
    memory = 24 << 20
    with shoal.local(threads=2, slots=128, memory=memory) as store:
        table = store.table("t", dim=dim, optimizer=shoal.SGD(), expire=shoal.TimeToLive(10**6))
        push(table, keys_at_random(20_000))
        start = resident() - table.stats().bytes
        for k in range(90):
            push(table, keys_at_random(20_000, seed=k))
            store.tick()
        assert table.stats().expired["TimeToLive"] > 0
        assert resident() - start < memory + (8 << 20)  # what calls work in, and Python's own

"""Shares of a pass: each batch counts once, and has the same bits, however often workers stop and others divide."""

from __future__ import annotations

import gzip
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

import shoal
from shoal.data import Batch, Reader
from shoal.data.rebatch import joined
from shoal.models.pass_reader import PassReader
from shoal.models.plan import Plan
from shoal.models.preprocessing import Sampling, class_weighted, take, warmed_up
from shoal.models.shares import ROW, Share, divided
from tiers import rounds

NUMBER = 1000  # the key whose value is the number of the example


def example(number: int) -> str:
    return f"{number % 3 % 2} {number % 7}:1 {NUMBER}:{number}\n"


def examples(first: int, end: int) -> str:
    return "".join(map(example, range(first, end)))


TEXTS = {
    "empty": [""],
    "one": [examples(0, 1)],
    "seven": [examples(0, 7)],
    "many": [examples(0, 385)],
    "files": [examples(0, 61), "", examples(61, 62), examples(62, 150), examples(150, 190)],
    "compressed": [examples(0, 150)],
    "malformed": [
        "".join(example(number) + "no example\n" * (number % 5 == 0) for number in range(first, first + 90))
        for first in (0, 90)
    ],
}
MALFORMED = {"malformed": 36}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    folder, made = tmp_path_factory.mktemp("shares"), {}
    for name, texts in TEXTS.items():
        made[name] = [folder / f"{name}-{i}.libsvm" for i in range(len(texts))]
        for path, text in zip(made[name], texts, strict=True):
            path.write_bytes(gzip.compress(text.encode()) if name == "compressed" else text.encode())
    return made


def numbers_of(batch: Batch) -> list[int]:
    assert batch.values is not None
    return [round(value) for value in batch.values[batch.keys == NUMBER]]


def bits_of(batch: Batch) -> tuple[bytes, ...]:
    arrays = (batch.labels, batch.indptr, batch.keys, batch.values, batch.weights)
    return tuple(b"" if array is None else array.tobytes() for array in arrays)


def cut(sizes: Sequence[int], first: int = 0) -> list[Batch]:
    """Make batches of such sizes of the examples from a number on."""
    batches = []
    for size in sizes:
        numbers = np.arange(first, first + size)
        labels = (numbers % 3 % 2).astype(np.float32)
        keys = np.full(size, NUMBER, np.uint64)
        batches.append(Batch(labels, np.arange(size + 1), keys, numbers.astype(np.float32)))
        first += size
    return batches


plans = st.builds(
    Plan,
    warm_up=st.booleans(),
    shuffle=st.sampled_from([0, 1, 3]),
    negative_rate=st.sampled_from([1.0, 0.4]),
    class_weight=st.sampled_from([None, (1.0, 2.0)]),
    seed=st.sampled_from([0, 7, 2**64 - 1]),
)


class Passes:
    """Passes of several workers over the same data, whose batches are recorded by their split and number."""

    def __init__(self, plan: Plan, *, epoch: int, known: int) -> None:
        self.plan, self.epoch, self.known = plan, epoch, known
        self.learned: dict[tuple[int, int, int], tuple[bytes, ...]] = {}
        self.skipped = 0

    def reader_of(self, data: Any, shares: Sequence[Share], rank: int, workers: int) -> PassReader:
        about = {"epoch": self.epoch, "known": self.known, "rank": rank, "workers": workers}
        return PassReader(data, self.plan, shares, **about)

    def undisturbed(self, splits: Sequence[Any]) -> dict[tuple[int, int, int], tuple[bytes, ...]]:
        """Return all batches as the plan makes them of each split."""
        batches = {}
        for rank, split in enumerate(splits):
            source = self.plan.source(split, self.epoch)
            made = self.plan.batches(source, self.epoch, self.known, workers=len(splits))
            batches.update({(rank, len(splits), i): bits_of(batch) for i, (batch, _) in enumerate(made)})
        return batches

    def proceed(self, data: PassReader, given: Sequence[Share], batches: int | None, ahead: int = 0) -> list[Share]:
        """Learn from some batches of a worker, others read ahead; None: from all."""
        shares = list(given)
        iterator = iter(data)
        waiting: list[Batch] = []
        while batches is None or batches > 0:
            waiting += itertools.islice(iterator, 1 + ahead - len(waiting))
            if not waiting:
                break
            index, number, batch = data.index, data.number, waiting.pop(0)
            assert number not in self.learned
            self.learned[number] = bits_of(batch)
            found, share = data.learned()
            assert found == index
            assert number == (share.rank, share.workers, share.next - share.step)
            shares[index] = Share.from_row(share.to_row())
            batches = None if batches is None else batches - 1
        iterator.close()
        self.skipped += sum(map(data.skipped_in, range(len(shares))))
        return shares


# ---- each batch once -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", TEXTS)
@settings(max_examples=rounds(60))
@given(data=st.data(), plan=plans)
def test_each_batch_of_readers_counts_once_whoever_divides_the_rest(
    paths: dict[str, list[Path]], name: str, data: st.DataObject, plan: Plan
) -> None:
    size, threads = data.draw(st.sampled_from([4, 20, 64]), "size"), data.draw(st.sampled_from([1, 2]), "threads")
    reader = shoal.read_libsvm(paths[name], batch_size=size, on_error="skip", reader_threads=threads)
    passes = Passes(plan, epoch=data.draw(st.integers(0, 2), "epoch"), known=data.draw(st.sampled_from([0, 900])))
    workers = data.draw(st.integers(1, 3), "workers")
    whole = passes.undisturbed([reader.split(rank, workers) for rank in range(workers)])
    lists = [[Share(rank=rank, workers=workers)] for rank in range(workers)]
    for stop in range(data.draw(st.integers(0, 3), "stops")):
        lists = progressed(passes, reader, lists, data, stop)
        lists = divided(lists, data.draw(st.integers(1, 5), "then"))
    passes.skipped = 0
    for rank, shares in enumerate(lists):
        own = reader.split(rank, len(lists))
        passes.proceed(passes.reader_of(own, shares, rank, len(lists)), shares, None)
    assert passes.learned == whole
    assert passes.skipped == MALFORMED.get(name, 0)


def progressed(
    passes: Passes, reader: Reader, lists: Sequence[Sequence[Share]], data: st.DataObject, stop: int
) -> list[list[Share]]:
    left = []
    for rank, shares in enumerate(lists):
        batches, ahead = data.draw(st.tuples(st.integers(0, 6), st.integers(0, 2)), f"{rank} at stop {stop}")
        own = passes.reader_of(reader.split(rank, len(lists)), shares, rank, len(lists))
        left.append(passes.proceed(own, shares, batches, ahead))
    return left


@settings(max_examples=rounds(100))
@given(st.data(), plans)
def test_each_batch_of_other_data_counts_once_when_as_many_workers_go_on(data: st.DataObject, plan: Plan) -> None:
    sizes = data.draw(st.lists(st.lists(st.integers(0, 90), max_size=9), min_size=1, max_size=3), "sizes")
    splits = [cut(split, 1000 * rank) for rank, split in enumerate(sizes)]
    passes = Passes(plan, epoch=1, known=0)
    lists = [[Share(rank=rank, workers=len(splits))] for rank in range(len(splits))]
    stops = data.draw(st.lists(st.integers(0, 6), max_size=3), "stops")
    for batches in [*stops, None]:
        for rank, shares in enumerate(divided(lists, len(splits))):
            own = passes.reader_of(splits[rank], shares, rank, len(splits))
            lists[rank] = passes.proceed(own, shares, batches)
    assert passes.learned == passes.undisturbed(splits)


# ---- division --------------------------------------------------------------------------------------------------------

A, B, C = (Share(rank=rank, workers=3, next=4 + rank, step=2, repeats=rank) for rank in range(3))


def test_as_many_workers_keep_their_shares() -> None:
    assert divided([[A], [B, C], []], 3) == [[A], [B, C], []]


def test_fewer_workers_have_the_shares_of_several_one_after_another() -> None:
    assert divided([[A], [B], [C]], 2) == [[A, C], [B]]
    assert divided([[A], [B], [C]], 1) == [[A, B, C]]


def test_more_workers_read_the_same_shares_and_the_first_of_them_counts_their_malformed_lines() -> None:
    first = structs.replace(A, step=4)
    second = structs.replace(A, next=A.next + 2, step=4, counts=False)
    assert divided([[A], [B]], 3) == [[first], [B], [second]]
    thirds = [structs.replace(B, next=5 + 2 * i, step=6, counts=i == 0, repeats=int(i == 0)) for i in range(3)]
    assert divided([[B]], 3) == [[third] for third in thirds]


def test_nobody_has_anything_of_nothing() -> None:
    assert divided([], 2) == [[], []]
    assert divided([[]], 3) == [[], [], []]


@given(st.integers(0, 9), st.integers(1, 5))
def test_batches_that_may_be_repeated_are_divided_too(repeats: int, readers: int) -> None:
    parts = [share for (share,) in divided([[Share(next=3, repeats=repeats)]], readers)]
    numbers = [part.next + i * part.step for part in parts for i in range(part.repeats)]
    assert sorted(numbers) == list(range(3, 3 + repeats))


@given(st.lists(st.integers(0, 2**63 - 1), min_size=ROW, max_size=ROW), st.booleans())
def test_a_share_is_a_row_of_whole_numbers(values: list[int], counts: bool) -> None:
    fields: dict[str, Any] = dict(zip(Share.__struct_fields__, values, strict=True))
    share = Share(**{**fields, "counts": counts})
    row = np.array(share.to_row(), np.int64)
    assert row.shape == (ROW,)
    assert Share.from_row(row.tolist()) == share


# ---- positions -------------------------------------------------------------------------------------------------------


def after(batches: int, data: Any, plan: Plan) -> Share:
    passes = Passes(plan, epoch=0, known=0)
    (share,) = passes.proceed(passes.reader_of(data, [Share()], 0, 1), [Share()], batches, ahead=2)
    return share


@pytest.mark.parametrize(
    ("plan", "batches", "block", "first"),
    [
        (Plan(warm_up=False), 7, 6, 6),
        (Plan(warm_up=False, shuffle=3), 6, 1, 3),
        (Plan(warm_up=False, shuffle=3), 7, 2, 6),
        (Plan(), 7, 3, 6),  # 32 and 28 examples of each block of 60
    ],
    ids=["plain", "a full buffer", "shuffled", "warmed up"],
)
def test_a_reader_resumes_at_the_block_of_the_last_batch(
    paths: dict[str, list[Path]], plan: Plan, batches: int, block: int, first: int
) -> None:
    size = 60 if plan.warm_up else 20
    reader = shoal.read_libsvm(paths["many"], batch_size=size)
    share = after(batches, reader, plan)
    before = block * size * max(1, plan.shuffle)
    assert (share.next, share.block, share.first, share.read, share.learned) == (batches, block, first, before, before)
    passes = Passes(plan, epoch=0, known=0)
    data = passes.reader_of(reader, [share], 0, 1)
    next(iter(data))
    assert isinstance(data.last, Reader)
    assert numbers_of(next(iter(data.last)))[0] == before


def test_the_batch_that_is_learned_from_is_the_oldest_that_was_returned() -> None:
    shares = [Share(next=1, step=2), Share(next=2, step=3)]
    data = PassReader(cut([1] * 6), Plan(warm_up=False), shares, epoch=0, known=0, rank=0, workers=1)
    batches = list(data)
    numbers = []
    for batch in batches:
        numbers.append((data.index, *data.number))
        assert numbers_of(batch) == [data.number[2]]
        data.learned()
    assert numbers == [(0, 0, 1, 1), (0, 0, 1, 3), (0, 0, 1, 5), (1, 0, 1, 2), (1, 0, 1, 5)]


def test_two_shares_of_one_split_count_malformed_lines_and_progress_once(paths: dict[str, list[Path]]) -> None:
    reader = shoal.read_libsvm(paths["malformed"], batch_size=20, on_error="skip")
    (shares,) = divided(divided([[Share()]], 2), 1)
    data = PassReader(reader, Plan(warm_up=False), shares, epoch=0, known=0, rank=0, workers=1)
    seen = [(sum(map(data.skipped_in, range(len(shares)))), data.progress()) for _ in data]
    assert [skipped for skipped, _ in seen[5:]] == [36] * 4  # the first share has five batches, the other four
    assert seen == sorted(seen)
    assert (seen[4][1], data.progress()) == (0.5, 1.0)


@given(plans, st.lists(st.integers(0, 90), max_size=9), st.integers(0, 2), st.sampled_from([0, 900]), st.integers(1, 3))
def test_a_plan_samples_weighs_and_shuffles_each_block_by_its_number_and_warms_up_over_all(
    plan: Plan, sizes: list[int], epoch: int, known: int, workers: int
) -> None:
    batches, number, expected = cut(sizes), epoch << 40, []
    sampling = Sampling(plan.negative_rate, plan.seed)
    for block, first in enumerate(range(0, len(batches), plan.shuffle or 1)):
        chosen = []
        for batch in batches[first : first + (plan.shuffle or 1)]:
            kept = sampling.apply(batch, number)
            chosen.append(kept if plan.class_weight is None else class_weighted(kept, plan.class_weight))
            number += len(batch)
        if plan.shuffle:
            order = np.random.default_rng([plan.seed, epoch, block]).permutation(sum(map(len, chosen)))
            ends = np.cumsum([len(batch) for batch in chosen])
            chosen = [take(joined(chosen), rows) for rows in np.split(order, ends[:-1])]
        expected += chosen
    made = warmed_up(expected, known, workers) if plan.warm_up else expected
    found = [bits_of(batch) for batch, _ in plan.batches(batches, epoch, known, workers=workers)]
    assert found == [bits_of(batch) for batch in made]


def test_a_plan_returns_the_batches_before_an_error_of_the_data() -> None:
    def failing() -> Iterator[Batch]:
        yield from cut([5] * 5)
        raise OSError("the disk is gone")

    batches = Plan(shuffle=3, warm_up=False).batches(failing(), 0, 0)
    found = [numbers_of(batch) for batch, _ in itertools.islice(batches, 5)]
    assert sorted(itertools.chain(*found)) == list(range(25))
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)


# ---- data that does not fit ------------------------------------------------------------------------------------------


def all_of(data: Any, share: Share, plan: Plan, workers: int = 1) -> Counter[int]:
    passes = PassReader(data, plan, [share], epoch=0, known=0, rank=0, workers=workers)
    return Counter(number for batch in passes for number in numbers_of(batch))


CHANGED = "had learned from 41 examples of this pass in 3 batches, and these have {} now: the data has changed"


@pytest.mark.parametrize(
    ("sizes", "found"),
    [([17, 17, 9], 43), ([17, 17, 9, 8], 43), ([17, 17, 5], 39), ([17, 17], 34)],
    ids=["appended", "appended and more", "cut off", "shorter"],
)
def test_other_data_that_has_changed_is_refused(sizes: list[int], found: int) -> None:
    plan = Plan(warm_up=False)
    share = after(3, cut([17, 17, 7, 9]), plan)
    assert all_of(cut([17, 17, 7, 9]), share, plan) == Counter(range(41, 50))
    with pytest.raises(ValueError, match=CHANGED.format(found)):
        all_of(cut(sizes), share, plan)


def test_a_file_that_was_appended_to_after_an_incomplete_batch_is_refused(tmp_path: Path) -> None:
    path, plan = tmp_path / "log.libsvm", Plan(warm_up=False)
    path.write_text(examples(0, 41))
    share = after(3, shoal.read_libsvm(path, batch_size=17), plan)
    path.write_text(examples(0, 43))
    with pytest.raises(ValueError, match=CHANGED.format(43)):
        all_of(shoal.read_libsvm(path, batch_size=17), share, plan)


def test_other_data_is_refused_within_a_reader_and_for_another_number_of_workers(paths: dict[str, list[Path]]) -> None:
    plan = Plan(warm_up=False)
    share = after(3, shoal.read_libsvm(paths["many"], batch_size=20), plan)
    with pytest.raises(TypeError, match="the fit is within a reader, and this is a list: pass a reader"):
        all_of(cut([20] * 9), share, plan)
    with pytest.raises(ValueError, match="begun with 1 workers, and only data of a reader can be divided again"):
        all_of(cut([20] * 9), Share(), plan, workers=2)

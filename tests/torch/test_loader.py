"""Readers in the workers of a DataLoader: every example once, in one order, from any place on, beside a store."""

from __future__ import annotations

import itertools
import os
import sys

import numpy as np
import psutil
import pytest

import shoal
from cluster_standin import cluster
from stores import together

torch = pytest.importorskip("torch", reason="torch is an extra")

from shoal.torch.loader import BatchDataset, BatchLoader  # noqa: E402
from tiers import long_after  # noqa: E402

ROWS = 1000

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="forks"),
    # Python 3.12 warns of every fork beside threads; here that is the point.
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]


@pytest.fixture
def reader(tmp_path):
    """Examples that are told apart by their one key, in three files."""
    bounds = [0, 150, 700, ROWS]
    for number, (begin, end) in enumerate(itertools.pairwise(bounds)):
        lines = [f"{i % 2} {i}:1\n" for i in range(begin, end)]
        (tmp_path / f"{number}.svm").write_text("".join(lines))
    return shoal.read_libsvm(tmp_path / "*.svm", batch_size=64)


def keys_of(batch):
    """What a worker makes of a batch: at the module's level, so that spawned processes find it."""
    return torch.from_numpy(batch.keys.view(np.int64))


def keys_or_error(batch):
    if 900 in batch.keys:
        raise LookupError("example 900")
    return keys_of(batch)


def who_am_i(batch):
    return os.getpid()


def flat(batches):
    return [key for batch in batches for key in batch.tolist()]


@pytest.mark.slow
def test_a_plain_data_loader_gives_each_example_once(reader):
    loader = torch.utils.data.DataLoader(BatchDataset(reader, keys_of), batch_size=None, num_workers=2)
    assert sorted(flat(loader)) == list(range(ROWS))


def test_without_processes_a_data_loader_gives_the_batches_of_the_reader(reader):
    loader = torch.utils.data.DataLoader(BatchDataset(reader, keys_of), batch_size=None)
    assert [batch.tolist() for batch in loader] == [batch.keys.tolist() for batch in reader]


@pytest.mark.slow
def test_the_workers_of_a_job_and_their_processes_share_the_examples_out(reader):
    seen = [flat(BatchLoader(reader, keys_of, num_workers=n, rank=rank, workers=2)) for rank in range(2) for n in (2,)]
    assert sorted(seen[0] + seen[1]) == list(range(ROWS))
    assert all(seen)


@pytest.mark.slow
@pytest.mark.parametrize("processes", long_after(1, [2, 0, 1]))
def test_a_pass_that_goes_on_from_any_state_gives_the_batches_that_would_have_followed(reader, processes):
    loader = BatchLoader(reader, keys_of, num_workers=processes)
    batches = [batch.tolist() for batch in loader]
    assert sorted(key for batch in batches for key in batch) == list(range(ROWS))
    assert [batch.tolist() for batch in loader] == batches
    cuts = [1, 2, len(batches) // 2, len(batches) - 1, len(batches)]
    states = [(0, loader.state_dict())] if not processes else []
    for cut in cuts:
        iterator = iter(loader)
        for _ in range(cut):
            next(iterator)
        states.append((cut, loader.state_dict()))
        iterator.close()
    for cut, state in states[-5:]:
        other = BatchLoader(reader, keys_of, num_workers=processes)
        other.load_state_dict(state)
        assert [batch.tolist() for batch in other] == batches[cut:]
    assert [batch.tolist() for batch in other] == batches  # the pass behind it is a whole one


@pytest.mark.slow
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(reader, tmp_path):
    loader = BatchLoader(reader, keys_of, num_workers=2)
    (tmp_path / "other.svm").write_text("1 5:1\n")
    before = loader.state_dict()
    with pytest.raises(ValueError, match="state is of 1 processes that read, this loader has 2: pass num_workers=1"):
        loader.load_state_dict(BatchLoader(reader).state_dict())
    with pytest.raises(ValueError, match=r"state is of split \[0, 2\], this loader reads \[1, 2\]"):
        loader.load_state_dict({"positions": [before["positions"][0]] * 2, "turn": 0})
    with pytest.raises(ValueError, match="this loader reads"):
        loader.load_state_dict(BatchLoader(reader, num_workers=2, rank=1, workers=2).state_dict())
    with pytest.raises(ValueError, match="make the reader of the same files"):
        BatchLoader(shoal.read_libsvm(tmp_path / "other.svm")).load_state_dict(BatchLoader(reader).state_dict())
    assert loader.state_dict() == before
    assert sorted(flat(loader)) == list(range(ROWS))


@pytest.mark.parametrize("what", ["log.tsv", None, []])
def test_what_is_no_reader_is_refused_before_a_pass(what):
    with pytest.raises(TypeError, match="pass a reader such as"):
        BatchLoader(what)


def test_what_does_not_fit_is_refused(reader):
    with pytest.raises(ValueError, match="worker 2 of 2"):
        BatchDataset(reader, rank=2, workers=2)
    with pytest.raises(ValueError, match="-1 processes"):
        BatchLoader(reader, num_workers=-1)
    with pytest.raises(ValueError, match="0 batches ahead"):
        BatchLoader(reader, prefetch=0)
    iterator = iter(reader)
    next(iterator)
    with pytest.raises(ValueError, match="starts from a position"):
        BatchLoader(reader.resume(reader.position()), num_workers=2)
    iterator.close()


@pytest.mark.parametrize("processes", [0, 2])
def test_an_error_in_a_process_is_raised_where_its_batch_would_have_come(reader, processes):
    seen = []
    with pytest.raises(LookupError, match="example 900") as caught:
        seen.extend(BatchLoader(reader, keys_or_error, num_workers=processes))
    assert 900 not in flat(seen)
    assert not processes or "in keys_or_error" in caught.value.__notes__[0]


class Local(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} {two}")  # so it cannot be pickled


def raises_what_cannot_be_told(batch):
    raise Local(1, 2)


def test_an_error_that_another_process_cannot_be_told_is_told_in_words(reader):
    with pytest.raises(RuntimeError, match="Local: 1 2"):
        list(BatchLoader(reader, raises_what_cannot_be_told, num_workers=1))


@pytest.mark.slow
def test_the_processes_end_with_a_pass_that_is_left_early(reader):
    before = set(psutil.Process().children())
    iterator = iter(BatchLoader(reader, who_am_i, num_workers=2))
    assert next(iterator) != os.getpid()
    children = set(psutil.Process().children()) - before
    iterator.close()
    assert len(children) == 2
    assert not any(process.is_running() for process in children)  # it has waited for them


def tries_the_parents_table(batch):
    try:
        PARENTS[0].pull(batch.keys)
    except shoal.ShoalError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


PARENTS = []


@pytest.mark.slow
@pytest.mark.parametrize(("method", "processes"), [("fork", 2), ("spawn", 1)])
def test_processes_that_read_run_beside_a_connected_store_and_leave_its_sockets_alone(reader, method, processes):
    """The parent pulls and pushes while children live; nothing of theirs reaches its servers."""

    def work(store):
        table = store.table("t", optimizer=shoal.SGD(lr=1.0))
        for keys in BatchLoader(reader, keys_of, num_workers=processes, start_method=method):
            table.pull(keys.numpy())
            table.push(keys.numpy(), np.ones((len(keys), 1), np.float32))
            store.tick()
        return table.pull(np.arange(ROWS, dtype=np.uint64))

    with cluster(2, 1) as made:
        (found,) = together(made.address, 1, work)
    assert found.tolist() == [[-1.0]] * ROWS


@pytest.mark.slow
def test_a_forked_process_that_touches_the_parents_store_is_told_so(reader):
    def work(store):
        PARENTS[:] = [store.table("t", optimizer=shoal.SGD(lr=1.0))]
        try:
            reported = set(BatchLoader(reader, tries_the_parents_table, num_workers=1, start_method="fork"))
        finally:
            PARENTS.clear()
        store.tick()
        return reported

    with cluster(1, 1) as made:
        (reported,) = together(made.address, 1, work)
    assert all(one.startswith("WrongProcessError") for one in reported)

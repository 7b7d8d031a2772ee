"""Fits of several workers under SSP and ASP, recorded and made again: the same bits."""

from __future__ import annotations

import contextlib
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

import shoal
from click_days import write_days
from cluster_fakes import TIMEOUT
from cluster_standin import cluster
from relay import wait_until
from shoal import _core
from shoal.cli import main
from shoal.cluster.worker.cluster_store import ClusterStore
from shoal.errors import CorruptionError
from shoal.lineage import Replayed, replay
from shoal.models import Checkpointing, EarlyStopping, files, order_record
from shoal.models.order_record import Messages, Segment
from shoal.storage.open import open_dir
from stores import one_by_one
from tiers import long_after, rounds

BATCH, EXAMPLES = 20, 1000


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A libsvm file of 1,000 examples, whose keys are in most batches."""
    random = np.random.default_rng(5)
    weights = random.normal(size=400)
    lines = []
    for _ in range(EXAMPLES):
        keys = np.unique(np.where(random.random(6) < 0.7, random.integers(0, 40, 6), random.integers(0, 400, 6)))
        label = int(random.random() < 1 / (1 + np.exp(-weights[keys].sum())))
        lines.append(f"{label} " + " ".join(f"{key}:{random.random():.3f}" for key in keys))
    path = tmp_path_factory.mktemp("log") / "log.libsvm"
    path.write_text("\n".join(lines) + "\n")
    return path


def reader(log: Path) -> shoal.data.Reader:
    return shoal.read_libsvm(log, batch_size=BATCH)


def logistic(store: shoal.Store, **how: Any) -> Any:
    return shoal.LogisticRegression(shoal.FTRL(alpha=0.3, l1=0.3), store=store, seed=3, **how)


def normalized(store: shoal.Store) -> Any:
    return logistic(store, normalized=True)


def machine(store: shoal.Store) -> Any:
    return shoal.FactorizationMachine(4, store=store, seed=3)


def classes(store: shoal.Store) -> Any:
    return shoal.models.MulticlassRegression(3, store=store, seed=3)


def recorded(
    log: Path,
    folder: Path,
    make: Any = logistic,
    *,
    workers: int = 3,
    servers: int = 2,
    threads: int = 2,
    consistency: Any = None,
    every: int | None = None,
    resume: bool = False,
    record: str = "record",
    connect: dict[str, Any] | None = None,
    **how: Any,
) -> None:
    """Fit a model together, into ``model``, and record it."""
    checkpoint = Checkpointing(folder / "model", every=every, keep=True, record=folder / record, resume=resume)

    def work(store: shoal.Store) -> None:
        data = reader(log).split(store.rank, workers) if workers > 1 else reader(log)
        make(store).fit(data, progress=False, checkpoint=checkpoint, **how)

    rules = shoal.ASP() if consistency is None else consistency
    with cluster(servers, threads) as made:
        one_by_one(made.address, workers, work, consistency=rules, **(connect or {}))


def digests(directory: Any) -> dict[str, str]:
    with shoal.load(directory) as model:
        return {table.name: table.digest() for table in model.tables}


def replayed(folder: Path, name: str = "again", **how: Any) -> Replayed:
    found = replay(folder / "record", folder / name, **how)
    assert found.is_whole, found.why
    return found


@pytest.mark.parametrize(
    ("make", "consistency", "workers", "servers"),
    long_after(
        4,
        [
            (normalized, shoal.ASP(), 2, 3),
            (machine, shoal.SSP(2), 3, 2),
            (classes, shoal.ASP(), 3, 1),
            (logistic, shoal.ASP(), 1, 2),
            (logistic, shoal.ASP(), 3, 2),
            (logistic, shoal.SSP(2), 2, 1),
            (machine, shoal.ASP(), 2, 1),
        ],
    ),
)
def test_a_replay_has_the_same_bits(
    make: Any, consistency: Any, workers: int, servers: int, log: Path, tmp_path: Path
) -> None:
    recorded(log, tmp_path, make, workers=workers, servers=servers, consistency=consistency, epochs=2)
    found = replayed(tmp_path)
    assert digests(tmp_path / "again") == digests(tmp_path / "model")
    assert (found.workers, found.begin, found.end) == (workers, 0, 2 * EXAMPLES)
    with shoal.load(tmp_path / "again") as again, shoal.load(tmp_path / "model") as model:
        assert again.history.passes[-1].metrics == model.history.passes[-1].metrics


def adam(store: shoal.Store) -> Any:
    """A model whose rows depend on the steps of their arcs."""
    return shoal.LogisticRegression(shoal.Adam(lr=0.05), store=store, seed=3)


@pytest.mark.slow
@pytest.mark.parametrize(("servers", "threads"), [(1, 1), (1, 6), (3, 3)])
@pytest.mark.parametrize("make", [machine, adam])
def test_a_replay_may_have_any_servers(servers: int, threads: int, make: Any, log: Path, tmp_path: Path) -> None:
    recorded(log, tmp_path, make, servers=2, threads=2, consistency=shoal.SSP(2), every=8)
    examples, place = list(files.kept(tmp_path / "model").items())[2]
    for begin, checkpoint in ((0, None), (examples, place)):
        with (
            cluster(servers, threads) as made,
            shoal.connect(made.address, consistency=shoal.ASP(), timeout=TIMEOUT) as store,
        ):
            found = replayed(tmp_path, store=store, checkpoint=checkpoint, overwrite=True)
        assert found.begin == begin
        assert digests(tmp_path / "again") == digests(tmp_path / "model")


@pytest.mark.slow
def test_the_command_replays_on_servers(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(log, tmp_path, servers=2, threads=2)
    command = ["replay", str(tmp_path / "record"), "--output", str(tmp_path / "again"), "--quiet"]
    assert main([*command, "--servers", "3"]) == 0
    assert digests(tmp_path / "again") == digests(tmp_path / "model")
    assert main(command) == 2
    assert "overwrite" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("consistency", long_after(1, [shoal.ASP(), shoal.SSP(2)]))
def test_a_replay_may_begin_at_any_checkpoint(consistency: Any, log: Path, tmp_path: Path) -> None:
    recorded(log, tmp_path, consistency=consistency, every=8, epochs=2, valid=reader(log).split(0, 3))
    kept = files.kept(tmp_path / "model")
    assert len(kept) > 4
    for number, (examples, place) in enumerate(kept.items()):
        if examples < 2 * EXAMPLES:
            found = replayed(tmp_path, f"again-{number}", checkpoint=place)
            assert (found.begin, found.end) == (examples, 2 * EXAMPLES)
            assert digests(tmp_path / f"again-{number}") == digests(tmp_path / "model")


@pytest.mark.slow
def test_a_fit_that_resumes_has_a_record_of_its_own(log: Path, tmp_path: Path) -> None:
    recorded(log, tmp_path, every=5)
    examples, place = list(files.kept(tmp_path / "model").items())[2]
    files.copy(place, tmp_path / "other" / "model")
    (tmp_path / "record").rename(tmp_path / "other" / "record")
    recorded(log, tmp_path / "other", servers=1, every=5, resume=True)
    found = replay(tmp_path / "other" / "record" / f"from-{examples:012}", tmp_path / "again")
    assert (found.is_whole, found.begin, found.end) == (True, examples, EXAMPLES)
    assert digests(tmp_path / "again") == digests(tmp_path / "other" / "model")
    found = replay(tmp_path / "other" / "record", tmp_path / "first")
    assert digests(tmp_path / "first") == digests(tmp_path / "model")
    with pytest.raises((ValueError, shoal.ShoalError), match=r"has the record of a fit: pass overwrite=True"):
        recorded(log, tmp_path / "other")


def test_filters_that_are_exact_and_small_messages_are_recorded(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = _core.Policy(message_bytes=256)  # several messages to each endpoint
    monkeypatch.setattr(_core, "Policy", lambda: small)
    filters = shoal.Filters(key_caching=True, zeros=True)
    recorded(log, tmp_path, machine, epochs=2, connect={"filters": filters})
    replayed(tmp_path)
    assert digests(tmp_path / "again") == digests(tmp_path / "model")


def test_what_depends_on_steps_is_replayed(log: Path, tmp_path: Path) -> None:
    recorded(log, tmp_path, adam)
    replayed(tmp_path)
    assert digests(tmp_path / "again") == digests(tmp_path / "model")


@pytest.mark.slow
def test_a_shuffled_sampled_fit_of_a_named_job_is_replayed(log: Path, tmp_path: Path) -> None:
    def sampled(store: shoal.Store) -> Any:
        return logistic(store, negative_rate=0.5)

    recorded(log, tmp_path, sampled, epochs=2, shuffle=3, every=7, connect={"job": "mine"})
    replayed(tmp_path)
    kept = list(files.kept(tmp_path / "model").values())[2]
    replayed(tmp_path, "later", checkpoint=kept)
    assert digests(tmp_path / "again") == digests(tmp_path / "later") == digests(tmp_path / "model")


@pytest.mark.slow
def test_early_stopping_is_replayed(log: Path, tmp_path: Path) -> None:
    recorded(log, tmp_path, epochs=4, valid=reader(log).split(0, 3), early_stopping=EarlyStopping(1))
    replayed(tmp_path)
    assert digests(tmp_path / "again") == digests(tmp_path / "model")


CLICK_MODEL = """
[data]
format = "csv"
label = "click"
categorical = ["user", "ad"]
numeric = ["price"]
dense = ["price"]
[model]
name = "deepfm"
dim = 4
hidden = [16, 8]
dropout = 0.3
[train]
batch_size = 50
dense = "servers"
"""


def dense_part(directory: Path) -> dict[str, bytes]:
    with shoal.load(directory) as model:
        return {name: its.detach().numpy().tobytes() for name, its in model.module.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("more", long_after(1, [["--set", "train.staleness=1"], []]))
def test_a_click_model_with_dropout_is_replayed(more: list[str], tmp_path: Path) -> None:
    days = write_days(tmp_path, 2, 400, lambda random, _, __: int(random.integers(0, 60)))
    (tmp_path / "ctr.toml").write_text(CLICK_MODEL)
    shoal_ = [sys.executable, "-m", "shoal"]
    train = [*shoal_, "train", "ctr", "--cluster", "--consistency", "asp", "--config", "ctr.toml", *more]
    keeps = ["--output", "model", "--record", "record", "--checkpoint-every", "5", "--keep-checkpoints", "--quiet"]
    command = [*shoal_, "launch", "--servers", "2", "--workers", "2", *train, *keeps, "--data", *days]
    subprocess.run(command, check=True, cwd=tmp_path, timeout=TIMEOUT * 10)
    kept = list(files.kept(tmp_path / "model").values())[1]
    replayed(tmp_path)
    with shoal.launch(1, consistency=shoal.ASP()) as store:
        replayed(tmp_path, "later", checkpoint=kept, store=store)
    assert digests(tmp_path / "again") == digests(tmp_path / "later") == digests(tmp_path / "model")
    assert dense_part(tmp_path / "again") == dense_part(tmp_path / "later") == dense_part(tmp_path / "model")


@pytest.mark.slow
def test_a_dense_part_that_is_summed_by_workers_is_refused(log: Path, tmp_path: Path) -> None:
    def work(store: shoal.Store) -> None:
        module = shoal.torch.models.DeepFM(shoal.torch.tables(store), 6, dim=2, hidden=(2,))
        model = shoal.torch.ClickModel(module, store=store)
        with pytest.raises(ValueError, match=r'pass dense="servers"'):
            model.fit(
                reader(log).split(store.rank, 2),
                progress=False,
                checkpoint=Checkpointing(tmp_path / "model", record=tmp_path / "record"),
            )

    with cluster(1, 1) as made:
        one_by_one(made.address, 2, work, consistency=shoal.ASP())
    assert not (tmp_path / "record").exists()


@pytest.mark.slow
def test_a_push_may_say_which_step_it_is() -> None:
    keys = _core.KeyBatch(np.arange(1, 400, dtype=np.uint64), 1024, _core.ThreadPool(1))
    grads = np.ones((len(keys.hashes), 1), np.float32)

    def pushed(store: Any, *steps: int) -> set[int]:
        shard = store.table("t", dim=1, optimizer=shoal.Adam(lr=0.1)).shard
        for step in steps:
            shard.push_as(step, keys, grads, None).result()
        return set(store.arc_steps("t"))

    with shoal.launch(2, consistency=shoal.ASP()) as store:
        assert pushed(store, 7) == {7}
        assert pushed(store, 3) == {7}  # a number of steps never falls
        assert pushed(store, 0) == {8}  # the next one
        store.tables["t"].push(np.array([5], np.uint64), np.ones((1, 1), np.float32)).result()
        assert set(store.arc_steps("t")) == {8, 9}
    with shoal.launch(1) as store, pytest.raises(shoal.ShoalError, match=r"under BSP is no step of its own: .*, got 7"):
        pushed(store, 7)


# ---- where the order is not all --------------------------------------------------------------------------------------


def test_a_record_ends_where_a_worker_is_lost(log: Path, tmp_path: Path) -> None:
    checkpoint = Checkpointing(tmp_path / "model", every=4, keep=True, record=tmp_path / "record")

    class Leaves(shoal.models.Callback):
        left = 7

        def batch_done(self, progress: Any) -> None:
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt

    def work(store: shoal.Store) -> None:
        callbacks = [Leaves()] if store.rank == 1 else []
        try:
            logistic(store).fit(
                reader(log).split(store.rank, 3), progress=False, checkpoint=checkpoint, callbacks=callbacks
            )
        except (KeyboardInterrupt, shoal.ShoalError):
            assert store.rank == 1

    with cluster(2, 2) as made:
        one_by_one(made.address, 3, work, consistency=shoal.ASP())
    found = replay(tmp_path / "record", tmp_path / "again")
    assert not found.is_whole
    assert 0 < found.end < EXAMPLES
    kept = files.kept(tmp_path / "model")
    assert digests(tmp_path / "again") == digests(kept[found.end])


def test_a_record_ends_where_slots_move(log: Path, tmp_path: Path) -> None:
    checkpoint = Checkpointing(tmp_path / "model", every=4, keep=True, record=tmp_path / "record")

    class Drains(shoal.models.Callback):
        def __init__(self, store: Any) -> None:
            self.store, self.left = store, 7

        def batch_done(self, progress: Any) -> None:
            self.left -= 1
            if not self.left and self.store.rank == 0:
                epoch = self.store.placement.epoch
                self.store.drain(1)
                wait_until(lambda: self.store.placement.epoch > epoch, "slots move")

    def work(store: shoal.Store) -> None:
        data = reader(log).split(store.rank, 2)
        logistic(store).fit(data, progress=False, checkpoint=checkpoint, callbacks=[Drains(store)])

    with cluster(2, 1) as made:
        one_by_one(made.address, 2, work, consistency=shoal.ASP())
    found = replay(tmp_path / "record", tmp_path / "again")
    assert (found.is_whole, found.why) == (False, "slots have moved to other servers, or a server was lost")
    assert digests(tmp_path / "again") == digests(files.kept(tmp_path / "model")[found.end])


def test_a_record_ends_where_the_number_of_a_push_is_lost(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ClusterStore.take_order

    def take_order(self: ClusterStore, tables: Any) -> Any:
        parts = whole(self, tables)
        if self.rank == 1 and self.clock > 9:
            parts[parts[:, 2] == 1, 5] = 0
        return parts

    monkeypatch.setattr(ClusterStore, "take_order", take_order)
    recorded(log, tmp_path, every=4)
    found = replay(tmp_path / "record", tmp_path / "again")
    assert (found.is_whole, found.why) == (False, "a push was sent again, after its answer was lost")
    assert digests(tmp_path / "again") == digests(files.kept(tmp_path / "model")[found.end])


@pytest.mark.slow
def test_the_record_of_a_fit_that_was_killed_is_replayed_as_far_as_it_goes(log: Path, tmp_path: Path) -> None:
    recorded(log, tmp_path, every=4)
    place = open_dir(tmp_path / "record")
    record = order_record.read(place)
    order_record.write(place, structs.replace(record, divisions=record.divisions[:3], is_complete=False))
    found = replay(tmp_path / "record", tmp_path / "again")
    assert (found.is_whole, found.end) == (False, record.divisions[3].examples)
    assert found.why == "the fit had not ended, or was killed"
    assert digests(tmp_path / "again") == digests(files.kept(tmp_path / "model")[found.end])
    order_record.write(place, structs.replace(record, divisions=[]))
    with pytest.raises(ValueError, match="the record begins at those of none"):
        replay(tmp_path / "record", tmp_path / "other")


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ({"consistency": shoal.BSP()}, "under BSP a fit is the same each time"),
        ({"connect": {"filters": shoal.Filters(gradients="bfloat16")}}, "filters that round or drop"),
        ({"connect": {"cache": shoal.Cache(rows=100, staleness=2)}}, "has a cache"),
        (
            {"make": lambda store: logistic(store, expire=shoal.MaxRows(5000))},
            "rules of admission or expiry, or a schedule",
        ),
    ],
)
def test_a_fit_that_no_order_describes_is_refused(
    what: dict[str, Any], message: str, log: Path, tmp_path: Path
) -> None:
    with pytest.raises((ValueError, shoal.ShoalError), match=message):
        recorded(log, tmp_path, **what)
    assert not (tmp_path / "record").exists()


def test_a_fit_in_one_process_needs_no_record(log: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no order to record: this store is in one process"):
        shoal.LogisticRegression().fit(
            reader(log), progress=False, checkpoint=Checkpointing(tmp_path / "m", record=tmp_path / "record")
        )


# ---- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_is_damaged_or_foreign_is_named(log: Path, tmp_path: Path) -> None:
    recorded(log, tmp_path, every=6)
    recorded(log, tmp_path / "other", every=6)
    file = tmp_path / "record" / order_record.file_of(2, 1)
    whole = file.read_bytes()
    for damaged, what in (
        (whole[:-1], "its checksum does not match"),
        (b"", "cut short"),
        (whole[:40] + bytes([whole[40] ^ 4]) + whole[41:], "its checksum does not match"),
        ((tmp_path / "other" / "record" / file.name).read_bytes(), "is of another record"),
        ((tmp_path / "record" / order_record.file_of(2, 2)).read_bytes(), "is of another record"),
    ):
        file.write_bytes(damaged)
        with pytest.raises(CorruptionError, match=rf"{file.name}.*{what}"):
            replay(tmp_path / "record", tmp_path / "again")
    file.unlink()
    with pytest.raises(CorruptionError, match=rf"{file.name} is missing"):
        replay(tmp_path / "record", tmp_path / "again")
    file.write_bytes(whole)
    with pytest.raises(ValueError, match="is no checkpoint of a fit that is under way"):
        replay(tmp_path / "record", tmp_path / "again", checkpoint=tmp_path / "model")
    foreign = list(files.kept(tmp_path / "other" / "model").values())[1]
    with pytest.raises(ValueError, match="is no checkpoint of the fit whose record is in"):
        replay(tmp_path / "record", tmp_path / "again", checkpoint=foreign)
    assert not (tmp_path / "again").exists()
    with pytest.raises(FileNotFoundError, match="there is no such record"):
        replay(tmp_path / "nothing", tmp_path / "again")
    (tmp_path / "record" / order_record.RECORD_FILE).write_text("{}")
    with pytest.raises(CorruptionError, match=r"record\.json is damaged"):
        replay(tmp_path / "record", tmp_path / "again")


def test_other_data_than_that_of_the_record_is_refused(log: Path, tmp_path: Path) -> None:
    mine = tmp_path / "log.libsvm"
    mine.write_text(log.read_text())
    recorded(mine, tmp_path)
    mine.write_text("".join(f"1{line[1:]}\n" for line in log.read_text().splitlines()))
    with pytest.raises(ValueError, match="the data of the fit has changed since"):
        replay(tmp_path / "record", tmp_path / "again")


def test_a_push_of_another_job_is_found(log: Path, tmp_path: Path) -> None:
    recorded(log, tmp_path)
    file = tmp_path / "record" / order_record.file_of(1, 1)
    segment, messages = order_record.decode(file.read_bytes(), "")
    number = messages.number.copy()
    number[np.flatnonzero(messages.is_push)[-1]] += 1000
    file.write_bytes(order_record.encode(segment, messages._replace(number=number)))
    with pytest.raises(CorruptionError, match="lacks pushes, or has some twice"):
        replay(tmp_path / "record", tmp_path / "again")


SEGMENT = Segment(
    record="0123",
    division=3,
    rank=1,
    workers=2,
    slots=64,
    tables=["a", "b"],
    arcs=[(0, 32, 0), (32, 64, 7)],
    messages=0,
)


@st.composite
def recordings(draw: st.DrawFn) -> tuple[Segment, Messages]:
    """Draw messages of a worker."""
    row = st.tuples(
        st.booleans(),
        st.integers(0, 1),
        st.booleans(),
        st.integers(0, 63),
        st.integers(1, 64),
        st.integers(0, 2**32 - 1),
    )
    rows = [one for one in draw(st.lists(row, max_size=30)) if one[3] < one[4]]
    begins, table, is_push, first, end, number = (np.array([one[k] for one in rows]) for k in range(6))
    begins[:1] = True
    wide = (one.astype(np.int64) for one in (table, first, end, number))
    table, first, end, number = wide
    messages = Messages(begins.astype(np.bool_), table, is_push.astype(np.bool_), first, end, number)
    return order_record.Segment(
        **{**{name: getattr(SEGMENT, name) for name in SEGMENT.__struct_fields__}, "messages": len(rows)}
    ), messages


@given(recordings())
@settings(max_examples=rounds(100), deadline=None)
def test_a_file_has_what_was_written(made: tuple[Segment, Messages]) -> None:
    segment, messages = order_record.decode(order_record.encode(*made), "file")
    assert segment == made[0]
    for mine, its in zip(messages, made[1], strict=True):
        np.testing.assert_array_equal(mine, its)


@given(recordings(), st.data())
@settings(max_examples=rounds(60), deadline=None)
def test_a_damaged_file_raises_one_error(made: tuple[Segment, Messages], data: st.DataObject) -> None:
    raw = bytearray(order_record.encode(*made))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.integers(len(raw) // 2, len(raw)))]
    if data.draw(st.booleans()):  # its author has computed the checksum
        raw = raw[:-4] + struct.pack("<I", _core.crc32c(bytes(raw[:-4])))
    with contextlib.suppress(CorruptionError):  # and nothing else
        segment, messages = order_record.decode(bytes(raw), "file")
        assert len(messages.number) == segment.messages
        assert (messages.end <= segment.slots).all()


def test_numbers_may_wrap_around() -> None:
    segment = Segment(**{**{name: getattr(SEGMENT, name) for name in SEGMENT.__struct_fields__}, "messages": 3})
    ones = np.ones(3, np.bool_)
    zeros = np.zeros(3, np.int64)
    number = np.array([2**32 - 1, 0, 1])
    messages = Messages(ones, zeros, ones, zeros, zeros + 8, number)
    np.testing.assert_array_equal(order_record.decode(order_record.encode(segment, messages), "")[1].number, number)

"""Schedules of learning rates: by the table's clock, the same everywhere, saved and resumed."""

from __future__ import annotations

import math

import numpy as np
import pytest

import shoal
from cluster_fakes import TIMEOUT
from cluster_standin import cluster
from shoal import schedules
from shoal.models import Checkpointing
from shoal.optim import make_optimizer
from shoal.schedules import Cosine, InverseRoot, Linear, Steps, Warmup
from stores import together

KEYS = np.arange(40, dtype=np.uint64)
ORACLES = [
    (Warmup(10), lambda c: min(1, (c + 1) / 10)),
    (Steps(7, 0.5), lambda c: 0.5 ** (c // 7)),
    (Steps(7, 0.5, warmup=3), lambda c: (c + 1) / 3 if c < 3 else 0.5 ** ((c - 3) // 7)),
    (Linear(20, 0.1), lambda c: 1 - 0.9 * min(c, 20) / 20),
    (Cosine(20, floor=0.2), lambda c: 0.2 + 0.8 * (1 + math.cos(math.pi * min(c, 20) / 20)) / 2),
    (InverseRoot(4, warmup=5), lambda c: (c + 1) / 5 if c < 5 else 1 / math.sqrt(1 + (c - 5) / 4)),
]
RULES = {
    "SGD": shoal.SGD,
    "Momentum": shoal.Momentum,
    "Adagrad": shoal.Adagrad,
    "RowWiseAdagrad": shoal.RowWiseAdagrad,
    "Adam": shoal.Adam,
    "AdamW": shoal.AdamW,
}


def push(store, table, clock):
    rng = np.random.default_rng(clock)
    table.push(KEYS, rng.normal(size=(len(KEYS), table.dim)).astype(np.float32)).result()
    store.tick()


@pytest.mark.parametrize(("schedule", "oracle"), ORACLES)
def test_a_table_steps_by_the_rate_of_its_clock(schedule, oracle):
    with shoal.local(slots=4) as store:
        table = store.table("t", dim=2, optimizer=shoal.SGD(0.5, schedule=schedule))
        was = table.pull(KEYS)
        for clock in range(30):
            assert schedule.at(clock) == np.float32(oracle(clock))
            table.push(KEYS, np.ones((len(KEYS), 2), np.float32)).result()
            now = table.pull(KEYS)
            np.testing.assert_allclose(was - now, 0.5 * oracle(clock), rtol=1e-4, atol=1e-6)
            was = now
            store.tick()


@pytest.mark.parametrize("name", RULES)
def test_every_rule_with_a_rate_has_the_steps_of_that_rate(name):
    """Without weight decay the state does not depend on the rate, so a step is the plain one times the schedule."""
    for dim in (1, 3, 64):
        with shoal.local(slots=4) as store:
            table = store.table("t", dim=dim, optimizer=RULES[name](0.25, schedule=Steps(1, 0.5)))
            plain = store.table("plain", dim=dim, optimizer=RULES[name](0.25))
            for clock in range(5):
                before = table.pull(KEYS), plain.pull(KEYS)
                grads = np.random.default_rng(clock).normal(size=(len(KEYS), dim)).astype(np.float32)
                table.push(KEYS, grads).result()
                plain.push(KEYS, grads).result()
                store.tick()
                moved, whole = table.pull(KEYS) - before[0], plain.pull(KEYS) - before[1]
                np.testing.assert_allclose(moved, whole * 0.5**clock, rtol=1e-3, atol=1e-6)


def test_a_schedule_survives_saving_and_goes_on_at_its_clock(tmp_path):
    optimizer = shoal.Adagrad(0.3, schedule=Cosine(20, 0.1, warmup=4))
    with shoal.local() as whole:
        table = whole.table("t", dim=3, optimizer=optimizer)
        for clock in range(16):
            push(whole, table, clock)
            if clock == 8:
                whole.save(tmp_path / "ckpt")
        with shoal.local(slots=16) as store:
            store.load(tmp_path / "ckpt")
            table = store.tables["t"]
            assert table.optimizer == optimizer
            for clock in range(9, 16):
                push(store, table, clock)
            assert table.digest() == whole.tables["t"].digest()


@pytest.mark.slow
def test_servers_of_any_number_make_the_steps_of_one_process_and_a_load_goes_on(tmp_path):
    optimizer = shoal.Adam(0.1, schedule=Linear(10, 0.1, warmup=3))

    def learn(store):
        table = store.table("t", dim=3, optimizer=optimizer)
        store.barrier()
        for clock in range(8):
            share = KEYS[store.rank :: store.num_workers]
            rng = np.random.default_rng(clock)
            rows = rng.normal(size=(len(KEYS), 3)).astype(np.float32)[store.rank :: store.num_workers]
            table.push(share, rows)
            store.tick()
        store.barrier()
        return table.digest()

    with shoal.local() as store:
        expected = learn(store)
        store.save(tmp_path / "ckpt")
        for clock in range(3):
            push(store, store.tables["t"], 100 + clock)
        later = store.tables["t"].digest()
    for servers in (1, 3):
        with cluster(servers, 2) as made:
            assert set(together(made.address, 2, learn, consistency=shoal.BSP())) == {expected}
    with (
        cluster(2, 2) as made,
        shoal.connect(made.address, consistency=shoal.BSP(), threads=1, timeout=TIMEOUT) as store,
    ):
        store.load(tmp_path / "ckpt")
        for clock in range(3):
            push(store, store.tables["t"], 100 + clock)
        assert store.tables["t"].digest() == later


@pytest.mark.slow
def test_a_model_keeps_its_schedule_and_a_fit_goes_on_with_it(tmp_path):
    rng = np.random.default_rng(3)
    X = rng.normal(size=(300, 5))
    y = (X[:, 0] > 0).astype(int)
    how = {"batch_size": 50, "epochs": 4, "progress": False}

    def make():
        return shoal.LogisticRegression(shoal.Adagrad(0.5, schedule=schedules.Steps(6, 0.5)), warm_up=False)

    def crash(progress):
        if progress.pass_number == 2:
            raise RuntimeError

    with make() as whole, make() as begun, make() as resumed:
        whole.fit(X, y, **how)
        with pytest.raises(RuntimeError):
            begun.fit(X, y, callbacks=crash, **how, checkpoint=Checkpointing(tmp_path / "m"))
        resumed.fit(X, y, **how, checkpoint=Checkpointing(tmp_path / "m", resume=True))
        assert resumed.table.digest() == whole.table.digest()
        with shoal.load(tmp_path / "m") as loaded:
            assert loaded.optimizer == whole.optimizer


def test_descriptions_survive_their_numbers_and_nonsense_is_refused():
    for schedule, _ in ORACLES:
        optimizer = shoal.SGD(0.1, schedule=schedule)
        assert make_optimizer("SGD", optimizer.params()) == optimizer
    for make, error, said in [
        (lambda: Steps(0), ValueError, "schedule_clocks"),
        (lambda: Steps(1.5), TypeError, "clocks is 1.5: pass a whole number"),
        (lambda: Steps(5, 1.5), ValueError, "schedule_factor from 0 to 1"),
        (lambda: Cosine(5, float("nan")), ValueError, "schedule_floor"),
        (lambda: Warmup(-1), ValueError, "schedule_warmup"),
        (lambda: Linear("5"), TypeError, "clocks is '5': pass a whole number"),
        (lambda: Linear(5).at(-1), ValueError, "clock is -1"),
        (lambda: Linear(5).at(2**32), ValueError, "clock is 4294967296: pass 0 to"),
        (lambda: Linear(5).at(1.5), TypeError, r"^clock is 1\.5: pass 0 to"),
        (lambda: Linear(5).at(None), TypeError, "clock is None: pass 0 to"),
        (lambda: shoal.SGD(0.1, schedule=7), TypeError, "needs a schedule such as"),
        (lambda: shoal.FTRL(0.1, schedule=Linear(5)), ValueError, "FTRL takes no schedule"),
        (lambda: shoal.GroupFTRL(schedule=Linear(5)), ValueError, "GroupFTRL takes no schedule"),
        (lambda: shoal.Proximal(schedule=Linear(5)), ValueError, "Proximal takes no schedule"),
        (lambda: make_optimizer("SGD", {"lr": 0.1, "weight_decay": 0.0, "schedule": 99.0}), ValueError, "no schedule"),
        (lambda: make_optimizer("SGD", {"lr": 0.1, "schedule_clocks": 9.0}), ValueError, "no schedule"),
    ]:
        with pytest.raises(error, match=said):
            make()


def test_the_learning_rate_may_stand_first():
    for name, make in (RULES | {"FTRL": shoal.FTRL, "GroupFTRL": shoal.GroupFTRL, "Proximal": shoal.Proximal}).items():
        rate = "alpha" if "FTRL" in name else "lr"
        assert make(0.5) == make(**{rate: 0.5})
        assert repr(make(0.5)) == f"{name}({rate}=0.5)"
    assert repr(shoal.SGD(0.1, clip_norm=2.0)) == "SGD(lr=0.1, clip_norm=2.0)"

"""Optimizers of one's own on clusters: what servers may import, and equal bits for any number of servers."""

from __future__ import annotations

import importlib
import sys

import msgspec
import numpy as np
import pytest

import shoal
from relay import has_copies, wait_until
from shoal.cluster.launch.local_cluster import running
from shoal.cluster.server.code import AllowedCode
from shoal.table.spec import TableRecord, TableSpec

MODULE = """
from dataclasses import dataclass
import numpy as np
import shoal

@dataclass(frozen=True, slots=True, kw_only=True)
class Momentum(shoal.UserOptimizer):
    lr: float = 0.1
    version = {version}

    def initial_state(self):
        return {{"v": 0.0}}

    def step(self, weights, state, grads, steps):
        if (grads == 13).any():
            raise ArithmeticError("thirteen")
        (v,) = state
        v *= 0.9
        v += grads
        weights -= self.lr * v
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A directory with a module of that name, which this process has imported."""
    name = "optimizer_of_a_user"
    (tmp_path / f"{name}.py").write_text(MODULE.format(version=1))
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    importlib.invalidate_caches()
    yield importlib.import_module(name)
    sys.modules.pop(name)


def record(optimizer):
    spec = TableSpec(name="t", dim=2, optimizer=optimizer, init=shoal.Zeros(), dtype="float32", seed=0)
    return msgspec.msgpack.decode(msgspec.msgpack.encode(TableRecord.of(spec)), type=TableRecord)


class TestAllowedCode:
    def test_what_is_neither_a_directory_nor_a_module_is_refused(self, tmp_path):
        for wrong in (str(tmp_path / "missing"), "a-b", "a..b", ""):
            with pytest.raises(ValueError, match="neither a directory nor the name of a module"):
                AllowedCode([wrong])

    def test_by_default_no_code_of_users_is_imported(self, module, tmp_path):
        form = record(module.Momentum())
        refusal = AllowedCode().refusal(form)
        assert "'t' is optimizer_of_a_user:Momentum" in refusal
        assert "may not run: start all servers with --allow-code optimizer_of_a_user" in refusal
        with pytest.raises(shoal.errors.UserCodeError, match="may not run"):
            AllowedCode(["optimizer"]).check([form])
        AllowedCode().check([record(shoal.SGD())])
        for allowed in (tmp_path, "optimizer_of_a_user"):
            AllowedCode([allowed]).check([form])

    def test_a_module_is_imported_from_the_directory(self, module, tmp_path):
        form = record(module.Momentum())
        del sys.modules[module.__name__]
        sys.path.remove(str(tmp_path))
        AllowedCode([tmp_path]).check([form])
        assert sys.modules[module.__name__].__file__ == str(tmp_path / "optimizer_of_a_user.py")

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"class.__main__:Momentum": 1.0}, "put the class into a module of its own"),
            ({"class.optimizer_of_a_user:Momentum": 2.0}, "version 2: this process has version 1 of it"),
            ({"class.optimizer_of_a_user:Other": 1.0}, "this process has no such class"),
            ({"class.broken:Momentum": 1.0}, "importing broken failed: ZeroDivisionError"),
            ({"class.json:Momentum": 1.0}, "json is already .*: give the module another name"),
            ({"class.../../escape:Momentum": 1.0}, "may not run"),
        ],
    )
    def test_a_class_that_cannot_step_is_refused(self, module, tmp_path, change, reason):
        (tmp_path / "broken.py").write_text("1 / 0\n")
        (tmp_path / "json.py").write_text("")
        form = record(module.Momentum())
        params = {name: value for name, value in form.params.items() if not name.startswith("class.")}
        with pytest.raises(shoal.errors.UserCodeError, match=reason):
            AllowedCode([tmp_path]).check([msgspec.structs.replace(form, params=params | change)])


def train(store, optimizer, between=lambda: None):
    table = store.table("t", dim=3, optimizer=optimizer, init=shoal.Uniform(0.1, seed=3), admit=shoal.AfterCount(2))
    random = np.random.default_rng(7)
    for clock in range(4):
        if clock == 2:
            between()
        keys = random.integers(0, 300, 500, np.uint64)
        table.push(keys, random.standard_normal((500, 3)).astype(np.float32)).result()
        store.tick()
    store.flush()
    return table


@pytest.mark.slow
@pytest.mark.parametrize(("servers", "replicas", "consistency"), [(1, 0, shoal.ASP()), (3, 1, shoal.BSP())])
def test_clusters_and_a_local_store_have_the_same_bits(module, tmp_path, servers, replicas, consistency):
    with shoal.local() as store:
        want = train(store, module.Momentum()).digest()
    with shoal.launch(servers, replicas=replicas, consistency=consistency, allow_code=[tmp_path], slots=64) as store:
        table = train(store, module.Momentum())
        table.pull(np.zeros(1, np.uint64))
        assert table.digest() == want
        keys = np.arange(300, dtype=np.uint64)

        def fail():
            table.push(keys[:1], np.full((1, 3), 13, np.float32)).result()
            store.tick()
            table.pull(keys)

        with pytest.raises(shoal.ShoalError, match="a step of the optimizer failed: ArithmeticError: thirteen"):
            fail()
        assert table.optimizer == module.Momentum()


@pytest.mark.slow
def test_copies_of_a_killed_server_continue_with_the_same_bits(module, tmp_path):
    with shoal.local() as store:
        want = train(store, module.Momentum()).digest()
    with (
        running(2, replicas=1, slots=64, storage_roots=[tmp_path], allow_code=[tmp_path]) as cluster,
        shoal.connect(cluster.address, consistency=shoal.ASP(), workers=1) as store,
    ):

        def kill():
            store.save(tmp_path / "saved")
            cluster.scheduler.process.kill()
            cluster.servers[0].process.kill()

        assert train(store, module.Momentum(), kill).digest() == want
        wait_until(lambda: has_copies(store.cluster()), "all slots have copies")  # a load fails while slots move
        store.load(tmp_path / "saved")  # the scheduler has the description from its journal
        assert store.tables["t"].stats().step == 2


@pytest.mark.slow
def test_servers_that_were_not_told_to_do_not_run_code_of_users(module):
    with shoal.launch(1, slots=64) as store:
        with pytest.raises(ValueError, match=r"may not run: start all servers with --allow-code optimizer_of_a_user"):
            store.table("t", optimizer=module.Momentum())
        store.table("t", optimizer=shoal.SGD(1.0)).push(np.arange(3, dtype=np.uint64), np.ones(3, np.float32)).result()

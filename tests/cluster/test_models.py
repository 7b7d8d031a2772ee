"""Models, dense tables and functions on a cluster: one worker has a local store's bits, several those of a merge."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import shoal
from cluster_fakes import TIMEOUT, declare_dead
from cluster_standin import cluster
from shoal import _core, cli
from shoal.models import BIAS_KEY, EarlyStopping
from shoal.tools.planted import PlantedModel, write_log
from stores import one_by_one, together


@pytest.fixture(scope="module")
def batches():
    """Some batches of a planted click log, of different lengths."""
    random = np.random.default_rng(5)
    planted = random.normal(size=400)
    made = []
    for n in (200, 133, 300, 1, 77, 250, 64):
        columns = np.minimum(random.zipf(1.3, size=(n, 6)), 400) - 1
        labels = (random.random(n) < 1 / (1 + np.exp(-planted[columns].sum(axis=1)))).astype(np.float32)
        keys = (columns * 6 + np.arange(6)).astype(np.uint64).ravel()
        values = random.normal(1, 0.1, size=len(keys)).astype(np.float32)
        made.append(shoal.Batch(labels, np.arange(0, 6 * n + 1, 6), keys, values))
    return made


def rows_of(model):
    keys = np.append(np.arange(2400, dtype=np.uint64), np.uint64(BIAS_KEY))
    return [column.tobytes() for table in model.tables for column in table.state(keys).values()]


MODELS = {
    "lr": lambda store: shoal.LogisticRegression(shoal.FTRL(alpha=0.1, l1=0.5), store=store, warm_up=False),
    "fm": lambda store: shoal.FactorizationMachine(4, store=store, warm_up=False),
    "softmax": lambda store: shoal.models.MulticlassRegression(3, store=store, warm_up=False),
    "ovr": lambda store: shoal.models.MulticlassRegression(3, store=store, loss="ovr", warm_up=False),
}


@pytest.mark.combined
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(("servers", "endpoints"), [(1, 1), (2, 2)])
def test_one_worker_learns_what_a_local_store_learns_to_the_bit(kind, servers, endpoints, batches, tmp_path):
    def learn(store):
        with MODELS[kind](store) as model:
            model.fit(batches, epochs=2, valid=batches[:2], progress=False)
            losses = [done.metrics.logloss for done in model.history.passes]
            return (
                losses,
                [done.valid for done in model.history.passes],
                rows_of(model),
                model.probabilities(batches[0]),
            )

    with shoal.local() as store:
        expected = learn(store)
    with cluster(servers, endpoints) as made:
        (found,) = together(made.address, 1, learn)
    assert found[:3] == expected[:3]
    assert found[3].tobytes() == expected[3].tobytes()


def merged_in_rank_order(kind, shares, passes):
    """One process that computes the workers' parts on the same weights, and merges them by rank into one step."""
    with shoal.local(threads=1) as store:
        model = MODELS[kind](store)
        for _ in range(passes):
            for clock in range(max(map(len, shares))):
                parts = []
                for batch in (share[clock] for share in shares if clock < len(share)):
                    keys = model.sort(batch)
                    rows = [table.pull_unique(keys) for table in model.tables]
                    margins, known = model._forward(batch, keys, rows)
                    slopes = model._loss(batch, margins, model.accumulator())[1]
                    parts.append((keys.hashes, model._backward(batch, keys, rows, slopes, known)))
                for number, table in enumerate(model.tables):
                    lists = [(hashes, grads[number].reshape(-1, table.dim)) for hashes, grads in parts]
                    hashes, sums = _core.merge(lists, table.dim, store.workers)
                    table.push(_core.unmix(hashes), sums)
        return rows_of(model)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "workers"), [("lr", 2), ("lr", 3), ("fm", 2), ("softmax", 2), ("ovr", 2)])
def test_several_workers_learn_what_one_process_merges_in_rank_order(kind, workers, batches):
    shares = [batches[rank::workers] for rank in range(workers)]  # not equally long

    def learn(store):
        with MODELS[kind](store) as model:
            model.fit(shares[store.rank], epochs=2, progress=False)
            clock = store.clock
            found = rows_of(model)
            store.barrier()
            return found, clock

    with cluster(2, 1) as made:
        found = together(made.address, workers, learn)
    assert all(one == found[0] for one in found)
    assert found[0][0] == merged_in_rank_order(kind, shares, 2)


@pytest.mark.slow
@pytest.mark.parametrize("consistency", [shoal.SSP(2), shoal.ASP(), shoal.BSP(reduce="mean")], ids=str)
def test_shares_of_different_lengths_end_under_every_consistency(consistency, batches):
    shares = [batches * 3, batches[:2], []]

    def learn(store):
        with shoal.LogisticRegression(store=store) as model:
            model.fit(shares[store.rank], epochs=2, progress=False)
            store.barrier()
            return model.examples, model.evaluate(batches).logloss

    with cluster(2, 1) as made:
        found = together(made.address, 3, learn, consistency=consistency)
    assert [examples for examples, _ in found] == [2 * sum(len(batch) for share in shares for batch in share)] * 3
    assert all(logloss < 0.68 for _, logloss in found)


@pytest.mark.slow
def test_the_solver_has_the_bits_of_a_local_store_and_workers_go_to_the_same_optimum(batches):
    solver = shoal.models.DBPG(l1=2.0, blocks=4, delay=2, tolerance=1e-2, passes=60)

    def learn(share):
        def work(store):
            with shoal.LogisticRegression(store=store, solver=solver) as model:
                model.fit(share(store))
                store.barrier()
                return model.solved, rows_of(model)

        return work

    with shoal.local() as store:
        expected = learn(lambda store: batches)(store)
    with cluster(2, 1) as made:
        (alone,) = together(made.address, 1, learn(lambda store: batches))
    assert alone == expected
    with cluster(2, 1) as made:
        found = together(made.address, 2, learn(lambda store: batches[store.rank :: 2]))
    assert found[0][1] == found[1][1]
    assert found[0][0].converged
    assert found[1][0].converged
    weights = [np.frombuffer(rows[0], np.float32).reshape(-1, 2)[:, 0] for rows in (expected[1], found[0][1])]
    assert np.max(np.abs(weights[0] - weights[1])) < 0.05


def test_functions_have_the_bits_of_a_local_store_on_any_number_of_servers():
    random = np.random.default_rng(3)
    keys = random.integers(2**64, size=3000, dtype=np.uint64)
    rows = random.normal(size=(3000, 3)).astype(np.float32)

    def work(store):
        table = store.table("t", dim=3, optimizer=shoal.FTRL(l1=0.3))
        table.assign(keys, rows)
        answers = [table.sum().tobytes(), table.norm(), table.norm(1), table.norm(np.inf), table.count(above=1.0)]
        answers += [part.tobytes() for part in table.topk(40)]
        answers += [table.decay(0.5), table.shrink(0.2), table.pull(keys).tobytes(), table.sum().tobytes()]
        answers.append(table.digest())
        with pytest.raises(ValueError, match="1, 2 or infinity"):
            table.norm(3)
        return answers

    with shoal.local() as store:
        expected = work(store)
    for servers, endpoints in ((1, 1), (2, 2)):
        with cluster(servers, endpoints) as made:
            assert together(made.address, 1, work) == [expected]


def test_dense_tables_of_workers_take_the_steps_of_sgd_on_the_whole():
    shape, steps = (30, 70), 6
    random = np.random.default_rng(4)
    grads = random.normal(size=(steps, 2, *shape)).astype(np.float32)

    def work(store):
        table = store.dense("w", shape, optimizer=shoal.SGD(lr=0.25), block=64)
        table.assign(np.ones(shape, np.float32))
        store.barrier()
        seen = []
        for step in range(steps):
            seen.append(table.pull().tobytes())
            table.push(grads[step, store.rank])
            store.tick()
        seen.append(table.pull_async().result().tobytes())
        store.barrier()
        return seen

    with cluster(2, 2) as made:
        first, second = together(made.address, 2, work)
    weights = np.ones(shape, np.float32)
    expected = [weights.tobytes()]
    for step in range(steps):
        summed = (grads[step, 0].astype(np.float64) + grads[step, 1]).astype(np.float32)
        weights = weights - np.float32(0.25) * summed
        expected.append(weights.tobytes())
    assert first == second == expected


@pytest.mark.slow
def test_a_model_is_saved_by_one_worker_and_loaded_by_all(batches, tmp_path):
    def learn(store):
        with shoal.LogisticRegression(store=store) as model:
            model.fit(batches[store.rank :: 2], progress=False)
            if store.rank == 0:
                model.save(tmp_path / "m")
            store.barrier()
            return model.probabilities(batches[0]).tobytes()

    def load(store):
        with shoal.LogisticRegression.load(tmp_path / "m", store=store) as model:
            found = model.probabilities(batches[0]).tobytes()
            model.fit(batches[store.rank :: 2], progress=False)
            store.barrier()
            return found

    with cluster(2, 1) as made:
        saved = together(made.address, 2, learn)
    with cluster(1, 2) as made:
        assert together(made.address, 2, load) == saved
    with shoal.LogisticRegression.load(tmp_path / "m") as model:
        assert [model.probabilities(batches[0]).tobytes()] * 2 == saved


def test_what_several_workers_cannot_do_is_refused(batches):
    def work(store):
        with shoal.LogisticRegression(store=store) as model, pytest.raises(ValueError, match="2 workers"):
            model.fit(batches, valid=batches, epochs=3, early_stopping=EarlyStopping(1))
        with (
            shoal.LogisticRegression(store=store, table="s", solver="dbpg") as model,
            pytest.raises(ValueError, match="BSP"),
        ):
            model.fit(batches)

    with cluster(1, 1) as made:
        together(made.address, 2, work, consistency=shoal.SSP(1))


DIFFERENT = {
    "loss is 'multinomial' on worker 0 and 'ovr' on worker 1": lambda store, batches: shoal.models.MulticlassRegression(
        3, store=store, loss="ovr" if store.rank else "multinomial"
    ).fit(batches),
    "epochs is 1 on worker 0 and 2 on worker 1": lambda store, batches: shoal.LogisticRegression(store=store).fit(
        batches, epochs=np.int64(1) if store.rank == 0 else 2
    ),
    "normalized is False on worker 0 and True on worker 1": lambda store, batches: shoal.LogisticRegression(
        store=store, normalized=store.rank == 1
    ).fit(batches),
    "blocks is 4 on worker 0 and 8 on worker 1": lambda store, batches: shoal.LogisticRegression(
        store=store, solver=shoal.models.DBPG(blocks=4 << store.rank)
    ).fit(batches),
    "epochs is 3 on worker 0 and 4 on worker 1": lambda store, batches: shoal.models.LogisticRegressionGrid(
        {"alpha": [0.1, 0.2]}, store=store
    ).fit(batches, epochs=3 + store.rank, progress=False),
}


@pytest.mark.slow
@pytest.mark.parametrize("found", DIFFERENT)
def test_workers_with_different_settings_are_all_refused(found, batches):
    def work(store):
        with pytest.raises(ValueError, match=f"^{found}: pass all workers of a fit the same settings$"):
            DIFFERENT[found](store, batches[store.rank :: 2])
        with shoal.LogisticRegression(store=store, table="another") as model:
            model.fit(batches[store.rank :: 2], progress=False)
            return model.examples

    with cluster(2, 1) as made:
        assert together(made.address, 2, work) == [sum(len(batch) for batch in batches)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("which", ["whole", "split"])
def test_workers_that_read_the_same_examples_are_refused(which, tmp_path, batches):
    path = tmp_path / "train.libsvm"
    path.write_text("".join(f"{i % 2} {i % 7}:1 {i % 5 + 10}:1\n" for i in range(64)))
    own = [tmp_path / str(rank) / "train.libsvm" for rank in range(2)]
    for rank, one in enumerate(own):  # files of one name may be two
        one.parent.mkdir()
        one.write_text(f"{rank} 7:1\n" * 32)

    def work(store):
        reader = shoal.read_libsvm(path, batch_size=8)
        wrong = reader if which == "whole" else reader.split(0, 3)
        with shoal.LogisticRegression(store=store) as model:
            with pytest.raises(ValueError, match="workers 0 and 1 read the same examples: pass each worker its"):
                model.fit(wrong, progress=False)
            model.fit(reader.split(store.rank, 2), progress=False)
            model.fit(shoal.read_libsvm(own[store.rank], batch_size=8), progress=False)
            return model.examples

    with cluster(2, 1) as made:
        assert together(made.address, 2, work) == [64 + 64] * 2


@pytest.mark.slow
def test_workers_with_splits_of_different_files_are_refused(tmp_path):
    paths = [tmp_path / f"{rank}.libsvm" for rank in range(2)]
    for rank, path in enumerate(paths):
        path.write_text(f"{rank} 7:1\n" * (10 + rank))

    def work(store):
        reader = shoal.read_libsvm(paths[store.rank], batch_size=8).split(store.rank, 2)
        with shoal.LogisticRegression(store=store) as model:
            with pytest.raises(ValueError, match="worker 0 reads 1 file of 60 bytes and worker 1 1 file of 66 bytes"):
                model.fit(reader, progress=False)
            model.fit(shoal.read_libsvm(paths, batch_size=8).split(store.rank, 2), progress=False)
            return model.examples

    with cluster(2, 1) as made:
        assert together(made.address, 2, work) == [21] * 2


@pytest.mark.slow
def test_after_different_settings_a_fit_with_the_same_ones_begins(batches):
    def work(store):
        with shoal.LogisticRegression(store=store) as model:
            with pytest.raises(ValueError, match="epochs is 1 on worker 0 and 2 on worker 1"):
                model.fit(batches[store.rank :: 2], epochs=1 + store.rank, progress=False)
            time.sleep(0.2 * store.rank)
            model.fit(batches[store.rank :: 2], epochs=2, progress=False)
            model.fit(batches[store.rank :: 2], epochs=1, progress=False)  # of another fit
            return len(model.history.passes)

    with cluster(2, 1) as made:
        assert together(made.address, 2, work) == [3, 3]


@pytest.mark.slow
def test_workers_wait_for_one_that_measures_for_longer_than_a_call_may_take(batches):
    def learn(store):
        impatient = iter([True, False, True, True, False] if store.rank else [])
        meet = store.meet

        def meet_in_time(name, timeout=None):
            if next(impatient, False):
                raise shoal.DeadlineExceededError("not all of them were there")
            return meet(name, timeout)

        store.meet = meet_in_time
        with shoal.LogisticRegression(store=store) as model:
            if store.rank == 1:
                with pytest.raises(shoal.DeadlineExceededError):  # at the begin there is nothing to wait for
                    model.fit(batches, progress=False)
            model.fit(batches, epochs=2, valid=None if store.rank else batches[:1], progress=False)
            return rows_of(model)

    with cluster(1, 1) as made:
        found = together(made.address, 2, learn)
    assert found[0] == found[1]


@pytest.mark.slow
def test_nobody_waits_for_a_worker_that_has_stopped(batches):
    class Stop(Exception):
        pass

    class Broken:
        def __iter__(self):
            yield batches[1]
            raise Stop

    def learn(store):
        with shoal.LogisticRegression(store=store) as model:
            if store.rank == 1:
                with pytest.raises(Stop):
                    model.fit(Broken(), epochs=2, progress=False)
            else:
                model.fit(batches, epochs=2, progress=False)
            return model.examples

    with cluster(1, 1) as made:
        found = one_by_one(made.address, 3, learn)
    everything = 4 * sum(map(len, batches)) + len(batches[1])
    assert found == [everything, len(batches[1]), everything]


def test_nobody_waits_for_a_worker_that_was_lost(batches):
    def learn(store):
        with shoal.LogisticRegression(store=store) as model:
            if store.rank == 1:
                store.barrier()
                store._scheduler.close()  # not a word more
                declare_dead(made.scheduler, "worker", 1)
                return 0
            store.barrier()
            model.fit(batches[store.rank :: 3], progress=False)
            return model.examples

    with cluster(1, 1) as made:
        found = one_by_one(made.address, 3, learn)
    assert found[0] > 0


def test_a_worker_that_took_a_dead_one_s_place_fits_splits_and_is_refused_a_share(batches, tmp_path):
    write_log(tmp_path / "log.tsv", PlantedModel(seed=1), 300, 0)
    reader = shoal.read_criteo(tmp_path / "log.tsv", batch_size=100)
    gone, replaced = threading.Event(), threading.Event()

    def stay(address):
        with shoal.connect(address, workers=2, rank=0, threads=1, timeout=TIMEOUT) as store:
            while store.member.lost_workers != {1}:
                time.sleep(0.01)
            store.tick()
            store.tick()
            store.table("answered at clock 2").pull(np.zeros(1, np.uint64))  # the servers know of both ticks
            gone.set()
            assert replaced.wait(TIMEOUT)  # else the job could end before, and the other one wait for a new one
            with shoal.LogisticRegression(store=store) as model:
                for split in store.splits(reader):
                    model.fit(split, progress=False)
                return model.examples

    def die_and_come_again(address):
        store = shoal.connect(address, workers=2, rank=1, threads=1, timeout=TIMEOUT)
        store._scheduler.close()  # not a word more
        declare_dead(made.scheduler, "worker", 1)
        assert gone.wait(TIMEOUT)
        with contextlib.suppress(shoal.ShoalError):
            store.close()
        with shoal.connect(address, workers=2, rank=1, threads=1, timeout=TIMEOUT) as store:
            clock = store.member.joined_at
            assert clock >= 2  # the other one goes on
            replaced.set()
            with shoal.LogisticRegression(store=store) as model:
                with pytest.raises(shoal.ShoalError, match=rf"worker 1 replaced .* clock {clock}: .* store.splits"):
                    model.fit(batches, progress=False)
                for split in store.splits(reader):
                    model.fit(split, progress=False)
                return model.examples

    with cluster(1, 1) as made, ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(work, made.address) for work in (stay, die_and_come_again)]
        assert sum(end.result(TIMEOUT) for end in ends) == 300


@pytest.mark.slow
def test_splits_of_the_data_are_learned_without_agreement_between_workers(tmp_path):
    planted = PlantedModel(seed=1)
    write_log(tmp_path / "log.tsv", planted, 3000, 0)
    reader = shoal.read_criteo(tmp_path / "log.tsv", batch_size=100)

    def learn(store):
        with shoal.LogisticRegression(store=store) as model:
            for split in store.splits(reader, split_bytes=50_000):
                model.fit(split, progress=False)
            return model.examples

    with cluster(2, 1) as made:
        assert sum(one_by_one(made.address, 2, learn)) == 3000


def test_the_command_trains_on_a_cluster_and_the_first_worker_saves(tmp_path):
    planted = PlantedModel(seed=1)
    write_log(tmp_path / "log.tsv", planted, 2000, 0)
    write_log(tmp_path / "test.tsv", planted, 500, 1 << 40)
    command = [sys.executable, "-W", "error", "-m", "shoal", "train", "lr", "--data", "log.tsv", "--format", "criteo"]
    command += ["--valid", "test.tsv", "--output", "m", "--workers", "2", "--batch-size", "100", "--json", "--quiet"]
    with cluster(2, 1) as made:
        workers = [
            subprocess.Popen([*command, "--cluster", made.address], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        reported = [json.loads(worker.communicate(timeout=120)[0]) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0]
    assert sorted(one["worker"] for one in reported) == [0, 1]
    assert [one["examples"] for one in reported] == [2000, 2000]
    metrics = [[(done["metrics"], done["valid"]) for done in one["passes"]] for one in reported]
    assert metrics[0] == metrics[1]
    (first,) = [one for one in reported if one["worker"] == 0]
    assert first["passes"][0]["valid"]["examples"] == 500
    with shoal.LogisticRegression.load(tmp_path / "m") as model:
        assert len(model.table) == first["rows"]
        metrics = model.evaluate(shoal.read_criteo(tmp_path / "test.tsv"))
        assert metrics.logloss == pytest.approx(first["passes"][0]["valid"]["logloss"])


@pytest.mark.slow
def test_the_command_solves_on_a_cluster_with_filters(tmp_path):
    write_log(tmp_path / "log.tsv", PlantedModel(seed=1), 1000, 0)
    command = [sys.executable, "-W", "error", "-m", "shoal", "train", "lr", "--data", "log.tsv", "--format", "criteo"]
    command += [
        "--solver",
        "dbpg",
        "--l1",
        "3",
        "--blocks",
        "4",
        "--slots",
        "64",
        "--json",
        "--quiet",
        "--threads",
        "1",
    ]
    command += ["--tolerance", "0.02", "--passes", "500"]
    alone = json.loads(subprocess.run([*command, "--output", "one"], cwd=tmp_path, capture_output=True).stdout)
    command += ["--output", "m", "--workers", "2", "--filters", "key_caching,zeros,weights=bfloat16"]
    with cluster(2, 1) as made:
        workers = [
            subprocess.Popen([*command, "--cluster", made.address], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        reported = [json.loads(worker.communicate(timeout=120)[0]) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0]
    assert alone["solved"]["converged"]
    for one in reported:
        assert one["solved"]["passes"] > 1
        tables = list(one["filters"].values())
        assert sum(table.get("lists_sent", 0) for table in tables) > 0
        assert sum(table.get("weight_bytes_saved", 0) for table in tables) > 0
    (first,) = [one for one in reported if one["worker"] == 0]
    losses = []
    for name in ("one", "m"):
        with shoal.LogisticRegression.load(tmp_path / name) as model:
            losses.append(model.evaluate(shoal.read_criteo(tmp_path / "log.tsv")).logloss)
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    assert first["nonzero_weights"] == pytest.approx(alone["nonzero_weights"], rel=0.2)


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (["--filters", "zeros"], "--filters requires --cluster"),
        (["--cluster", "tcp://127.0.0.1:1", "--filters", "holes"], "'holes' is not a filter: pass key_caching, zeros,"),
        (["--cluster", "tcp://127.0.0.1:1", "--filters", "zeros=1"], "'zeros=1' is not a filter"),
        (["--cluster", "tcp://127.0.0.1:1", "--filters", "gradients"], "'gradients' is not a filter"),
        (["--cluster", "tcp://127.0.0.1:1", "--filters", "gradients=int8"], "int8"),
        (["--cluster", "tcp://127.0.0.1:1", "--filters", "threshold=much"], "threshold=much is not a number"),
        (["--cluster", "tcp://127.0.0.1:1", "--filters", "zeros,zeros"], "names zeros twice"),
        (["--passes", "3"], "--passes requires --solver dbpg"),
        (["--solver", "dbpg", "--grid", "l1=0,1"], "--grid does not apply to --solver dbpg"),
        (["--solver", "dbpg", "--alpha", "0.2"], "--alpha does not apply to --solver dbpg"),
        (
            ["--solver", "dbpg", "--epochs", "2"],
            "--epochs does not apply to --solver dbpg: pass --passes and --tolerance",
        ),
        (["--solver", "dbpg", "--delay", "256"], "delay is 256"),
        (["--consistency", "asp"], "--consistency requires --cluster"),
        (["--workers", "2"], "--workers requires --cluster"),
        (["--cluster", "tcp://127.0.0.1:1", "--consistency", "ssp"], "is not a consistency: write bsp, bsp:mean"),
        (["--cluster", "tcp://127.0.0.1:1", "--grid", "l1=0,1"], "leave out --cluster"),
    ],
)
def test_the_command_says_what_does_not_fit(arguments, reported, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("log").write_text("1 1:1\n")
    command = ["train", "lr", "--data", "log", "--format", "libsvm", "--output", "m", *arguments]
    try:
        status = cli.main(command)
    except SystemExit as end:  # what argparse refuses
        status = end.code
    assert status == 2
    assert reported in capsys.readouterr().err

"""Clusters on Ray: placed, trained on, and continued when actors and nodes die."""

import os
import runpy
import shlex
import signal
import subprocess
import sys
import threading
import time
import urllib.request

import numpy as np
import prometheus_client.parser
import pytest

import shoal
from manifests import KUBERNETES, documents
from ray_nodes import PATIENCE, VARIABLES, wait_until
from shoal.cluster.launch.local_cluster import running
from shoal.tools.planted import PlantedModel, write_log

pytest.importorskip("ray.train", reason="ray is an extra: pip install 'shoal[ray]'")
import ray
from ray.autoscaler.v2.sdk import get_cluster_status

from tiers import long_after

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings(r"ignore::Warning:ray\..*")]

# The workers of Ray cannot import this file.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

KEYS = np.arange(200, dtype=np.uint64)
SUMS = {"dim": 1, "optimizer": shoal.SGD(lr=1.0)}  # a row is the negative sum of what was pushed


def config(**changes):
    return shoal.ray.ShoalConfig(**{"timeout": PATIENCE, "resources_per_server": {"CPU": 1}, **changes})


def scaling(workers):
    return ray.train.ScalingConfig(num_workers=workers)


def run_config(folder, **changes):
    return ray.train.RunConfig(name="run", storage_path=str(folder), **changes)


class Pushes:
    """A thread that pushes ones to all keys, a clock for each push. A context manager, which checks the rows."""

    def __init__(self, cluster):
        self.store = cluster.connection.connect(rank=0, workers=1, consistency=shoal.ASP())
        self.table = self.store.table("sums", **SUMS)
        self.before = self.table.pull(KEYS)[:, 0]
        self.count = 0
        self.fault = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self):
        try:
            while not self._stop.is_set():
                self.table.push(KEYS, np.ones((len(KEYS), 1), np.float32)).result()
                self.count += 1
        except BaseException as error:
            self.fault = error

    def __enter__(self):
        self._thread.start()
        self.wait_for_more()
        return self

    def wait_for_more(self):
        before = self.count
        wait_until(lambda: self.fault or self.count > before + 3, "no push was acknowledged")
        assert self.fault is None

    def __exit__(self, *failure):
        self._stop.set()
        self._thread.join(PATIENCE)
        with self.store:
            if failure[0] is None:
                assert self.fault is None
                assert (self.table.pull(KEYS)[:, 0] - self.before).tolist() == [-self.count] * len(KEYS)


def whole(cluster, servers, replicas=1):
    """Whether so many servers are members and each arc has its copies."""
    status = cluster.status()
    complete = all(len(arc["copies"]) >= replicas for arc in status["arcs"])
    return len(status["servers"]) == servers and status["arcs"] and complete


@pytest.fixture(scope="module")
def servers(ray_cluster):
    """Three servers with a copy of each slot, of which tests kill some."""
    with shoal.ray.start(config(servers=3, replicas=1)) as cluster:
        yield cluster


def test_servers_are_on_different_nodes_and_named_by_role_and_rank(servers):
    assert [role.name for role in servers.servers] == ["server 0", "server 1", "server 2"]
    assert [role.joined.rank for role in servers.servers] == [0, 1, 2]
    assert len({role.joined.node for role in servers.servers}) == 3
    names = {"scheduler", "server-0", "server-1", "server-2"}
    assert {f"{servers.name}-{name}" for name in names} <= set(ray.util.list_named_actors())
    assert servers.scheduler.joined.node == ray.get_runtime_context().get_node_id()
    assert servers.connection.keys is None  # all addresses are of this machine
    assert whole(servers, 3)


def test_ray_reports_the_counters_of_each_server_to_prometheus(servers):
    pytest.importorskip("aiohttp_cors", reason="Ray's nodes report metrics with pip install 'ray[default]' alone")
    (here,) = (node for node in ray.nodes() if node["NodeID"] == ray.get_runtime_context().get_node_id())
    (server,) = (role for role in servers.servers if role.joined.node == here["NodeID"])
    name = f"{servers.name}-{server.name.replace(' ', '-')}"

    def messages():
        with urllib.request.urlopen(f"http://127.0.0.2:{here['MetricsExportPort']}/metrics", timeout=PATIENCE) as reply:
            families = prometheus_client.parser.text_string_to_metric_families(reply.read().decode())
        samples = [one for family in families if family.name == "ray_shoal_server_messages" for one in family.samples]
        return sum(one.value for one in samples if one.labels["server"] == name)

    with Pushes(servers):
        wait_until(messages, "Ray reports no messages")


def test_pushes_continue_when_a_server_is_killed_and_another_one_is_started(servers):
    with Pushes(servers) as pushes:
        dead = servers.servers[1]
        os.kill(dead.joined.pid, signal.SIGKILL)
        pushes.wait_for_more()
        wait_until(lambda: dead not in servers.servers and whole(servers, 3), "there is no other server")
        pushes.wait_for_more()
    assert [role.name for role in servers.servers] == ["server 0", "server 1", "server 2"]
    assert servers.fault is None


def test_pushes_continue_while_the_scheduler_is_started_again(servers):
    with Pushes(servers) as pushes:
        dead, address = servers.scheduler, servers.address
        os.kill(dead.joined.pid, signal.SIGKILL)
        pushes.wait_for_more()
        wait_until(lambda: servers.scheduler is not dead and servers.scheduler.joined, "there is no other scheduler")
        assert servers.scheduler.joined.address == address
        assert whole(servers, 3)
        pushes.wait_for_more()


def test_pushes_continue_when_a_node_is_killed_and_its_server_moves_to_another_node(servers, ray_cluster):
    head = ray.get_runtime_context().get_node_id()
    dead = next(role for role in servers.servers if role.joined.node != head)
    with Pushes(servers) as pushes:
        ray_cluster.kill(dead.joined.node)
        pushes.wait_for_more()
        wait_until(lambda: dead not in servers.servers and whole(servers, 3), "there is no other server")
        pushes.wait_for_more()
    ray_cluster.add()
    assert servers.fault is None
    assert dead.joined.node not in {role.joined.node for role in servers.servers if role.joined is not None}


def learn(store, path):
    reader = shoal.read_criteo([path], batch_size=256)
    with shoal.LogisticRegression(shoal.FTRL(alpha=0.1, l1=0.5), store=store) as model:
        model.fit(reader.split(store.rank, store.num_workers), progress=False)
        model.store.barrier()


def state(directory):
    """Return the keys and states of the tables of a checkpoint, as bytes; not of the rows of fits, with their job."""
    with shoal.local() as store:
        store.load(directory)
        found = {}
        for name, table in store.tables.items():
            if name.endswith("-progress"):
                continue
            keys = np.sort(np.concatenate([keys for keys, _ in table.items()]))
            found[name] = (keys.tobytes(), {part: rows.tobytes() for part, rows in table.state(keys).items()})
        assert found
        return found


def native(path, folder):
    """Train as the two workers of a launched cluster; save to a folder."""
    faults = []

    def work(rank):
        try:
            with shoal.connect(cluster.address, workers=2, rank=rank, timeout=PATIENCE) as store:
                learn(store, path)
                if rank == 0:
                    store.save(folder)
        except BaseException as error:
            faults.append(error)

    with running(2, workers=2, timeout=PATIENCE, storage_roots=[folder.parent]) as cluster:
        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
    assert not faults


@pytest.fixture(scope="module")
def natively_trained(tmp_path_factory):
    """A log, and the tables that a launched cluster learns from it."""
    folder = tmp_path_factory.mktemp("native")
    write_log(folder / "train.tsv", PlantedModel(seed=1), 2000, 0)
    native(folder / "train.tsv", folder / "tables")
    return folder / "train.tsv", state(folder / "tables")


@pytest.mark.parametrize("shared_storage", long_after(1, [True, False]))
def test_the_model_has_the_bits_of_a_native_launch(servers, natively_trained, tmp_path, shared_storage):
    path, tables = natively_trained
    mode = ray.train.CheckpointUploadMode.NO_UPLOAD if shared_storage else ray.train.CheckpointUploadMode.SYNC

    def loop(given):
        learn(shoal.ray.store(), given["path"])
        ray.train.report(
            {"workers": os.environ["SHOAL_WORKERS"]}, checkpoint=shoal.ray.snapshot(), checkpoint_upload_mode=mode
        )

    result = shoal.ray.ShoalTrainer(
        loop,
        shoal_config=config(servers=2, shared_storage=True) if shared_storage else servers,
        train_loop_config={"path": str(path)},
        scaling_config=scaling(2),
        run_config=run_config(tmp_path / "runs"),
    ).fit()
    assert result.metrics["workers"] == "2"
    with result.checkpoint.as_directory() as directory:
        assert state(directory) == tables


def test_restarted_workers_continue_from_the_last_snapshot_and_an_error_of_theirs_reaches_the_caller(servers, tmp_path):
    def loop(settings):
        store = shoal.ray.store()
        restored = shoal.ray.restore()
        table = store.table("restarted", **SUMS)
        for clock in range(2 if restored else 0, 4):
            table.push(KEYS, np.ones((len(KEYS), 1), np.float32))
            store.tick()
            ray.train.report({"restored": restored}, checkpoint=shoal.ray.snapshot() if clock == 1 else None)
            if clock == 2 and not restored:
                store.barrier()
                raise RuntimeError("a worker fails")
        assert restored
        if store.rank == 0:
            np.save(settings["rows"], table.pull(KEYS)[:, 0])
        store.barrier()
        raise shoal.CorruptionError("tables-0 is truncated")

    trainer = shoal.ray.ShoalTrainer(
        loop,
        train_loop_config={"rows": str(tmp_path / "rows.npy")},
        shoal_config=servers.connection,
        scaling_config=scaling(2),
        run_config=run_config(tmp_path, failure_config=ray.train.FailureConfig(max_failures=1)),
    )
    with pytest.raises(shoal.CorruptionError, match="tables-0 is truncated") as failed:
        trainer.fit()
    assert isinstance(failed.value.__cause__, ray.train.TrainingFailedError)
    assert np.load(tmp_path / "rows.npy").tolist() == [-8.0] * len(KEYS)  # two workers, four clocks


def test_without_replicas_the_loss_of_a_server_is_reported(ray_cluster, tmp_path):
    with shoal.ray.start(config(servers=2)) as cluster:
        os.kill(cluster.servers[0].joined.pid, signal.SIGKILL)
        wait_until(lambda: cluster.fault, "the loss of a server was not reported")
        with pytest.raises(shoal.ServerLostError, match=r"server 0 \(process .* has died: .*no replicas"):
            raise cluster.fault


def test_keys_are_sent_to_the_actors(ray_cluster, tmp_path):
    from shoal.cluster.protocol.curve import make_keys

    make_keys(tmp_path / "keys")
    with shoal.ray.start(config(curve=tmp_path / "keys")) as cluster:
        with cluster.connection.connect() as store:
            table = store.table("sums", **SUMS)
            table.push(KEYS, np.ones((len(KEYS), 1), np.float32))
            store.tick()
            assert table.pull(KEYS[:1]).tolist() == [[-1.0]]
        with pytest.raises(shoal.NotConnectedError):
            shoal.connect(cluster.address, timeout=2.0)


def test_a_run_that_no_nodes_can_hold_is_an_error_before_it_starts(ray_cluster, tmp_path):
    trainer = shoal.ray.ShoalTrainer(
        lambda: None,
        shoal_config=config(servers=2, timeout=1.0),
        scaling_config=scaling(1000),
        run_config=run_config(tmp_path),
    )
    with pytest.raises(
        shoal.DeadlineExceededError, match=r"have \d+ CPU in all, and 2 x 1 for servers and 1000 x 1 for"
    ):
        trainer.fit()


def test_servers_that_ray_cannot_place_are_an_error_with_the_numbers(ray_cluster):
    with pytest.raises(shoal.DeadlineExceededError, match=r"no place for 2 servers with {'CPU': 1000}"):
        shoal.ray.start(config(servers=2, resources_per_server={"CPU": 1000}, timeout=2.0))


def test_a_spare_server_waits_for_a_node_and_then_has_the_copies_of_one_that_dies(ray_cluster):
    nodes = 1 + len(ray_cluster.nodes)
    with shoal.ray.start(
        config(servers=nodes, replicas=1, spares=1, resources_per_server={"rows": 2})  # a server takes a node
    ) as cluster:
        spare = cluster.servers[-1]
        assert len(cluster.status()["servers"]) == nodes
        assert spare.joined is None
        wait_until(lambda: {"rows": 2} in requested(ray_cluster), "Ray's autoscaler does not see the request")
        node = ray_cluster.add()
        wait_until(lambda: spare.joined, "the spare server has not joined")
        assert spare.joined.node == node
        assert not serving(cluster, spare)
        with Pushes(cluster) as pushes:
            os.kill(cluster.servers[0].joined.pid, signal.SIGKILL)
            wait_until(lambda: serving(cluster, spare), "the spare server has no copies")
            pushes.wait_for_more()
        assert cluster.fault is None
    ray_cluster.kill(node)


def requested(ray_cluster):
    """Return what actors and tasks wait for, as Ray's autoscaler sees it."""
    demands = get_cluster_status(ray_cluster.address).resource_demands.ray_task_actor_demand
    return [one.bundle for demand in demands for one in demand.bundles_by_count]


def serving(cluster, role):
    """Whether a server has slots or copies."""
    return any(role.joined.rank in {arc["server"], *arc["copies"]} for arc in cluster.status()["arcs"])


@pytest.mark.long
def test_workers_join_and_leave_a_run(servers, ray_cluster, tmp_path, monkeypatch):
    # Longer than a decision about the number of workers lasts: else the next one counts the seats of a dead node.
    monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "1.5")
    ends = []

    def loop():
        store = shoal.ray.store()
        table = store.table("elastic", **SUMS)
        number = np.array([store.num_workers], np.uint64)
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            table.push(number, np.ones((1, 1), np.float32))
            store.tick()
            rows = table.pull(KEYS[:3])[:, 0].tolist()
            if store.num_workers == 1 and rows[2]:
                break
        ray.train.report({"workers": store.num_workers, "rows": rows}, checkpoint=shoal.ray.snapshot())

    def fit():
        try:
            trainer = shoal.ray.ShoalTrainer(
                loop,
                shoal_config=servers,
                scaling_config=ray.train.ScalingConfig(
                    num_workers=(1, 2), resources_per_worker={"seat": 2}, elastic_resize_monitor_interval_s=1.0
                ),
                run_config=run_config(tmp_path, failure_config=ray.train.FailureConfig(max_failures=1)),
            )
            ends.append(trainer.fit().metrics)
        except BaseException as error:
            ends.append(error)

    def clocks():
        assert not ends
        return [worker["clock"] for worker in servers.status()["workers"]]

    def after_look_for_nodes(true):  # as it does by itself every 20 seconds
        ray.get(coordinator._tick.remote(), timeout=PATIENCE)
        return true()

    thread = threading.Thread(target=fit)
    thread.start()
    wait_until(lambda: max(clocks(), default=0) > 1, "the first worker does not train")
    coordinator = ray.get_actor("AutoscalingCoordinator", namespace="AutoscalingCoordinator")
    kept = ray.get(coordinator.get_reserved_resources.remote(servers.name), timeout=PATIENCE)
    kept = kept.values() if isinstance(kept, dict) else kept  # a list before Ray 2.60
    assert sum(node["CPU"] for node in kept) == 3  # workers do not grow into the servers' CPUs
    second = ray_cluster.add(resources={"seat": 2})
    wait_until(
        lambda: after_look_for_nodes(lambda: len(clocks()) == 2 and min(clocks()) > 1), "no second worker trains"
    )
    ray_cluster.kill(second)
    wait_until(lambda: after_look_for_nodes(lambda: ends), "the run does not end")
    thread.join(PATIENCE)
    assert isinstance(ends[0], dict), ends
    assert ends[0]["workers"] == 1
    assert ends[0]["rows"][2] < 0  # the tables still have what two workers have pushed


@pytest.mark.long
def test_the_command_of_the_ray_job_trains_a_model(ray_cluster, tmp_path, monkeypatch):
    (job,) = (one for one in documents("ray") if one["kind"] == "RayJob")
    python, program, *arguments = shlex.split(job["spec"]["entrypoint"])
    assert (python, program) == ("python", "/app/train_ray.py")
    more = ["--examples=2000", "--epochs=1", f"--storage={tmp_path}"]
    monkeypatch.setattr(sys, "argv", [program, *arguments, *more])
    runpy.run_path(str(KUBERNETES / "ray" / "train_ray.py"), run_name="__main__")
    saved = next(path for path in tmp_path.glob("*/checkpoint_*") if path.is_dir())  # Ray's manager keeps a file there
    ((keys, _),) = state(saved).values()
    assert len(keys) > 8 * 1000


PROGRAM = """\
import os, sys, time
import numpy as np
import shoal

with shoal.connect() as store:
    table = store.table("sums", optimizer=shoal.SGD(lr=1.0))
    table.push(np.arange(3, dtype=np.uint64), np.ones((3, 1), np.float32))
    store.tick()
    print("rows", table.pull(np.arange(3, dtype=np.uint64))[:, 0].tolist(), os.path.basename(os.getcwd()), sys.argv[1:])
    store.barrier()
    rank = store.rank
if rank == 1:
    sys.exit(7)
try:
    time.sleep(600)
finally:
    print("terminated")
"""


def launch_on_ray(folder, address, *arguments):
    (folder / "train.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "shoal", "launch", "--engine", "ray", "--servers", "2", *arguments]
    return subprocess.run(
        [*command, "--timeout", str(PATIENCE), "train.py", "--word"],
        cwd=folder,
        env={**os.environ, **VARIABLES, "RAY_ADDRESS": address},
        capture_output=True,
        text=True,
        timeout=3 * PATIENCE,
    )


def test_shoal_launch_runs_a_program_on_ray_and_ends_with_the_status_of_the_worker_that_fails(ray_cluster, tmp_path):
    done = launch_on_ray(tmp_path, ray_cluster.address, "--workers", "2")
    assert done.returncode == 7, done.stderr
    lines = sorted(line for line in (done.stdout + done.stderr).splitlines() if line.startswith("[") and "rows" in line)
    assert lines == [f"[{rank}] rows [-2.0, -2.0, -2.0] {tmp_path.name} ['--word']" for rank in range(2)]
    assert "worker 1 ended with status 7; its last output: \nrows" in done.stderr

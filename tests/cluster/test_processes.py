"""Real processes: launched, killed, stopped and cut off. None is left behind, and nobody waits for ever."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time

import msgspec
import numpy as np
import psutil
import pytest

import shoal
from cluster_fakes import HeldPort, Wire, declare_dead
from processes import Processes, server_processes
from shoal.cluster.launch import local_cluster
from shoal.cluster.protocol.scheduler_client import SchedulerClient
from shoal.cluster.worker.cluster_store import ClusterStore
from shoal.errors import DeadlineExceededError, FencedError, NotConnectedError, ServerLostError, ShoalError
from tiers import long_after

LONG = 120.0  # seconds for what happens at once on a quiet machine
KEYS = np.arange(500, dtype=np.uint64)
ONES = np.ones((500, 1), np.float32)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes as Linux has them"),
]


@contextlib.contextmanager
def running(servers, **settings):
    with server_processes(servers, **settings) as cluster:
        pids = [child.process.pid for child in cluster.servers]
        yield cluster
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def connect(cluster, *, consistency=None, timeout=LONG, **settings):
    return shoal.connect(cluster.address, consistency=consistency or shoal.BSP(), timeout=timeout, **settings)


def table_of(store):
    return store.table("t", optimizer=shoal.SGD(lr=1.0))


def until(what, seconds=LONG):
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


@contextlib.contextmanager
def script(text, *arguments, **settings):
    """A Python process that runs a text; its lines can be read."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(text), *arguments], stdout=subprocess.PIPE, text=True, **settings
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


VICTIM = """
    import sys, numpy as np, shoal, time
    store = shoal.connect(sys.argv[1], workers=2, rank=1)
    table = store.table("t", optimizer=shoal.SGD(lr=1.0))
    table.push(np.arange(500, dtype=np.uint64), np.ones((500, 1), np.float32)).result()
    print("pushed", store.clock, flush=True)
    while True:
        time.sleep(0.05)
        try:
            table.pull(np.zeros(1, np.uint64))
        except shoal.ShoalError as error:
            print(type(error).__name__, flush=True)
            sys.exit(7)
"""


# --- launch from Python ---------------------------------------------------------------------------------------------


def test_a_launched_store_works_and_leaves_no_process_behind():
    before = set(psutil.Process().children(recursive=True))
    with shoal.launch(servers=2, server_threads=2, timeout=LONG) as store:
        started = set(psutil.Process().children(recursive=True)) - before
        assert len(started) == 3
        table = table_of(store)
        table.push(KEYS, ONES).result()
        store.tick()
        assert table.pull(KEYS).sum() == -500.0
        figures = store.server_metrics()
        assert [endpoint["server"] for endpoint in figures] == [0, 0, 1, 1]
        assert [endpoint["clocks"] for endpoint in figures] == [{0: 1}] * 4
        assert sum(sum(endpoint["pull_staleness"].values()) for endpoint in figures) == 4
    assert not [process for process in started if process.is_running()]


@pytest.mark.usefixtures("true_starts")  # for the family that the launcher has
def test_roles_end_when_the_process_that_launched_them_is_killed():
    with script(
        """
        import shoal, psutil, time
        store = shoal.launch(servers=1)
        print(*(child.pid for child in psutil.Process().children()), flush=True)
        time.sleep(1000)
        """
    ) as process:
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 2
        process.kill()
        until(lambda: not any(alive(pid) for pid in pids))


@pytest.fixture
def address():
    """An address where nobody listens until the test does."""
    with HeldPort() as held:
        yield held.address


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def with_wrong_code(monkeypatch, server):
    """Have a launcher start a server with a setting that it refuses."""
    starting = local_cluster.LocalCluster._start

    def start(running, name, config, *former):
        if name == server:
            config = msgspec.structs.replace(config, allow_code=("no module",))
        return starting(running, name, config, *former)

    monkeypatch.setattr(local_cluster.LocalCluster, "_start", start)


def test_a_server_that_cannot_start_is_named_with_its_last_words(monkeypatch):
    with_wrong_code(monkeypatch, "server 0")
    with pytest.raises(ShoalError, match=r"server 0 ended with status 2; its last output: \n.*neither a directory nor"):
        shoal.launch(servers=1, timeout=LONG)


def test_the_first_role_that_dies_at_start_up_is_named_at_once_and_none_is_left(monkeypatch):
    with_wrong_code(monkeypatch, "server 1")
    before = set(psutil.Process().children())
    with pytest.raises(ShoalError, match=r"server 1 ended with status 2; its last output: \n.*neither a directory nor"):
        shoal.launch(servers=3, timeout=10 * LONG)  # server 0 would wait for server 1 as long as that
    assert set(psutil.Process().children()) == before


def test_a_launch_whose_store_cannot_be_made_leaves_no_process():
    before = set(psutil.Process().children())
    with pytest.raises(TypeError, match="filters"):
        shoal.launch(servers=1, timeout=LONG, filters=3)
    assert set(psutil.Process().children()) == before


def test_roles_that_are_not_ready_in_time_are_all_named():
    with (
        pytest.raises(
            DeadlineExceededError, match=r"not complete after 0.01 s: (scheduler|server 0) was not ready; its output"
        ),
        local_cluster.running(2, timeout=0.01),
    ):
        pass


def test_a_server_that_still_waits_for_the_others_ends_with_its_parent(address):
    with script(
        """
        import sys, time
        from shoal.cluster.launch.local_cluster import start_role
        from shoal.config import ServerConfig
        child = start_role("server", ServerConfig(scheduler=sys.argv[1], timeout=300), lambda *_: None)
        print(child.process.pid, flush=True)
        time.sleep(1000)
        """,
        address,  # where no scheduler listens
    ) as process:
        pid = int(process.stdout.readline())
        until(lambda: any("zmq" in map.path for map in psutil.Process(pid).memory_maps()))
        process.kill()
        until(lambda: not alive(pid))


# --- shoal launch ---------------------------------------------------------------------------------------------------


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(
        textwrap.dedent("""
            import os, signal, subprocess, sys, time
            import numpy as np, shoal
            what = sys.argv[1]
            with shoal.connect() as store:
                table = store.table("t", optimizer=shoal.SGD(lr=1.0))
                keys = np.arange(500, dtype=np.uint64)
                for _ in range(3):
                    table.push(keys, np.full((500, 1), 1.0 + store.rank, np.float32))
                    store.tick()
                print("rank", store.rank, "of", store.num_workers, "sum", table.pull(keys).sum(), flush=True)
                store.barrier()
                if what == "fail" and store.rank == 1:
                    print("no luck", flush=True)
                    sys.exit(3)
                if what == "wait" or what == "fail":
                    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
                    print("pid", child.pid, os.getpid(), flush=True)
                    time.sleep(1000)
        """)
    )
    return str(path)


def shoal_launch(*arguments):
    return [sys.executable, "-m", "shoal", "launch", *arguments]


def test_a_server_that_waits_for_its_configuration_ends_with_its_parent():
    with script(
        """
        import time
        from shoal.cluster.launch.local_cluster import LocalCluster
        cluster = LocalCluster()
        cluster._start_ahead(["server 0"])
        print(cluster._ahead["server 0"].process.pid, flush=True)
        time.sleep(1000)
        """
    ) as process:
        pid = int(process.stdout.readline())
        until(lambda: any("zmq" in map.path for map in psutil.Process(pid).memory_maps()))
        process.kill()
        until(lambda: not alive(pid))


def test_launch_runs_a_program_on_all_workers_and_ends_well_when_they_do(program):
    done = subprocess.run(
        shoal_launch("--servers", "2", "--workers", "2", program, "end"), capture_output=True, text=True, timeout=LONG
    )
    assert done.returncode == 0, done
    assert sorted(done.stdout.split("\n")[:2]) == [f"[{rank}] rank {rank} of 2 sum -4500.0" for rank in range(2)]
    assert done.stderr == ""


def test_a_bar_that_draws_over_itself_becomes_lines_and_none_of_them_is_empty(tmp_path):
    path = tmp_path / "bar.py"
    path.write_text(
        "import sys\n"
        "for share in (1, 50):\n"
        "    print(f'\\r{share}%', end='', file=sys.stderr, flush=True)\n"
        "print('\\r100%', file=sys.stderr)\n"
        "print('done\\n\\nreally')\n"
    )
    done = subprocess.run(shoal_launch(str(path)), capture_output=True, text=True, timeout=LONG)
    assert done.returncode == 0, done
    assert done.stderr.splitlines() == ["1%", "50%", "100%"]
    assert done.stdout.splitlines() == ["done", "", "really"]


def test_results_of_workers_are_objects_and_nothing_else_on_standard_output(tmp_path):
    path = tmp_path / "result.py"
    path.write_text(
        "import json, os, sys\n"
        "print('working', file=sys.stderr)\n"
        "print(json.dumps({'worker': int(os.environ['SHOAL_RANK'])}))\n"
    )
    done = subprocess.run(shoal_launch("--workers", "2", str(path)), capture_output=True, text=True, timeout=LONG)
    assert done.returncode == 0, done
    assert sorted(done.stdout.splitlines()) == ['{"worker": 0}', '{"worker": 1}']
    assert sorted(line for line in done.stderr.splitlines() if "working" in line) == ["[0] working", "[1] working"]


def test_launch_ends_with_the_first_failing_status_and_that_process_last_output(program):
    done = subprocess.run(shoal_launch("--workers", "2", program, "fail"), capture_output=True, text=True, timeout=LONG)
    assert done.returncode == 3, done
    assert "worker 1 ended with status 3; its last output:" in done.stderr
    assert done.stderr.rstrip().endswith("no luck")
    pids = [int(word) for line in done.stdout.splitlines() if "pid" in line for word in line.split()[2:]]
    until(lambda: not any(alive(pid) for pid in pids))


@pytest.mark.parametrize(
    ("text", "status", "reported"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 139, "was killed by signal 11"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 137, "was killed by signal 9"),
        (None, 127, "train.txt cannot be run: No such file or directory"),
    ],
)
def test_launch_tells_how_a_program_ended_that_did_not_exit(tmp_path, text, status, reported):
    path = tmp_path / ("train.txt" if text is None else "train.py")
    if text is not None:
        path.write_text(text)
    done = subprocess.run(shoal_launch(str(path)), capture_output=True, text=True, timeout=LONG)
    assert done.returncode == status, done
    assert reported in done.stderr


def test_launch_finds_a_program_beside_python_and_all_workers_features_are_named(tmp_path):
    log = tmp_path / "log"
    log.write_text("".join(f"{i % 2} {i % 700}:1 {1000 + i}:1\n" for i in range(4000)))
    train = ["shoal", "train", "lr", "--cluster", "--data", str(log), "--format", "libsvm", "--output", "m", "--names"]
    done = subprocess.run(
        shoal_launch("--workers", "2", *train),
        capture_output=True,
        text=True,
        timeout=LONG,
        cwd=tmp_path,
        env={**os.environ, "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done
    assert set(shoal.models.load_names(tmp_path / "m")) == {*range(700), *range(1000, 5000)}


@pytest.mark.usefixtures("true_starts")
@pytest.mark.parametrize("number", long_after(1, [signal.SIGKILL, signal.SIGTERM]))
def test_nothing_is_left_when_launch_itself_is_killed(program, number):
    with subprocess.Popen(
        shoal_launch("--workers", "2", program, "wait"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as launch:
        workers = []  # and what they have started
        while len(workers) < 4:
            line = launch.stdout.readline()
            assert line, launch.stderr.read()
            if "pid" in line:
                workers += [int(word) for word in line.split()[2:]]
        family = psutil.Process(launch.pid).children()
        assert len(family) == 4
        launch.send_signal(number)
        until(lambda: not any(alive(pid) for pid in [*workers, *(process.pid for process in family)]))
        launch.communicate(timeout=LONG)
        assert launch.returncode == (-9 if number == signal.SIGKILL else 143)


@pytest.mark.usefixtures("true_starts")  # for the family that the launcher has
def test_launch_names_the_server_that_was_killed(program):
    with subprocess.Popen(
        shoal_launch("--servers", "1", program, "wait"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as launch:
        while "pid" not in launch.stdout.readline():
            pass
        server = next(child for child in psutil.Process(launch.pid).children() if "server" in child.cmdline())
        server.kill()
        errors = launch.communicate(timeout=LONG)[1]
        assert launch.returncode == 137
        assert "server 0 was killed by signal 9" in errors


def test_a_role_that_fails_at_start_up_gives_launch_its_status_and_last_words(program):
    done = subprocess.run(
        shoal_launch("--tier", "/dev/null/rows:64MiB", program, "end"), capture_output=True, text=True, timeout=LONG
    )
    assert done.returncode == 1
    assert re.search(r"server 0 ended with status 1; its last output: \n.*/dev/null/rows", done.stderr)
    assert (done.stdout, done.stderr.count("shoal: server 0")) == ("", 1)  # and nothing of the program


LEARNING = """
    import sys, time, numpy as np, shoal
    class Endless:
        def __iter__(self):
            keys = np.arange(100, dtype=np.uint64)
            while True:
                print("batch", flush=True)
                time.sleep(0.02)
                yield shoal.Batch(np.arange(100, dtype=np.float32) % 2, np.arange(101), keys, np.ones(100, np.float32))
    with shoal.connect() as store:
        model = shoal.LogisticRegression(store=store, warm_up=False)
        try:
            model.fit(Endless(), progress=False)
        except KeyboardInterrupt:
            if store.rank == 0:
                model.save("m")
            raise
"""


@pytest.mark.parametrize("number", long_after(1, [signal.SIGTERM, signal.SIGINT]))
def test_a_signal_to_launch_lets_workers_save_while_the_servers_live(tmp_path, number):
    (tmp_path / "learn.py").write_text(textwrap.dedent(LEARNING))
    with subprocess.Popen(
        shoal_launch("--servers", "2", "--workers", "2", "learn.py"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        process_group=0,  # as a shell starts it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as launch:
        for _ in range(40):  # at most one of the workers is still in its first batch: both have begun
            assert "batch" in launch.stdout.readline()
        os.killpg(launch.pid, number)
        out, errors = launch.communicate(timeout=LONG)
    assert launch.returncode == 128 + number, errors
    assert "the workers have 60 s to save what they have learned (--grace)" in errors
    if number == signal.SIGTERM:
        assert "Traceback" not in out
    with shoal.LogisticRegression.load(tmp_path / "m") as model:
        assert model.examples > 0
        assert model.table.contains(np.arange(100, dtype=np.uint64)).all()


@pytest.mark.parametrize("again", [True, False])
def test_workers_that_do_not_end_are_killed_by_a_second_signal_or_after_the_grace(tmp_path, again):
    path = tmp_path / "deaf.py"
    path.write_text(
        "import os, signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('pid', os.getpid(), flush=True)\n"
        "time.sleep(1000)\n"
    )
    with subprocess.Popen(
        shoal_launch("--grace", "1000" if again else "0.5", str(path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as launch:
        pid = int(launch.stdout.readline().split()[1])
        family = [process.pid for process in psutil.Process(launch.pid).children()]
        launch.send_signal(signal.SIGINT)
        assert "Ctrl-C again ends them at once" in launch.stderr.readline()
        assert alive(pid)
        if again:
            launch.send_signal(signal.SIGINT)
        errors = launch.communicate(timeout=LONG)[1]
        assert launch.returncode == 130
        assert ("worker 0 had not ended after 0.5 s and is killed" in errors) is not again
        until(lambda: not any(alive(one) for one in [pid, *family]))


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun")
def test_mpirun_starts_a_whole_cluster_by_one_command(program, address):
    done = subprocess.run(
        ["mpirun", "--oversubscribe", "-np", "4", *shoal_launch("--scheduler", address, program, "end")],
        capture_output=True,
        text=True,
        timeout=LONG,
        env={**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
    )
    assert done.returncode == 0, done
    assert sum("of 2 sum -4500.0" in line for line in done.stdout.splitlines()) == 2


def test_a_group_of_processes_as_srun_starts_them_ends_as_a_whole_when_one_program_fails(program, address):
    group = [
        subprocess.Popen(
            shoal_launch("--scheduler", address, program, "fail"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "here"},
        )
        for rank in range(4)
    ]
    ended = [(*process.communicate(timeout=LONG), process.returncode) for process in group]
    assert [status for *_, status in ended] == [
        3,
        0,
        1,
        3,
    ]  # scheduler, server, the program that waits, the one that fails
    assert "ended with status 3" in ended[0][1]
    assert "was stopped" in ended[2][1]
    pids = [int(word) for out, *_ in ended for line in out.splitlines() if "pid" in line for word in line.split()[2:]]
    assert len(pids) == 2
    until(lambda: not any(alive(pid) for pid in pids))


def test_a_group_that_is_told_to_end_as_a_whole_serves_until_its_workers_have_saved(tmp_path, address):
    (tmp_path / "learn.py").write_text(textwrap.dedent(LEARNING))
    group = [
        subprocess.Popen(
            shoal_launch("--scheduler", address, "learn.py"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "here"},
        )
        for rank in range(4)
    ]
    for worker in group[2:]:
        for _ in range(20):
            assert "batch" in worker.stdout.readline()
    for process in group:
        process.send_signal(signal.SIGTERM)
    ended = [(*process.communicate(timeout=LONG), process.returncode) for process in group]
    assert [status for *_, status in ended] == [143] * 4, ended
    with shoal.LogisticRegression.load(tmp_path / "m") as model:
        assert model.table.contains(np.arange(100, dtype=np.uint64)).all()


def test_mpirun_with_too_few_processes_is_told_how_many_it_takes(program):
    place = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}
    done = subprocess.run(
        shoal_launch("--servers", "2", program), capture_output=True, text=True, timeout=LONG, env=os.environ | place
    )
    assert done.returncode == 2
    assert "a scheduler, 2 servers and a worker are 4 at least" in done.stderr


# --- workers that die -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster():
    with running(2, workers=2) as made:
        yield made


def test_a_killed_worker_is_dismissed_and_another_takes_its_place_at_the_clock_of_the_others(cluster):
    with script(VICTIM, cluster.address) as victim, connect(cluster, workers=2, rank=0) as store:
        assert victim.stdout.readline() == "pushed 0\n"
        table = table_of(store)
        begin = table.pull(KEYS).sum()
        table.push(KEYS, ONES).result()
        store.tick()
        victim.kill()
        declare_dead(cluster.scheduler, "worker", 1)
        assert table.pull(KEYS).sum() == begin - 500.0  # the push of the dead one's clock, never ticked, is dropped
        for _ in range(3):
            store.tick()
        store.flush()  # a tick may not have arrived when it returns
        again = threading.Thread(target=join_again, args=(cluster, found := {}))
        again.start()
        until(lambda: "clock" in found)
        assert found["clock"] == 4
        table.push(KEYS, ONES).result()
        store.tick()
        assert table.pull(KEYS).sum() == begin - 1500.0
        found["go"].set()
        again.join()


def join_again(cluster, found):
    found["go"] = threading.Event()
    with connect(cluster, workers=2, rank=1) as store:
        table_of(store).push(KEYS, ONES).result()
        clock = store.clock
        store.tick()
        found["clock"] = clock
        found["go"].wait(LONG)


def test_a_worker_that_was_stopped_too_long_is_fenced_when_it_goes_on(cluster):
    with script(VICTIM, cluster.address) as victim, connect(cluster, workers=2, rank=0) as store:
        assert victim.stdout.readline() == "pushed 0\n"
        victim.send_signal(signal.SIGSTOP)
        declare_dead(cluster.scheduler, "worker", 1)
        store.tick()
        table_of(store).pull(KEYS)  # of which the other has not ended the clock
        victim.send_signal(signal.SIGCONT)
        assert victim.stdout.readline() == "FencedError\n"
        assert victim.wait(LONG) == 7


def test_a_worker_that_is_cut_off_is_dismissed_and_learns_it_when_the_wire_is_whole_again(cluster, monkeypatch):
    monkeypatch.setattr("shoal.cluster.protocol.scheduler_client._SILENCE_MS", 600)  # until it connects anew
    wire = Wire(cluster.address)
    with connect_both(cluster, wire) as (store, cut_off):
        wire.cut()
        declare_dead(cluster.scheduler, "worker", 1)
        store.tick()
        table_of(store).pull(KEYS)
        client = cut_off._scheduler
        client._welcome = msgspec.structs.replace(client._welcome, heartbeat=0.1, dead_after=0.5)
        with pytest.raises(NotConnectedError, match="has been silent for"):
            cut_off.barrier(timeout=2.0)
        wire.mend()
        with pytest.raises(FencedError, match="was declared dead"):
            until(lambda: cut_off._scheduler.check())
    wire.close()


def test_a_clock_whose_tick_reached_one_server_counts_on_both_when_its_worker_dies(cluster, monkeypatch):
    wire = Wire(cluster.address)
    second = through_a_wire(monkeypatch, 1)
    with connect_both(cluster, wire) as (store, dying):
        table = table_of(store)
        begin = table.pull(KEYS)
        table_of(dying).push(KEYS, ONES).result()
        second[0].cut()
        dying.tick()
        until(lambda: [figures["clocks"][1] for figures in store.server_metrics()] == [1, 0])
        wire.cut()
        declare_dead(cluster.scheduler, "worker", 1)
        dying.channel.fail(ShoalError("it is dead"))
        store.tick()
        np.testing.assert_array_equal(table.pull(KEYS), begin - 1.0)
        assert len({int(figures[0]) for figures in table.shard.endpoint_stats()}) == 1  # steps
        wire.mend()
    wire.close()
    second[0].close()


def through_a_wire(monkeypatch, rank):
    """Connect a worker that joins to the second endpoint by a wire; returns where the wire will be."""
    join, wires = ClusterStore._join, []

    def join_through(store):
        role = join(store)
        if role.worker.rank != rank:
            return role
        first, second = role.map.endpoints
        wires.append(Wire(second.address))
        endpoints = first, msgspec.structs.replace(second, address=wires[0].address)
        return role._replace(map=msgspec.structs.replace(role.map, endpoints=endpoints))

    monkeypatch.setattr(ClusterStore, "_join", join_through)
    return wires


@contextlib.contextmanager
def connect_both(cluster, wire):
    found = []
    other = threading.Thread(target=lambda: found.append(shoal.connect(wire.address, workers=2, rank=1, timeout=LONG)))
    other.start()
    with connect(cluster, workers=2, rank=0) as store:
        other.join()
        try:
            yield store, found[0]
        finally:
            with contextlib.suppress(ShoalError):
                found[0].close()


def test_a_barrier_that_the_other_does_not_come_to_ends_at_the_deadline(cluster):
    with connect(cluster, workers=1) as store:
        store.barrier()
    wire = Wire(cluster.address)
    with connect_both(cluster, wire) as (store, _), pytest.raises(DeadlineExceededError, match="the others at barrier"):
        store.barrier(timeout=0.3)
    wire.close()


# --- servers and schedulers that die --------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "servers"), [(signal.SIGKILL, 2), (signal.SIGSTOP, 1), (signal.SIGTERM, 1)])
def test_a_lost_server_is_named_within_the_deadline(number, servers):
    last = servers - 1
    with running(servers) as cluster, connect(cluster, timeout=LONG) as store:
        table = table_of(store)
        table.push(KEYS, ONES).result()
        store.tick()
        table.pull(KEYS)  # the clock has ended: nothing is left for the end of the block, which would raise too
        cluster.servers[last].process.send_signal(number)
        if number != signal.SIGTERM:  # after which it says that it leaves
            declare_dead(cluster.scheduler, "server", last)
        with pytest.raises(ServerLostError, match=rf"server {last} at tcp://127.0.0.1:\d+ .*is lost .* its rows"):
            until(lambda: table.pull(KEYS) is None, LONG)
        with pytest.raises(ServerLostError, match=f"server {last} at"):
            connect(cluster, timeout=LONG)
        cluster.servers[last].process.send_signal(signal.SIGCONT)


def test_a_dead_scheduler_ends_the_servers_after_their_grace_and_calls_that_need_it_fail():
    with Processes() as made:
        scheduler = made.start_scheduler(servers=1, heartbeat=0.5)
        server = made.start_server(grace=3)
        with shoal.connect(made.address, timeout=LONG) as store:
            scheduler.signal(signal.SIGKILL)
            store._timeout = 3.0
            with pytest.raises(NotConnectedError, match="silent for"):
                table_of(store)
            assert server.process.wait(LONG) == 1
            assert "has been silent for" in server.describe_end()


def test_a_wrong_advertised_address_is_reported_at_join_with_the_remedy():
    with Processes() as made:
        scheduler = made.start_scheduler(servers=1)
        wrong = ["--scheduler", made.address, "--bind", "tcp://127.0.0.1:*", "--advertise", "127.9.9.9"]
        done = subprocess.run(
            [sys.executable, "-m", "shoal", "server", *wrong], capture_output=True, text=True, timeout=LONG
        )
        assert done.returncode == 2
        assert "cannot be reached at tcp://127.9.9.9:" in done.stderr
        assert "(connection refused): pass --advertise HOST" in done.stderr
        assert made.end(scheduler, signal.SIGTERM) == 0
        assert "pass --advertise HOST" in scheduler.describe_end()


def test_an_address_where_nobody_listens_is_said_to_be_so(address):
    with (
        SchedulerClient(address, "worker") as link,
        pytest.raises(NotConnectedError, match="no scheduler answers"),
    ):
        link.hello(0.3)

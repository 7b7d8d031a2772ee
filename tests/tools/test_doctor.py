"""shoal doctor: what it finds on machines and clusters, and the remedies."""

import json
import os
import signal
from pathlib import Path

import pytest

from shoal.cli import main
from shoal.cluster.launch.local_cluster import running
from shoal.tools import doctor

GIB = 1 << 30


def machine(root: Path, **files: str) -> Path:
    """Write files of a machine; ``__`` stands for a slash."""
    for name, text in files.items():
        file = root / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def meminfo(**gib: float) -> str:
    return "".join(f"{name}: {round(value * GIB) // 1024} kB\n" for name, value in gib.items())


def levels(findings):
    return [one.level for one in findings]


def test_memory_of_a_machine_and_of_a_container(tmp_path):
    assert doctor.memory(tmp_path) == []
    assert doctor.available_bytes(tmp_path) == 0
    root = machine(
        tmp_path,
        proc__meminfo=meminfo(MemTotal=64, MemAvailable=48, SwapTotal=8, SwapFree=8),
        sys__kernel__mm__transparent_hugepage__enabled="always [madvise] never\n",
    )
    (found,) = doctor.memory(root)
    assert found.level == "ok"
    assert found.text == "48.0 GiB available of 64.0 GiB"
    machine(root, **{"sys__fs__cgroup__memory.max": f"{8 * GIB}\n", "sys__fs__cgroup__memory.current": f"{3 * GIB}\n"})
    assert doctor.available_bytes(root) == 5 * GIB
    assert "limited to 8.0 GiB" in doctor.memory(root)[0].text
    machine(root, **{"sys__fs__cgroup__memory.max": "max\n"})
    assert doctor.available_bytes(root) == 48 * GIB


def test_pages_and_swap_are_notes_with_remedies(tmp_path):
    root = machine(
        tmp_path,
        proc__meminfo=meminfo(MemTotal=64, MemAvailable=48, SwapTotal=8, SwapFree=4),
        sys__kernel__mm__transparent_hugepage__enabled="always madvise [never]\n",
    )
    found = doctor.memory(root)
    assert levels(found) == ["ok", "note", "note"]
    assert "transparent_hugepage" in found[1].remedy
    assert found[2].text.startswith("4.0 GiB are swapped out")


def test_a_quota_of_cores_and_a_slow_clock_are_notes(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "cores", lambda: 8)
    monkeypatch.setattr(doctor, "_is_unsynchronized", lambda: True)
    clock = "sys__devices__system__clocksource__clocksource0__current_clocksource"
    root = machine(tmp_path, **{"sys__fs__cgroup__cpu.max": "250000 100000\n", clock: "hpet\n"})
    quota = next(one for one in doctor.processor(root) if one.level == "note" and "container" in one.text)
    assert "2.5 of 8 cores" in quota.text
    assert "--threads 2," in quota.remedy
    assert levels(doctor.clock(root)) == ["note", "note"]
    monkeypatch.setattr(doctor, "_is_unsynchronized", lambda: False)
    machine(root, **{"sys__fs__cgroup__cpu.max": "max 100000\n", clock: "tsc\n"})
    assert not any("container" in one.text for one in doctor.processor(root))
    assert [one.text for one in doctor.clock(root)] == ["tsc, synchronized"]


def test_instructions_for_bfloat16_are_named(tmp_path):
    root = machine(tmp_path, proc__cpuinfo="processor : 0\nflags : fpu amx_bf16 avx512_bf16\n")
    (found,) = (one for one in doctor.processor(root) if "precision" in one.text)
    assert found.text.startswith("bfloat16 by amx_bf16, avx512_bf16: ")
    machine(root, proc__cpuinfo="flags : fpu avx2\n")
    assert not any("precision" in one.text for one in doctor.processor(root))


def test_few_open_files_are_a_note(monkeypatch):
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda which: (1024, 4096))
    (found,) = doctor.limits()
    assert found.level == "note"
    assert found.remedy.startswith("ulimit -n 4096")


def test_a_disk_is_measured_and_left_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "_DISK_BYTES", 16 << 20)
    findings, speed = doctor.disk(tmp_path)
    assert speed > 0
    assert findings[0].topic == "disk"
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(doctor, "_SLOW_DISK", 1e15)
    monkeypatch.setattr(doctor, "_SLOW_SYNC", -1.0)
    findings, _ = doctor.disk(tmp_path)
    assert levels(findings) == ["note", "note"]
    assert "--journal" in findings[1].remedy


def test_a_job_that_does_not_fit_is_a_problem_with_the_number_of_servers_that_would():
    plan = doctor.Job(keys=10**9, dim=16, servers=2)
    found = doctor.job(plan, free_bytes=20 * 10**9, disk_bytes=10**12, disk_speed=1e9)
    assert levels(found) == ["problem"]
    fewest = int(found[0].remedy.split()[1])
    fits = doctor.Job(keys=10**9, dim=16, servers=fewest)
    assert levels(doctor.job(fits, free_bytes=20 * 10**9, disk_bytes=10**12, disk_speed=1e9)) == ["ok"]
    short = doctor.Job(keys=10**9, dim=16, servers=fewest - 1)
    assert levels(doctor.job(short, free_bytes=20 * 10**9, disk_bytes=10**12, disk_speed=1e9)) == ["problem"]
    assert "two checkpoints" in doctor.job(fits, free_bytes=0, disk_bytes=10**9, disk_speed=1e9)[0].text
    hopeless = doctor.job(plan, free_bytes=10**8, disk_bytes=10**12, disk_speed=1e9)
    assert "more than 32 servers" in hopeless[0].remedy


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """Write little to the disk."""
    monkeypatch.setattr(doctor, "_DISK_BYTES", 1 << 20)
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def examined(capsys, *arguments):
    """Run the command; return its status and findings."""
    status = main(["doctor", *map(str, arguments), "--json"])
    facts = json.loads(capsys.readouterr().out)
    problems = [one for one in facts["findings"] if one["level"] == "problem"]
    assert facts["problems"] == len(problems)
    assert status == (1 if problems else 0)
    assert all(one["remedy"] for one in facts["findings"] if one["level"] != "ok")
    return facts["findings"]


def test_the_command_examines_this_machine(quick, capsys):
    topics = {one["topic"] for one in examined(capsys, "--keys", "1e4")}
    assert {"versions", "processor", "limits", "disk", "job"} <= topics
    assert main(["doctor"]) in (0, 1)
    assert "versions" in capsys.readouterr().out


def test_keys_that_others_may_read_or_that_are_none_are_problems(quick, capsys, tmp_path):
    keys = tmp_path / "keys"
    assert main(["keygen", "--output", str(keys), "--quiet"]) == 0
    assert not [one for one in examined(capsys, "--curve", keys) if one["level"] == "problem"]
    (keys / "worker.key_secret").chmod(0o644)
    (keys / "server.key_secret").write_text("no key")
    found = [one for one in examined(capsys, "--curve", keys) if one["level"] == "problem"]
    assert [one["topic"] for one in found] == ["keys", "keys"]
    assert found[1]["remedy"] == f"chmod 600 {keys}/worker.key_secret"
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no secret key" in examined(capsys, "--curve", empty)[-1]["text"]
    assert "no such directory" in examined(capsys, "--curve", tmp_path / "nowhere")[-1]["text"]


@pytest.mark.slow
def test_a_cluster_is_reached_and_a_stopped_server_is_named(quick, capsys):
    with running(address="tcp://127.0.0.1:*") as cluster:
        (server,) = cluster.status()["servers"]
        address = cluster.address
        found = examined(capsys, address)
        assert [one["topic"] for one in found[-3:]] == ["scheduler", "servers", "network"]
        assert "answers after" in found[-2]["text"]
        process = int(server["about"].split()[1])
        os.kill(process, signal.SIGSTOP)
        try:
            found = examined(capsys, address, "--timeout", "0.5")
        finally:
            os.kill(process, signal.SIGCONT)
        assert any("does not answer" in one["text"] for one in found if one["level"] == "problem")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["tcp://127.0.0.1:1", "--timeout", "0.2"], "no scheduler answers at tcp://127.0.0.1:1"),
        (["tcp://no.such.host.invalid:5570"], "the name 'no.such.host.invalid' cannot be resolved"),
    ],
)
def test_a_scheduler_that_is_not_there_is_a_problem(quick, capsys, arguments, says):
    found = examined(capsys, *arguments)
    assert says in found[-1]["text"]
    assert found[-1]["level"] == "problem"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["host:5570"], "is not an address"),
        (["--servers", "0"], "--servers is 0"),
        (["--replicas", "1"], "--replicas 1"),
        (["--dir", "/nowhere/at/all"], "no such directory"),
        (["--keys", "10", "--dim", "0"], "dim"),
    ],
)
def test_bad_arguments_are_told(quick, capsys, arguments, says):
    assert main(["doctor", *arguments]) == 2
    assert says in capsys.readouterr().err

"""Logs: every role writes events of one line, as text or as JSON, with the numbers of process, job and call."""

import json
import logging
import re
import signal
import subprocess
import sys
import threading
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shoal
from cluster_fakes import TIMEOUT
from processes import processes
from requests_by_hand import MAP, batch
from shoal import _core
from shoal.base import logs
from shoal.cli import main
from shoal.cluster.worker.channel import Channel, Role, WorkerIdentity
from shoal.errors import ServerLostError


@pytest.fixture
def as_json():
    with logs.logging_to_stderr("json", level=logging.INFO, role="server"):
        yield logging.getLogger("shoal.test")


def events(text):
    """Parse all lines of a log, each of which is an event."""
    found = [json.loads(line) for line in text.splitlines()]
    for event in found:
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", event["time"])
        assert event["level"] in ("info", "warning", "error", "critical")
        assert {"logger", "message", "pid"} <= event.keys()
    return found


def test_an_event_of_json_has_the_identity_of_its_process_and_of_its_call(as_json, capsys):
    logs.identify(rank=3, cluster="8c1d", job=None)
    as_json.warning("slot %d", 7, extra={"worker": 2, "call": 9, "sequence": None})
    (event,) = events(capsys.readouterr().err)
    assert (event["role"], event["rank"], event["cluster"]) == ("server", 3, "8c1d")
    assert (event["worker"], event["call"], event["message"], event["level"]) == (2, 9, "slot 7", "warning")
    assert not {"job", "sequence", "exception"} & event.keys()


def test_an_exception_is_part_of_its_line(as_json, capsys):
    try:
        raise ValueError("two\nlines")
    except ValueError:
        as_json.exception("it failed")
    (event,) = events(capsys.readouterr().err)
    assert event["message"] == "it failed"
    assert event["exception"].endswith("ValueError: two\nlines")
    with logs.logging_to_stderr("text", level=logging.INFO, role="server"):
        try:
            raise ValueError("two\nlines")
        except ValueError:
            as_json.exception("it failed")
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(r"shoal: it failed \[Traceback .* \| ValueError: two \| lines\]$", line)


def test_an_event_whose_arguments_do_not_fit_is_kept():
    record = logging.LogRecord("shoal.test", logging.INFO, "", 0, "%d slots", ("no number",), None)
    assert json.loads(logs.JsonFormatter().format(record))["message"].startswith("%d slots (with arguments that do not")


@given(st.text(st.characters(), max_size=60))
def test_any_message_is_one_line(text):
    record = logging.LogRecord("shoal.test", logging.INFO, "", 0, "%s", (text,), None)
    line = logs.JsonFormatter().format(record)
    assert line.isascii()
    assert line.splitlines() == [line]
    assert json.loads(line)["message"] == text
    line = logs.TextFormatter().format(record)
    assert line.splitlines() == [line]
    assert "\x1b" not in line


@pytest.mark.usefixtures("as_json")
def test_what_would_print_a_traceback_is_an_event(capsys):
    warnings.showwarning("old", DeprecationWarning, "a.py", 3)
    thread = threading.Thread(target=lambda: 1 / 0, name="copier")
    thread.start()
    thread.join()
    try:
        1 / 0  # noqa: B018
    except ZeroDivisionError:
        sys.excepthook(*sys.exc_info())
    old, ended, last = events(capsys.readouterr().err)
    assert (old["logger"], old["level"]) == ("py.warnings", "warning")
    assert ended["message"].startswith("the thread copier ends: ZeroDivisionError")
    assert "ZeroDivisionError" in ended["exception"]
    assert last["level"] == "critical"


def test_the_set_up_of_a_command_ends_with_it(capsys):
    before = logging.getLogger().handlers[:]
    assert main(["server", "--log-format", "json"]) == 2
    (event,) = events(capsys.readouterr().err)
    assert (event["level"], event["role"]) == ("error", "server")
    assert "--scheduler" in event["message"]
    assert not logs.is_json()
    assert logging.getLogger().handlers == before
    assert sys.excepthook is not logs._log_uncaught
    assert main(["server"]) == 2
    assert capsys.readouterr().err.startswith("shoal: a server requires")


def test_the_environment_chooses_the_format_and_a_wrong_one_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("SHOAL_LOG_FORMAT", "json")
    assert main(["server"]) == 2
    events(capsys.readouterr().err)
    assert main(["server", "--log-format", "text"]) == 2
    assert capsys.readouterr().err.startswith("shoal: ")
    monkeypatch.setenv("SHOAL_LOG_FORMAT", "xml")
    assert main(["server"]) == 2
    assert "SHOAL_LOG_FORMAT='xml' in the environment is not a log format: set text or json" in capsys.readouterr().err
    with pytest.raises(ValueError, match="SHOAL_LOG_FORMAT"):
        shoal.connect("tcp://127.0.0.1:1")


def test_lines_of_workers_become_events_once(as_json):
    event = json.loads(logs.worker_line("pass 1 \x1b[1m50 %s", 3, 4))
    assert (event["logger"], event["message"], event["role"], event["rank"]) == (
        "shoal.output", "pass 1 \x1b[1m50 %s", "worker", 3,
    )  # fmt: skip
    line = logs.JsonFormatter().format(logging.LogRecord("a", logging.INFO, "", 0, "b", (), None))
    assert logs.worker_line(line, 3, 4) == line


def test_failed_calls_are_logged_with_their_numbers_once_in_a_while(caplog):
    channel = Channel(Role(WorkerIdentity(3, 2, 77), MAP))
    try:
        pull = {"hashes": batch(8).hashes, "begins": batch(8).offsets, "out": np.zeros((8, 2), np.float32), "dim": 2}
        failed = [channel.begin(_core.Op.PULL, 1, **pull) for _ in range(2)]
        channel.lose(0, "silent")
        with pytest.raises(ServerLostError):
            failed[0].result()
        channel.begin(_core.Op.PULL, 1, **pull)
    finally:
        channel.close()
    (record,) = caplog.records
    event = json.loads(logs.JsonFormatter().format(record))
    assert (event["level"], event["logger"], event["worker"], event["incarnation"], event["job"]) == (
        "warning", "shoal.worker", 3, 2, 77,
    )  # fmt: skip
    assert (event["op"], event["table"], event["clock"], event["call"]) == ("pull", 1, 0, 1)
    assert "is lost (silent" in event["message"]


PROGRAM = """
import logging, sys
import numpy as np
import shoal
with shoal.connect(timeout=60) as store:
    table = store.table("w", dim=1, optimizer=shoal.SGD(lr=0.1))
    table.push(np.array([1], np.uint64), np.ones((1, 1), np.float32)).result()
    store.tick()
    logging.getLogger("shoal.program").warning("one of two")
    print("plain text")
    print('{"time": "not an event"}', file=sys.stderr)
"""


@pytest.mark.slow
def test_all_lines_of_a_launched_cluster_are_events(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "shoal", "launch", "--servers", "1", "--workers", "2", "--log-format", "json"]
    done = subprocess.run([*command, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr
    found = events(done.stdout) + events(done.stderr)
    by_role = {role: [one for one in found if one.get("role") == role] for role in ("scheduler", "server", "worker")}
    assert any(one["message"].startswith("scheduler at ipc:///") for one in by_role["scheduler"])
    assert any("serves slots" in one["message"] and one["rank"] == 0 for one in by_role["server"])
    own = [one for one in by_role["worker"] if one["message"] == "one of two"]
    assert sorted(one["rank"] for one in own) == [0, 1]
    (cluster,) = {one["cluster"] for one in found if "cluster" in one}
    assert {one["cluster"] for one in own} == {cluster}
    assert len({one["job"] for one in own}) == 1
    output = [one for one in found if one["logger"] == "shoal.output"]
    assert sorted(one["message"] for one in output) == ["plain text"] * 2 + ['{"time": "not an event"}'] * 2


@pytest.mark.slow
def test_every_line_of_scheduler_and_server_is_an_event_also_when_they_end(monkeypatch):
    monkeypatch.setenv("SHOAL_LOG_FORMAT", "json")
    with processes(servers=1) as cluster:
        scheduler, server = *cluster.children, cluster.start_server()
        with shoal.connect(cluster.address, consistency=shoal.ASP(), timeout=TIMEOUT) as store:
            table = store.table("w", dim=1, optimizer=shoal.SGD(lr=0.1))
            table.push(np.array([1], np.uint64), np.ones((1, 1), np.float32)).result()
        scheduler.signal(signal.SIGINT)
        scheduler.process.wait(TIMEOUT)
        server.process.wait(TIMEOUT)
        for child in (scheduler, server):
            child._join_readers()
            assert {one["role"] for one in events("\n".join(child.last))} == {child.name.split()[0]}


def test_a_store_in_a_process_with_another_role_is_not_its_identity():
    with logs.logging_to_stderr("json", level=logging.INFO, role="server"):
        logs.identify(rank=1)
        logs.identify_store("worker", rank=7, job="a")
        record = logging.LogRecord("shoal.server", logging.INFO, "", 0, "x", (), None)
        event = json.loads(logs.JsonFormatter().format(record))
    assert (event["role"], event["rank"], "job" in event) == ("server", 1, False)

"""Control messages and the tasks of saves and loads have the bytes that ``golden/control.json`` holds.

    python tests/cluster/protocol/test_control_golden.py        prints the file's content

The preambles there have the version: after a change of messages it is raised, and the file is written again.

A class is found by its tag, so renaming one does not change this file.
"""

from __future__ import annotations

import json
from typing import Any, get_args

import msgspec
import pytest

import shoal
from paths import GOLDEN
from shoal.checkpoint.format import SavedTable
from shoal.cluster.protocol import messages
from shoal.cluster.protocol.messages import EndpointMetrics, JobConsistency
from shoal.cluster.protocol.slot_map import cut_evenly
from shoal.cluster.protocol.status import (
    ArcStatus,
    AwaitedStatus,
    EndpointStatus,
    FailoverStatus,
    FitModelStatus,
    FitStatus,
    JobStatus,
    LauncherStatus,
    ServerStatus,
    StreamStatus,
    WorkerStatus,
)
from shoal.cluster.protocol.tasks import ReadTask, Report, WriteTask
from shoal.table.spec import TableRecord

MESSAGES = GOLDEN / "control.json"


def kinds(*unions: Any) -> dict[str, Any]:
    return {kind.__struct_config__.tag: kind for union in unions for kind in get_args(union)}


def fit_status(state: Any) -> FitStatus:
    models = (FitModelStatus(1 << 40, 3, 0.25, 0.75, None), FitModelStatus(7, 0, None, None, 0.5))
    return FitStatus("ads", 9, 1, state, 2, 5, 1000, 2, models)


def bodies() -> dict[str, Any]:
    """One message of each tag."""
    with shoal.local() as store:
        specs = [
            store.table("a", optimizer=shoal.FTRL(alpha=0.25, l1=1.0)).spec,
            store.table(
                "b",
                dim=2,
                optimizer=shoal.Adam(lr=0.5),
                init=shoal.Uniform(0.1, seed=7),
                admit=shoal.AfterCount(2),
                expire=[shoal.TimeToLive(9)],
            ).spec,
        ]
    forms = [TableRecord.of(spec) for spec in specs]
    of = kinds(messages.AnyRequest, messages.AnyReply, messages.AnyOrder, messages.AnyEvent)
    slots = cut_evenly(3, 64, [("tcp://10.0.0.1:5571", 0), ("tcp://[::1]:5572", 1)])
    tables = tuple(of["table"](k, form) for k, form in enumerate(forms))
    return {
        "hello": of["hello"]("worker", "process 7 on host"),
        "welcome": of["welcome"]("0123456789abcdef", "10.0.0.9", 64, 2.0, 10.0, 3, 600.0, 1),
        "join": of["join"](2, ("tcp://:5571", "tcp://h:1"), 4, JobConsistency("ssp", 3, False), "node7", True, 8, "b"),
        "joined": of["joined"](1, slots, tables, 2, 9, 4, 5, 60.0, True, {"barrier": 7}, 6),
        "ask-map": of["ask-map"](),
        "map": of["map"](slots),
        "ask-table": of["ask-table"](forms[1]),
        "table": tables[0],
        "ask-tables": of["ask-tables"](),
        "tables": of["tables"](tables),
        "barrier": of["barrier"]("begin"),
        "passed": of["passed"]((0, 3)),
        "take-part": of["take-part"](3, 1000, "ab" * 32, 7, 1.5, 12),
        "part": of["part"](8, None),
        "ask-figures": of["ask-figures"](),
        "figures": of["figures"]((EndpointMetrics(0, "tcp://h:1", {"pulls": 3, "lag": {"0": 1}}),), {"garbage": 2}),
        "ask-status": of["ask-status"](),
        "status": of["status"](
            "0123456789abcdef",
            7,
            12.5,
            2.0,
            10.0,
            1,
            64,
            2,
            "server 1 is lost",
            ("a", "b"),
            JobStatus(9, "SSP(staleness=3)", 3, (1,), (AwaitedStatus(2, "worker 2 is dead", 59.5),)),
            (ServerStatus(0, "process 7", "10.0.0.9", (EndpointStatus("tcp://h:1", ((0, 64),)),), True, 0.5, "n"),),
            (
                WorkerStatus(0, "w", "10.0.0.8", 2, 17, True, 0.25),
                WorkerStatus(None, "v", "10.0.0.8", 0, 0, False, 3.0, "b"),
            ),
            (LauncherStatus("l", "10.0.0.8", True, 1.0),),
            1,
            (0,),
            (ArcStatus(0, 64, 0, "tcp://h:1", 3, (1, 2), 1000, 1 << 16, 77),),
            (StreamStatus("tcp://h:1", "tcp://h:2", 1, 3, 4096, ((32, 48),), 1 << 20, 1 << 21),),
            (FailoverStatus(3, "process 9 on host", "it is silent", "0 to 15", 12.5, 0.25, 1.125, None),),
            (JobStatus(10, "ASP()", 1, (), (), "b"),),
            "finished",
            (fit_status("stopped"),),
        ),
        "report-stream": of["report-stream"](77, 3, "arrived", "why"),
        "drain": of["drain"](1),
        "rebalance": of["rebalance"]((7, 0, 300)),
        "stop-cluster": of["stop-cluster"](),
        "accepted": of["accepted"]("server 1 ends"),
        "hand-over": of["hand-over"](True),
        "leave": of["leave"](1),
        "left": of["left"](),
        "waiting": of["waiting"]("other servers"),
        "refused": of["refused"]("input", "no such rank"),
        "start-job": of["start-job"](7, JobConsistency("bsp", 0, True), (1, 2, 3), 11, True),
        "end-job": of["end-job"](7),
        "hold": of["hold"](7),
        "admit": of["admit"](1, 2, 3, 7),
        "fence": of["fence"](1, 2, 7),
        "dismiss": of["dismiss"](1, 2, 3, (0, 4), 7),
        "add-table": of["add-table"](4, forms[0]),
        "drop-table": of["drop-table"](4),
        "tell-figures": of["tell-figures"](),
        "server-gone": of["server-gone"](1, "server 1 is lost", "it was silent"),
        "worker-gone": of["worker-gone"](1, 2, "worker 1 is dead", 7),
        "workers-change": of["workers-change"](9),
        "map-changed": of["map-changed"](slots),
        "scheduler-stopped": of["scheduler-stopped"](),
    }


def control_frames() -> dict[str, list[str]]:
    """The frames of each message in its envelope, in hex."""
    envelope = kinds(messages.Message)
    made = bodies()
    asked = kinds(messages.AnyRequest)
    replies, orders = kinds(messages.AnyReply), kinds(messages.AnyOrder)
    whole = {}
    for tag, body in made.items():
        if tag in asked:
            whole[tag] = envelope["ask"](b"0123456789abcdef", 5, body, 6, (3, 5))
        elif tag in replies:
            whole[tag] = envelope["reply"](5, body, 7)
        elif tag in orders:
            whole[tag] = envelope["order"](2, body, 7)
        else:
            whole[tag] = envelope["news"](1, (body,), 7)
    refused = made["refused"]
    whole["done"] = envelope["done"](b"0123456789abcdef", 2, 9, "why", ({"pulls": 3},), refused, (1, 2), 7)
    progress = messages.StreamProgress(77, 3, 4096, 1 << 20, 1 << 21)
    whole["heartbeat"] = envelope["heartbeat"](
        b"0123456789abcdef",
        4,
        17,
        (progress,),
        (messages.ArcLoad(32, 1000, 1 << 16, 77),),
        messages.Figures({"rows": 5.0, "loss": 0.25}, {"pull": {1024: 3, 1280: 1}}, (fit_status("running"),)),
    )
    whole["assign"] = envelope["assign"](made["map"].map, envelope["order"](9, made["hold"], 0), 1 << 28, 7)
    whole["assigned"] = envelope["assigned"](b"0123456789abcdef", 3, whole["done"], "why")
    whole["close"] = envelope["close"]((77, 78), 7)
    stamp = messages.ArcStamp(7, 32, (1 << 61) + 5)
    whole["closed"] = envelope["closed"](b"0123456789abcdef", (77, 78), (stamp,))
    frames = {tag: [frame.hex() for frame in messages.encode(message)] for tag, message in whole.items()}
    frames["refusal"] = [frame.hex() for frame in messages.refusal("another version")]
    return frames


def test_every_message_has_the_bytes_that_it_had():
    golden = json.loads(MESSAGES.read_text())["control"]
    assert control_frames() == golden


def test_every_kind_of_message_is_there():
    tags = set(kinds(messages.Message, messages.AnyRequest, messages.AnyReply, messages.AnyOrder, messages.AnyEvent))
    golden = json.loads(MESSAGES.read_text())["control"]
    assert set(golden) >= tags - {"ask", "reply", "order", "news"}


def golden_messages() -> list[str]:
    return [tag for tag in json.loads(MESSAGES.read_text())["control"] if tag != "refusal"]


@pytest.mark.parametrize("tag", golden_messages())
def test_what_was_written_is_read_and_written_alike(tag):
    frames = [bytes.fromhex(frame) for frame in json.loads(MESSAGES.read_text())["control"][tag]]
    assert messages.encode(messages.decode(frames)) == frames


def task_bytes() -> dict[str, str]:
    """Tasks and reports of saves and loads, in hex."""
    forms = [table.form for table in bodies()["tables"].tables]
    common = {"directory": "/data/model", "options": {"endpoint_url": "http://h"}, "patience": 60.0}
    encode = msgspec.msgpack.encode
    write = WriteTask(
        **common,
        token="stem-look.slots",
        content=b"0123456789abcdef",
        stem="stem",
        version=3,
        durable=True,
        tables=forms,
        kinds=["plain", "delta"],
    )
    fields = {name: getattr(forms[1], name) for name in forms[1].__struct_fields__}
    saved = SavedTable(**fields, step=4, rows=2, files=[], sections=[])
    return {
        "write": encode(write).hex(),
        "read": encode(ReadTask(**common, go=True, digest="ab" * 32, slots=64)).hex(),
        "ready": encode(Report("ready")).hex(),
        "working": encode(Report("working", 12)).hex(),
        "failed": encode(Report("failed", kind="storage", text="no room")).hex(),
        "loaded": encode(Report("done", 12, loaded=[5, 7])).hex(),
        "saved": encode(Report("done", 12, msgspec.Raw(encode([saved])))).hex(),
    }


def test_tasks_and_reports_have_the_bytes_that_they_had():
    assert task_bytes() == json.loads(MESSAGES.read_text())["tasks"]


if __name__ == "__main__":
    print(json.dumps({"control": control_frames(), "tasks": task_bytes()}, indent=1))

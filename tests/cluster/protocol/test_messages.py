"""Control messages: what was encoded is read back; whatever else comes is a fault, with an answer where one helps."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal
from shoal.cluster.protocol import messages
from shoal.cluster.protocol.messages import (
    Barrier,
    DropTable,
    ErrorReply,
    Events,
    Heartbeat,
    JobConsistency,
    Join,
    JoinReply,
    MalformedMessageError,
    Order,
    OrderReply,
    PeerRefusedError,
    Reply,
    Request,
    StartJob,
    TableRecord,
    TableReply,
    WorkerGone,
    checked,
    decode,
    encode,
    framed,
    refusal,
)
from shoal.cluster.protocol.slot_map import cut_evenly
from tiers import rounds

SPECS = [
    {"optimizer": shoal.FTRL(alpha=0.2, l1=1.0)},
    {"dim": 3, "optimizer": shoal.Momentum(nesterov=True), "init": shoal.Uniform(0.1, seed=2**64 - 1)},
    {"dim": 2, "optimizer": shoal.Adam(per_row_step=True, clip_norm=2.0), "init": shoal.Constant(0.5), "seed": 2**63},
    {"dim": 4096, "optimizer": shoal.RowWiseAdagrad(decoupled=True), "dtype": "bfloat16", "init": shoal.Normal(1e-3)},
]


@pytest.mark.parametrize("what", SPECS)
def test_a_table_is_described_to_the_servers_as_it_is(what):
    with shoal.local() as store:
        spec = store.table("a name", **what).spec
    joined = JoinReply(3, cut_evenly(2, 64, [("tcp://h:1", 0)]), (TableReply(7, TableRecord.of(spec)),), 2, 9, 4, 5)
    read = decode(encode(Reply(1, joined)))
    assert read == Reply(1, joined)
    assert read.body.tables[0].form.spec() == spec


@pytest.mark.parametrize(
    "message",
    [
        Request(b"s" * 16, 1, Join(None, ("tcp://:1",))),
        Request(b"s" * 16, 2**40, Join(3, (), 4, JobConsistency("ssp", 3, False))),
        Order(1, StartJob(2**32 - 1, JobConsistency("bsp", 0, True), (1, 2))),
        OrderReply(b"s", 1, 5, "why"),
        OrderReply(b"s", 1, refused=ErrorReply("memory", "no room")),
        Order(3, DropTable(7)),
        Heartbeat(b"s", 0),
        Events(3, (WorkerGone(1, 2, "text"),)),
    ],
)
def test_messages_come_back_as_they_were(message):
    assert decode(encode(message)) == message


@given(st.lists(st.binary(max_size=40), max_size=4))
@settings(max_examples=rounds(300), deadline=None)
def test_whatever_comes_is_a_message_or_a_fault(frames):
    with pytest.raises(MalformedMessageError):
        decode(frames)
    preamble = encode(Heartbeat(b"s", 0))[0]
    with pytest.raises(MalformedMessageError):
        decode([preamble, *frames] if len(frames) != 1 else [preamble])


@given(st.binary(max_size=60), st.integers(0, 2**32))
@settings(max_examples=rounds(300), deadline=None)
def test_a_changed_message_is_read_as_some_message_or_refused(noise, at):
    frames = encode(Request(b"s" * 16, 1, Join(3, ("tcp://h:1",), 4, JobConsistency("ssp", 3, False))))
    body = bytearray(frames[1][4:])
    at %= len(body)
    body[at : at + len(noise)] = noise
    if framed(bytes(body)) != frames:
        with pytest.raises(MalformedMessageError, match="damaged on its way") as caught:
            decode([frames[0], frames[1][:4] + bytes(body)])
        assert caught.value.reply is None
    try:
        message = decode(framed(bytes(body)))
    except MalformedMessageError as fault:
        message = answer_to(fault)
    assert isinstance(message, Request | Heartbeat | OrderReply | Reply | Order | Events | str)


def answer_to(fault):
    """What a message that cannot be read is answered with: the reply to a request, else a refusal of all versions."""
    if len(fault.reply) == 2:
        answer = decode(fault.reply)
        assert answer.body == ErrorReply("input", str(fault))
        return answer
    with pytest.raises(
        PeerRefusedError, match="the other side refuses: a control message that cannot be read"
    ) as caught:
        decode(fault.reply)
    return str(caught.value)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (["join", None, [], 2**40], "workers = 1099511627776: Expected `int` <= 2147483647"),
        (["join", -1, [], 2], "rank = -1: Expected `int` >= 0"),
        (["join", None, ["h" * 2000], 2], "addresses.0 = 'hhhh"),
        (["join", None, ["h"] * 20_000, 2], "Expected `array` of length <= 16384"),
        (["join", None, [], 2, ["xxx", 0, False]], "rules.0 = 'xxx'"),
        (["join", None, [], 2, ["ssp", -1, False]], "rules.1 = -1: Expected `int` >= 0"),
        (["join", None, [], 2, ["ssp", 2**31, False]], "rules.1 = 2147483648"),
        (["join", None, [], 2, ["bsp", 1, False]], "bsp takes neither waits=1 nor mean=False"),
        (["join", None, [], 2, ["asp", 0, True]], "asp takes neither waits=0 nor mean=True"),
        (["take-part", 0, 1, "d", 0, float("nan"), 0], "reissue = nan"),
        (["take-part", 0, -1, "d", 0, 0.0, 0], "count = -1"),
        (["barrier", "b" * 2000], "name = 'bbbb"),
        (["leave", 2**40], "status = 1099511627776"),
        (["poem"], "'poem'"),
    ],
)
def test_a_request_with_a_field_out_of_its_bounds_is_answered_with_the_name_of_the_field(body, text):
    with pytest.raises(MalformedMessageError, match="cannot be read") as caught:
        decode(framed(msgspec.msgpack.encode(["ask", b"s" * 16, 7, body])))
    assert text in str(caught.value)
    assert decode(caught.value.reply) == Reply(7, ErrorReply("input", str(caught.value)))


@pytest.mark.parametrize(
    "body",
    [
        Join(2**70),
        Join(rank=2**40),
        Join(workers=-1),
        Barrier("bad\ud800"),
        Barrier("b" * 2000),
        Join(0, ("x",) * 2**15),
    ],
)
def test_a_request_that_no_scheduler_would_take_is_refused_before_it_is_sent(body):
    with pytest.raises(ValueError, match="the scheduler"):
        checked(body)
    assert checked(Join(3, (), 4, JobConsistency("ssp", 2, False))) == Join(3, (), 4, JobConsistency("ssp", 2, False))


def test_messages_that_are_nested_deeply_or_promise_more_than_they_hold_are_refused():
    done = b"\x96\xa4done\xc4\x01s\x01\x00\xa0"
    for body in (
        done + b"\x91\x81\xa1a" + b"\x91" * 1_000_000 + b"\x00",
        done + b"\xdd\xff\xff\xff\xff",
        done + b"\x91\xdf\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\x93\xa3ask\xc6\xff\xff\xff\xff",
        b"\x81\x91\x01\x01",
    ):
        with pytest.raises(MalformedMessageError, match="cannot be read"):
            decode(framed(body))


def test_another_version_is_refused_in_words_that_all_versions_read():
    other = [messages._MAGIC + b"\x63\x00", b"anything"]
    said = f"version 99 meet version {messages.VERSION}"
    with pytest.raises(MalformedMessageError, match=f"{said}: install one shoal on all machines") as caught:
        decode(other)
    assert len(caught.value.reply) == 3
    with pytest.raises(MalformedMessageError, match=f"the other side refuses: .*{said}"):
        decode(caught.value.reply)
    assert refusal("no")[1:] == [b"", b"no"]


def test_a_message_with_a_field_more_or_of_another_type_is_refused():
    for body in (["heartbeat", b"s", 0, 1, 2], ["heartbeat", b"s", "0"], ["heartbeat", b"s"], ["poem"], {}, 3):
        with pytest.raises(MalformedMessageError, match="cannot be read"):
            decode(framed(msgspec.msgpack.encode(body)))

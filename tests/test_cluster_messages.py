"""Control messages: what was encoded is read back; whatever else comes is a fault, with an answer where one helps."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal
from shoal.rpc import messages
from shoal.rpc.map import cut_evenly
from shoal.rpc.messages import (
    Ask,
    Done,
    DropTable,
    Fault,
    Heartbeat,
    Join,
    Joined,
    News,
    Order,
    Refused,
    Reply,
    Rules,
    StartJob,
    TableForm,
    TableIs,
    WorkerGone,
    decode,
    encode,
    refusal,
)

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
    joined = Joined(3, cut_evenly(2, 64, [("tcp://h:1", 0)]), (TableIs(7, TableForm.of(spec)),), 2, 9, 4, 5)
    read = decode(encode(Reply(1, joined)))
    assert read == Reply(1, joined)
    assert read.body.tables[0].form.spec() == spec


@pytest.mark.parametrize(
    "message",
    [
        Ask(b"s" * 16, 1, Join(None, ("tcp://:1",))),
        Ask(b"s" * 16, 2**40, Join(3, (), 4, Rules("ssp", 3, False))),
        Order(1, StartJob(2**32 - 1, Rules("bsp", 0, True), (1, 2))),
        Done(b"s", 1, 5, "why"),
        Done(b"s", 1, refused=Refused("memory", "no room")),
        Order(3, DropTable(7)),
        Heartbeat(b"s", 0),
        News(3, (WorkerGone(1, 2, "text"),)),
    ],
)
def test_messages_come_back_as_they_were(message):
    assert decode(encode(message)) == message


@given(st.lists(st.binary(max_size=40), max_size=4))
@settings(max_examples=300, deadline=None)
def test_whatever_comes_is_a_message_or_a_fault(frames):
    with pytest.raises(Fault):
        decode(frames)
    preamble = encode(Heartbeat(b"s", 0))[0]
    with pytest.raises(Fault):
        decode([preamble, *frames] if len(frames) != 1 else [preamble])


@given(st.binary(max_size=60), st.integers(0, 2**32))
@settings(max_examples=300, deadline=None)
def test_a_changed_message_is_read_as_some_message_or_refused(noise, at):
    frames = encode(Ask(b"s" * 16, 1, Join(3, ("tcp://h:1",), 4, Rules("ssp", 3, False))))
    body = bytearray(frames[1])
    at %= len(body)
    body[at : at + len(noise)] = noise
    try:
        message = decode([frames[0], bytes(body)])
    except Fault as fault:
        message = decode_refusal(fault.reply)
    assert isinstance(message, Ask | Heartbeat | Done | Reply | Order | News | str)


def decode_refusal(reply):
    with pytest.raises(Fault, match="the other side refuses: a control message that cannot be read") as caught:
        decode(reply)
    return str(caught.value)


def test_another_version_is_refused_in_words_that_all_versions_read():
    other = [messages._MAGIC + b"\x07\x00", b"anything"]
    with pytest.raises(Fault, match="version 7 meet version 3: install one shoal on all machines") as caught:
        decode(other)
    assert len(caught.value.reply) == 3
    with pytest.raises(Fault, match=r"the other side refuses: .*version 7 meet version 3"):
        decode(caught.value.reply)
    assert refusal("no")[1:] == [b"", b"no"]


def test_a_message_with_a_field_more_or_of_another_type_is_refused():
    preamble, _ = encode(Heartbeat(b"s", 0))
    for body in (["heartbeat", b"s", 0, 1], ["heartbeat", b"s", "0"], ["heartbeat", b"s"], ["poem"], {}, 3):
        with pytest.raises(Fault, match="cannot be read"):
            decode([preamble, msgspec.msgpack.encode(body)])

"""Peers answer questions from threads of their own, to those that know their secret; nothing that comes ends them."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

pytest.importorskip("torch", reason="the package of peers imports torch")

import msgspec

from cluster_fakes import TIMEOUT
from shoal.torch.peers import PeerServer, ask


@dataclass
class Answering:
    """A server that echoes, and the questions that it was asked."""

    server: PeerServer
    asked: list[bytes] = field(default_factory=list)


@pytest.fixture
def answering() -> Iterator[Answering]:
    asked: list[bytes] = []

    def answer(question: bytes) -> bytes:
        asked.append(question)
        return question + b"!"

    with contextlib.closing(PeerServer("127.0.0.1", 1, answer)) as server:
        yield Answering(server, asked)


def test_an_answer_may_be_longer_than_a_packet(answering: Answering) -> None:
    question = bytes(range(256)) * 250
    assert ask(answering.server.address, question, TIMEOUT) == question + b"!"


@pytest.mark.parametrize("secret", [b"", b"\0" * 16, b"\0" * 15])
def test_a_question_without_the_secret_is_not_answered(secret: bytes, answering: Answering) -> None:
    address = msgspec.structs.replace(answering.server.address, secret=secret)
    with pytest.raises(OSError, match="ended within a message"):
        ask(address, b"q", TIMEOUT)
    assert not answering.asked


@pytest.mark.parametrize("content", [b"", b"\1", b"\xff" * 8, b"\xff" * 40, (1 << 40).to_bytes(8, "little")])
def test_garbage_and_cut_connections_leave_the_server_as_it_was(content: bytes, answering: Answering) -> None:
    with socket.create_connection((answering.server.address.host, answering.server.address.port), TIMEOUT) as peer:
        peer.sendall(content)
    assert ask(answering.server.address, b"q", TIMEOUT) == b"q!"


def test_a_connection_that_sends_nothing_delays_no_other(answering: Answering) -> None:
    with socket.create_connection((answering.server.address.host, answering.server.address.port), TIMEOUT):
        assert ask(answering.server.address, b"q", TIMEOUT) == b"q!"


def test_a_closed_server_answers_no_more() -> None:
    server = PeerServer("127.0.0.1", 1, lambda question: question)
    server.close()
    with pytest.raises(OSError, match="refused"):
        ask(server.address, b"q", TIMEOUT)

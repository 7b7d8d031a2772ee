"""PING messages of the data plane, which ask whether the thread of an endpoint answers.

docs/wire-format.md describes them. They need no worker and no job.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal import _core

NO_WORKER = 0xFFFFFFFF  # in the place of a rank, of who is no worker


def encode_ping(number: int) -> bytes:
    """Encode a PING."""
    return _core.encode_header(op=_core.Op.PING, worker=NO_WORKER, sequence=number)


def ping_number(frames: Sequence[bytes]) -> int | None:
    """Return the number of the PING that a message answers; None if it is not the answer to one."""
    try:
        message = _core.decode(frames)
    except ValueError:
        return None
    is_answer = message.op == _core.Op.PING and message.status == _core.Status.OK
    return message.sequence if is_answer else None

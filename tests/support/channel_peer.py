"""The peer of a channel."""

from __future__ import annotations

import threading
import time

import numpy as np
import zmq

from shoal import _core
from shoal._core import Op
from shoal.cluster.worker.channel import WorkerIdentity
from table_specs import native, table_spec

SLOTS = 16


SPEC = table_spec(2)


ME = WorkerIdentity(0, 1, 77)


WORKERS = _core.ThreadPool(1)


TIMEOUT = 120.0


class Peer:
    """A data loop in a thread; `script(number, asked)` says what becomes of each message: its answers, or None."""

    def __init__(self, first, end, script=None):
        self.endpoint = _core.Endpoint(SLOTS, [(first, end)])
        self.endpoint.start_job(ME.job, "asp")
        self.endpoint.admit(ME.rank, ME.incarnation, 0)
        self.endpoint.add_table(0, native(SPEC))
        self.script = script
        self.asked = []
        self.error = None
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self.address = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.range = (first, end, self.address, 0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        try:
            while not self._stop.is_set():
                if not self._socket.poll(2):
                    continue
                peer, *frames = self._socket.recv_multipart()
                asked = _core.decode(frames, replies=False)
                self.asked.append(asked)
                answers = None if self.script is None else self.script(len(self.asked), asked)
                if answers is None:
                    answers = [reply for _, reply in self.endpoint.handle(peer, frames)]
                for reply in answers:
                    self._socket.send_multipart([peer, *reply])
        except Exception as error:
            self.error = error

    def close(self):
        self._stop.set()
        self._thread.join(TIMEOUT)
        self._socket.close(0)
        self._context.term()
        assert self.error is None

    @property
    def rows(self):
        return len(self.endpoint.shard(0))


def answer(asked, status, **more):
    payload = more.pop("payload", ())
    header = _core.encode_header(
        op=asked.op,
        status=status,
        reply=True,
        table=asked.table,
        worker=asked.worker,
        incarnation=asked.incarnation,
        sequence=asked.sequence,
        clock=asked.clock,
        job=asked.job,
        part=asked.part,
        payload=payload,
        **more,
    )
    return [[header, *payload]]


def batch_of(keys):
    return _core.KeyBatch(np.asarray(keys, np.uint64), SLOTS, WORKERS)


def push(channel, keys):
    batch = batch_of(keys)
    return channel.begin(
        Op.PUSH, 0, hashes=batch.hashes, begins=batch.offsets, values=np.ones((len(batch), 2), np.float32), dim=2
    )


def eventually(is_so):
    deadline = time.monotonic() + TIMEOUT
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.002)

"""Servers in threads of the test: ROUTERs in Python before what answers messages, and the orders of the scheduler."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import zmq

from cluster_fakes import TIMEOUT, scheduler
from shoal import _core
from shoal._core import Op, WireDtype
from shoal.cluster.link import Link
from shoal.cluster.scheduler import Scheduler
from shoal.rpc.messages import AddTable, OrderBody

Replies = list[tuple[bytes, list[Any]]]


class PlainService:
    """Answers messages from shards of the engine, as they come: no clocks, no windows, no epochs."""

    def __init__(self, slots: int, first: int, end: int) -> None:
        self.slots, self.first, self.end = slots, first, end
        self.workers = _core.Workers(1)
        self.specs: dict[int, dict[str, Any]] = {}
        self.shards: dict[int, _core.Shard] = {}
        self.fresh: dict[int, _core.Shard] = {}

    def add_table(self, number: int, **spec: Any) -> None:
        self.specs[number] = spec
        self.shards[number] = self.empty(number)

    def empty(self, number: int) -> _core.Shard:
        return _core.Shard(**self.specs[number], slots=self.slots, workers=self.workers)

    def handle(self, peer: bytes, frames: list[Any]) -> Replies:
        asked = _core.decode(frames, replies=False)
        answer = self.answer(asked, self.shards[asked.table])
        header = _core.encode_header(
            op=asked.op,
            reply=True,
            table=asked.table,
            worker=asked.worker,
            incarnation=asked.incarnation,
            sequence=asked.sequence,
            clock=asked.clock,
            job=asked.job,
            part=asked.part,
            **answer,
        )
        return [(peer, [header, *answer.get("payload", ())])]

    def answer(self, asked: _core.Message, shard: _core.Shard) -> dict[str, Any]:
        values = asked.values.reshape(-1, asked.dim) if asked.op in (Op.PUSH, Op.ASSIGN) else asked.values
        if asked.op in (Op.PULL, Op.PUSH, Op.ASSIGN, Op.ERASE, Op.CONTAINS, Op.STATE):
            slots = asked.hashes >> np.uint64(65 - self.slots.bit_length())
            assert np.all((slots >= self.first) & (slots < self.end))
            batch = _core.KeyBatch(_core.unmix(asked.hashes), self.slots, self.workers)
        match asked.op:
            case Op.PULL:
                rows = np.empty((len(batch), asked.dim), np.float32)
                shard.pull(batch, rows)
                return {"payload": [rows], "count": len(rows), "dim": asked.dim, "dtype": WireDtype.FLOAT32}
            case Op.PUSH:
                shard.push(batch, values)
            case Op.ASSIGN:
                shard.assign(batch, values)
            case Op.ERASE:
                return {"aux": shard.erase(batch)}
            case Op.CONTAINS:
                return {"payload": [shard.contains(batch)], "count": len(batch), "dtype": WireDtype.UINT8}
            case Op.STATE:
                column = shard.state(batch, asked.aux)
                return self.floats([column], column)
            case Op.SLOT:
                hashes, rows = shard.read_slot(asked.aux)
                return self.floats([hashes, rows], rows)
            case Op.SECTION:
                count, section = shard.section(asked.aux)
                return {"payload": [section], "count": count, "dtype": WireDtype.UINT8}
            case Op.STATS:
                numbers = np.array([shard.step, *shard.stats().values()], np.uint64)
                return {"payload": [numbers], "count": len(numbers)}
            case Op.REDUCE:
                answers = shard.reduce(asked.aux, values)
                return {"payload": [answers], "count": len(answers), "dtype": WireDtype.FLOAT64}
            case Op.LOAD_BEGIN:
                self.fresh[asked.table] = self.empty(asked.table)
                self.fresh[asked.table].reserve(asked.numbers.tolist())
            case Op.LOAD_ROWS:
                self.fresh[asked.table].restore(asked.count, np.array(values))
            case Op.LOAD_END:
                self.shards[asked.table] = self.fresh.pop(asked.table)
                self.shards[asked.table].step = int(asked.numbers[0])
        return {}

    def floats(self, payload: list[Any], rows: np.ndarray) -> dict[str, Any]:
        return {"payload": payload, "count": len(rows), "dim": rows.shape[1], "dtype": WireDtype.FLOAT32}


class Server:
    """A server whose data loops and control plane share one thread of Python."""

    def __init__(self, address: str, endpoints: int, make_service: Callable[[int, int, int], Any]) -> None:
        self.error: Exception | None = None
        self.services: dict[zmq.Socket[bytes], Any] = {}
        self._link = Link(address, "server")
        self._context = zmq.Context()
        self._make_service = make_service
        self._sockets = {}
        for _ in range(endpoints):
            opened = self._context.socket(zmq.ROUTER)
            self._sockets[f"tcp://127.0.0.1:{opened.bind_to_random_port('tcp://127.0.0.1')}"] = opened
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            joined = self._link.join(timeout=TIMEOUT, addresses=tuple(self._sockets))
            poller = zmq.Poller()
            for endpoint in joined.map.endpoints:
                opened = self._sockets.get(endpoint.address)
                if opened is not None:
                    poller.register(opened, zmq.POLLIN)
                    self.services[opened] = self._make_service(joined.map.slots, endpoint.first_slot, endpoint.end_slot)
            while not self._stop.is_set():
                order = self._link.next_order(0)
                if order is not None:
                    self._obey(order.body)
                    self._link.done(order)
                for opened, _ in poller.poll(2):
                    peer, *frames = opened.recv_multipart()
                    for to, reply in self.services[opened].handle(peer, frames):
                        opened.send_multipart([to, *reply])
        except Exception as error:
            self.error = error

    def _obey(self, order: OrderBody) -> None:
        if isinstance(order, AddTable):
            spec = order.form.spec()
            for service in self.services.values():
                service.add_table(
                    order.id,
                    dim=spec.dim,
                    dtype=spec.dtype,
                    optimizer=type(spec.optimizer).__name__,
                    params=spec.optimizer.params(),
                    init=type(spec.init).__name__,
                    init_parameter=spec.init.parameter,
                    init_seed=spec.init.init_seed,
                    seed=spec.seed,
                )

    def close(self) -> None:
        self._stop.set()
        self._thread.join(TIMEOUT)
        self._link.close()
        for opened in self._sockets.values():
            opened.close(0)
        self._context.term()
        if self.error is not None:
            raise self.error


@contextlib.contextmanager
def cluster(
    servers: int = 1,
    endpoints: int = 1,
    make_service: Callable[[int, int, int], Any] = PlainService,
    **settings: Any,
) -> Iterator[Scheduler]:
    """Run a scheduler and servers in threads."""
    with scheduler(servers, **settings) as made, contextlib.ExitStack() as stack:
        for _ in range(servers):
            stack.enter_context(contextlib.closing(Server(made.address, endpoints, make_service)))
        yield made

"""Servers in threads of the test: a ROUTER in Python before whatever answers messages, and the control plane's orders."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import zmq

from cluster_fakes import TIMEOUT, scheduler
from shoal import _core
from shoal.cluster.link import Link
from shoal.rpc.messages import AddTable, Admit, Dismiss, Hold, StartJob
from shoal.rpc.requests import Op, Status

Replies = list[tuple[bytes, list[Any]]]


class MiniService:
    def __init__(self, slots, first, end):
        self.slots, self.first, self.end = slots, first, end
        self.workers = _core.Workers(1)
        self.tables = {}
        self.fresh = {}

    def start_job(self, *a):
        pass

    def admit(self, *a):
        pass

    def dismiss(self, *a):
        pass

    def add_table(self, id, **spec):
        self.tables[id] = (spec, _core.Shard(**spec, slots=self.slots, workers=self.workers))

    def released(self):
        return []

    def handle(self, peer, frames):
        m = _core.decode(frames, replies=False)
        reply = {"status": 0, "payload": (), "count": 0, "aux": 0, "dtype": 0, "dim": 0}
        spec, shard = self.tables.get(m.table, (None, None))
        op = m.op
        if op in (1, 2, 4, 5, 6, 7):
            batch = _core.KeyBatch(_core.unmix(m.hashes), self.slots, self.workers)
            assert all(self.first <= int(h) >> 54 < self.end for h in m.hashes)
        if op == Op.PULL:
            rows = np.empty((len(batch), m.dim), np.float32)
            shard.pull(batch, rows)
            reply |= {"payload": [rows], "count": len(rows), "dtype": 1, "dim": m.dim}
        elif op == Op.PUSH:
            shard.push(batch, m.values.reshape(-1, m.dim))
            reply |= {"count": 0}
        elif op == Op.ASSIGN:
            shard.assign(batch, m.values.reshape(-1, m.dim))
        elif op == Op.ERASE:
            reply |= {"aux": shard.erase(batch)}
        elif op == Op.CONTAINS:
            reply |= {"payload": [shard.contains(batch)], "count": len(batch), "dtype": 4}
        elif op == Op.STATE:
            values = shard.state(batch, m.aux)
            reply |= {"payload": [values], "count": len(values), "dtype": 1, "dim": values.shape[1]}
        elif op == Op.SLOT:
            hashes, values = shard.read_slot(m.aux)
            reply |= {"payload": [hashes, values], "count": len(values), "dtype": 1, "dim": values.shape[1]}
        elif op == Op.SECTION:
            rows, section = shard.section(m.aux)
            reply |= {"payload": [section], "count": rows, "dtype": 4}
        elif op == Op.STATS:
            s = shard.stats()
            numbers = np.array([shard.step, *(s[k] for k in FIGURES)], np.uint64)
            reply |= {"payload": [numbers], "count": len(numbers)}
        elif op == Op.REDUCE:
            answers = shard.reduce(m.aux, m.values)
            reply |= {"payload": [answers], "count": len(answers), "dtype": 6}
        elif op == Op.LOAD_BEGIN:
            self.fresh[m.table] = _core.Shard(**spec, slots=self.slots, workers=self.workers)
            self.fresh[m.table].reserve(m.numbers.tolist())
        elif op == Op.LOAD_ROWS:
            self.fresh[m.table].restore(m.count, np.array(m.values))
        elif op == Op.LOAD_END:
            self.fresh[m.table].step = int(m.numbers[0])
            self.tables[m.table] = (spec, self.fresh.pop(m.table))
        header = _core.encode_header(
            op=op,
            reply=True,
            table=m.table,
            worker=m.worker,
            incarnation=m.incarnation,
            sequence=m.sequence,
            epoch=m.epoch,
            clock=m.clock,
            job=m.job,
            part=m.part,
            **reply,
        )
        return [(peer, [header, *reply["payload"]])]


FIGURES = (
    "rows", "cells", "bytes", "pulls", "pushes", "rows_pulled", "rows_pushed", "rows_created", "rows_erased",
    "nonfinite_rows",
)


class Server:
    def __init__(self, address, make_service=MiniService, *, endpoints=1, rank=None):
        self.link = Link(address, "server")
        self.context = zmq.Context()
        self.sockets = []
        self.error = None
        for _ in range(endpoints):
            socket = self.context.socket(zmq.ROUTER)
            socket.linger = 0
            self.sockets.append((socket, f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"))
        self.make = make_service
        self.endpoints = endpoints
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        try:
            joined = self.link.join(timeout=TIMEOUT, addresses=tuple(a for _, a in self.sockets))
            slots = joined.map.slots
            mine = {e.address: e for e in joined.map.endpoints}
            self.services = [(s, self.make(slots, mine[a].first_slot, mine[a].end_slot)) for s, a in self.sockets]
            poller = zmq.Poller()
            for s, _ in self.services:
                poller.register(s, zmq.POLLIN)
            by = dict(self.services)
            while not self.stop.is_set():
                order = self.link.next_order(0)
                if order is not None:
                    for _, service in self.services:
                        self.obey(service, order.body)
                    self.link.done(order)
                for s, _ in poller.poll(5):
                    peer, *frames = s.recv_multipart()
                    for to, reply in by[s].handle(peer, frames):
                        s.send_multipart([to, *reply])
        except Exception as error:
            import traceback
            traceback.print_exc()
            self.error = error

    def obey(self, service, body):
        if isinstance(body, AddTable):
            spec = body.form.spec()
            service.add_table(
                body.id,
                dim=spec.dim,
                dtype=spec.dtype,
                optimizer=type(spec.optimizer).__name__,
                params=spec.optimizer.params(),
                init=type(spec.init).__name__,
                init_parameter=spec.init.parameter,
                init_seed=spec.init.init_seed,
                seed=spec.seed,
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop.set()
        self.thread.join()
        self.link.close()
        for s, _ in self.sockets:
            s.close(0)
        self.context.term()


@contextlib.contextmanager
def cluster(servers=1, endpoints=1, make_service=MiniService, **settings):
    with scheduler(servers, **settings) as made, contextlib.ExitStack() as stack:
        made.servers = [
            stack.enter_context(Server(made.address, make_service, endpoints=endpoints)) for _ in range(servers)
        ]
        yield made

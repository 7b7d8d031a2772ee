"""An endpoint with several arcs answers as one with a single arc: the same bytes, in any order of any requests."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from msgspec import structs

import shoal
from endpoint_peer import Worker, deliver, part_named, released
from shoal import _core
from shoal._core import Op, Status, WireDtype
from table_specs import native, native_spec, table_spec
from tiers import long_after

SLOTS = 16
WIDTH = 1 << 60
DIM = 2
RANKS = 3
LOAD = 3 << 32
BASE = [1, 2, 3, 4]
ADAGRAD = shoal.Adagrad(lr=0.1, eps=1e-8, n0=0.1)
RULES = {
    "admit": shoal.AfterCount(2, capacity=4000),
    "expire": (shoal.TimeToLive(3), shoal.MaxRows(400)),
}
TABLES = {0: table_spec(DIM), 1: table_spec(DIM, ADAGRAD, init=shoal.Uniform(0.5), **RULES)}
ARCS = {
    "two": [(0, 5), (5, 16)],
    "five": [(0, 1), (1, 4), (4, 8), (8, 15), (15, 16)],
    "sixteen": [(s, s + 1) for s in range(SLOTS)],
}

Message = list[Any]


def served(arcs: list[tuple[int, int]], mode: str, *, mean: bool = False, narrow: bool = False) -> _core.Endpoint:
    endpoint = _core.Endpoint(SLOTS, arcs)
    endpoint.set_memory(1_000_000)
    for id, spec in TABLES.items():
        # Rounding noise depends on the step, which is an arc's own unless a step is that of a clock.
        changed = {"optimizer": TABLES[0].optimizer} if mode != "bsp" else {"dtype": "bfloat16"} if narrow else {}
        endpoint.add_table(id, native(structs.replace(spec, **changed)))
    endpoint.start_job(1, mode, 1, mean)
    for rank in range(RANKS):
        endpoint.admit(rank, 1, 0)
    return endpoint


class Traffic:
    """Messages of some workers, with repetitions, refusals, and old and new clocks."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.clock = [0] * RANKS
        self.sequence = [0] * RANKS
        self.reads = 1 << 63
        self.pushed: list[list[int]] = [[] for _ in range(RANKS)]
        self.sent: list[Message] = []

    def hashes(self) -> npt.NDArray[np.uint64]:
        """Draw no key, a few, many, or keys of neighbouring slots or of one slot."""
        n = int(self.rng.choice([0, 1, 3, 40, 300]))
        hashes = _core.mix(self.rng.integers(0, 900, n, np.uint64))
        shape = self.rng.integers(0, 5)
        if shape == 0:
            hashes = (hashes >> np.uint64(4)) + np.uint64(int(self.rng.integers(0, SLOTS)) * WIDTH)
        elif shape == 1:
            hashes = hashes >> np.uint64(2)
        return np.unique(hashes)

    def next(self) -> tuple[int, Message]:
        rank = int(self.rng.integers(0, RANKS))
        worker, table = Worker(rank, epoch=int(self.rng.integers(0, 9) != 0)), int(self.rng.integers(0, 2))
        op = self.rng.choice(WRITES + READS + OTHERS)
        if self.sent and self.rng.integers(0, 5) == 0:
            message = self.sent[int(self.rng.integers(max(0, len(self.sent) - 40), len(self.sent)))]
        elif op in WRITES:
            message = self.write(worker, table, int(op))
        elif op == Op.TICK:
            message = self.tick(worker)
        else:
            message = self.read(worker, table, int(op))
        self.sent.append(message)
        return rank, message

    def write(self, worker: Worker, table: int, op: int) -> Message:
        rank = worker.rank
        self.sequence[rank] += 1
        fields = {"sequence": self.sequence[rank], "clock": self.clock[rank], "table": table}
        hashes = self.hashes()
        if op == Op.SWEEP:
            return worker.sweep([1, 2, 0] if table else [], **fields) if table else worker.sweep([4, 30, 0], **fields)
        if op == Op.REDUCE:
            return worker.reduce(int(self.rng.integers(5, 7)), [0.5], **fields)
        if op == Op.ERASE:
            return worker.keys(op, hashes[: len(hashes) // 4], **fields)
        values = self.rng.integers(-8, 9, (len(hashes), DIM)) * 0.25
        if op == Op.ASSIGN:
            return worker._write(op, hashes, values, **fields, **({} if len(hashes) else {"dim": DIM}))
        if table and len(hashes) and self.rng.integers(0, 2):
            fields["counts"] = self.rng.integers(1, 4, len(hashes))
        if len(hashes):
            self.pushed[rank].append(part_named(int(hashes[-1]) // WIDTH, self.sequence[rank]))
        return worker._write(op, hashes, values, **fields, **({} if len(hashes) else {"dim": DIM}))

    def tick(self, worker: Worker) -> Message:
        rank = worker.rank
        named = self.pushed[rank] if self.rng.integers(0, 3) else []
        message = worker.tick(self.clock[rank], named[-64:], (0, 1))
        self.clock[rank] += 1
        self.pushed[rank] = []
        return message

    def read(self, worker: Worker, table: int, op: int) -> Message:
        self.reads += 1
        worker = worker if self.rng.integers(0, 4) else Worker(0xFFFFFFFF)
        clock = self.clock[worker.rank] if worker.rank < RANKS else 0
        fields = {"sequence": self.reads, "clock": clock, "table": table}
        slot = int(self.rng.integers(0, SLOTS + 1))
        if op == Op.PULL:
            hashes = self.hashes()
            return worker._message(
                op, [hashes], count=len(hashes), dtype=WireDtype.FLOAT32, packed=bool(slot % 2), **fields
            )
        if op == Op.REDUCE:
            function = int(self.rng.choice([1, 2, 3, 4, 7]))
            return worker.reduce(function, {2: [2.0], 3: [0.5], 4: [7.0]}.get(function, []), **fields)
        if op == Op.SWEEP:
            return worker.sweep([1, 2, 0, 4, 30, 0] if table else [4, 30, 0], dry_run=True, **fields)
        if op in (Op.SLOT, Op.SECTION):
            return worker.bare(op, aux=slot, **fields)
        return worker.keys(op, self.hashes(), **fields)


WRITES = [Op.PUSH, Op.PUSH, Op.PUSH, Op.PUSH, Op.ASSIGN, Op.ERASE, Op.REDUCE, Op.SWEEP]
READS = [Op.PULL, Op.PULL, Op.CONTAINS, Op.STATE, Op.SLOT, Op.SECTION]
OTHERS = [Op.TICK, Op.TICK, Op.TICK]


def reported(endpoint: _core.Endpoint) -> dict[str, Any]:
    """What an endpoint reports, but for what is kept for the arcs of one message apart."""
    apart = {"pending_bytes", "pending_peak", "dropped_pushes"}
    return {name: value for name, value in endpoint.metrics().items() if name not in apart}


def contents(shard: _core.Shard) -> list[tuple[Any, ...]]:
    """Return all rows and admission filters."""
    taken = [shard.section(slot) for slot in range(SLOTS)]
    return [(rows, section.tobytes(), filter.tobytes()) for rows, section, filter in taken]


@pytest.mark.slow
@pytest.mark.parametrize("mode", long_after(1, ["bsp", "ssp", "asp"]))
@pytest.mark.parametrize("arcs", ARCS)
def test_replies_and_rows_are_those_of_one_arc(arcs: str, mode: str) -> None:
    met = set()
    for seed in range(2):
        rng = np.random.default_rng([seed, len(arcs)])
        one, many = (served(of, mode, mean=seed == 1, narrow=seed == 0) for of in ([(0, SLOTS)], ARCS[arcs]))
        traffic = Traffic(rng)
        for event in range(500):
            rank, message = traffic.next()
            replies = [endpoint.handle(b"%d" % rank, message) for endpoint in (one, many)]
            assert replies[0] == replies[1], f"seed {seed}, event {event}"
            met |= {_core.decode(frames).status for _, frames in replies[0]}
            if event % 50 == 49:
                change = int(rng.integers(0, 5))
                first, end = sorted(rng.integers(0, SLOTS + 1, 2).tolist())
                worker = int(rng.integers(0, RANKS))
                for endpoint in (one, many):
                    if change == 0:
                        endpoint.hold()
                    elif change == 1:
                        endpoint.resume()
                    elif change == 2:
                        clock, tables = endpoint.fence(worker, 1 + event // 50)
                        endpoint.dismiss(worker, 1 + event // 50, clock, tables)
                    endpoint.set_map(1, [(first, end)] if event % 100 == 49 else [(0, SLOTS)])
                assert one.released() == many.released()
            assert [item for item in reported(one).items() if item[1] != reported(many)[item[0]]] == []
        for id in TABLES:
            ours, theirs = one.shard(id), many.shard(id)
            assert contents(ours) == contents(theirs)
            assert mode != "bsp" or ours.step == theirs.step
            assert ours.step >= theirs.step > 0
    assert {Status.OK, Status.WRONG_EPOCH, Status.BAD_REQUEST} <= met
    assert mode == "asp" or Status.DEFERRED in met


@pytest.mark.parametrize("arcs", ARCS)
def test_a_save_and_a_load_reach_all_arcs(arcs: str, rng: np.random.Generator) -> None:
    def pieces(session: _core.CheckpointSession) -> list[tuple[Any, ...]]:
        taken = [session.section(0, slot) for slot in session.slots]
        return [(rows, section.tobytes(), filter.tobytes()) for rows, section, filter in taken]

    keys = _core.mix(np.arange(500, dtype=np.uint64))
    hashes = np.sort(keys)
    results = []
    for of in ([(0, SLOTS)], ARCS[arcs]):
        endpoint = served(of, "bsp")
        a = Worker()
        for rank in range(RANKS):
            service_rows = np.full((500, DIM), rank + 1.0)
            deliver(endpoint, Worker(rank).push(hashes, service_rows, sequence=1))
        begin = a.numbers(Op.SAVE_BEGIN, [0] * 4 + [1 << 32], sequence=2, clock=1)
        for rank in range(RANKS):
            deliver(endpoint, Worker(rank).tick(0, [1]))
        (reply,) = endpoint.handle(b"", begin)
        assert endpoint.handle(b"", begin) == [reply]  # the same save
        save = endpoint.next_session()
        assert save is not None
        deliver(endpoint, Worker(1).push(hashes[:9], np.ones((9, DIM)), sequence=2, clock=1))  # not in it
        rows = pieces(save)
        with pytest.raises(ValueError, match="no slot 16"):
            save.section(0, SLOTS)
        deliver(endpoint, a.numbers(Op.SAVE_END, [2, *BASE], sequence=3))
        # The next save contains what has changed, in every arc.
        deliver(endpoint, a.push(hashes[100:104], np.ones((4, DIM)), sequence=4, clock=1))
        for rank in range(RANKS):
            deliver(endpoint, Worker(rank).tick(1, []))
        (delta,) = endpoint.handle(b"", a.numbers(Op.SAVE_BEGIN, [*BASE, 2 << 32], sequence=5, clock=2))
        assert _core.decode(delta[1]).status == Status.OK
        changes = endpoint.next_session()
        assert changes is not None
        changed = sum(changes.changes(0, slot)[0] for slot in changes.slots)
        deliver(endpoint, a.numbers(Op.SAVE_END, [5, *BASE], sequence=6))
        # Another table is filled from it, by messages and by a thread.
        counts = [piece[0] for piece in rows]
        assert deliver(endpoint, a.numbers(Op.LOAD_BEGIN, counts, sequence=7))[0].status == Status.OK
        assert deliver(endpoint, a.numbers(Op.SAVE_BEGIN, [0] * 4 + [LOAD], sequence=8, clock=2))[0].status == Status.OK
        load = endpoint.next_session()
        assert load is not None
        restored = 0
        for slot, (count, section, _) in enumerate(rows):
            values = np.frombuffer(section, np.uint8)
            if slot % 2:
                restored += load.restore(0, count, values)
            else:
                assert deliver(endpoint, a.section(count, values, sequence=9 + slot))[0].status == Status.OK
        with pytest.raises(ValueError, match="does not hold 7 rows"):
            load.restore(0, 7, np.zeros(3, np.uint8))
        deliver(endpoint, a.numbers(Op.SAVE_END, [8, *BASE], sequence=40))
        for _ in range(2):
            assert deliver(endpoint, a.numbers(Op.LOAD_END, [41, 7, *BASE], sequence=41))[0].status == Status.OK
        shard = endpoint.shard(0)
        assert (len(shard), shard.step) == (500, 41)
        results.append((reply, rows, changed, restored, contents(shard)))
    assert results[0] == results[1]
    assert results[0][3] == sum(results[0][1][slot][0] for slot in range(1, SLOTS, 2))


def test_a_write_that_is_refused_in_one_arc_is_repeated_in_that_arc_alone() -> None:
    endpoint = _core.Endpoint(SLOTS, ARCS["two"])
    endpoint.add_table(0, native_spec())
    endpoint.start_job(1, "asp")
    endpoint.admit(0, 1, 0)
    hashes = [WIDTH, 3 * WIDTH, 6 * WIDTH, 9 * WIDTH]
    message = Worker(epoch=1).push(hashes, [1, 2, 3, 4], sequence=1)
    endpoint.set_map(1, [(3, 8)])
    refused = deliver(endpoint, message)[0]
    assert (refused.status, refused.slots) == (Status.WRONG_EPOCH, (1, 9))
    endpoint.set_map(1, [(0, 16)])
    for _ in range(3):
        assert deliver(endpoint, message)[0].status == Status.OK
    assert deliver(endpoint, Worker().pull(hashes))[0].values.ravel().tolist() == [-1, -2, -3, -4]


@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize("size", [1, 2, 15, 31, 32, 63, 64, 65, 200, 1000])
def test_a_message_is_cut_by_slot_whatever_its_number_of_keys(
    size: int, skewed: bool, rng: np.random.Generator
) -> None:
    hashes = np.unique(rng.integers(0, 3 * WIDTH if skewed else 2**64, size, dtype=np.uint64))
    grads = rng.integers(1, 100, len(hashes))
    for arcs in ([(0, SLOTS)], *ARCS.values()):
        endpoint = _core.Endpoint(SLOTS, arcs)
        endpoint.add_table(0, native_spec())
        endpoint.start_job(1, "asp")
        endpoint.admit(0, 1, 0)
        push = Worker().push(hashes, grads, sequence=1)
        for _ in range(2):  # once for every slot
            assert deliver(endpoint, push)[0].status == Status.OK
        for some in (hashes, hashes[::-1][:1], hashes[len(hashes) // 2 :]):
            values = deliver(endpoint, Worker().pull(some))[0].values.ravel()
            assert values.tolist() == (-grads[np.isin(hashes, some)]).tolist()
        assert endpoint.metrics()["duplicates"] == 1


def test_the_budget_of_a_slot_does_not_depend_on_the_arcs() -> None:
    texts = []
    for arcs in ([(0, SLOTS)], *ARCS.values()):
        endpoint = _core.Endpoint(SLOTS, arcs)
        endpoint.set_memory(20_000)
        endpoint.add_table(0, native_spec())
        endpoint.start_job(1, "bsp")
        endpoint.admit(0, 1, 0)
        hashes = np.arange(3000, dtype=np.uint64) + np.uint64(7 * WIDTH)
        a = Worker()
        assert deliver(endpoint, a.push(hashes, np.ones(3000), sequence=1))[0].status == Status.OK
        deliver(endpoint, a.tick(0, [part_named(7, 1)]))
        reply = deliver(endpoint, a.pull(hashes[:1], clock=1))[0]
        assert reply.status == Status.RESOURCE_EXHAUSTED
        texts.append(reply.text)
        assert len(endpoint.shard(0)) == 0
        assert (
            deliver(endpoint, a.keys(Op.ERASE, hashes[:1], sequence=2))[0].status == Status.OK
        )  # then it may be tried again
        assert deliver(endpoint, a.pull(hashes[:1], clock=1))[0].status == Status.OK
    assert len(set(texts)) == 1


def test_a_map_names_the_arcs_before_the_first_job_and_the_slots_that_they_serve_later() -> None:
    endpoint = _core.Endpoint(SLOTS)
    assert deliver(endpoint, Worker().pull([1]))[0].status == Status.NOT_ADMITTED
    endpoint.set_memory(100_000)
    endpoint.add_table(0, native_spec())
    endpoint.set_map(1, [(2, 4), (8, 9)])
    endpoint.start_job(1, "asp")
    endpoint.admit(0, 1, 0)
    a = Worker(epoch=1)
    for ranges, text in (
        ([(0, 17)], r"no slots \[0, 17\) of 16"),
        ([(8, 9), (2, 4)], "must ascend"),
        ([(2, 3), (3, 4)], "must be adjacent"),
        ([(3, 5)], "overlaps another"),
        ([(2, 4), (12, 13)], "before the first job"),
    ):
        with pytest.raises(ValueError, match=text):
            endpoint.set_map(2, ranges)
    slots = list(range(SLOTS))
    refused = deliver(endpoint, a.push([slot * WIDTH for slot in slots], [1] * SLOTS, sequence=1))[0]
    assert refused.slots == (0, 1, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15)
    assert deliver(endpoint, a.pull([2 * WIDTH, 3 * WIDTH, 8 * WIDTH]))[0].values.ravel().tolist() == [-1] * 3
    assert deliver(endpoint, a.bare(Op.SLOT, aux=8))[0].status == Status.OK
    assert deliver(endpoint, a.bare(Op.SLOT, aux=9))[0].slots == (9,)
    assert len(deliver(endpoint, a.reduce(1))[0].values) == 3
    endpoint.set_map(2, [(8, 9)])
    assert deliver(endpoint, a.pull([2 * WIDTH, 8 * WIDTH]))[0].slots == (2,)
    assert released(endpoint) == []

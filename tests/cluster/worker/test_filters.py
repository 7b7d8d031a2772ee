"""Filters of the traffic: kernels against slow twins, and requests with filters against endpoints without sockets."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal
from maps import map_of
from oracle.wire import murmur3_128
from requests_by_hand import counts_of, make_filter
from shoal import _core
from shoal._core import Filter, Op, Policy, Requests, WireDtype
from shoal.cluster.worker.filters import Filters, choose
from table_specs import native_spec
from tiers import rounds

SLOTS = 64
JOB = 7
THREAD = _core.ThreadPool(1)
EXACT = Filters(key_caching=True, zeros=True)


class Cluster:
    """Two endpoints and one worker; a network that may lose and repeat messages, from a seed."""

    def __init__(self, *, dim: int = 1, mode: str = "bsp", loss: float = 0.0, seed: int = 0, **limits: int) -> None:
        self.dim, self.clock, self.now, self.loss = dim, 0, 0.0, loss
        self.random = random.Random(seed)
        self.bytes = 0  # of requests and replies
        self.endpoints: dict[str, _core.Endpoint] = {}
        ranges = []
        for i, (first, end) in enumerate(((0, SLOTS // 2), (SLOTS // 2, SLOTS))):
            endpoint = _core.Endpoint(SLOTS, [(first, end)], **limits)
            endpoint.set_map(1, [(first, end)])
            endpoint.start_job(JOB, mode, 0, False)
            endpoint.add_table(0, native_spec(dim))
            endpoint.admit(0, 1, 0)
            self.endpoints[f"tcp://h:{i}"] = endpoint
            ranges.append((first, end, f"tcp://h:{i}", i))
        policy = Policy(resend_after=0.1, longest=0.1, pause=0.01)
        self.requests = Requests((0, 1, JOB), map_of(1, *ranges), policy)

    def run(self, call: Any) -> Any:
        for _ in range(100_000):
            while asked := self.requests.take_outgoing():
                for address, frames in asked:
                    self.bytes += sum(map(len, frames))
                    for _ in range(self.copies()):
                        for _, reply in self.endpoints[address].handle(b"peer", frames):
                            self.bytes += sum(map(len, reply))
                            for _ in range(self.copies()):
                                self.requests.receive(address, reply, self.now)
            if call.done():
                return call.get()
            self.now = max(self.now, self.requests.next_time())
            self.requests.on_time(self.now)
        raise AssertionError("the call is never done")

    def copies(self) -> int:
        return (0 if self.random.random() < 0.5 else 2) if self.random.random() < self.loss else 1

    def submit(self, op: int, keys: Any, filter: Filter | None, **what: Any) -> Any:
        batch = _core.KeyBatch(np.asarray(keys, np.uint64), SLOTS, THREAD)
        if "values" in what:
            values = np.asarray(what["values"], np.float32).reshape(-1, self.dim)
            what["values"] = np.empty((len(batch), self.dim), np.float32)
            batch.sum(values, self.dim, what["values"], THREAD)
        if op == Op.PULL:
            what["out"] = np.full((len(batch), self.dim), np.nan, np.float32)
        call = self.requests.submit(
            op, 0, self.clock, self.now, self.now + 1000, hashes=batch.hashes, begins=batch.offsets, dim=self.dim,
            filter=filter, **what,
        )  # fmt: skip
        got = self.run(call)
        if op == Op.PULL:
            rows = np.empty((len(keys), self.dim), np.float32)
            batch.expand(got, self.dim, rows, THREAD)
            return rows
        return got

    def pull(self, keys: Any, filter: Filter | None = None) -> np.ndarray:
        return self.submit(Op.PULL, keys, filter)

    def push(self, keys: Any, grads: Any, filter: Filter | None = None) -> None:
        self.submit(Op.PUSH, keys, filter, values=grads)

    def tick(self) -> None:
        self.run(self.requests.tick(self.clock, [0], self.now, self.now + 1000))
        self.clock += 1

    def metrics(self, name: str) -> float:
        return sum(endpoint.metrics()[name] for endpoint in self.endpoints.values())

    def rows(self) -> list[tuple[int, tuple[float, ...]]]:
        found = []
        for endpoint in self.endpoints.values():
            for slot in range(SLOTS):
                hashes, rows = endpoint.shard(0).read_slot(slot)
                found += [(hash, tuple(row)) for hash, row in zip(hashes.tolist(), rows.tolist(), strict=True)]
        return sorted(found)


def one(filters: Filters) -> Filter:
    return make_filter(filters, 0, 1, JOB)


# ---- kernels ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2**64 - 1), max_size=20), st.integers(0, 2**32 - 1))
def test_a_digest_is_murmur3_of_the_list(hashes, seed):
    array = np.array(hashes, np.uint64)
    assert _core.digest(array, seed) == murmur3_128(array.tobytes(), seed)


def test_the_slow_digest_gives_the_published_one():
    found = murmur3_128(b"The quick brown fox jumps over the lazy dog")
    assert found[:8][::-1].hex() + found[8:][::-1].hex() == "e34bbc7bbc071b6c7a433ca9c49a9347"


@given(st.lists(st.sampled_from([0.0, 0.0, -0.0, 1.5, -3.0, np.inf, np.nan]), max_size=70), st.booleans())
def test_packing_leaves_out_what_is_zero_and_nothing_else(values, halves):
    array = np.array(values, np.float16).view(np.uint16) if halves else np.array(values, np.float32)
    words = array if halves else array.view(np.uint32)
    packed = _core.pack(array)
    if packed is None:
        assert -(-len(words) // 8) + np.count_nonzero(words) * array.itemsize >= array.nbytes
        return
    bits, kept = packed
    assert np.packbits(words != 0, bitorder="little").tobytes() == bits.tobytes()
    assert kept.tobytes() == array[words != 0].tobytes()
    assert bits.nbytes + kept.nbytes < array.nbytes


def neighbours(values: np.ndarray, dtype: int) -> tuple[np.ndarray, np.ndarray]:
    """The greatest number of 16 bits that is not above, and the least that is not below."""
    if dtype == WireDtype.BFLOAT16:
        low = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)  # towards zero
        high = np.where(low == values, low, (low.view(np.uint32) + np.uint32(0x10000)).view(np.float32))
    else:
        near = values.astype(np.float16)
        away = np.where(np.abs(near.astype(np.float32)) < np.abs(values), np.inf, 0).astype(np.float16)
        other = np.nextafter(near, np.copysign(away, values).astype(np.float16))
        exact = near.astype(np.float32) == values
        low, high = near.astype(np.float32), np.where(exact, near, other).astype(np.float32)
    return np.minimum(low, high), np.maximum(low, high)


def gap(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return np.where(low == high, 1.0, high.astype(np.float64) - low)


def widened(halves: np.ndarray, dtype: int) -> np.ndarray:
    if dtype == WireDtype.FLOAT16:
        return halves.view(np.float16).astype(np.float32)
    return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)


@pytest.mark.parametrize("dtype", [WireDtype.FLOAT16, WireDtype.BFLOAT16])
def test_a_narrowed_number_is_a_neighbour_and_right_on_average(dtype):
    random = np.random.default_rng(1)
    values = random.normal(size=(500, 3)).astype(np.float32)
    hashes = _core.mix(np.arange(500, dtype=np.uint64))
    low, high = neighbours(values, dtype)
    draws = 300
    total = np.zeros_like(values, np.float64)
    for message in range(draws):
        halves, squared, largest = _core.narrow(values, hashes, dtype, 5, message)
        wide = widened(halves, dtype)
        assert np.all((wide == low) | (wide == high))
        error = wide.astype(np.float64) - values
        assert squared == pytest.approx((error**2).sum(), rel=1e-9)
        assert largest == np.abs(error).max()
        total += error
    steps = total / draws / gap(low, high)
    assert np.abs(steps).max() < 5.5 * 0.5 / np.sqrt(draws)
    assert abs(steps.mean()) < 5 * 0.5 / np.sqrt(draws * values.size)


def test_kernels_check_their_arguments():
    hashes = np.arange(3, dtype=np.uint64)
    with pytest.raises(ValueError, match="float16 or bfloat16"):
        _core.narrow(np.zeros((3, 1), np.float32), hashes, WireDtype.FLOAT32, 0, 0)
    with pytest.raises(ValueError, match="4 values"):
        _core.narrow(np.zeros((4, 1), np.float32), hashes, WireDtype.FLOAT16, 0, 0)
    with pytest.raises(ValueError, match="float32\\[n, dim\\]"):
        _core.filter_significant(np.zeros(3, np.float32), hashes, 0.1, 0, 0)
    with pytest.raises(TypeError):
        _core.pack(np.zeros(3))
    with pytest.raises(TypeError):
        _core.digest(np.zeros(3), 0)


# ---- descriptions ----------------------------------------------------------------------------------------------------


def test_what_is_no_filter_is_refused():
    with pytest.raises(ValueError, match="gradients are sent as float32, float16, bfloat16, got 'int8'"):
        Filters(gradients="int8")
    with pytest.raises(ValueError, match="weights"):
        Filters(weights="float64")
    with pytest.raises(ValueError, match="threshold must be a finite number >= 0, got -1"):
        Filters(threshold=-1)
    with pytest.raises(ValueError, match="seed"):
        Filters(seed=2**64)
    with pytest.raises(TypeError, match=r"shoal\.Filters"):
        choose("zeros", "wide")
    with pytest.raises(TypeError, match=r"shoal\.Filters"):
        choose({"wide": True}, "wide")


def test_a_table_has_its_own_filters_or_those_of_the_store():
    assert choose(None, "wide") is None
    assert choose(EXACT, "wide") is EXACT
    assert choose({"wide": EXACT}, "wide") is EXACT
    assert choose({"wide": EXACT}, "deep") is None
    assert shoal.Filters is Filters
    assert EXACT.exact
    assert not Filters(threshold=0.1).exact
    assert not Filters(weights="float16").exact


# ---- at work ---------------------------------------------------------------------------------------------------------


def sparse(n: int, dim: int, share: float, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    return np.where(random.random((n, dim)) < share, random.normal(size=(n, dim)), 0).astype(np.float32)


def test_a_push_behind_its_pull_and_a_batch_that_comes_again_send_no_keys():
    cluster, filter = Cluster(), one(Filters(key_caching=True))
    keys = np.arange(1000)
    for turn in range(3):
        before, saved = cluster.bytes, counts_of(filter)["key_bytes_saved"]
        cluster.pull(keys, filter)
        cluster.push(keys, np.ones(1000), filter)
        cluster.tick()
        named = 1 if turn == 0 else 2
        assert counts_of(filter)["key_bytes_saved"] - saved == named * (8000 - 2 * 16)
        plain = 2 * 8000 + 2 * 4000
        assert cluster.bytes - before < plain - named * 7900 + 1000  # headers, and the tick
    assert cluster.metrics("key_lists") == 2
    assert cluster.metrics("key_list_hits") == 2 * 5
    assert cluster.metrics("key_list_misses") == counts_of(filter)["lists_lost"] == 0
    assert cluster.pull(keys).tolist() == [[-3.0]] * 1000


def test_a_list_that_the_server_gave_up_is_sent_again():
    cluster, filter = Cluster(key_list_bytes=3000), one(Filters(key_caching=True))  # room for one
    for turn in range(3):
        for first in (0, 1000):
            keys = np.arange(first, first + 500)
            cluster.pull(keys, filter)
            cluster.push(keys, np.ones(500), filter)
        cluster.tick()
        assert counts_of(filter)["lists_lost"] == 4 * turn
    assert counts_of(filter)["key_bytes_saved"] == 3 * 2 * (500 * 8 - 2 * 16) - 8 * 16
    assert cluster.metrics("key_lists") == 2
    assert cluster.pull(np.arange(500)).tolist() == [[-3.0]] * 500


def test_a_new_job_forgets_the_lists():
    cluster = Cluster()
    cluster.pull(np.arange(100), one(EXACT))
    assert cluster.metrics("key_lists") == 2
    for endpoint in cluster.endpoints.values():
        endpoint.start_job(JOB + 1, "bsp", 0, False)
    assert cluster.metrics("key_lists") == cluster.metrics("key_list_bytes") == 0


def test_a_digest_with_another_count_finds_nothing():
    cluster = Cluster()
    hashes = np.arange(20, dtype=np.uint64)  # of slot 0
    fields = {
        "op": Op.PULL,
        "dtype": WireDtype.FLOAT32,
        "dim": 1,
        "worker": 0,
        "incarnation": 1,
        "job": JOB,
        "epoch": 1,
    }

    def ask(payload: list[Any], **more: Any) -> int:
        frames = [_core.encode_header(payload=payload, **fields, **more), *payload]
        return _core.decode(cluster.endpoints["tcp://h:0"].handle(b"p", frames)[0][1]).status

    name = _core.digest(hashes, JOB)
    assert ask([name], count=20, digest=True) == _core.Status.UNKNOWN_KEY_LIST
    assert ask([hashes], count=20, keep=True) == _core.Status.OK
    assert ask([name], count=20, digest=True) == _core.Status.OK
    assert ask([name], count=19, digest=True) == _core.Status.UNKNOWN_KEY_LIST
    assert ask([bytes(16)], count=20, digest=True) == _core.Status.UNKNOWN_KEY_LIST


@pytest.mark.parametrize("dim", [1, 5])
def test_zeros_cost_a_bit_both_ways_and_nothing_is_changed(dim):
    plain, packed, filter = Cluster(dim=dim), Cluster(dim=dim), one(Filters(zeros=True))
    keys = np.arange(2000)
    grads = sparse(2000, dim, 0.1, 3)
    grads[7] = -0.0
    for cluster, used in ((plain, None), (packed, filter)):
        for _ in range(2):
            cluster.push(keys, grads, used)
            cluster.tick()
        assert cluster.pull(keys, used).tobytes() == plain.pull(keys).tobytes()
    assert packed.rows() == plain.rows()
    size, kept = grads.size, np.count_nonzero(grads.view(np.uint32))
    assert counts_of(filter)["gradient_bytes_saved"] == pytest.approx(2 * (4 * size - size / 8 - 4 * kept), abs=8)
    assert counts_of(filter)["weight_bytes_saved"] == packed.metrics("weight_bytes_saved") > 3 * size
    assert filter.metrics()["gradient_error"] == 0


def test_what_has_no_zeros_is_sent_as_it_is():
    cluster, filter = Cluster(), one(Filters(zeros=True))
    cluster.push(np.arange(100), np.ones(100), filter)
    cluster.tick()
    assert cluster.pull(np.arange(100), filter).tolist() == [[-1.0]] * 100
    assert counts_of(filter)["gradient_bytes_saved"] == counts_of(filter)["weight_bytes_saved"] == 0


@pytest.mark.slow
@settings(max_examples=rounds(60), deadline=None)
@given(st.integers(0, 2**32), st.booleans(), st.booleans(), st.sampled_from([0.0, 0.3]), st.sampled_from([600, 10**6]))
def test_exact_filters_change_no_bit_whatever_is_lost_and_repeated(seed, key_caching, zeros, loss, key_list_bytes):
    filter = one(Filters(key_caching=key_caching, zeros=zeros))
    random = np.random.default_rng(seed)
    batches = [random.integers(0, 300, size=random.integers(0, 80)) for _ in range(3)]
    plain = Cluster(dim=2, mode="asp")
    filtered = Cluster(dim=2, mode="asp", loss=loss, seed=seed, key_list_bytes=key_list_bytes)
    for turn in range(8):
        keys = batches[random.integers(3)]
        grads = sparse(len(keys), 2, 0.3, seed + turn)
        assert filtered.pull(keys, filter).tobytes() == plain.pull(keys).tobytes()
        plain.push(keys, grads)
        filtered.push(keys, grads, filter)
    assert filtered.rows() == plain.rows()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_in_16_bits_arrive_with_the_error_that_is_counted(dtype):
    cluster, filter = Cluster(dim=3), one(Filters(gradients=dtype, seed=5))
    keys, grads = np.arange(400), sparse(400, 3, 1.0, 8)
    cluster.push(keys, grads, filter)
    cluster.tick()
    error = -cluster.pull(keys).astype(np.float64) - grads
    assert filter.metrics()["gradient_error"] == pytest.approx((error**2).sum(), rel=1e-9)
    assert filter.metrics()["largest_error"] == np.abs(error).max() > 0
    assert counts_of(filter)["gradient_bytes_saved"] == grads.nbytes / 2
    low, high = neighbours(grads, WireDtype[dtype.upper()])
    assert np.all((-cluster.pull(keys) == low) | (-cluster.pull(keys) == high))


def test_16_bits_and_no_zeros_go_together():
    cluster, filter = Cluster(), one(Filters(gradients="bfloat16", weights="bfloat16", zeros=True))
    keys, grads = np.arange(800), sparse(800, 1, 0.2, 8)
    cluster.push(keys, grads, filter)
    cluster.tick()
    kept = np.count_nonzero(grads)
    assert counts_of(filter)["gradient_bytes_saved"] == pytest.approx(3200 - 100 - 2 * kept, abs=4)
    cluster.pull(keys, filter)
    assert counts_of(filter)["weight_bytes_saved"] == counts_of(filter)["gradient_bytes_saved"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_in_16_bits_are_right_on_average(dtype):
    cluster, filter = Cluster(mode="asp"), one(Filters(weights=dtype))
    keys = np.arange(300)
    cluster.push(keys, sparse(300, 1, 1.0, 2))
    exact = cluster.pull(keys)
    draws = 100
    pulled = [cluster.pull(keys, filter) for _ in range(draws)]
    low, high = neighbours(exact, WireDtype[dtype.upper()])
    assert all(np.all((rows == low) | (rows == high)) for rows in pulled)
    steps = (np.mean(pulled, axis=0, dtype=np.float64) - exact) / gap(low, high)
    assert np.abs(steps).max() < 5.5 * 0.5 / np.sqrt(draws)
    squared = sum(((rows.astype(np.float64) - exact) ** 2).sum() for rows in pulled)
    assert cluster.metrics("narrowed") == draws * 300
    assert cluster.metrics("narrowed_squared_error") == pytest.approx(squared, rel=1e-9)
    assert counts_of(filter)["weight_bytes_saved"] == draws * 600 == cluster.metrics("weight_bytes_saved")


def test_small_gradients_are_sent_seldom_and_right_on_average():
    filter = one(Filters(threshold=0.1, zeros=True, seed=4))
    cluster = Cluster(mode="asp")
    keys = np.arange(500)
    grads = np.full((500, 1), 0.01, np.float32)
    grads[:50] = 0.7
    turns = 40
    for _ in range(turns):
        cluster.push(keys, grads, filter)
    moved = -cluster.pull(keys)
    assert np.all(moved[:50] == moved[0])
    assert moved[0] == pytest.approx(0.7 * turns, rel=1e-5)
    mean = moved[50:].mean() / turns
    assert mean == pytest.approx(0.01, abs=5 * np.sqrt(0.1 * 0.01 / (450 * turns)))
    assert counts_of(filter)["rows_dropped"] + counts_of(filter)["rows_raised"] == 450 * turns
    assert counts_of(filter)["rows_raised"] == pytest.approx(0.1 * 450 * turns, abs=5 * np.sqrt(0.09 * 450 * turns))
    raised, dropped = counts_of(filter)["rows_raised"], counts_of(filter)["rows_dropped"]
    assert filter.metrics()["gradient_error"] == pytest.approx(raised * 0.09**2 + dropped * 0.01**2, rel=1e-5)
    # 50 + about 45 of 500 gradients, and a bit for each.
    assert counts_of(filter)["gradient_bytes_saved"] > turns * (2000 - 64 - 4 * 120)
    assert len(cluster.rows()) == 500


def sent_rows(filters: Filters, *, rank: int = 0, calls: int = 1, message_bytes: int = 1 << 20) -> list[np.ndarray]:
    """The rows in each message of the last one of some equal pushes."""
    policy = Policy(message_bytes=message_bytes)
    requests = Requests((rank, 1, JOB), map_of(1, (0, SLOTS, "tcp://h:0", 0)), policy)
    batch = _core.KeyBatch(np.arange(200, dtype=np.uint64), SLOTS, THREAD)
    what = {"hashes": batch.hashes, "begins": batch.offsets, "values": sparse(200, 2, 1.0, 5) * np.float32(0.3)}
    for _ in range(calls):
        requests.submit(Op.PUSH, 0, 0, 0.0, 9.0, dim=2, filter=make_filter(filters, rank, 1, JOB), **what)
    messages = [_core.decode(frames, replies=False) for _, frames in requests.take_outgoing()]
    return [message.values for message in messages if message.sequence == calls]


def test_a_part_of_a_push_carries_what_the_whole_would():
    filters = Filters(gradients="bfloat16", threshold=0.5, seed=9)
    (whole,) = sent_rows(filters)
    parts = sent_rows(filters, message_bytes=1000)
    assert len(parts) > 1
    assert np.array_equal(whole, np.concatenate(parts))
    assert not np.array_equal(whole, sent_rows(filters, calls=2)[0])
    assert not np.array_equal(whole, sent_rows(filters, rank=1)[0])


def test_a_push_that_is_sent_again_is_the_same_message():
    cluster = Cluster(mode="asp", loss=0.6, seed=3)
    calm = Cluster(mode="asp")
    filters = Filters(gradients="bfloat16", threshold=0.2, key_caching=True, zeros=True)
    there, here = one(filters), one(filters)
    keys = np.arange(300)
    for turn in range(20):
        grads = sparse(300, 1, 0.5, turn)
        cluster.push(keys, grads, there)
        calm.push(keys, grads, here)
    assert cluster.requests.counts["resent"] > 10
    assert cluster.rows() == calm.rows()

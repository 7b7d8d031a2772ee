"""The channel: who drives the sockets, what happens when nobody waits, a peer is silent, somebody interrupts."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import zmq

import shoal
from channel_peer import (
    ME,
    SPEC,
    TIMEOUT,
    Peer,
    answer,
    batch_of,
    eventually,
    push,
)
from forks import in_child
from maps import map_of
from shoal._core import Op, Policy, Status
from shoal.cluster.worker.channel import Channel, Role
from shoal.cluster.worker.remote_shard import RemoteShard


@contextlib.contextmanager
def connected(*peers, timeout=TIMEOUT, policy=None, **more):
    role = Role(ME, map_of(1, *(peer.range for peer in peers)))
    channel = Channel(role, timeout=timeout, policy=policy or Policy(resend_after=0.05), **more)
    try:
        yield channel
    finally:
        channel.close()
        for peer in peers:
            peer.close()


def pull(channel, keys):
    batch = batch_of(keys)
    rows = np.empty((len(batch), 2), np.float32)
    call = channel.begin(Op.PULL, 0, hashes=batch.hashes, begins=batch.offsets, out=rows, dim=2)
    call.result()
    return rows


def test_a_call_is_cut_over_two_loops_and_put_together_again():
    one, two = Peer(0, 5), Peer(5, 16)
    with connected(one, two) as channel:
        push(channel, range(1000)).result()
        assert np.all(pull(channel, range(1000)) == -1)
        assert one.rows + two.rows == 1000
        assert min(one.rows, two.rows) > 200
        metrics = channel.metrics()
        assert metrics["sent"] == metrics["answers"] == 4
        assert metrics["under_way"] == metrics["bytes_held"] == 0
        assert metrics["bytes_sent"] == 4 * 64 + 2 * 8 * 1000 + 8 * 1000


@pytest.mark.slow
def test_what_is_lost_is_sent_again():
    peer = Peer(0, 16, lambda number, asked: [] if number % 3 else None)
    with connected(peer) as channel:
        for number in range(1, 4):
            push(channel, range(10)).result()
            assert np.all(pull(channel, range(10)) == -number)
        assert channel.metrics()["resent"] >= 6


def test_a_push_that_nobody_waits_for_is_sent_again_while_all_threads_sleep():
    peer = Peer(0, 16, lambda number, asked: [] if number < 3 else None)
    with connected(peer) as channel:
        begun = push(channel, range(10))
        eventually(lambda: begun.done())
        assert peer.rows == 10


@pytest.mark.slow
def test_garbage_from_a_server_is_counted_and_passed_over():
    garbage = [[b""], [b"x" * 64], [b"SHOL" + bytes(60)], [b"a", b"b", b"c"], [bytes(200_000)]]
    peer = Peer(0, 16, lambda number, asked: [garbage[number - 1]] if number <= len(garbage) else None)
    with connected(peer) as channel:
        push(channel, range(10)).result()
        assert channel.metrics()["garbled"] == len(garbage)


def test_many_threads_share_one_channel():
    peers = Peer(0, 3), Peer(3, 16)
    with connected(*peers) as channel, ThreadPoolExecutor(8) as pool:

        def work(number):
            keys = range(1000 * number, 1000 * number + 7)
            for times in range(1, 31):
                begun = push(channel, keys)
                if number % 2:
                    begun.result()
                assert np.all(pull(channel, keys) == -times)
            return number

        assert list(pool.map(work, range(8))) == list(range(8))
        channel.drain(TIMEOUT)
        assert channel.metrics()["under_way"] == 0


def test_a_wait_of_its_own_ends_and_the_call_goes_on():
    free = threading.Event()
    peer = Peer(0, 16, lambda number, asked: None if free.is_set() else [])
    with connected(peer) as channel:
        begun = push(channel, range(10))
        with pytest.raises(shoal.DeadlineExceededError, match=r"push of table 0 at clock 0 is not done after 0\.05 s"):
            begun.result(0.05)
        assert not begun.done()
        with pytest.raises(shoal.DeadlineExceededError, match="1 calls are not done"):
            channel.drain(0.05)
        free.set()
        begun.result()
        assert peer.rows == 10


@pytest.mark.parametrize("timeout", ["a", float("nan"), True, [1.0]])
def test_a_wait_of_no_number_of_seconds_is_the_callers_error(timeout):
    with connected(Peer(0, 16)) as channel:
        call = push(channel, range(40))
        with pytest.raises(ValueError, match=rf"timeout must be a number of seconds, got {re.escape(repr(timeout))}$"):
            call.result(timeout)
        call.result(np.float32(60))


def test_draining_waits_for_what_was_asked_before_and_for_nothing_that_came_later():
    free = threading.Event()
    peer = Peer(0, 16, lambda number, asked: [] if asked.op == Op.STATS and not free.is_set() else None)
    with connected(peer) as channel, ThreadPoolExecutor(1) as pool:
        push(channel, range(10))
        draining = pool.submit(channel.drain)
        never = channel.begin(Op.STATS, 0)
        draining.result(TIMEOUT)
        assert not never.done()
        free.set()
        channel.drain()
        assert never.done()


@pytest.mark.slow
def test_the_deadline_of_a_call_names_who_was_silent_and_is_told_once_where_nobody_waited():
    peer = Peer(0, 16, lambda number, asked: [])
    with connected(peer, timeout=0.2) as channel:
        begun = push(channel, range(10))
        eventually(lambda: begun.done())
        with pytest.raises(shoal.DeadlineExceededError, match=f"server 0 at {peer.address} did not answer"):
            channel.raise_unobserved()
        channel.raise_unobserved()
        second = push(channel, range(10))
        for _ in range(2):
            with pytest.raises(shoal.DeadlineExceededError):
                second.result()
        channel.raise_unobserved()  # it was heard


def test_a_lost_server_wakes_who_waits_for_it():
    peer = Peer(0, 16, lambda number, asked: [])
    with connected(peer) as channel, ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(pull, channel, range(10)) for _ in range(3)]
        eventually(lambda: len(peer.asked) >= 3)
        channel.lose(0, "silent for 10.2 s")
        for one in waiting:
            with pytest.raises(shoal.ServerLostError, match=r"server 0 at .*silent for 10\.2 s"):
                one.result(TIMEOUT)
        with pytest.raises(shoal.ServerLostError):
            pull(channel, range(10))


def test_after_a_failure_for_good_every_call_raises_it():
    with connected(Peer(0, 16)) as channel:
        channel.fail(shoal.errors.FencedError("another has its place"))
        for _ in range(3):
            with pytest.raises(shoal.errors.FencedError, match="another has its place"):
                pull(channel, range(10))


def test_closing_ends_the_calls_of_other_threads():
    peer = Peer(0, 16, lambda number, asked: [])
    with connected(peer) as channel, ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(pull, channel, range(10)) for _ in range(3)]
        eventually(lambda: len(peer.asked) >= 3)
        channel.close()
        for one in waiting:
            with pytest.raises(shoal.errors.ClosedError):
                one.result(TIMEOUT)
        for call in (lambda: pull(channel, [1]), channel.tick, channel.drain, channel.metrics):
            with pytest.raises(shoal.errors.ClosedError):
                call()
        channel.close()


def begin_many(channel):
    return [push(channel, [1]) for _ in range(1025)]


def begin_large(channel):
    batch = batch_of(range(1025))
    rows = np.empty((1025, 2**16 - 1), np.float32)  # 256 MiB that nobody uses
    return [channel.begin(Op.PULL, 0, hashes=batch.hashes, begins=batch.offsets, out=rows, dim=rows.shape[1])]


@pytest.mark.slow
@pytest.mark.parametrize("begin", [begin_many, begin_large])
def test_whoever_asks_for_too_much_waits_until_some_of_it_is_done(begin):
    free = threading.Event()
    peer = Peer(0, 16, lambda number, asked: answer(asked, Status.NO_TABLE) if free.is_set() else [])
    with connected(peer) as channel, ThreadPoolExecutor(1) as pool:
        first = begin(channel)
        next_one = pool.submit(push, channel, range(10))
        with pytest.raises(TimeoutError):
            next_one.result(0.1)
        metrics = channel.metrics()
        assert metrics["under_way"] == len(first)
        assert metrics["under_way"] > 1024 or metrics["bytes_held"] > 2**28
        free.set()
        for one in (*first, next_one.result(TIMEOUT)):
            with pytest.raises(shoal.errors.ProtocolError, match="no such table"):
                one.result()
        assert channel.metrics()["bytes_held"] == channel.metrics()["under_way"] == 0


def test_a_tick_lists_the_tables_that_were_pushed_to_and_moves_the_clock():
    ticks = []

    def script(number, asked):
        if asked.op == Op.TICK:
            ticks.append((asked.clock, asked.tables.tolist()))
            return answer(asked, Status.OK)
        return None

    with connected(Peer(0, 16, script)) as channel:
        assert channel.clock == 0
        push(channel, range(10)).result()
        channel.tick().result()
        assert channel.clock == 1
        pull(channel, range(10))
        channel.tick().result()
        assert ticks == [(0, [0]), (1, [])]


def test_a_parked_pull_is_answered_later():
    deferred = []

    def script(number, asked):
        if asked.op == Op.PULL and not deferred:
            deferred.append(asked)
            return answer(asked, Status.DEFERRED)
        if asked.op == Op.PUSH:
            rows = np.full((deferred[0].count, 2), 5, np.float32)
            late = answer(deferred[0], Status.OK, payload=[rows], count=len(rows), dim=2, dtype=1)
            return late + answer(asked, Status.OK)
        return None

    with connected(Peer(0, 16, script)) as channel, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(pull, channel, range(10))
        eventually(lambda: deferred)
        push(channel, range(3)).result()
        assert np.all(waiting.result(TIMEOUT) == 5)


def test_refused_slots_go_to_who_has_them_by_a_newer_map():
    old, new = Peer(0, 16), Peer(0, 16)
    new.endpoint.set_map(2, [(8, 16)])
    moved = set(range(8, 16))

    def script(number, asked):
        slots = set((asked.hashes >> np.uint64(60)).astype(int).tolist())
        if not slots & moved:
            return None
        refused = np.array(sorted(slots & moved), np.uint16)
        return answer(asked, Status.WRONG_EPOCH, payload=[refused], count=len(refused), epoch=2)

    old.script = script
    asked_for = []

    def refresh():
        asked_for.append(1)
        return map_of(2, (0, 8, old.address, 0), (8, 16, new.address, 1))

    with contextlib.closing(new), connected(old, refresh=refresh) as channel:
        assert np.all(pull(channel, range(1000)) == 0)
        assert asked_for == [1]
        push(channel, range(1000)).result()
        assert np.all(pull(channel, range(1000)) == -1)
        assert old.rows + new.rows == 1000
        assert new.rows > 300
        channel.set_map(map_of(3, (0, 16, new.address, 1)))  # the old one is gone
        new.endpoint.set_map(3, [(0, 16)])
        pull(channel, range(1000))
        assert len(new.asked) == 4


def test_what_a_dead_server_has_not_answered_goes_at_once_over_a_connection_that_is_open():
    """The server answers nothing; then the map names its backup, to which nothing was sent before."""
    silent, backup = Peer(0, 16, lambda number, asked: []), Peer(0, 16)
    policy = Policy(resend_after=1000.0, longest=1000.0)
    with contextlib.closing(backup), connected(silent, policy=policy) as channel, ThreadPoolExecutor(1) as pool:
        channel.set_map(map_of(2, (0, 16, silent.address, 0), backups=[(silent.address, backup.address)]))
        eventually(lambda: backup.address in channel.client.connections)
        waiting = pool.submit(pull, channel, range(100))
        pushed = push(channel, range(50))
        eventually(lambda: len(silent.asked) == 2)
        assert backup.asked == []
        backup.endpoint.set_map(3, [(0, 16)])
        channel.set_map(map_of(3, (0, 16, backup.address, 1)))
        assert len(waiting.result(TIMEOUT)) == 100
        pushed.result()
        assert backup.rows == 50
        assert channel.metrics()["moved"] == 2
        assert channel.client.connections == [backup.address]


def test_an_interruption_while_it_waits_leaves_the_channel_in_order():
    free = threading.Event()
    peer = Peer(0, 16, lambda number, asked: None if free.is_set() else [])
    with connected(peer) as channel:
        for _ in range(3):
            before = len(peer.asked)

            def interrupt(before=before):
                eventually(lambda: len(peer.asked) > before)
                os.kill(os.getpid(), signal.SIGINT)

            helper = threading.Thread(target=interrupt)
            helper.start()
            with pytest.raises(KeyboardInterrupt):
                pull(channel, range(10))
            helper.join(TIMEOUT)
        free.set()
        assert np.all(pull(channel, range(10)) == 0)


def test_a_channel_that_was_dropped_ends_its_thread():
    peer = Peer(0, 16)
    with contextlib.closing(peer):
        channel = Channel(Role(ME, map_of(1, peer.range)), context=zmq.Context.instance())
        keeper = channel._background
        del channel
        gc.collect()
        keeper.join(TIMEOUT)
        assert not keeper.is_alive()


@pytest.mark.slow
def test_a_forked_child_is_told_whose_channel_it_is_even_in_the_midst_of_calls():
    peers = Peer(0, 7), Peer(7, 16)
    with connected(*peers) as channel:
        stop = threading.Event()

        def busy():
            while not stop.is_set():
                push(channel, range(50))
                pull(channel, range(50))

        def work():
            for call in (lambda: pull(channel, [1]), lambda: push(channel, [1]), channel.tick, channel.drain):
                with pytest.raises(shoal.errors.WrongProcessError, match="fork"):
                    call()
            with pytest.raises(shoal.errors.WrongProcessError):
                begun.result()
            channel.close()
            gc.collect()
            return "fine"

        peers[0].script = lambda number, asked: [] if asked.op == Op.STATS else None
        begun = channel.begin(Op.STATS, 0)
        threads = [threading.Thread(target=busy) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(5):
                assert in_child(work) == "fine"
        finally:
            stop.set()
            for thread in threads:
                thread.join(TIMEOUT)
        assert pull(channel, range(50)).max() < 0  # the parent goes on


@pytest.mark.parametrize("lost", [(), (1,), (2,), (1, 2), (1, 2, 3)], ids=str)
def test_a_pull_behind_a_push_sees_it_whatever_is_lost(lost):
    """The pull may arrive first: then it is made again."""
    peer = Peer(0, 16, lambda number, asked: [] if number in lost else None)
    with connected(peer) as channel:
        shard = RemoteShard(channel, 0, SPEC)
        for times in range(1, 4):
            batch = batch_of(range(10))
            rows = np.empty((10, 2), np.float32)
            behind = shard.pull_after(shard.push(batch, np.ones((10, 2), np.float32)), batch, rows)
            behind.result()
            assert behind.done()
            assert np.all(rows == -times)
        if not lost:
            assert len(peer.asked) == 6

"""Threads of a client: dropped calls, closing, forks, signals, the exit of the interpreter, the GIL held for long."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import textwrap
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import count

import numpy as np
import pytest
import zmq

import shoal
from channel_peer import ME, SPEC, TIMEOUT, Peer, answer, batch_of, eventually, push
from cluster_standin import cluster
from forks import in_child
from maps import map_of
from paths import ROOT
from shoal import _core
from shoal._core import Op, Policy, Status
from shoal.cluster.protocol.libzmq import backend
from shoal.cluster.worker.channel import Channel, Role
from shoal.cluster.worker.filters import Filters, make_filter
from shoal.cluster.worker.remote_shard import RemoteShard
from stores import joined

NEVER = 1e6  # seconds


@contextlib.contextmanager
def connected(*peers, policy=None, **more):
    role = Role(ME, map_of(1, *(peer.range for peer in peers)))
    with contextlib.ExitStack() as stack:
        for peer in peers:
            stack.callback(peer.close)
        channel = Channel(role, policy=policy or Policy(resend_after=0.05), **{"timeout": TIMEOUT} | more)
        yield stack.enter_context(contextlib.closing(channel))


@contextlib.contextmanager
def lone_client(*peers, report=None):
    """A client whose threads never look for signals or send again, without one in the background: others wake them."""
    with contextlib.ExitStack() as stack:
        for peer in peers:
            stack.callback(peer.close)
        context = stack.enter_context(zmq.Context())
        client = _core.Client(
            backend(), context.underlying, ME, map_of(1, *(peer.range for peer in peers)), timeout=NEVER,
            policy=Policy(resend_after=NEVER, longest=NEVER), signal_seconds=NEVER, report=report,
        )  # fmt: skip
        stack.callback(client.close)
        yield client


def begin_pull(client, keys):
    batch = batch_of(keys)
    return client.pull(0, batch, np.empty((len(batch), 2), np.float32), 2)


# ---- calls that nobody waits for -------------------------------------------------------------------------------------


@pytest.mark.combined
@pytest.mark.parametrize("lost", [(), (1,), (2,), (1, 2), (1, 2, 3)], ids=str)
@pytest.mark.parametrize("filters", [Filters(), Filters(key_caching=True, zeros=True, weights="bfloat16")], ids=str)
def test_a_push_pull_is_done_by_itself_whatever_is_lost(filters, lost):
    peer = Peer(0, 16, lambda number, asked: [] if number in lost else None)
    with connected(peer) as channel:
        shard = RemoteShard(channel, 0, SPEC, make_filter(filters, ME.rank, ME.incarnation, ME.job))
        for times in range(1, 4):
            batch = batch_of(range(10))
            rows = np.empty((10, 2), np.float32)
            behind = shard.pull_after(shard.push(batch, np.ones((10, 2), np.float32)), batch, rows)
            eventually(behind.done)
            behind.result(0)
            assert np.all(rows == -times)
        assert channel.metrics()["under_way"] == 0


def allocated():
    """Return the bytes that malloc has given out."""

    class Information(ctypes.Structure):
        _fields_ = [(f"field{number}", ctypes.c_size_t) for number in range(10)]

    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Information
    found = mallinfo2()
    return found.field4 + found.field7  # in blocks of mmap, in others


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="counts memory as glibc from 2.33 on does")
def test_calls_that_nobody_waits_for_leave_nothing_behind():
    calls = 10_000
    peer = Peer(0, 16)
    with connected(peer) as channel:

        def drop():
            left = []
            for number in range(calls):
                batch = batch_of([number % 50])
                grads = np.ones((1, 2), np.float32)
                left += [weakref.ref(batch), weakref.ref(grads)]
                channel.calls.push(0, batch, grads, 2)
            del batch, grads
            channel.drain()
            assert channel.metrics()["under_way"] == channel.metrics()["bytes_held"] == 0
            assert not any(ref() is not None for ref in left)
            peer.asked.clear()

        drop()
        before = allocated()
        drop()
        assert allocated() - before < 10 * calls  # bytes; a call has hundreds
        channel.raise_unobserved()


def test_the_arrays_of_calls_that_nobody_waits_for_are_released_by_the_next_call():
    peer = Peer(0, 16)
    with connected(peer) as channel:
        batch, grads = batch_of(range(10)), np.ones((10, 2), np.float32)
        kept = weakref.ref(batch), weakref.ref(grads)
        channel.calls.push(0, batch, grads, 2)
        del batch, grads
        eventually(lambda: not channel.client.has_pending)
        push(channel, range(3))
        assert [one() for one in kept] == [None, None]


@pytest.mark.parametrize("how", ["flush", "tick", "close"])
def test_the_errors_of_calls_that_nobody_waits_for_are_raised_once(how):
    with cluster() as made, joined(made.address, 1, consistency=shoal.ASP()) as (store,):
        for _ in range(300):
            batch = store.key_batch(np.arange(5, dtype=np.uint64)).native
            store.channel.calls.push(99, batch, np.ones((5, 1), np.float32), 1)
        eventually(lambda: not store.channel.client.has_pending)
        with pytest.raises(shoal.errors.ProtocolError, match=r"no such table; .* \(and 299 calls more\)"):
            getattr(store, how)()
        if how != "close":
            store.flush()
            store.tick()


# ---- closing ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_closing_ends_threads_that_wait_submit_and_add_callbacks():
    for _ in range(20):
        peer = Peer(0, 16, lambda number, asked: [])
        called, added = [], count()
        with connected(peer) as channel, ThreadPoolExecutor(9) as pool:
            begun = threading.Barrier(10)

            def waits(channel=channel, begun=begun):
                begun.wait(TIMEOUT)
                while True:
                    push(channel, [1]).result()

            def submits(channel=channel, begun=begun):
                begun.wait(TIMEOUT)
                while True:
                    push(channel, [1])

            def adds(channel=channel, begun=begun, called=called, added=added):
                begun.wait(TIMEOUT)
                while True:
                    push(channel, [1]).add_done_callback(called.append)
                    next(added)

            working = [pool.submit(work) for work in (waits, submits, adds) * 3]
            begun.wait(TIMEOUT)
            eventually(lambda peer=peer: len(peer.asked) > 10)
            channel.close()
            done, _ = wait(working, TIMEOUT)
            assert len(done) == 9
            for one in working:
                with pytest.raises(shoal.errors.ClosedError):
                    one.result()
        assert len(called) == next(added)
        assert len(set(map(id, called))) == len(called)
        assert all(isinstance(call.error, shoal.errors.ClosedError) for call in called)


def test_a_callback_of_a_settled_call_is_called_at_once_also_after_closing():
    peer = Peer(0, 16)
    with connected(peer) as channel:
        call = push(channel, [1])
        call.result()
        channel.close()
        called = []
        call.add_done_callback(called.append)
        assert called == [call]


# ---- callbacks that use the channel ----------------------------------------------------------------------------------


def test_a_callback_may_pull_and_add_callbacks_while_others_wait():
    peer = Peer(0, 16, lambda number, asked: [] if number in (2, 3, 5) else None)
    with connected(peer) as channel, ThreadPoolExecutor(2) as pool:
        seen, ended = [], threading.Event()

        def pulls(call):
            seen.append(begin_pull(channel.client, range(10)).result().tolist())
            if len(seen) < 5:
                push(channel, range(10)).add_done_callback(pulls)
            else:
                ended.set()

        push(channel, range(10)).add_done_callback(pulls)
        waiting = pool.submit(lambda: begin_pull(channel.client, range(3)).result())
        assert ended.wait(TIMEOUT)
        waiting.result(TIMEOUT)
        assert seen == [[[-times] * 2] * 10 for times in range(1, 6)]


def test_a_save_in_the_background_and_its_callback_may_use_the_store(tmp_path):
    keys = np.arange(50, dtype=np.uint64)
    with cluster(2) as made, joined(made.address, 1, consistency=shoal.ASP()) as (store,):
        table = store.table("t", optimizer=shoal.SGD(lr=1.0), init=shoal.Zeros())
        table.push(keys, np.ones((50, 1), np.float32)).result()
        seen, ended = [], threading.Event()

        def pulls(save):
            seen.append(table.pull(keys).sum())
            ended.set()

        store.save(tmp_path, wait=False).add_done_callback(pulls)
        assert table.pull(keys).sum() == -50
        assert ended.wait(TIMEOUT)
        assert seen == [-50]


def test_threads_that_wait_for_the_same_pull_expand_its_rows_once():
    """What one of them changes in the rows that it has is not overwritten for another."""
    peer = Peer(0, 16)
    pool = _core.ThreadPool(1)
    with connected(peer) as channel, ThreadPoolExecutor(4) as threads:
        for _ in range(10):
            keys = np.repeat(np.arange(1000, dtype=np.uint64), 500)
            rows = np.empty((len(keys), 2), np.float32)
            call = channel.calls.pull_per_key(0, batch_of(keys), rows, 2, pool)
            together, order = threading.Barrier(4), count()

            def change(call=call, rows=rows, together=together, order=order):
                together.wait(TIMEOUT)
                call.result()
                if next(order) == 0:
                    rows[:] = 7

            for one in [threads.submit(change) for _ in range(4)]:
                one.result(TIMEOUT)
            assert np.all(rows == 7)


# ---- who wakes whom --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_no_thread_sleeps_on_when_its_answer_has_come_also_while_the_gil_is_held():
    """Without a background thread, times to send again and looks for signals, a lost wake-up would last forever."""
    one, other = Peer(0, 5), Peer(5, 16)
    with lone_client(one, other) as client:
        stop = threading.Event()
        numbers = list(range(300_000))

        def hold():
            while not stop.is_set():
                numbers.sort(key=str)  # str: sorted as text and back, both without a switch of threads
                numbers.sort()
                stop.wait(0.002)

        def pulls(number):
            for _ in range(40):
                assert not begin_pull(client, range(number, 3 * number + 1)).result().any()
            return number

        holding = threading.Thread(target=hold)
        pool = ThreadPoolExecutor(8)
        working = [pool.submit(pulls, number) for number in range(8)]
        holding.start()
        try:
            _, late = wait(working, TIMEOUT)
        finally:
            stop.set()
            holding.join()
            client.close()  # ends those that would wait forever
            pool.shutdown()
        assert not late
        assert [one.result() for one in working] == list(range(8))


def test_a_thread_that_has_its_answer_leaves_the_sockets_to_another_that_waits():
    asked = []

    def script(number, one):
        asked.append(one)
        return [] if number < 3 else answer(asked[number - 3], Status.NO_TABLE)

    with lone_client(Peer(0, 16, script)) as client, ThreadPoolExecutor(2) as pool:
        calls = [begin_pull(client, [number]) for number in range(2)]
        waiting = []
        for call in calls:
            waiting.append(pool.submit(call.result))
            threading.Event().wait(0.05)  # the first one is at the sockets
        for one in waiting:
            begin_pull(client, [3])  # has the peer answer a call
            _, late = wait([one], TIMEOUT)
            if late:
                client.close()
            assert not late
            with pytest.raises(shoal.errors.ProtocolError):
                one.result()


def test_closing_wakes_every_thread_that_waits():
    with lone_client(Peer(0, 16, lambda number, asked: [])) as client, ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(begin_pull(client, [number]).result) for number in range(3)]
        threading.Event().wait(0.05)
        client.close()  # waits until nobody uses the sockets
        for one in waiting:
            with pytest.raises(shoal.errors.ClosedError):
                one.result(TIMEOUT)


@pytest.mark.slow
def test_an_interruption_ends_a_wait_also_if_another_thread_is_at_the_sockets():
    """The thread looks for signals by itself in a million seconds: it is woken."""
    free = threading.Event()
    peer = Peer(0, 16, lambda number, asked: answer(asked, Status.NO_TABLE) if free.is_set() else [])
    interrupted = threading.Event()

    def interrupt(*_):
        if not interrupted.is_set():  # one that comes before the sleep is not seen: it is sent until it is
            interrupted.set()
            raise KeyboardInterrupt

    def send():
        while not interrupted.wait(0.02):
            os.kill(os.getpid(), signal.SIGUSR1)

    handler = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with lone_client(peer) as client, ThreadPoolExecutor(1) as pool:
            at_sockets = pool.submit(begin_pull(client, [1]).result)
            eventually(lambda: len(peer.asked) == 1)
            call = begin_pull(client, range(10))
            guard = threading.Timer(TIMEOUT, client.close)
            guard.start()
            for _ in range(5):
                interrupted.clear()
                sender = threading.Timer(0.05, send)
                sender.start()
                with pytest.raises(KeyboardInterrupt):
                    call.result()
                sender.join()
                assert not call.done()
            guard.cancel()
            assert not at_sockets.done()
            client.lose(0, "enough")
            for wait_for in (call.result, lambda: at_sockets.result(TIMEOUT)):
                with pytest.raises(shoal.ServerLostError):
                    wait_for()
    finally:
        signal.signal(signal.SIGUSR1, handler)


# ---- forks and the end of the process --------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_forked_child_may_look_at_calls_that_were_done_while_the_parent_is_busy():
    """The locks of the client are as they were at the fork, perhaps held."""
    parent = os.getpid()

    def report():
        assert os.getpid() == parent

    peer = Peer(0, 16, lambda number, asked: answer(asked, Status.NO_TABLE) if asked.table else None)
    with lone_client(peer, report=report) as client:
        one, many = batch_of([1]), batch_of(range(30_000))
        grads = np.ones((30_000, 2), np.float32)
        failed = client.push(5, one, grads[:1], 2)  # is to be logged from now on
        good = client.push(0, one, grads[:1], 2)
        good.result()
        eventually(failed.done)
        stop = threading.Event()
        rounding = make_filter(Filters(gradients="bfloat16"), ME.rank, ME.incarnation, ME.job)

        def busy():
            while not stop.is_set():
                client.push(0, many, grads, 2, None, rounding).result()

        def look():
            assert good.result() is None
            with pytest.raises(shoal.errors.ProtocolError):
                failed.result()
            called = []
            good.add_done_callback(called.append)
            assert called == [good]
            return "fine"

        threads = [threading.Thread(target=busy) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(15):
                assert in_child(look) == "fine"
        finally:
            stop.set()
            for thread in threads:
                thread.join(TIMEOUT)


BEGIN = """
import os, sys, threading, time
import numpy as np
from channel_peer import ME, batch_of, eventually, push
from maps import map_of
from shoal.cluster.worker.channel import Channel, Role
channel = Channel(Role(ME, map_of(1, (0, 16, {address!r}, 0))), timeout={timeout})
calls = [push(channel, [number]) for number in range(10)]
"""


def run(peer, program, timeout=TIMEOUT):
    """Run a program whose channel is connected to a peer; return its output."""
    code = textwrap.dedent(BEGIN.format(address=peer.address, timeout=timeout)) + textwrap.dedent(program)
    path = os.pathsep.join([str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.slow
def test_a_child_of_a_fork_exits_as_any_other_while_a_thread_of_the_parent_waits():
    free = threading.Event()

    def script(number, asked):
        if asked.op == Op.STATS:
            free.set()
            return []
        return None if free.is_set() else []

    with contextlib.closing(Peer(0, 16, script)) as peer:
        found = run(
            peer,
            """
            from shoal._core import Op
            from shoal.errors import WrongProcessError
            waiting = threading.Thread(target=calls[0].result)
            waiting.start()
            eventually(lambda: channel.metrics()["sent"] >= 10)
            child = os.fork()
            if child == 0:
                for use in (calls[0].result, channel.drain, channel.tick, lambda: push(channel, [1])):
                    try:
                        use()
                    except WrongProcessError:
                        print("refused", flush=True)
                sys.exit(7)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
            channel.begin(Op.STATS, 0)  # has the peer answer from now on
            waiting.join()
            for call in calls:
                call.result()
            print("fine", flush=True)
            """,
        )
    assert found.split() == ["refused"] * 4 + ["7", "fine"]


@pytest.mark.slow
@pytest.mark.combined
@pytest.mark.parametrize("seconds", [0, 1], ids=["pending", "settled while it ends"])
@pytest.mark.parametrize("closed", ["", "import atexit; atexit.register(channel.close)"], ids=["open", "closed"])
def test_an_interpreter_ends_with_calls_under_way_and_threads_that_wait(closed, seconds):
    with contextlib.closing(Peer(0, 16, lambda number, asked: [])) as peer:
        found = run(
            peer,
            f"""
            class Slow:
                def __del__(self, sleep=time.sleep, write=os.write):  # when threads can no longer run Python
                    sleep({seconds})
                    write(1, b"over")
            {closed}
            def waits(call):
                try:
                    call.result()
                except Exception:
                    pass
            for call in calls[:3]:
                call.add_done_callback(print)
                threading.Thread(target=waits, args=(call,), daemon=True).start()
            eventually(lambda: channel.metrics()["sent"] >= 10)
            sys.slow = Slow()
            print("ends", flush=True)
            """,
            timeout=0.5 if seconds else TIMEOUT,
        )
    assert found.startswith("ends\n")
    assert found.endswith("over")

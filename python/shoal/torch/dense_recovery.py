"""DenseRecovery: sums over all workers of a fit, of which one may die and be replaced at any moment.

    gloo fails --> ask the others: has one of them the result?       yes: take it       (StepLog)
                                                                     no: all meet, worker 0 opens a place,
                                                                         all connect, the sum is made again

Under BSP a replacement begins at the clock C that its predecessor has not ended. No pull of clock C + 1 is answered
before it ends C, and a worker with a batch pulls before it sums gradients. So the others have at most made the step of
C, and summed the batch sizes of C + 1. A replacement takes the dense part from before the step of C, and repeats its
batch: the rows are those of C, and so all bits are those of its predecessor. What the others have completed of this
step it takes from one of them. Each worker therefore keeps the parameters from before its last step.

A sum that is completed by one worker and fails at another is taken by that one likewise. Gradients stay where the
backward pass left them until their sum is complete, so a sum can be made as often as needed.

Invariants
    R1  A sum of a clock is made once by all workers, or its result comes from one that has made it.
    R2  A group has one incarnation of each rank. A worker that learns of a newer one gives up its sum, and they form
        another group. One that learns of a newer one of its own rank ends.
    R3  Every wait ends: when the scheduler gives up a dead worker, when one leaves the fit, or after
        `STEP_SECONDS` without a new worker.

Threads: the one that trains; `_answer` runs in those of the peer server, under the lock of the log.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import torch

from shoal.errors import FencedError, WorkerLostError
from shoal.models.pass_coordinator import PassCoordinator
from shoal.store.base import Store
from shoal.torch.gloo_group import GlooGroup, enter_meeting, open_meeting
from shoal.torch.peers import PeerAddress, PeerServer, ask
from shoal.torch.step_log import GRADIENTS, JOIN, SIZES, Sizes, StepLog

log = logging.getLogger("shoal.torch")

STEP_SECONDS = 600.0  # for all workers to reach a step: each of them reads and computes a batch meanwhile
_SUM_SECONDS = 30.0  # after which workers meet again, if one has not come: it may be slow, or its connection lost
_CONNECT_SECONDS = 20.0  # for workers that have met to connect
_ASK_SECONDS = 0.5  # for an answer of some bytes
_STATE_SECONDS = 60.0  # between two packets of a dense part
_SILENT_SECONDS = 2.0  # for which a worker that has not answered is not asked again
_MET_SECONDS = 5.0  # for which a worker that has come to a meeting is there, unless it comes again
_LATE_SECONDS = 1.0  # after which a sum that others have given up cannot be completed by what is under way
_REMEDY = "start the fit again, with resume=True (--resume) if it writes checkpoints"
_FIRST_PAUSE, _LAST_PAUSE = 0.01, 0.25  # between two rounds of questions


class _Meet(msgspec.Struct, frozen=True, tag="meet"):
    """A worker waits for the others at ``what`` of a clock; ``used`` is the last place at which it has connected."""

    rank: int
    address: PeerAddress
    clock: int
    what: int
    used: str = ""


class _Met(msgspec.Struct, frozen=True):
    """The answer: what the asked worker knows, and the place that worker 0 has opened for this sum.

    ``incarnation`` is the newest one of the asking rank that it knows.
    """

    incarnation: int
    is_done: bool
    sizes: tuple[int, bool, bool] | None
    worked: int
    ended: int
    place: str


class _GetDense(msgspec.Struct, frozen=True, tag="dense"):
    """Request for the dense part from before the step of a clock, or after it (GRADIENTS)."""

    clock: int
    what: int


# Made here: msgspec crashes where several threads are the first to decode a type.
_question = msgspec.msgpack.Decoder(_Meet | _GetDense)
_met = msgspec.msgpack.Decoder(_Met)
_address = msgspec.msgpack.Decoder(PeerAddress)
_pack = msgspec.msgpack.encode


class _GivenUpError(Exception):
    """The sum cannot be completed by this group."""


class _Arrival(NamedTuple):
    """When a worker has come to a meeting, and to which one."""

    meet: _Meet
    at: float


class DenseRecovery:
    """The sums of one worker in a fit whose workers are replaced."""

    def __init__(self, store: Store, coordinator: PassCoordinator, steps: StepLog) -> None:
        self._store = store
        self._coordinator = coordinator
        self._steps = steps
        self._group: GlooGroup | None = None
        self._members: dict[int, int] = {}  # incarnations in the group
        self._used = ""  # the last place at which this worker has connected
        # Under the lock of the log:
        self._silent: dict[int, float] = {}  # until when ranks are not asked
        self._peers: dict[int, PeerAddress] = {}  # of all other ranks, the newest ones
        self._arrivals: dict[int, _Arrival] = {}
        self._place: tuple[str, int, int] | None = None  # opened by worker 0, for a sum
        self._news = threading.Event()
        self._server = PeerServer(store.host, store.incarnation, self._answer)

    # ---- joining and leaving -----------------------------------------------------------------------------------------

    def join(self, *, has_begun: bool) -> None:
        """Take the dense part of the other workers; at the beginning that of worker 0."""
        self._coordinator.publish_address(_pack(self._server.address))
        if not has_begun:
            self._coordinator.wait_for_all()
        for rank, content in self._coordinator.addresses().items():
            if content and rank != self._store.rank:
                self._know(rank, _address.decode(content))
        clock = self._store.clock
        if (self._store.rank or self._store.is_replacement) and self._take(clock, JOIN) is None and has_begun:
            raise WorkerLostError(
                f"all {self._store.num_workers} workers have died, and with them the dense part, which no server has: "
                f'{_REMEDY}; with dense="servers" it outlives them'
            )
        with self._steps.lock:
            self._steps.joined = clock
            self._steps.stepped = clock - 1  # at the latest
        if not has_begun:
            self._coordinator.wait_for_all()

    def close(self) -> None:
        """Answer no more."""
        self._group = None
        self._server.close()

    # ---- sums --------------------------------------------------------------------------------------------------------

    def sizes(self, make: Callable[[], torch.Tensor]) -> Sizes:
        """Sum the sizes of batches: ``make`` returns this worker's ``[examples, has_batch, moves]``."""
        clock = self._store.clock
        found = self._together(clock, SIZES, make)
        if isinstance(found, torch.Tensor):
            sizes = Sizes.of(found)
        else:
            assert found.sizes is not None
            sizes = Sizes(*found.sizes)
        self._steps.record_sizes(clock, sizes)
        return sizes

    def step(self, make: Callable[[], torch.Tensor], apply: Callable[[torch.Tensor], None]) -> None:
        """Sum the gradients, which ``make`` returns, and ``apply`` the sum to the dense part."""
        clock = self._store.clock
        found = self._together(clock, GRADIENTS, make)
        if isinstance(found, torch.Tensor):
            with self._steps.stepping(clock):
                apply(found)

    def has_ended(self, clock: int) -> bool:
        """Whether no worker had a batch at a clock that all of them have ended."""
        deadline = time.monotonic() + STEP_SECONDS
        pause = _FIRST_PAUSE
        while True:
            for found in self._meet(clock, SIZES).values():
                if found.ended == clock:
                    return True
                if found.worked >= clock:
                    return False
            self._check_others(deadline)
            time.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE)

    def _together(self, clock: int, what: int, make: Callable[[], torch.Tensor]) -> torch.Tensor | _Met:
        """Return the sum over all workers, or the answer of one that has it, whose dense part was taken then."""
        while True:
            if self._group is None:
                found = self._take(clock, what)
                if found is not None:
                    return found
            if what == GRADIENTS and self._steps.is_partial:
                self._complete(clock)
            numbers = make()
            assert self._group is not None
            try:
                self._group.all_reduce(numbers, functools.partial(self._check, clock, what, time.monotonic()))
                return numbers
            except (RuntimeError, _GivenUpError) as error:
                log.info("the sum of clock %d failed, and is made again: %s", clock, str(error).partition("\n")[0])
                self._group = None

    def _check(self, clock: int, what: int, begun: float) -> None:
        """Raise an error if a sum that waits for others is not to be waited for."""
        self._check_others(begun + 2 * STEP_SECONDS)
        with self._steps.lock:
            if {rank: peer.incarnation for rank, peer in self._peers.items()} != self._members:
                raise _GivenUpError("another worker was replaced")
            late = [
                rank
                for rank, one in self._arrivals.items()
                if (one.meet.clock, one.meet.what) == (clock, what) and begun < one.at
            ]
        if late and time.monotonic() > begun + _LATE_SECONDS:
            raise _GivenUpError(f"worker {late[0]} has given it up")

    # ---- when there is no group --------------------------------------------------------------------------------------

    def _take(self, clock: int, what: int) -> _Met | None:
        """Take what another worker has of a clock, or form a group with all others: then there is no answer."""
        began = time.monotonic()
        deadline = began + STEP_SECONDS + self._store.replacement_seconds
        pause, known = _FIRST_PAUSE, self._incarnations()
        while True:
            answers = self._meet(clock, what)
            for rank, found in answers.items():
                if found.is_done and (what == SIZES or self._take_dense(rank, clock, what)):
                    return found
            if what == JOIN:
                if self._store.rank == 0 and self._all_are_here(clock, what):
                    return None  # none of them has it
            elif self._form(clock, what, answers):
                return None
            if known != (known := self._incarnations()):
                deadline, pause = time.monotonic() + STEP_SECONDS, _FIRST_PAUSE
            self._check_others(deadline)
            if self._news.wait(pause):
                self._news.clear()
            pause = min(2 * pause, _LAST_PAUSE)

    def _meet(self, clock: int, what: int) -> dict[int, _Met]:
        """Tell all others where this worker waits; return the answers of those that answer."""
        meet = _Meet(self._store.rank, self._server.address, clock, what, self._used)
        answers: dict[int, _Met] = {}
        for rank, peer in self._others().items():
            with self._steps.lock:
                is_silent = self._silent.get(rank, 0.0) > time.monotonic()
            content = b"" if is_silent else self._ask(rank, peer, meet)
            if not content:
                continue
            answers[rank] = found = _met.decode(content)
            if found.incarnation > self._store.incarnation:
                raise FencedError(
                    f"worker {self._store.rank} (incarnation {self._store.incarnation}) was declared dead, and another "
                    f"process has taken its place: end this one"
                )
        return answers

    def _take_dense(self, rank: int, clock: int, what: int) -> bool:
        """Take the dense part of a worker from before or after the step of a clock; False: it does not have it."""
        peer = self._others()[rank]
        content = self._ask(rank, peer, _GetDense(clock, what), _STATE_SECONDS)
        if not content:
            return False
        if what == GRADIENTS:
            with self._steps.stepping(clock):
                self._steps.take(content)
        else:
            with self._steps.lock:
                self._steps.take(content)
        return True

    def _complete(self, clock: int) -> None:
        """Take the state of the optimizer from before a step, which no worker has made."""
        deadline = time.monotonic() + STEP_SECONDS
        while not any(self._take_dense(rank, clock, SIZES) and not self._steps.is_partial for rank in self._others()):
            self._check_others(deadline)
            time.sleep(_LAST_PAUSE)

    def _form(self, clock: int, what: int, answers: dict[int, _Met]) -> bool:
        """Form a group, if all others are here."""
        members = self._incarnations()
        try:
            if self._store.rank == 0:
                if not self._all_are_here(clock, what):
                    return False
                meeting, place = open_meeting(self._store, _CONNECT_SECONDS)
                with self._steps.lock:
                    self._place = (place, clock, what)
                    self._arrivals.clear()
                self._group = GlooGroup(self._store, meeting, _SUM_SECONDS)
            else:
                place = answers[0].place if 0 in answers else ""
                if not place:
                    return False
                self._used = place
                meeting = enter_meeting(self._store, place, _CONNECT_SECONDS)
                self._group = GlooGroup(self._store, meeting, _SUM_SECONDS)
        except RuntimeError as error:
            log.info("workers could not connect, and try again: %s", str(error).partition("\n")[0])
            return False
        finally:
            with self._steps.lock:
                self._place = None
        self._members = members
        return True

    def _all_are_here(self, clock: int, what: int) -> bool:
        """Whether all others wait at the same sum."""
        now = time.monotonic()
        with self._steps.lock:
            here = [
                rank
                for rank, one in self._arrivals.items()
                if (one.meet.clock, one.meet.what) == (clock, what)
                and one.meet.address == self._peers.get(rank)
                and now < one.at + _MET_SECONDS
            ]
        return len(here) == self._store.num_workers - 1

    def _check_others(self, deadline: float) -> None:
        """Raise WorkerLostError if one of the others will not come, or the error of this worker's own calls."""
        left = self._coordinator.find_left()
        lost = sorted(self._store.lost_workers)
        if not lost and not left and time.monotonic() < deadline:
            return
        if lost:
            raise WorkerLostError(
                f"worker {lost[0]} of {self._store.num_workers} has died and was not replaced within "
                f"{self._store.replacement_seconds:g} s, and all workers make the steps of the dense part together: "
                f"{_REMEDY}"
            )
        if left:
            raise WorkerLostError(
                f"worker {left[0]} of {self._store.num_workers} has ended this fit early, by an error, and all workers "
                f"make the steps of the dense part together: {_REMEDY}"
            )
        raise WorkerLostError(
            f"worker {self._store.rank} has waited {STEP_SECONDS:g} s for the other workers at a step of the dense "
            f"part, of which one does not come although it lives: {_REMEDY}"
        )

    # ---- the other workers -------------------------------------------------------------------------------------------

    def _others(self) -> dict[int, PeerAddress]:
        with self._steps.lock:
            return dict(self._peers)

    def _incarnations(self) -> dict[int, int]:
        return {rank: peer.incarnation for rank, peer in self._others().items()}

    def _know(self, rank: int, peer: PeerAddress) -> None:
        with self._steps.lock:
            self._learn_of(rank, peer)

    def _learn_of(self, rank: int, peer: PeerAddress) -> None:
        known = self._peers.get(rank)
        if known is None or known.incarnation < peer.incarnation:
            self._peers[rank] = peer
            self._silent.pop(rank, None)
            self._news.set()

    def _ask(self, rank: int, peer: PeerAddress, question: Any, seconds: float = _ASK_SECONDS) -> bytes:
        """Return the answer of another worker; empty: there is none."""
        try:
            return ask(peer, _pack(question), seconds)
        except TimeoutError:
            with self._steps.lock:
                self._silent[rank] = time.monotonic() + _SILENT_SECONDS
        except OSError:
            pass
        return b""

    def _answer(self, content: bytes) -> bytes:
        """Answer another worker."""
        try:
            question = _question.decode(content)
        except msgspec.DecodeError:
            return b""
        if isinstance(question, _GetDense):
            return self._steps.dense(question.clock, question.what, self._store.clock)
        with self._steps.lock:
            self._learn_of(question.rank, question.address)
            newest = self._peers[question.rank].incarnation
            place = ""
            if newest == question.address.incarnation:
                opened = self._place
                if opened is not None and opened[1:] == (question.clock, question.what) and opened[0] != question.used:
                    place = opened[0]
                else:
                    before = self._arrivals.get(question.rank)
                    self._arrivals[question.rank] = _Arrival(question, time.monotonic())
                    if before is None or before.meet != question:
                        self._news.set()
            is_done = self._steps.is_done(question.clock, question.what)
            sizes = self._steps.sizes.get(question.clock) if question.what == SIZES else None
            return _pack(_Met(newest, is_done, sizes, self._steps.worked, self._steps.ended, place))

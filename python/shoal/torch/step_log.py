"""StepLog: what the workers of a fit have computed together in the last steps, for one that was not there.

A step of a clock has two sums over all workers: of their batch sizes, and of the gradients of the dense part.

    clock c     SIZES (examples, has_batch, moves)    backward pushes    GRADIENTS, then the optimizer steps    tick

A worker that takes the place of one that died repeats the last step or two of its predecessor. Sums of these that are
complete cannot be made again, since other workers have gone on, so it takes their results from one of those.

Invariants
    L1  `sizes` has the last two clocks at which this worker has summed batch sizes.
    L2  If the last step of the dense part was at clock c, the module has its values from after it, and `before` those
        from before it; a worker that joined later has no `before` until it makes a step.

Threads: the one that trains changes this object and the dense part, under `lock`; those that answer questions read both
under it.
"""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Self

import torch
from torch import nn

JOIN, SIZES, GRADIENTS = range(3)  # what workers do together at a clock, in this order

_KEPT = 2  # results of SIZES


class Sizes(NamedTuple):
    """The sum of the sizes of all batches of a step, whether any worker has one, and whether any is to move."""

    examples: int
    has_batch: bool
    moves: bool

    @classmethod
    def of(cls, numbers: torch.Tensor) -> Self:
        """Return those of a sum."""
        examples, has_batch, moves = numbers.tolist()
        return cls(examples, bool(has_batch), bool(moves))


class StepLog:
    """The results of the last steps of one worker."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], optimizer: Callable[[], torch.optim.Optimizer | None]
    ) -> None:
        self.lock = threading.Lock()
        # Clock at which this worker has the values that all have; -1: not yet.
        self.joined = self.worked = self.ended = self.stepped = -1
        # By clock.
        self.sizes: dict[int, Sizes] = {}
        # Whether the state of the optimizer is missing.
        self.is_partial = False
        self._parameters = list(parameters)
        self._trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        self._optimizer = optimizer
        self._before: list[torch.Tensor] = []
        self._has_before = False

    def record_sizes(self, clock: int, sizes: Sizes) -> None:
        """Record a sum of batch sizes."""
        with self.lock:
            self.sizes[clock] = sizes
            while len(self.sizes) > _KEPT:
                del self.sizes[min(self.sizes)]
            if sizes.has_batch:
                self.worked = clock
            else:
                self.ended = clock

    @contextlib.contextmanager
    def stepping(self, clock: int) -> Iterator[None]:
        """Keep the values of the dense part from before the step that the block makes."""
        with self.lock:
            own = [parameter.detach() for parameter in self._trained]
            if not self._before:
                self._before = [torch.empty_like(one) for one in own]
            if own:
                torch._foreach_copy_(self._before, own)
            self._has_before = True
            yield
            self.stepped = clock

    # ---- for others --------------------------------------------------------------------------------------------------

    def is_done(self, clock: int, what: int) -> bool:
        """Whether this worker has what is done together at a clock; under `lock`."""
        if what == JOIN:
            return self.joined >= 0
        return clock in self.sizes if what == SIZES else self.stepped == clock

    def dense(self, clock: int, what: int, now: int) -> bytes:
        """Return the dense part with its optimizer's state from before or after the step of a clock; empty: unknown.

        ``what`` is GRADIENTS for after it; ``now`` is the clock of this worker. From before a step that this worker has
        made the optimizer's state is missing.
        """
        with self.lock:
            if self.joined < 0:
                return b""
            if what == GRADIENTS:
                is_now = self.stepped == clock
            else:
                is_now = self.stepped < clock <= now
                if self.stepped == clock and self._has_before:
                    return self._encoded(self._before, None)
            if not is_now or self.is_partial:
                return b""
            optimizer = self._optimizer()
            return self._encoded(
                [parameter.detach() for parameter in self._trained],
                {} if optimizer is None else optimizer.state_dict(),
            )

    def _encoded(self, trained: Sequence[torch.Tensor], optimizer: object) -> bytes:
        fixed = [parameter.detach() for parameter in self._parameters if not parameter.requires_grad]
        file = io.BytesIO()
        torch.save({"trained": list(trained), "fixed": fixed, "optimizer": optimizer}, file)
        return file.getvalue()

    # ---- from others -------------------------------------------------------------------------------------------------

    def take(self, content: bytes) -> None:
        """Take a dense part that `dense` of another worker has returned; under `lock`, or before others may ask."""
        state = torch.load(io.BytesIO(content), weights_only=True)
        fixed = [parameter for parameter in self._parameters if not parameter.requires_grad]
        with torch.no_grad():
            for name, own in (("trained", self._trained), ("fixed", fixed)):
                for parameter, its in zip(own, state[name], strict=True):
                    parameter.copy_(its)
        self.is_partial = state["optimizer"] is None
        optimizer = self._optimizer()
        if optimizer is not None and not self.is_partial:
            optimizer.load_state_dict(state["optimizer"])

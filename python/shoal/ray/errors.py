"""The errors of shoal that Ray has wrapped.

An exception that a method of an actor raises reaches its caller as a ``RayTaskError``, whose ``cause`` is the original
one; the death of an actor as an ``ActorDiedError`` without cause. Ray Train collects the errors of workers in one.

Threads: functions of their arguments.
"""

from __future__ import annotations

from collections.abc import Iterator

from ray.exceptions import RayError

from shoal.errors import ShoalError


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that it wraps, outermost first; each once."""
    front, seen = [error], set()
    while front:
        one = front.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        workers = getattr(one, "worker_failures", None)
        inner = [*workers.values()] if isinstance(workers, dict) else []
        inner += [getattr(one, "cause", None), one.__cause__, getattr(one, "base_exc", None)]
        front += [wrapped for wrapped in inner if isinstance(wrapped, BaseException)]


def unwrap(error: BaseException) -> BaseException:
    """Return the exception that an actor has raised, or the error of Ray if there is none."""
    return next((one for one in _causes(error) if not isinstance(one, RayError)), error)


def find_cause(error: BaseException) -> ShoalError | None:
    """Return the first error of shoal among those that an error wraps."""
    found = (one for one in _causes(error) if isinstance(one, ShoalError) and not isinstance(one, RayError))
    return next(found, None)

"""The modules for ``torch.compile``: custom ops, which are opaque to the compiler.

    shoal::embed       keys, anchor, module        --> rows, lookup
    shoal::embed_push  gradient, lookup            --> gradient of the anchor
    shoal::pool        keys, offsets, values, ...  --> pooled, lookup
    shoal::pool_push   gradient, values, lookup    --> gradients of the anchor and of the values

The arguments of an op are tensors and numbers. A module is identified by its number, a forward by its *lookup*: a
tensor of one number whose memory keeps alive the state that the forward left for backward. The gradient of the anchor,
which has no elements, keeps a push in the backward graph.

Without the compiler modules do not use these ops: an op costs about 60 us more than a Function.

Threads: as `shoal.torch.sparse`.
"""

from __future__ import annotations

import itertools
from typing import Any, Protocol
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor


class Module(Protocol):
    """A module that ops call, a `SparseModule`."""

    anchor: torch.nn.Parameter
    number: int

    @property
    def dim(self) -> int:
        """Floats in a row."""

    @property
    def records(self) -> bool:
        """Whether a backward of what forward returns now would reach the rows."""

    @property
    def pushes(self) -> bool:
        """Whether it would push."""


class BagModule(Module, Protocol):
    """An `EmbeddingBag`."""

    include_last_offset: bool


_numbers = itertools.count(1)
_modules: WeakValueDictionary[int, Module] = WeakValueDictionary()


class _SavedForBackward(np.ndarray[Any, Any]):
    """The memory of a lookup: one number, and what a forward left for its backward."""

    what: Any


_saved: WeakValueDictionary[int, _SavedForBackward] = WeakValueDictionary()


def register(module: Module) -> int:
    """Return the number that identifies a module in ops, while the module exists."""
    number = next(_numbers)
    _modules[number] = module
    return number


def _module(number: int) -> Any:
    module = _modules.get(number)
    if module is None:
        raise RuntimeError("the embedding that this compiled function calls no longer exists: compile the model again")
    return module


def _lookup_id(what: Any) -> Tensor:
    number = next(_numbers)
    memory = np.array([number], np.int64).view(_SavedForBackward)
    memory.what = what
    _saved[number] = memory
    return torch.from_numpy(memory)


def _saved_value(lookup: Tensor) -> Any:
    memory = _saved.get(int(lookup))
    if memory is None:
        raise RuntimeError(
            "the data that this backward needs from its forward no longer exists: the compiler copied the lookup"
        )
    return memory.what


def _empty() -> Tensor:
    return torch.empty(0)


# ---- Embedding -------------------------------------------------------------------------------------------------------


def embed(module: Module, keys: Tensor) -> Tensor:
    """Call an `Embedding` under the compiler."""
    pushes = module.pushes
    anchor = module.anchor if module.records else module.anchor.detach()
    rows: Tensor = _embed(keys, anchor, module.number, module.dim, pushes)[0]
    return rows


@torch.library.custom_op("shoal::embed", mutates_args=(), device_types="cpu")
def _embed(keys: Tensor, anchor: Tensor, module: int, dim: int, pushes: bool) -> tuple[Tensor, Tensor]:
    called = _module(module)
    lookup, shape = called.begin(keys)
    return called.expand(lookup, shape), _lookup_id(lookup if pushes else None)


@_embed.register_fake
def _(keys: Tensor, anchor: Tensor, module: int, dim: int, pushes: bool) -> tuple[Tensor, Tensor]:
    return anchor.new_empty((*keys.shape, dim)), anchor.new_empty((1,), dtype=torch.int64)


@torch.library.custom_op("shoal::embed_push", mutates_args=(), device_types="cpu")
def _embed_push(grad: Tensor, lookup: Tensor, module: int) -> Tensor:
    called, saved = _module(module), _saved_value(lookup)
    if saved is None:
        called.raise_unlearned()
    called.push_per_key(saved, grad)
    return _empty()


@_embed_push.register_fake
def _(grad: Tensor, lookup: Tensor, module: int) -> Tensor:
    return grad.new_empty((0,))


def _embed_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.module = inputs[2]
    ctx.save_for_backward(output[1])


def _embed_backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    (lookup,) = ctx.saved_tensors
    return None, _embed_push(grad, lookup, ctx.module), None, None, None


_embed.register_autograd(_embed_backward, setup_context=_embed_context)


# ---- EmbeddingBag ----------------------------------------------------------------------------------------------------


def pool(module: BagModule, keys: Tensor, offsets: Tensor | None, values: Tensor | None) -> Tensor:
    """Call an `EmbeddingBag` under the compiler."""
    pushes = module.pushes
    anchor = module.anchor if module.records else module.anchor.detach()
    last = module.include_last_offset
    out: Tensor = _pool(keys, offsets, values, anchor, module.number, module.dim, last, pushes)[0]
    return out


@torch.library.custom_op("shoal::pool", mutates_args=(), device_types="cpu")
def _pool(
    keys: Tensor,
    offsets: Tensor | None,
    values: Tensor | None,
    anchor: Tensor,
    module: int,
    dim: int,
    last: bool,
    pushes: bool,
) -> tuple[Tensor, Tensor]:
    called = _module(module)
    lookup, bags = called.begin(keys, offsets, values)
    out, pooled = called.pool(lookup, bags, keep=values is not None, pushes=pushes)
    return out, _lookup_id(pooled)


@_pool.register_fake
def _(
    keys: Tensor,
    offsets: Tensor | None,
    values: Tensor | None,
    anchor: Tensor,
    module: int,
    dim: int,
    last: bool,
    pushes: bool,
) -> tuple[Tensor, Tensor]:
    bags = keys.shape[0] if offsets is None else offsets.shape[0] - last
    return anchor.new_empty((bags, dim)), anchor.new_empty((1,), dtype=torch.int64)


@torch.library.custom_op("shoal::pool_push", mutates_args=(), device_types="cpu")
def _pool_push(
    grad: Tensor, values: Tensor | None, lookup: Tensor, module: int, records: bool
) -> tuple[Tensor, Tensor]:
    called, saved = _module(module), _saved_value(lookup)
    if records and not saved.pushes:
        called.raise_unlearned()
    slopes = called.push_pooled(saved, values, grad)
    return _empty(), _empty() if slopes is None else slopes


@_pool_push.register_fake
def _(grad: Tensor, values: Tensor | None, lookup: Tensor, module: int, records: bool) -> tuple[Tensor, Tensor]:
    nothing = grad.new_empty((0,))
    return nothing, grad.new_empty((0,)) if values is None else grad.new_empty(values.shape)


def _pool_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.module = inputs[4]
    ctx.save_for_backward(inputs[2], output[1])


def _pool_backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    values, lookup = ctx.saved_tensors
    anchor, slopes = _pool_push(grad, values, lookup, ctx.module, ctx.needs_input_grad[3])
    return None, None, None if values is None else slopes, anchor, None, None, None, None


_pool.register_autograd(_pool_backward, setup_context=_pool_context)

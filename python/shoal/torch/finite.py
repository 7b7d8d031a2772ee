"""Numbers that are not finite: no step makes the dense part of a model NaN, and no such part replaces a saved one.

Stores drop gradients of rows that are not finite (docs/optimizers.md). A dense part has no such guard, and one NaN in
it makes all later predictions NaN: the step raises an error instead, before it changes the part.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from shoal.models.features import Features
from shoal.table.table import Table
from shoal.torch.inputs import Inputs, Items

# Squares of larger gradients overflow in the state of Adam and Adagrad: their parameters would never move again.
GRADIENT_LIMIT = 1.8e19
_LARGE = 1e4  # a value that makes predictions overflow where others of about 1 do not


def are_finite(tensors: Iterable[torch.Tensor | None], limit: float = math.inf) -> bool:
    """Return whether all numbers are finite, and their absolute values below a limit."""
    given = [one.detach() for one in tensors if one is not None and one.numel()]
    if not given:
        return True
    sizes: Sequence[torch.Tensor] = torch._foreach_norm(given, float("inf"))
    return bool((torch.stack([size.float() for size in sizes]) < limit).all())


def check_finite(module: nn.Module) -> None:
    """Raise ValueError if a dense parameter or a buffer of a module holds NaN or infinity."""
    state: Mapping[str, object] = module.state_dict()
    for name, tensor in state.items():
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and not are_finite([tensor]):
            bad = int((~torch.isfinite(tensor)).sum())
            raise ValueError(
                f"{bad:,} of {tensor.numel():,} numbers of the dense parameter {name!r} are not finite: the model is "
                "not saved, and what was saved before stays; train with a smaller learning rate, or scale the values"
            )


def overflow(
    what: str, examples: int, inputs: Inputs, features: Features | int, tables: Iterable[Table] = ()
) -> ValueError:
    """Return the error of a batch, after so many examples, that would make the dense part NaN: it is not learned."""
    remedy = "scale such values to about 1, or use a smaller learning rate"
    why = largest_value(inputs, features)
    if not why and (why := _largest_row(inputs, features, tables)):
        remedy = "use a smaller learning rate of the table, or bound its steps by clip_norm or weight_decay"
    return ValueError(
        f"the {what} of a batch are not finite, that of the examples {examples + 1:,} to "
        f"{examples + len(inputs.keys):,} that this fit learns from: "
        f"{why or 'no value is large, so the steps are'}: {remedy}"
    )


def _largest_row(inputs: Inputs, features: Features | int, tables: Iterable[Table]) -> str:
    """Describe the row of a batch's keys with the largest weight, if that makes predictions overflow; else nothing."""
    names = _fixed_names(features)
    owners = [(int(key), name) for column, name in enumerate(names) for key in _unique(inputs.keys[:, column])]
    for name, items in {**inputs.lists, **inputs.sequences}.items():
        its = (items.keys, *items.side.values())
        owners += [(int(key), f"feature {name!r}") for keys in its for key in _unique(keys)]
    keys = np.array([key for key, _ in owners], np.uint64)
    found = [(np.abs(table.pull(keys)).reshape(len(keys), -1).max(axis=1), table.name) for table in tables if len(keys)]
    sizes, table_name = max(found, key=lambda one: float(one[0].max()), default=(np.zeros(1), ""))
    place = int(sizes.argmax())
    if not sizes[place] > _LARGE:
        return ""
    key, name = owners[place]
    return f"a weight of the row of key {key} of {name} in table {table_name!r} is {sizes[place]:.4g}"


def _unique(keys: torch.Tensor) -> npt.NDArray[np.uint64]:
    return np.unique(keys.numpy().view(np.uint64))


def _fixed_names(features: Features | int) -> list[str]:
    if isinstance(features, int):
        return [f"field {number}" for number in range(features)]
    return [f"feature {one.name!r}" for one in features.fixed]


def largest_value(inputs: Inputs, features: Features | int) -> str:
    """Describe the largest value of a batch, if it is large enough to make predictions overflow; else nothing."""
    found: list[tuple[float, str]] = []
    for values, names in _valued(inputs, features):
        sizes = torch.nan_to_num(values.detach().abs(), nan=float("inf"))
        example, column = divmod(int(sizes.argmax()), values.shape[1])
        value = float(values[example, column])
        of_key = f", by key {int(inputs.keys[example, column]) % 2**64}" if values is inputs.values else ""
        found.append((float(sizes.max()), f"{names[column]} is {value:.4g} in its example {example}{of_key}"))
    size, text = max(found, default=(0.0, ""))
    return text if size > _LARGE else ""


def _valued(inputs: Inputs, features: Features | int) -> Iterator[tuple[torch.Tensor, list[str]]]:
    pairs = [(inputs.values, _fixed_names(features))]
    if not isinstance(features, int):
        pairs.append((inputs.dense, [f"feature {one.name!r}" for one in features.dense for _ in range(one.size or 1)]))
    pairs += [
        (_of_items(items, values), [f"feature {name!r}"])
        for name, items in {**inputs.lists, **inputs.sequences}.items()
        for values in (items.weights, *(() if items.numeric is None else items.numeric.unbind(1)))
    ]
    yield from ((values, names) for values, names in pairs if values is not None and values.numel())


def _of_items(items: Items, values: torch.Tensor | None) -> torch.Tensor | None:
    """Return the largest of the items' values of each example, float32[n, 1]."""
    if values is None:
        return None
    largest = torch.zeros(len(items.offsets) - 1)
    return largest.scatter_reduce(0, items.example, values.abs(), "amax").unsqueeze(1)

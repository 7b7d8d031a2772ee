"""Numbers that are not finite: no step makes the dense part of a model NaN, and no such part replaces a saved one.

Stores drop gradients of rows that are not finite (docs/optimizers.md). A dense part has no such guard, and one NaN in
it makes all later predictions NaN: the step raises an error instead, before it changes the part.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from shoal.torch.features import Features
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


def overflow(what: str, examples: int, inputs: Inputs, features: Features | int) -> ValueError:
    """Return the error of a batch, after so many examples, that would make the dense part NaN: it is not learned."""
    why = largest_value(inputs, features) or "no value is large, so the steps are"
    return ValueError(
        f"the {what} of a batch are not finite, that of the examples {examples + 1:,} to "
        f"{examples + len(inputs.keys):,} that this fit learns from: {why}: scale such values to about 1, or use a "
        "smaller learning rate"
    )


def largest_value(inputs: Inputs, features: Features | int) -> str:
    """Describe the largest value of a batch, if it is large enough to make predictions overflow; else nothing."""
    found: list[tuple[float, str]] = []
    for values, names in _valued(inputs, features):
        sizes = torch.nan_to_num(values.detach().abs(), nan=float("inf"))
        example, column = divmod(int(sizes.argmax()), values.shape[1])
        value = float(values[example, column])
        found.append((float(sizes.max()), f"{names[column]} is {value:.4g} in its example {example}"))
    size, text = max(found, default=(0.0, ""))
    return text if size > _LARGE else ""


def _valued(inputs: Inputs, features: Features | int) -> Iterator[tuple[torch.Tensor, list[str]]]:
    if isinstance(features, int):
        pairs = [(inputs.values, [f"field {number}" for number in range(features)])]
    else:
        dense = [f"feature {one.name!r}" for one in features.dense for _ in range(one.size or 1)]
        pairs = [(inputs.values, [f"feature {one.name!r}" for one in features.fixed]), (inputs.dense, dense)]
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

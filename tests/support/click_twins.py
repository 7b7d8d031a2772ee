"""Small click models on small inputs, and what their slow twins in float64 are made of."""

import inspect

import numpy as np
import torch
from torch import nn

from shoal.models.features import Features
from shoal.torch.inputs import Inputs, Items
from shoal.torch.model import by_task
from shoal.torch.models import MODELS

ROWS = 40  # of each table: keys are 0 to 39
N, FIELDS, DIM = 7, 5, 4
SMALL = (8, 6)
LENGTHS = (0, 3, 1, 0, 2, 5, 0)  # of the sequence
SEQUENTIAL = ("din", "bst")
SEVERAL = ("mmoe", "ple", "esmm")  # labels


def make(name: str, dim: int) -> nn.Module:
    """A maker of torch's own tables, whose rows are large enough to see."""
    table = nn.Embedding(ROWS, dim)
    nn.init.normal_(table.weight, std=0.5)
    return table


def some(*, valued: bool = False, dense: int = 0, history: bool = False) -> Inputs:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.tensor(LENGTHS)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return Inputs(
        torch.randint(ROWS, (N, FIELDS), generator=generator),
        torch.rand(N, FIELDS, generator=generator) if valued else None,
        torch.randn(N, dense, generator=generator) if dense else None,
        sequences={
            "seen": Items(torch.randint(ROWS, (int(lengths.sum()),), generator=generator), offsets),
        }
        if history
        else {},
    )


def inputs_of(name: str, *, valued: bool = False, dense: int = 0) -> Inputs:
    """The inputs of `some` that a model of this name reads."""
    return some(valued=valued, dense=dense, history=name in SEQUENTIAL)


def described(dense: int = 0, *, history: bool = False, labels: dict | None = None) -> Features:
    """The features of `some`: the history has the rows of field 2."""
    numbers = [{"name": f"x{i}", "type": "number"} for i in range(dense)]
    seen = [{"name": "seen", "type": "sequence", "share": "2", "max_len": 5}] if history else []
    return Features([*map(str, range(FIELDS)), *numbers, *seen], labels=labels)


def features_of(name: str, dense: int = 0) -> Features:
    """The features of a model of this name."""
    labels = {"ctr": "click", "cvr": "conv"} if name in SEVERAL else None
    return described(dense, history=name in SEQUENTIAL, labels=labels)


def needed_by(name: str, dense: int = 0) -> dict:
    """The settings without which a model of this name cannot be made."""
    numbers = [f"x{i}" for i in range(dense)]
    return {"user": ["0", "1", "3", *numbers[:1]], "item": ["2", "4", *numbers[1:]]} if name == "two_tower" else {}


def settings_of(name: str, *, per_field: bool = False, dense: int = 0) -> dict:
    parameters = inspect.signature(MODELS[name]).parameters
    how = {"dim": DIM, "per_field": per_field, "attention": (3,), "task_hidden": (8,)}
    how = {key: value for key, value in how.items() if key in parameters} | needed_by(name, dense)
    return how | ({"hidden": SMALL} if "deep" in parameters else {})


def built(name: str, *, dense: int = 0, per_field: bool = False) -> nn.Module:
    return MODELS[name](make, features_of(name, dense), **settings_of(name, per_field=per_field, dense=dense))


def outputs_of(model: nn.Module, x: Inputs) -> dict[str, torch.Tensor]:
    """The logits that a model computes, by task."""
    return {name: one for name, one in by_task(model(x), model.features).items() if one.dim() == 1}


def wide(tensor) -> np.ndarray:
    return tensor.detach().double().numpy()


def rows_of(lookup, x: Inputs) -> np.ndarray:
    """The rows of fixed fields by plain indexing, float64[n, fields, dim], times the values."""
    keys = x.keys.numpy()
    tables = [wide(table.weight) for table in lookup.tables]
    out = np.stack([tables[i % len(tables)][keys[:, i]] for i in range(FIELDS)], axis=1)
    return out if x.values is None else out * wide(x.values)[:, :, None]


def flat_of(lookup, x: Inputs) -> np.ndarray:
    """The rows of fixed fields side by side, then the dense columns."""
    rows = rows_of(lookup, x).reshape(N, -1)
    return rows if x.dense is None else np.hstack([rows, wide(x.dense)])


def through(layers: nn.Module, x: np.ndarray) -> np.ndarray:
    """Fully connected layers and ReLUs, row by row."""
    for layer in layers.modules():
        if isinstance(layer, nn.Linear):
            bias = 0 if layer.bias is None else wide(layer.bias)
            x = np.array([[np.dot(w, row) for w in wide(layer.weight)] for row in x]) + bias
        elif isinstance(layer, nn.ReLU):
            x = np.maximum(x, 0)
    return x


def agrees(model: nn.Module, x: Inputs, expected: np.ndarray | dict[str, np.ndarray]) -> None:
    got = model(x)
    by_name = {"": expected} if isinstance(expected, np.ndarray) else expected
    outputs = {"": got} if isinstance(got, torch.Tensor) else got
    assert list(outputs) == list(by_name)
    for name, one in outputs.items():
        assert one.shape == (N,)
        assert one.dtype == torch.float32
        np.testing.assert_allclose(wide(one), by_name[name], rtol=2e-5, atol=2e-5)
    sum(one.sum() for one in outputs.values()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} is not part of the output"

"""Towers and their activations, against slow plain twins in float64."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import get_args

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the models are torch modules")

from torch import nn  # noqa: E402

from shoal.torch.activations import Activation, BatchNorm, Dice, activation  # noqa: E402
from shoal.torch.models.layers import initialize, tower  # noqa: E402

N, WIDTH = 9, 4


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(5)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def wide(tensor) -> np.ndarray:
    return tensor.detach().double().numpy()


CURVES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "relu": lambda x: np.maximum(x, 0),
    "prelu": lambda x: np.where(x > 0, x, 0.25 * x),
    "gelu": lambda x: x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2,
    "silu": lambda x: x * sigmoid(x),
    "leaky_relu": lambda x: np.where(x > 0, x, 0.01 * x),
    "tanh": np.tanh,
    "sigmoid": sigmoid,
    "identity": lambda x: x,
}


@pytest.mark.parametrize("name", [name for name in get_args(Activation) if name != "dice"])
def test_an_activation_has_its_formula(name):
    x = torch.randn(N, WIDTH)
    np.testing.assert_allclose(wide(activation(name, WIDTH)(x)), CURVES[name](wide(x)), rtol=1e-6, atol=1e-6)


def test_dice_gates_by_the_statistics_of_the_batch_and_later_by_running_ones():
    x = torch.randn(N, WIDTH) * 3 + 1
    dice = Dice(WIDTH)
    nn.init.normal_(dice.alpha)

    def expected(mean: np.ndarray, variance: np.ndarray) -> np.ndarray:
        p = sigmoid((wide(x) - mean) / np.sqrt(variance + 1e-8))
        return p * wide(x) + (1 - p) * wide(dice.alpha) * wide(x)

    mean, variance = wide(x).mean(axis=0), wide(x).var(axis=0)
    np.testing.assert_allclose(wide(dice(x)), expected(mean, variance), rtol=1e-5, atol=1e-6)
    dice.eval()
    running = 0.01 * mean, 0.99 + 0.01 * variance * N / (N - 1)  # torch keeps the unbiased variance
    np.testing.assert_allclose(wide(dice(x)), expected(*running), rtol=1e-5, atol=1e-6)


def test_dice_and_prelu_learn_a_slope_for_each_unit():
    for name in ("dice", "prelu"):
        made = activation(name, WIDTH)
        made(torch.randn(N, WIDTH)).square().sum().backward()
        (slope,) = made.parameters()
        assert slope.shape == (WIDTH,)
        assert (slope.grad != 0).all()


@pytest.mark.parametrize("examples", [0, 1])
@pytest.mark.parametrize("how", [{"batch_norm": True}, {"activation": "dice"}])
def test_a_batch_of_fewer_than_two_examples_is_normalized_by_the_running_means(examples, how):
    made = tower(WIDTH, [3], **how)
    before = [buffer.clone() for buffer in made.buffers()]
    x = torch.randn(examples, WIDTH)
    out = made(x)
    assert out.shape == (examples, 3)
    assert torch.isfinite(out).all()
    out.sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(before, made.buffers(), strict=True))
    assert torch.equal(out, made.eval()(x))


def test_batch_norm_has_the_bits_of_torch():
    own, torchs = BatchNorm(WIDTH), nn.BatchNorm1d(WIDTH)
    for _ in range(3):
        x = torch.randn(N, WIDTH)
        assert torch.equal(own(x), torchs(x))
    assert torch.equal(own.eval()(x), torchs.eval()(x))


def test_a_layer_is_normalized_then_activated_then_dropped():
    kinds = [type(layer) for layer in tower(WIDTH, [3, 2], batch_norm=True, activation="prelu", dropout=0.5)]
    assert kinds == 2 * [nn.Linear, BatchNorm, nn.PReLU, nn.Dropout]
    kinds = [type(layer) for layer in tower(WIDTH, [3], layer_norm=True, activation="dice")]
    assert kinds == [nn.Linear, nn.LayerNorm, Dice]
    assert [type(layer) for layer in tower(WIDTH, [3, 2])] == 2 * [nn.Linear, nn.ReLU]


@pytest.mark.parametrize("how", [{"batch_norm": True}, {"layer_norm": True}])
def test_a_tower_computes_its_layers(how):
    made, x = tower(WIDTH, [5, 3], activation="silu", **how), torch.randn(N, WIDTH)
    expected = wide(x)
    for layer in (one for one in made if isinstance(one, nn.Linear)):
        expected = expected @ wide(layer.weight).T + wide(layer.bias)
        axis = 0 if "batch_norm" in how else 1
        mean, variance = expected.mean(axis=axis, keepdims=True), expected.var(axis=axis, keepdims=True)
        expected = (expected - mean) / np.sqrt(variance + 1e-5)
        expected = expected * sigmoid(expected)
    np.testing.assert_allclose(wide(made(x)), expected, rtol=1e-4, atol=1e-5)


def test_a_tower_runs_under_autocast():
    for name in get_args(Activation):
        made = tower(WIDTH, [3], activation=name, batch_norm=True)
        with torch.autocast("cpu", torch.bfloat16):
            out = made(torch.randn(N, WIDTH))
        out.float().sum().backward()
        assert all(torch.isfinite(parameter.grad).all() for parameter in made.parameters())


@pytest.mark.parametrize(
    ("init", "variance"),
    [
        ("xavier_normal", lambda n, m: 2 / (n + m)),
        ("xavier_uniform", lambda n, m: 2 / (n + m)),
        ("kaiming_normal", lambda n, _: 2 / n),
    ],
)
def test_initial_weights_have_the_variance_of_their_init(init, variance):
    widths = [300, 200, 100]
    made = tower(widths[0], widths[1:], init=init)
    layers = [one for one in made if isinstance(one, nn.Linear)]
    for layer, (before, after) in zip(layers, pairwise(widths), strict=True):
        assert np.isclose(wide(layer.weight).var(), variance(before, after), rtol=0.05)
        assert abs(wide(layer.weight).mean()) < 0.002
        assert not layer.bias.any()


def test_without_an_init_weights_are_those_of_torch():
    torch.manual_seed(3)
    made = tower(WIDTH, [3])
    torch.manual_seed(3)
    assert torch.equal(made[0].weight, nn.Linear(WIDTH, 3).weight)
    before = made[0].weight.clone()
    initialize(made, None)
    assert torch.equal(made[0].weight, before)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"activation": "dise"}, "no activation 'dise': did you mean 'dice'"),
        ({"init": "xavier_norm"}, "no init 'xavier_norm': did you mean 'xavier_normal'"),
        ({"batch_norm": True, "layer_norm": True}, "pass one of them"),
    ],
)
def test_what_a_tower_cannot_have_is_told(how, says):
    with pytest.raises(ValueError, match=says):
        tower(WIDTH, [3], **how)

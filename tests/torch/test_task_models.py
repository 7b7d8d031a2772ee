"""Models of several tasks against slow twins in float64: their outputs, and the loss of ESMM."""

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the models are torch modules")

from torch import nn  # noqa: E402

from click_twins import (  # noqa: E402
    DIM,
    SMALL,
    N,
    agrees,
    described,
    flat_of,
    make,
    some,
    through,
    wide,
)
from shoal.models.features import Features  # noqa: E402
from shoal.torch.inputs import Inputs  # noqa: E402
from shoal.torch.model import losses_of  # noqa: E402
from shoal.torch.models import ESMM, MODELS, PLE, MMoE  # noqa: E402
from shoal.torch.models.esmm import both  # noqa: E402

LABELS = {
    "ctr": "click",
    "cvr": {"column": "conv", "mask": "ctr", "weight": 2.0},
    "stay": {"column": "s", "loss": "mse"},
}
HOW = {"dim": DIM, "hidden": SMALL}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(5)


def mixed(gate, x: np.ndarray, experts: list[np.ndarray]) -> np.ndarray:
    """The mean of experts by the softmax of a linear function, example by example."""
    out = []
    for i, scores in enumerate(x @ wide(gate.weights.weight).T):
        total = sum(math.exp(score) for score in scores)
        out.append(sum(math.exp(score) / total * its[i] for score, its in zip(scores, experts, strict=True)))
    return np.array(out)


def task_outputs(model, inputs: list[np.ndarray]) -> dict[str, np.ndarray]:
    towers = zip(LABELS, model.towers.towers, inputs, strict=True)
    return {task: through(its, x)[:, 0] for task, its, x in towers}


@pytest.mark.parametrize("task_hidden", [(), (3, 2)])
def test_mmoe_gives_each_task_its_mixture_of_the_experts(task_hidden):
    x = some(valued=True, dense=2)
    model = MMoE(make, described(2, labels=LABELS), experts=3, task_hidden=task_hidden, **HOW)
    first = flat_of(model.embedding, x)
    experts = [through(expert, first) for expert in model.experts]
    agrees(model, x, task_outputs(model, [mixed(gate, first, experts) for gate in model.gates]))


@pytest.mark.parametrize("layers", [1, 3])
def test_ple_mixes_a_tasks_own_experts_and_the_shared_ones(layers):
    x = some(valued=True, dense=2)
    how = {"experts": 2, "shared": 3, "layers": layers, "task_hidden": (3,)}
    model = PLE(make, described(2, labels=LABELS), **how, **HOW)
    for gate in [gate for layer in model.layers for gate in (*layer.gates, layer.shared_gate) if gate is not None]:
        nn.init.normal_(gate.weights.weight, std=5)  # later inputs are small
    inputs = [flat_of(model.embedding, x)] * 4
    for number, layer in enumerate(model.layers):
        own = [[through(expert, inputs[task]) for expert in layer.own[task]] for task in range(3)]
        shared = [through(expert, inputs[3]) for expert in layer.shared]
        after = [mixed(layer.gates[task], inputs[task], own[task] + shared) for task in range(3)]
        if number < layers - 1:
            after.append(mixed(layer.shared_gate, inputs[3], [*own[0], *own[1], *own[2], *shared]))
        inputs = after
    agrees(model, x, task_outputs(model, inputs))


def test_esmm_has_the_logit_of_click_and_conversion():
    x = some(valued=True, dense=2)
    model = ESMM(make, described(2, labels=LABELS), **HOW)
    expected = task_outputs(model, [flat_of(model.embedding, x)] * 3)
    p = 1 / (1 + np.exp(-expected["ctr"])) / (1 + np.exp(-expected["cvr"]))
    agrees(model, x, {**expected, "ctcvr": np.log(p / (1 - p))})


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [(0.0, 0.0, -math.log(3)), (80.0, 80.0, 80 - math.log(2)), (-300.0, -300.0, -600.0), (50.0, -200.0, -200.0)],
)
def test_the_logit_of_both_is_exact_where_probabilities_are_0_or_1_to_float32(a, b, expected):
    first, second = torch.tensor([a], requires_grad=True), torch.tensor([b], requires_grad=True)
    logit = both(first, second)
    logit.backward()
    assert logit.item() == pytest.approx(expected, rel=1e-6)
    assert 0 <= first.grad.item() <= 1
    assert first.grad.item() + second.grad.item() > 0.5


def esmm_loss(z: dict[str, np.ndarray], y: dict[str, np.ndarray], w: np.ndarray) -> float:
    total = 0.0
    for i in range(len(w)):
        p = 1 / (1 + math.exp(-z["ctr"][i]))
        q = p / (1 + math.exp(-z["cvr"][i]))
        total -= w[i] * math.log(p if y["ctr"][i] else 1 - p)
        if not (y["ctr"][i] and math.isnan(y["cvr"][i])):
            total -= 2 * w[i] * math.log(q if y["ctr"][i] and y["cvr"][i] else 1 - q)
        if not math.isnan(y["stay"][i]):
            total += w[i] * (z["stay"][i] - y["stay"][i]) ** 2
    return total / len(w)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_loss_of_esmm_is_that_of_the_click_and_of_click_and_conversion_over_all_examples(rng, weighted):
    n = 60
    model = ESMM(make, described(labels=LABELS), **HOW).double()
    outputs = {name: torch.from_numpy(rng.standard_normal(n)).requires_grad_() for name in ("ctr", "cvr", "stay")}
    clicks = rng.integers(0, 2, n).astype(float)
    labels = {"ctr": clicks, "cvr": rng.integers(0, 2, n).astype(float), "stay": rng.random(n)}
    labels["cvr"][::7] = labels["stay"][3] = math.nan
    assert {(click, conv) for click, conv in zip(clicks, labels["cvr"], strict=True) if conv == conv} == {
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    }
    assert set(clicks[::7]) == {0, 1}
    weights = rng.random(n) if weighted else np.ones(n)
    got = model.loss(
        {**outputs, "ctcvr": both(outputs["ctr"], outputs["cvr"])},
        Inputs(torch.zeros(n, 1)),
        {name: torch.from_numpy(one) for name, one in labels.items()},
        torch.from_numpy(weights) if weighted else None,
        losses_of(model.features),
    )
    z = {name: wide(one) for name, one in outputs.items()}
    assert float(got.detach()) == pytest.approx(esmm_loss(z, labels, weights), rel=1e-9)
    got.backward()
    gone = (clicks == 1) & np.isnan(labels["cvr"])
    np.testing.assert_array_equal(wide(outputs["cvr"].grad) == 0, gone)
    for name, one in outputs.items():  # central differences of the twin
        for i in range(0, n, 13):
            z[name][i] += 1e-6
            above = esmm_loss(z, labels, weights)
            z[name][i] -= 2e-6
            slope = (above - esmm_loss(z, labels, weights)) / 2e-6
            z[name][i] += 1e-6
            assert one.grad[i].item() == pytest.approx(slope, abs=1e-8)


@pytest.mark.parametrize("name", ["mmoe", "ple", "esmm"])
def test_a_model_of_several_tasks_needs_two(name):
    with pytest.raises(ValueError, match="learns several tasks, and there are 1 named labels: name two or more"):
        MODELS[name](make, Features(["ad"], labels={"ctr": "click"}))


@pytest.mark.parametrize(
    ("make_it", "says"),
    [
        (lambda: MMoE(make, described(labels=LABELS), experts=0), "experts is 0"),
        (lambda: PLE(make, described(labels=LABELS), shared=0), "shared is 0: pass a whole number from 1"),
        (lambda: ESMM(make, described(labels={"ctr": "c", "ctcvr": "b"})), "a label is named 'ctcvr'"),
        (
            lambda: ESMM(make, described(labels={"ctr": "c", "spend": {"column": "x", "loss": "mse"}})),
            "the loss of label 'spend' is 'mse', and a conversion is 0 or 1",
        ),
    ],
)
def test_what_cannot_be_built_is_told(make_it, says):
    with pytest.raises(ValueError, match=says):
        make_it()


def test_the_outputs_of_the_models_are_those_of_the_labels_in_order():
    for kind, more in ((MMoE, []), (PLE, []), (ESMM, ["ctcvr"])):
        model = kind(make, described(labels=LABELS), **HOW)
        assert list(model(some())) == [*LABELS, *more]
        assert model(some())["ctr"].shape == (N,)

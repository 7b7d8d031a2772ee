"""Losses against their formulas in float64, and what a function of a user may do."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="losses are functions of tensors")

from torch.nn.functional import binary_cross_entropy_with_logits, poisson_nll_loss  # noqa: E402

import shoal  # noqa: E402
from shoal.base import own_code  # noqa: E402
from shoal.torch.click_model import ClickModel  # noqa: E402
from shoal.torch.losses import loss_of  # noqa: E402
from shoal.torch.recipe import Recipe, recipe_of  # noqa: E402

N = 40
LOGITS = torch.linspace(-9, 9, N)
LABELS = (torch.arange(N) % 3 == 0).float()
WEIGHTS = torch.linspace(0.5, 2, N)


@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize("spec", ["bce", {"name": "bce", "pos_weight": 3}, {"name": "focal", "gamma": 0}])
def test_bce_is_torchs_and_so_is_a_focal_loss_without_focus(spec, weights):
    factor = torch.tensor(float(spec.get("pos_weight", 1))) if isinstance(spec, dict) else None
    expected = binary_cross_entropy_with_logits(LOGITS, LABELS, weights, pos_weight=factor)
    torch.testing.assert_close(loss_of(spec)(LOGITS, LABELS, weights), expected, rtol=1e-6, atol=0)


def test_bce_without_settings_has_the_bits_of_torch():
    for spec in ("bce", {"name": "bce"}, {"name": "bce", "pos_weight": 1.0}):
        assert torch.equal(loss_of(spec)(LOGITS, LABELS, None), binary_cross_entropy_with_logits(LOGITS, LABELS))


@pytest.mark.parametrize("gamma", [0.5, 2.0])
@pytest.mark.parametrize("alpha", [None, 0.25])
@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_a_focal_loss_has_the_formula_of_torchvision(gamma, alpha, weights):
    x, y = (one.double().numpy() for one in (LOGITS, LABELS))
    p = 1 / (1 + np.exp(-x))
    likelihood = p * y + (1 - p) * (1 - y)
    losses = -np.log(likelihood) * (1 - likelihood) ** gamma
    if alpha is not None:
        losses *= alpha * y + (1 - alpha) * (1 - y)
    expected = np.mean(losses * (1 if weights is None else weights.double().numpy()))
    settings = {"name": "focal", "gamma": gamma} | ({} if alpha is None else {"alpha": alpha})
    assert loss_of(settings)(LOGITS, LABELS, weights).item() == pytest.approx(expected, rel=1e-6)


def test_a_focal_loss_has_a_finite_gradient_where_a_probability_is_rounded_to_1():
    logits = torch.tensor([200.0, -200.0, 200.0, -200.0], requires_grad=True)
    loss_of({"name": "focal", "gamma": 0.5})(logits, torch.tensor([1.0, 0.0, 0.0, 1.0]), None).backward()
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_losses_of_numbers_are_those_of_torch(weights):
    values, labels = torch.linspace(-2, 3, N), torch.arange(N) % 7
    factor = 1 if weights is None else weights
    expected = (factor * (values - labels) ** 2).mean()
    torch.testing.assert_close(loss_of("mse")(values, labels, weights), expected)
    expected = (factor * poisson_nll_loss(values, labels, log_input=True, reduction="none")).mean()
    torch.testing.assert_close(loss_of("poisson")(values, labels, weights), expected)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "lossy").mkdir()
    (tmp_path / "lossy" / "__init__.py").write_text("")
    (tmp_path / "lossy" / "mine.py").write_text(
        "def hinge(logits, labels, weights, margin=1.0):\n"
        "    return (margin - (2 * labels - 1) * logits).clamp(min=0).mean()\n"
        "def each(logits, labels, weights):\n"
        "    return logits\n"
        "number = 7\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(own_code, "_allowed", set())
    yield "lossy"
    for name in [name for name in sys.modules if name.partition(".")[0] == "lossy"]:
        del sys.modules[name]


def test_a_function_of_an_allowed_package_is_a_loss(package):
    logits = LOGITS.clone().requires_grad_()
    for allowed in (["lossy"], ["other", "lossy.mine"]):
        own_code._allowed.clear()
        own_code.allow(allowed)
        loss = loss_of({"name": "lossy.mine:hinge", "margin": 2.0})
        expected = np.maximum(2 - (2 * LABELS.numpy() - 1) * LOGITS.numpy(), 0).mean()
        assert loss(logits, LABELS, None).item() == pytest.approx(expected, rel=1e-6)
    own_code.allow(["lossy"])
    with pytest.raises(ValueError, match=r"returned a tensor of shape \(40,\): return the mean loss"):
        loss_of("lossy.mine:each")(logits, LABELS, None)


@pytest.mark.parametrize(
    ("spec", "allowed", "says"),
    [
        ("lossy.mine:hinge", [], "imported only if you allow it: pass --import lossy"),
        (
            "lossy.mine:hinge",
            ["los", "lossy.min"],
            r"in Python the function itself, or to load a model shoal.torch.load\(..., imports=\['lossy'\]\)",
        ),
        ("lossy.mine:hing", ["lossy"], "lossy.mine has no hing"),
        ("lossy.yours:hinge", ["lossy"], "cannot be imported: ModuleNotFoundError: No module named 'lossy.yours'"),
        ("lossy.mine:number", ["lossy"], "int 7: name a function"),
        ("bec", [], "a model has no loss 'bec': did you mean 'bce'"),
        ({"name": "bce", "pos_wieght": 3}, [], "loss bce has no key 'pos_wieght': did you mean 'pos_weight'"),
        ({"gamma": 3}, [], "a loss has no name: it is one of bce, focal"),
        ({"name": "focal", "alpha": 1.5}, [], "alpha of loss focal is 1.5: pass a number from 0 to 1"),
        ({"name": "focal", "gamma": -1}, [], "gamma of loss focal is -1: pass 0 or more"),
        ({"name": "bce", "pos_weight": 0}, [], "pos_weight of loss bce is 0: pass a number above 0"),
        ({"name": "bce", "pos_weight": "3"}, [], "pos_weight of loss bce is '3'"),
    ],
)
def test_what_is_no_loss_is_told(package, spec, allowed, says):
    own_code.allow(allowed)
    with pytest.raises(ValueError, match=says):
        loss_of(spec)


def test_nothing_is_imported_before_it_is_allowed(package):
    own_code.allow(["other"])
    with pytest.raises(ValueError, match="imports"):
        loss_of("lossy.mine:hinge")
    recipe_of({"loss": "lossy.mine:hinge"})
    assert "lossy" not in sys.modules


def fitted(recipe: Recipe) -> float:
    batch = shoal.Batch(np.array([1, 0], np.float32), np.array([0, 1, 2]), np.array([1, 2], np.uint64), None)
    with shoal.local(threads=1) as store:
        module = shoal.torch.models.LR(shoal.torch.tables(store, shoal.SGD(lr=1.0)), 1)
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        model = ClickModel(module, store=store, optimizer=optimizer, recipe=recipe)
        model.fit([batch], progress=False)
        assert model.history.passes[0].metrics.logloss == pytest.approx(np.log(2))  # whatever is minimized
        return module.linear.bias.item()


def test_a_model_minimizes_its_loss():
    def twice(logits: Any, labels: Any, weights: Any) -> Any:
        return 2 * loss_of({"name": "bce", "pos_weight": 3})(logits, labels, weights)

    assert fitted(Recipe()) == 0.0
    assert fitted(Recipe(loss={"name": "bce", "pos_weight": 3})) == 0.5  # (3 - 1) / 2 / 2
    assert fitted(Recipe(loss=twice)) == 1.0


def test_a_package_that_a_recipe_does_not_name_is_not_imported(package):
    with pytest.raises(ValueError, match="imports"):
        fitted(Recipe(loss="lossy.mine:hinge"))
    own_code.allow(["lossy"])
    assert fitted(Recipe(loss="lossy.mine:hinge")) == 0.0


def test_labels_of_clicks_are_no_numbers():
    with pytest.raises(ValueError, match="loss is 'mse', which is of numbers"):
        Recipe(loss="mse")

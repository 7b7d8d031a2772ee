"""A model over shoal's tables learns what it learns over torch's own embeddings: losses, step by step.

bench/bench_ctr_quality.py does this with all models on real data.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import shoal

torch = pytest.importorskip("torch", reason="the models are torch's: requirements/torch.txt says how to get it")

from shoal.torch.inputs import Inputs, Items  # noqa: E402
from shoal.torch.models import MODELS as CLICK_MODELS  # noqa: E402
from tiers import long_after  # noqa: E402

FIELDS, EACH, BATCH, STEPS, DIM = 4, 60, 128, 80, 8
INIT = shoal.Normal(0.01, seed=3)
RULES = {
    "SGD": (shoal.SGD(lr=3.0), lambda rows: torch.optim.SGD(rows, lr=3.0)),
    "Adagrad": (
        shoal.Adagrad(lr=0.05, n0=1e-6),
        lambda rows: torch.optim.Adagrad(rows, lr=0.05, initial_accumulator_value=1e-6),
    ),
    "Adam": (shoal.Adam(lr=0.01), lambda rows: torch.optim.SparseAdam(rows, lr=0.01)),
}
MODELS = {
    "lr": {},
    "deepfm": {"dim": DIM, "hidden": (32, 16)},
    "din": {"dim": DIM, "hidden": (32, 16), "attention": (16,)},
}
# Each model and each rule once, then the others.
PAIRS = sorted(itertools.product(MODELS, RULES), key=lambda pair: pair not in zip(MODELS, RULES, strict=True))


class Numbered(torch.nn.Module):
    """torch's own rows, found by where a key stands among all keys."""

    def __init__(self, keys, rows):
        super().__init__()
        self.keys = keys
        self.rows = torch.nn.Embedding.from_pretrained(rows, freeze=False, sparse=True)

    def forward(self, keys):
        return self.rows(torch.searchsorted(self.keys, keys))


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()  # torch warns until told either way
    yield
    torch.set_num_threads(before)


@pytest.fixture
def click_log(rng):
    """Batches of (inputs, labels), and every key in them: frequent keys and rare ones, labels of a planted model."""
    keys = rng.integers(-(2**63), 2**63, FIELDS * EACH)
    weights = rng.standard_normal(FIELDS * EACH)
    batches = []
    for _ in range(STEPS):
        ids = (EACH * rng.random((BATCH, FIELDS)) ** 3).astype(np.int64) + EACH * np.arange(FIELDS)
        labels = rng.random(BATCH) < 1 / (1 + np.exp(-weights[ids].sum(axis=1)))
        lengths = rng.integers(0, 4, BATCH)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        history = keys[EACH + rng.integers(0, EACH, offsets[-1])]
        inputs = Inputs(
            torch.from_numpy(keys[ids]), sequences={"seen": Items(torch.from_numpy(history), torch.from_numpy(offsets))}
        )
        batches.append((inputs, torch.from_numpy(labels.astype(np.float32))))
    return batches, torch.from_numpy(np.sort(keys))


def learned(model, batches, together, step):
    """Train; the loss of every step."""
    loss_of = torch.nn.BCEWithLogitsLoss()
    losses = []
    for inputs, labels in batches:
        loss = loss_of(model(inputs), labels)
        with together(model):
            loss.backward()
        step()
        losses.append(float(loss.detach()))
    return np.array(losses)


def stepping(*optimizers):
    def step():
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return step


def described(name):
    seen = [{"name": "seen", "type": "sequence", "share": "1"}] if name == "din" else []
    return shoal.torch.Features([*map(str, range(FIELDS)), *seen])


def over_tables(name, store, rule, batches):
    torch.manual_seed(5)
    model = CLICK_MODELS[name](
        lambda table, dim: shoal.torch.Embedding(
            store.table(table, dim=dim, optimizer=rule, init=shoal.Zeros() if dim == 1 else INIT)
        ),
        described(name),
        **MODELS[name],
    )
    dense = torch.optim.Adam(model.parameters(), lr=1e-3)
    return learned(model, batches, shoal.torch.accumulate, stepping(dense))


def over_torch(name, store, rule, theirs, batches, keys):
    """Train over nn.Embedding whose rows begin as those of tables that nothing was pushed to."""

    def make(table, dim):
        first = store.table(table, dim=dim, optimizer=rule, init=shoal.Zeros() if dim == 1 else INIT)
        return Numbered(keys, torch.from_numpy(first.pull(keys.numpy())))

    torch.manual_seed(5)
    model = CLICK_MODELS[name](make, described(name), **MODELS[name])
    rows = [module.rows.weight for module in model.modules() if isinstance(module, Numbered)]
    others = [weight for weight in model.parameters() if all(weight is not row for row in rows)]
    optimizers = (theirs(rows), torch.optim.Adam(others, lr=1e-3))
    return learned(model, batches, lambda _: torch.enable_grad(), stepping(*optimizers))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rule"), long_after(3, PAIRS))
def test_losses_are_those_of_torchs_own_embeddings(one_thread, click_log, name, rule):
    batches, keys = click_log
    ours, theirs = RULES[rule]
    with shoal.local(slots=16, threads=1) as store:
        found = over_tables(name, store, ours, batches)
    with shoal.local(slots=16, threads=1) as store:
        expected = over_torch(name, store, ours, theirs, batches, keys)
    np.testing.assert_allclose(found, expected, rtol=0, atol=5e-6)
    assert np.mean(found[-10:]) < np.mean(found[:10]) - 0.005

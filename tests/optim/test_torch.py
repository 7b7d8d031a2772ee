"""The oracles and the engine beside torch, where torch has the rule.

The oracle must agree with torch in float64 to rounding; the engine with the oracle elsewhere. Here the engine also
meets torch's own float32 directly, as a user would compare them.
"""

from __future__ import annotations

import numpy as np
import pytest

import shoal
from oracle.optimizers import rule_of

torch = pytest.importorskip("torch", reason="torch is an oracle here: requirements/torch.txt says how to get it")
torch.sparse.check_sparse_tensor_invariants.enable()  # torch warns until told either way

ROWS, DIM, STEPS = 12, 5, 40
DENSE = {
    "sgd": (shoal.SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "sgd with decay": (
        shoal.SGD(lr=0.1, weight_decay=0.05),
        lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.05),
    ),
    "momentum": (shoal.Momentum(lr=0.05, mu=0.9), lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)),
    "nesterov": (
        shoal.Momentum(lr=0.05, mu=0.8, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.8, nesterov=True),
    ),
    "nesterov with decay": (
        shoal.Momentum(lr=0.05, mu=0.8, nesterov=True, weight_decay=0.05),
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.8, nesterov=True, weight_decay=0.05),
    ),
    "adagrad": (shoal.Adagrad(lr=0.1), lambda p: torch.optim.Adagrad(p, lr=0.1)),
    "adagrad from n0 with decay": (
        shoal.Adagrad(lr=0.1, n0=0.1, eps=1e-6, weight_decay=0.05),
        lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1, eps=1e-6, weight_decay=0.05),
    ),
    # eps 0: where torch's dense rules and the sparse form we follow put eps in different places, they are one rule
    "adam": (shoal.Adam(lr=0.01, eps=0.0), lambda p: torch.optim.Adam(p, lr=0.01, eps=0.0)),
    "adam with decay": (
        shoal.Adam(lr=0.01, eps=0.0, weight_decay=0.05),
        lambda p: torch.optim.Adam(p, lr=0.01, eps=0.0, weight_decay=0.05),
    ),
    "adamw": (
        shoal.AdamW(lr=0.01, eps=0.0, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.01, eps=0.0, weight_decay=0.1),
    ),
}
SPARSE = {
    "sgd": (shoal.SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "adagrad": (shoal.Adagrad(lr=0.1), lambda p: torch.optim.Adagrad(p, lr=0.1)),
    "adam": (shoal.Adam(lr=0.01), lambda p: torch.optim.SparseAdam(p, lr=0.01)),
    "adam with large eps": (
        shoal.Adam(lr=0.01, eps=1e-2, b1=0.7, b2=0.9),
        lambda p: torch.optim.SparseAdam(p, lr=0.01, eps=1e-2, betas=(0.7, 0.9)),
    ),
}


def dense_run(make, w0, grads, dtype):
    """Step torch on every row, every time; return the weights after each step."""
    weight = torch.nn.Parameter(torch.tensor(w0, dtype=dtype))
    optimizer = make([weight])
    for g in grads:
        weight.grad = torch.tensor(g, dtype=dtype)
        optimizer.step()
        yield weight.detach().numpy().copy()


def sparse_run(make, w0, batches, dtype):
    """Step torch through an embedding with sparse gradients: ids with duplicates, their gradients given."""
    layer = torch.nn.Embedding(ROWS, DIM, sparse=True, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(w0))
    optimizer = make(list(layer.parameters()))
    for ids, g in batches:
        optimizer.zero_grad()
        (layer(torch.tensor(ids)) * torch.tensor(g, dtype=dtype)).sum().backward()
        optimizer.step()
        yield layer.weight.detach().numpy().copy()


@pytest.fixture
def dense_data(rng):
    w0 = rng.standard_normal((ROWS, DIM)).astype(np.float32)
    return w0, rng.standard_normal((STEPS, ROWS, DIM)).astype(np.float32)


@pytest.fixture
def sparse_data(rng):
    w0 = rng.standard_normal((ROWS, DIM)).astype(np.float32)
    counts = rng.integers(1, 20, STEPS)
    return w0, [(rng.integers(0, ROWS, n), rng.standard_normal((n, DIM)).astype(np.float32)) for n in counts]


def summed(ids, g):
    total = np.zeros((ROWS, DIM))
    np.add.at(total, ids, g.astype(np.float64))
    return total


@pytest.mark.parametrize(("ours", "theirs"), DENSE.values(), ids=DENSE.keys())
def test_the_oracle_is_torch_in_float64(ours, theirs, dense_data):
    w0, grads = dense_data
    rule = rule_of(ours)
    state = rule.start(w0.astype(np.float64))
    for t, (g, expected) in enumerate(zip(grads, dense_run(theirs, w0, grads, torch.float64), strict=True), 1):
        state = rule.step(state, g.astype(np.float64), t)
        np.testing.assert_allclose(rule.weights(state), expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("ours", "theirs"), SPARSE.values(), ids=SPARSE.keys())
def test_the_oracle_is_torch_with_sparse_gradients_in_float64(ours, theirs, sparse_data):
    w0, batches = sparse_data
    rule = rule_of(ours)
    rows = [rule.start(w.astype(np.float64)) for w in w0]
    for t, ((ids, g), expected) in enumerate(
        zip(batches, sparse_run(theirs, w0, batches, torch.float64), strict=True), 1
    ):
        total = summed(ids, g)
        for i in np.unique(ids):
            rows[i] = rule.push(rows[i], total[i], t)
        weights = [rule.weights(row) for row in rows]
        np.testing.assert_allclose(weights, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("ours", "theirs"), DENSE.values(), ids=DENSE.keys())
def test_the_engine_is_torch_in_float32(ours, theirs, dense_data):
    w0, grads = dense_data
    keys = np.arange(ROWS, dtype=np.uint64)
    with shoal.local() as store:
        table = store.table("t", dim=DIM, optimizer=ours)
        table.assign(keys, w0)
        for g, expected in zip(grads, dense_run(theirs, w0, grads, torch.float32), strict=True):
            table.push(keys, g).result()
            np.testing.assert_allclose(table.pull(keys), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(("ours", "theirs"), SPARSE.values(), ids=SPARSE.keys())
def test_the_engine_is_torch_with_sparse_gradients_in_float32(ours, theirs, sparse_data):
    w0, batches = sparse_data
    keys = np.arange(ROWS, dtype=np.uint64)
    with shoal.local() as store:
        table = store.table("t", dim=DIM, optimizer=ours)
        table.assign(keys, w0)
        for (ids, g), expected in zip(batches, sparse_run(theirs, w0, batches, torch.float32), strict=True):
            table.push(ids.astype(np.uint64), g).result()
            np.testing.assert_allclose(table.pull(keys), expected, rtol=1e-5, atol=2e-6)


def test_sparse_adam_moves_a_row_whose_gradient_is_zero_and_ours_does_not(sparse_data):
    w0, _ = sparse_data
    batches = [(np.array([3]), np.ones((1, DIM), np.float32)), (np.array([3]), np.zeros((1, DIM), np.float32))]
    first, second = sparse_run(lambda p: torch.optim.SparseAdam(p, lr=0.01), w0, batches, torch.float32)
    assert np.all(first[3] != second[3])
    with shoal.local() as store:
        table = store.table("t", dim=DIM, optimizer=shoal.Adam(lr=0.01))
        key = np.array([3], np.uint64)
        table.push(key, batches[0][1]).result()
        before = table.pull(key)
        table.push(key, batches[1][1]).result()
        np.testing.assert_array_equal(table.pull(key), before)

"""shoal.torch.Embedding and EmbeddingBag beside torch's own, on stores of every kind.

The twin has a dense weight, whose row k is the key UNIQUE[k]; shoal's table has SGD with lr 1 and rows that were
assigned, so that what backward pushed is what the rows have lost.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import itertools
import pickle
import re
import shutil
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shoal
from cluster_fakes import TIMEOUT
from cluster_standin import cluster
from forks import in_child

torch = pytest.importorskip("torch", reason="shoal.torch needs it: requirements/torch.txt says how to get it")
from torch.nn import functional as F  # noqa: E402

from tiers import long_after  # noqa: E402

EXACT = ("sum", "max")  # of few bits
UNIQUE = np.array([7, 3, 0, 2**64 - 1, 2**63, 11, 12, 13], np.uint64)
DIM = 5
MODES = ("sum", "mean", "sqrtn", "max")


@pytest.fixture(scope="module", params=["local", "launched", "connected"])
def store(request, tmp_path_factory):
    if request.param == "local":
        with shoal.local(threads=2) as one:
            yield one
    elif request.param == "launched":
        how = {"consistency": shoal.ASP(), "timeout": TIMEOUT, "storage_roots": [tmp_path_factory.getbasetemp()]}
        with shoal.launch(servers=2, server_threads=2, threads=2, **how) as one:
            yield one
    else:
        with (
            cluster(3, 1) as made,
            shoal.connect(made.address, threads=2, consistency=shoal.ASP(), timeout=TIMEOUT) as one,
        ):
            yield one


@pytest.fixture(scope="module")
def local():
    with shoal.local(threads=2) as one:
        yield one


@pytest.fixture
def name(request):
    return re.sub(r"\W+", " ", request.node.name)


def weights(rng, dim=DIM):
    """Numbers with few bits: sums of some are exact, so that twins agree to the bit where only adding is done."""
    return (rng.integers(-64, 64, (len(UNIQUE), dim)) / 16).astype(np.float32)


def filled(store, name, rows, **how):
    how = {"optimizer": shoal.SGD(lr=1.0)} | how
    table = store.table(name, dim=rows.shape[1], **how)
    table.assign(UNIQUE, rows)
    return table


def keys_of(places, dtype=torch.int64):
    return torch.from_numpy(np.asarray(UNIQUE[np.asarray(places)]).view(np.int64)).view(dtype)


def moved(store, table, rows):
    """What was pushed: SGD with lr 1 subtracts it."""
    store.flush()
    return rows - table.pull(UNIQUE)


def twin(rows):
    return torch.from_numpy(rows.copy()).requires_grad_()


# ---- Embedding -------------------------------------------------------------------------------------------------------


@pytest.mark.combined
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64])
@pytest.mark.parametrize("shape", [(6,), (3, 2), (2, 1, 3), ()])
def test_an_embedding_reads_and_pushes_what_torchs_does(store, name, rng, dtype, shape):
    rows = weights(rng)
    table = filled(store, name, rows)
    embedding = shoal.torch.Embedding(table)
    places = rng.integers(0, 4, shape)
    weight = twin(rows)
    expected = F.embedding(torch.from_numpy(np.asarray(places)), weight)
    got = embedding(keys_of(places, dtype))
    assert got.shape == (*shape, DIM)
    assert got.requires_grad
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    scale = torch.from_numpy(rng.integers(-4, 4, (*shape, DIM)).astype(np.float32))
    (got * scale).sum().backward()
    (expected * scale).sum().backward()
    np.testing.assert_array_equal(moved(store, table, rows), weight.grad.numpy())


def test_an_unseen_key_reads_its_initial_row_and_is_made_by_the_push(store, name):
    table = store.table(name, dim=2, optimizer=shoal.SGD(lr=1.0), init=shoal.Constant(3.0))
    embedding = shoal.torch.Embedding(table)
    out = embedding(torch.tensor([[5], [-1]]))
    assert out.tolist() == [[[3.0, 3.0]], [[3.0, 3.0]]]
    assert len(table) == 0
    out.sum().backward()
    store.flush()
    assert table.pull(np.array([5, 2**64 - 1], np.uint64)).tolist() == [[2.0, 2.0], [2.0, 2.0]]


@pytest.mark.parametrize("kind", ["embedding", "bag", "jagged", "max"])
def test_no_keys_at_all_are_fine(store, name, kind):
    table = store.table(name, dim=3)
    nothing = torch.empty(0, dtype=torch.int64)
    if kind == "embedding":
        out = shoal.torch.Embedding(table)(nothing.view(0, 4))
        assert out.shape == (0, 4, 3)
    elif kind == "bag":
        out = shoal.torch.EmbeddingBag(table)(nothing.view(2, 0))
        assert out.tolist() == [[0.0] * 3] * 2
    else:
        out = shoal.torch.EmbeddingBag(table, mode="max" if kind == "max" else "mean")(nothing, torch.zeros(4).long())
        assert out.tolist() == [[0.0] * 3] * 4
    out.sum().backward()
    store.flush()
    assert len(table) == 0


# ---- EmbeddingBag ----------------------------------------------------------------------------------------------------


def compare(store, table, rows, mode, places, offsets, values, scale, *, last=False, exact=True):
    """Forward and backward of one batch of bags beside torch's, or beside `pooled` where torch has no such mode."""
    bag = shoal.torch.EmbeddingBag(table, mode=mode, include_last_offset=last)
    weight = twin(rows)
    theirs = ours = None
    if values is not None:
        theirs, ours = (torch.from_numpy(values.copy()).requires_grad_() for _ in range(2))
    at = None if offsets is None else torch.from_numpy(np.asarray(offsets, np.int64))
    theirs_at = torch.from_numpy(np.asarray(places, np.int64))
    if mode == "sum" or (values is None and mode != "sqrtn"):
        how = {"mode": mode, "per_sample_weights": theirs, "include_last_offset": last}
        expected = F.embedding_bag(theirs_at, weight, at, **how)
    else:
        ends = np.arange(len(places) + 1) * np.shape(places)[-1] if at is None else [*offsets, len(places)]
        ends = ends[:-1] if last else ends
        expected = pooled(weight, theirs_at.view(-1), ends, mode, theirs)
    got = bag(keys_of(np.asarray(places, np.int64)), at, ours)
    near = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-6, "atol": 1e-5}
    torch.testing.assert_close(got, expected, **near)
    before = table.pull(UNIQUE)
    (got * scale).sum().backward()
    (expected * scale).sum().backward()
    store.flush()
    np.testing.assert_allclose(before - table.pull(UNIQUE), weight.grad.numpy(), rtol=near["rtol"], atol=near["atol"])
    if values is not None:
        torch.testing.assert_close(ours.grad, theirs.grad, **near)


def pooled(weight, places, ends, mode, values):
    """What the modes are, bag by bag in float64, with the gradients of autograd."""
    values = torch.ones(len(places)) if values is None else values.reshape(-1)
    bags = []
    for begin, end in itertools.pairwise(ends):
        x = values[begin:end, None].double()
        rows = weight[places[begin:end]].double() * x
        divisor = x.sum() if mode == "mean" else x.square().sum().sqrt()
        if begin == end or (mode != "max" and divisor == 0):
            bags.append(0 * (weight[0].double() + values.sum()))
        elif mode == "max":
            bags.append(rows.max(dim=0).values)
        else:
            bags.append(rows.sum(dim=0) / divisor)
    return torch.stack(bags).float()


@pytest.mark.combined(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["fixed", "offsets", "last", "weights", "fixed weights"])
def test_a_bag_reads_and_pushes_what_torchs_does(store, name, rng, mode, kind):
    rows = weights(rng)
    table = filled(store, name, rows)
    scale = torch.from_numpy(rng.integers(-4, 4, (4, DIM)).astype(np.float32))
    if "fixed" in kind:
        places, offsets = rng.integers(0, 4, (4, 4)), None
    else:
        places, offsets = rng.integers(0, 4, 11), [0, 3, 3, 7]  # the second one is empty
    if kind == "last":
        offsets = [*offsets, 11]
    values = (rng.integers(-8, 8, places.shape) / 4).astype(np.float32) if "weights" in kind else None
    compare(store, table, rows, mode, places, offsets, values, scale, last=kind == "last", exact=mode in EXACT)


@pytest.mark.slow
@given(data=st.data())
def test_bags_of_any_shape_are_those_of_torch(local, data):
    mode = data.draw(st.sampled_from(MODES))
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=8))
    dim = data.draw(st.sampled_from([1, 2, 4, 7, 16, 23]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    rows = weights(rng, dim)
    rows[rng.integers(0, len(rows))] = rows[0]  # a tie of a max is the first one's
    places = rng.integers(0, len(UNIQUE), sum(lengths))
    valued = data.draw(st.booleans())
    values = (rng.integers(-8, 8, len(places)) / 4).astype(np.float32) if valued else None
    scale = torch.from_numpy(rng.integers(-4, 4, (len(lengths), dim)).astype(np.float32))
    table = filled(local, f"any {dim}", rows)
    offsets = np.cumsum([0, *lengths[:-1]])
    compare(local, table, rows, mode, places, offsets, values, scale, exact=mode in EXACT)


def test_of_equal_entries_the_first_gets_the_gradient(local, name):
    rows = np.array([[1, 5], [1, 5]] + [[0, 0]] * 6, np.float32)
    table = filled(local, name, rows)
    shoal.torch.EmbeddingBag(table, mode="max")(keys_of([[1, 0, 1]])).sum().backward()
    assert moved(local, table, rows)[:2].tolist() == [[0, 0], [1, 1]]


def test_a_batch_is_taken_as_it_is(store, name, rng):
    rows = weights(rng)
    table = filled(store, name, rows)
    bag = shoal.torch.EmbeddingBag(table)
    values = np.array([1, 2, 0.5, -1], np.float32)
    batch = shoal.Batch(np.zeros(3, np.float32), np.array([0, 2, 2, 4]), UNIQUE[[1, 0, 3, 1]], values)
    out = bag(batch)
    expected = [rows[1] + 2 * rows[0], np.zeros(DIM), 0.5 * rows[3] - rows[1]]
    np.testing.assert_array_equal(out.detach().numpy(), np.array(expected, np.float32))
    out.sum().backward()
    np.testing.assert_array_equal(moved(store, table, rows)[[0, 1, 3], 0], [2, 0, 0.5])
    plain = bag(shoal.Batch(np.zeros(1, np.float32), np.array([0, 2]), UNIQUE[:2], None))
    np.testing.assert_array_equal(plain.detach().numpy()[0], table.pull(UNIQUE[:2]).sum(axis=0))


@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_those_of_differences(local, name, rng, mode):
    """A loss that is no sum, by central differences on the rows and on their weights."""
    rows = rng.normal(size=(len(UNIQUE), 3)).astype(np.float32)
    table = filled(local, name, rows)
    bag = shoal.torch.EmbeddingBag(table, mode=mode)
    keys, offsets = keys_of(rng.integers(0, 5, 12)), torch.tensor([0, 4, 4, 9])
    mixing = torch.from_numpy(rng.normal(size=(3, 2)).astype(np.float32))
    values = torch.from_numpy(rng.uniform(0.5, 2, 12).astype(np.float32)).requires_grad_()

    def loss():
        return (torch.tanh(bag(keys, offsets, values) @ mixing) ** 2).sum()

    loss().backward()
    pushed = moved(local, table, rows)
    table.assign(UNIQUE, rows)
    h = 1e-2
    for at in range(12):
        ends = []
        for sign in (1, -1):
            with torch.no_grad():
                values[at] += sign * h
                ends.append(loss().item())
                values[at] -= sign * h
        assert values.grad[at] == pytest.approx((ends[0] - ends[1]) / (2 * h), rel=2e-2, abs=2e-3)
    for row, column in [(0, 0), (1, 2), (4, 1), (6, 0)]:
        ends = []
        for sign in (1, -1):
            bumped = rows.copy()
            bumped[row, column] += sign * h
            table.assign(UNIQUE, bumped)
            with torch.no_grad():
                ends.append(loss().item())
        assert pushed[row, column] == pytest.approx((ends[0] - ends[1]) / (2 * h), rel=2e-2, abs=2e-3)


@pytest.mark.slow
def test_the_bits_do_not_depend_on_threads(rng):
    keys = torch.from_numpy(rng.integers(0, 3000, (2048, 13)))
    grads = torch.from_numpy(rng.normal(size=(2048, 16)).astype(np.float32))
    spread = torch.from_numpy(rng.normal(size=(2048, 13, 16)).astype(np.float32))
    values = torch.from_numpy(rng.normal(size=(2048, 13)).astype(np.float32))
    results = []
    for threads in (1, 2, 3):
        with shoal.local(threads=threads) as store:
            tables = [
                store.table(f"t{k}", dim=16, optimizer=shoal.Adagrad(lr=0.1), init=shoal.Normal(0.1, seed=k))
                for k in range(9)
            ]
            left = iter(tables)
            outs = [
                shoal.torch.EmbeddingBag(next(left), mode=mode)(keys, per_sample_weights=weights)
                for mode in MODES
                for weights in (None, values)
            ]
            for out in outs:
                out.backward(grads)
            outs.append(shoal.torch.Embedding(next(left))(keys))
            outs[-1].backward(spread)
            unique = np.unique(keys.numpy())
            results.append([out.detach().numpy() for out in outs] + [table.pull(unique) for table in tables])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


# ---- when it pushes --------------------------------------------------------------------------------------------------


def test_eval_mode_and_no_grad_push_nothing(store, name, rng):
    rows = weights(rng)
    table = filled(store, name, rows)
    for module in (shoal.torch.Embedding(table), shoal.torch.EmbeddingBag(table)):
        keys = keys_of([[0, 1], [1, 2]])
        with torch.no_grad():
            assert not module(keys).requires_grad
        with torch.inference_mode():
            assert not module(keys).requires_grad
        module.eval()
        factor = torch.ones(1, requires_grad=True)
        loss = (module(keys) * factor).sum()
        with pytest.raises(RuntimeError, match=f"the rows of table '{re.escape(name)}' would not learn: forward was"):
            loss.backward(retain_graph=True)
        (grad,) = torch.autograd.grad(loss, factor, retain_graph=True)  # which does not reach the rows
        assert grad == loss
        module.train()
        with pytest.raises(RuntimeError, match="would not learn"):  # it was read in eval mode
            loss.backward()
        assert module(keys).requires_grad
    assert not moved(store, table, rows).any()


def test_in_eval_mode_nothing_is_added_up_for_an_accumulated_step(local, name):
    table = local.table(name, dim=1)
    for module in (shoal.torch.Embedding(table), shoal.torch.EmbeddingBag(table)):
        with shoal.torch.accumulate(module.eval()), pytest.raises(RuntimeError, match="would not learn"):
            module(keys_of([[0, 1]])).sum().backward()
    assert table.stats().step == 0


def test_weights_of_the_rows_get_their_gradient_in_eval_mode_too(local, name, rng):
    rows = weights(rng)
    table = filled(local, name, rows)
    bag = shoal.torch.EmbeddingBag(table).eval()
    values = torch.ones((1, 2), requires_grad=True)
    loss = bag(keys_of([[0, 1]]), per_sample_weights=values).sum()
    (grad,) = torch.autograd.grad(loss, values, retain_graph=True)  # which does not reach the rows
    np.testing.assert_array_equal(grad.numpy(), [rows[:2].sum(axis=1)])
    with pytest.raises(RuntimeError, match="would not learn"):
        loss.backward()
    values.grad = None
    bag.requires_grad_(False)
    bag(keys_of([[0, 1]]), per_sample_weights=values).sum().backward()
    np.testing.assert_array_equal(values.grad.numpy(), [rows[:2].sum(axis=1)])
    assert table.stats().step == 0


def test_a_forward_without_a_backward_pushes_nothing(local, name):
    table = local.table(name, dim=2)
    embedding = shoal.torch.Embedding(table)
    embedding(torch.tensor([1, 2]))
    dense = torch.ones(2, requires_grad=True)
    torch.autograd.grad((embedding(torch.tensor([1])) * dense).sum(), [dense])  # of the dense part alone
    assert table.stats().step == 0


@pytest.mark.parametrize("kind", ["embedding", "bag"])
def test_several_forwards_may_be_open_at_once(store, name, rng, kind):
    rows = weights(rng)
    table = filled(store, name, rows)
    module = shoal.torch.Embedding(table) if kind == "embedding" else shoal.torch.EmbeddingBag(table)
    places = [rng.integers(0, 8, (n, 2)) for n in (5, 1, 9, 3)]
    outs = [module(keys_of(each)) for each in places]
    for out, each in zip(outs, places, strict=True):
        expected = rows[each] if kind == "embedding" else rows[each].sum(axis=1)
        np.testing.assert_array_equal(out.detach().numpy(), expected)
    for out in (outs[2], outs[0], outs[3], outs[1]):
        out.sum().backward()
    counts = np.bincount(np.concatenate([each.ravel() for each in places]), minlength=8)
    np.testing.assert_array_equal(moved(store, table, rows), np.tile(counts[:, None], DIM))


def test_gradients_accumulate_to_one_step(store, name, rng):
    rows = weights(rng)
    table = filled(store, name, rows)
    model = torch.nn.Sequential(shoal.torch.Embedding(table), torch.nn.Flatten())
    with shoal.torch.accumulate(model):
        for places in ([[0, 1], [1, 1]], [[0, 2]], [[4, 0]]):
            model(keys_of(places)).sum().backward()
        store.flush()
        assert table.stats().step == 0
    np.testing.assert_array_equal(moved(store, table, rows)[:5, 0], [3, 3, 1, 0, 1])
    assert table.stats().step == 1
    with shoal.torch.accumulate(model, *model):  # one backward, and a module that was named twice
        model(keys_of([[0]])).sum().backward()
    store.flush()
    assert table.stats().step == 2


def adagrad_of_torch(counts):
    """The weights that torch's Adagrad makes of zeros, with so many uses of each of eight rows before its step."""
    weight = torch.zeros(8, 1, requires_grad=True)
    optimizer = torch.optim.Adagrad([weight], lr=1.0)
    (weight * torch.tensor(counts)[:, None]).sum().backward()
    optimizer.step()
    return weight.detach().ravel().tolist()


@pytest.mark.parametrize("accumulates", [True, False], ids=["accumulated", "one backward"])
@pytest.mark.parametrize("modules", [1, 2], ids=["called twice", "two modules"])
def test_a_table_gets_one_step_however_many_modules_and_calls_use_it(store, name, modules, accumulates):
    table = store.table(name, dim=1, optimizer=shoal.Adagrad(lr=1.0, eps=1e-10))
    first = shoal.torch.Embedding(table)
    second = first if modules == 1 else shoal.torch.EmbeddingBag(table)
    calls = [(first, keys_of([[0, 1], [1, 2]])), (second, keys_of([[1, 3], [0, 1]]))]
    if accumulates:
        with shoal.torch.accumulate(first, second):
            for module, keys in calls:
                module(keys).sum().backward()
    else:
        sum(module(keys).sum() for module, keys in calls).backward()
    store.flush()
    assert table.stats().step == 1
    learned = first(keys_of([list(range(8))])).ravel().tolist()
    np.testing.assert_allclose(learned, adagrad_of_torch([2, 4, 1, 1, 0, 0, 0, 0]), rtol=1e-6)


@pytest.mark.combined
@pytest.mark.slow
@pytest.mark.parametrize("modules", [1, 2], ids=["called twice", "two modules"])
@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_a_step_of_several_lookups_is_one_under_bsp_and_for_the_compiler_too(modules, compiled):
    torch.compiler.reset()
    learned = []
    with cluster(2, 1) as made, shoal.connect(made.address, threads=1, timeout=TIMEOUT) as bsp, shoal.local() as local:
        assert bsp.consistency == shoal.BSP()
        for store in (bsp, local):
            table = store.table("t", dim=1, optimizer=shoal.Adagrad(lr=1.0, eps=1e-10))
            first = shoal.torch.Embedding(table)
            second = first if modules == 1 else shoal.torch.EmbeddingBag(table)

            def loss(a, b, first=first, second=second):
                return first(a).sum() + second(b).sum()

            call = torch.compile(loss, fullgraph=True, backend="aot_eager") if compiled else loss
            call(keys_of([[0, 1], [1, 2]]), keys_of([[1, 3], [0, 1]])).backward()
            store.tick()
            assert table.stats().step == 1
            learned.append(table.pull(UNIQUE).ravel().tolist())
    assert learned[0] == learned[1]
    np.testing.assert_allclose(learned[0], adagrad_of_torch([2, 4, 1, 1, 0, 0, 0, 0]), rtol=1e-6)


def test_a_backward_that_fails_pushes_nothing_and_the_next_one_only_its_own(local, name):
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, rows):
            return rows.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ZeroDivisionError

    table = local.table(name, dim=1, optimizer=shoal.SGD(lr=1.0))
    embedding = shoal.torch.Embedding(table)
    before = Failing.apply(embedding(keys_of([0])))  # its backward comes last
    with pytest.raises(ZeroDivisionError):
        (before.sum() + embedding(keys_of([1])).sum()).backward()
    assert table.stats().step == 0
    embedding(keys_of([2])).sum().backward()
    assert embedding(keys_of([0, 1, 2])).ravel().tolist() == [0, 0, -1]
    assert table.stats().step == 1


@pytest.mark.parametrize("kind", ["embedding", "bag"])
def test_frozen_rows_do_not_learn_and_the_rest_does(local, name, kind):
    table = local.table(name, dim=1, optimizer=shoal.SGD(lr=1.0))
    module = shoal.torch.Embedding(table) if kind == "embedding" else shoal.torch.EmbeddingBag(table)
    tower = torch.nn.Linear(1, 1)
    assert module.requires_grad_(False) is module
    tower(module(keys_of([[0, 1]]))).sum().backward()
    assert tower.bias.grad is not None
    assert table.stats().step == 0
    module.requires_grad_()
    tower(module(keys_of([[0, 1]]))).sum().backward()
    assert table.stats().step == 1


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_rows_are_frozen_with_the_model_that_they_are_of(local, name, compiled):
    torch.compiler.reset()
    tables = [local.table(name + kind, dim=1, optimizer=shoal.SGD(lr=1.0)) for kind in ("embedding", "bag")]

    class Inner(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.rows, self.bag = shoal.torch.Embedding(tables[0]), shoal.torch.EmbeddingBag(tables[1])
            self.tower = torch.nn.Linear(1, 1)

        def forward(self, keys):
            return self.tower(self.rows(keys).sum(1) + self.bag(keys))

    inner = Inner()
    head = torch.nn.Linear(1, 1)
    whole = torch.nn.Sequential(inner, head)
    call = torch.compile(whole, backend="aot_eager") if compiled else whole
    optimizer = torch.optim.Adam(whole.parameters(), lr=0.1)
    steps = []

    def step():
        optimizer.zero_grad()
        call(keys_of([[0, 1]])).sum().backward()
        optimizer.step()
        steps.append([table.stats().step for table in tables])

    inner.requires_grad_(False)
    before = head.bias.item()
    step()
    assert head.bias.item() != before
    inner.requires_grad_(True)
    step()
    for parameter in inner.parameters():
        parameter.requires_grad = False
    step()
    assert steps == [[0, 0], [1, 1], [1, 1]]
    whole.requires_grad_(False)
    assert not call(keys_of([[0, 1]])).requires_grad


def test_what_was_accumulated_is_dropped_if_the_block_raises(local, name):
    table = local.table(name, dim=2)
    embedding = shoal.torch.Embedding(table)
    with pytest.raises(ZeroDivisionError), shoal.torch.accumulate(embedding):  # noqa: PT012
        embedding(torch.tensor([1])).sum().backward()
        raise ZeroDivisionError
    assert table.stats().step == 0
    with pytest.raises(RuntimeError, match="accumulated already"), shoal.torch.accumulate(embedding):  # noqa: SIM117
        with shoal.torch.accumulate(embedding):
            pass
    embedding(torch.tensor([1])).sum().backward()
    assert table.stats().step == 1


def test_what_occurred_counts_for_admission(local, name):
    how = {"dim": 1, "optimizer": shoal.SGD(lr=1.0), "admit": shoal.AfterCount(3)}
    table = local.table(name, **how)
    embedding = shoal.torch.Embedding(table)
    embedding(torch.tensor([7, 3, 7, 5, 5, 5])).sum().backward()
    assert table.contains(np.array([7, 3, 5], np.uint64)).tolist() == [False, False, True]
    with shoal.torch.accumulate(embedding):
        embedding(torch.tensor([3, 9])).sum().backward()
        embedding(torch.tensor([3, 9, 7])).sum().backward()
    assert table.contains(np.array([7, 3, 5, 9], np.uint64)).tolist() == [True, True, True, False]
    assert embedding(torch.tensor([7, 3, 5, 9])).ravel().tolist() == [-1, -2, -3, 0]


def test_under_autocast_rows_are_float32_as_torchs_own_are(local, name, rng):
    rows = weights(rng)
    table = filled(local, name, rows)
    embedding, linear = shoal.torch.Embedding(table), torch.nn.Linear(DIM, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        theirs = F.embedding(torch.tensor([0, 1]), torch.from_numpy(rows))
        ours = embedding(keys_of([0, 1]))
        assert ours.dtype == theirs.dtype == torch.float32
        loss = linear(ours).sum()
    assert loss.dtype == torch.bfloat16
    loss.backward()
    assert moved(local, table, rows)[:2].any()


def test_gradients_of_any_layout_and_dtype_are_taken(local, name, rng):
    rows = weights(rng)
    table = filled(local, name, rows)
    embedding = shoal.torch.Embedding(table)
    out = embedding(keys_of([[0, 1], [2, 0]]))
    out.backward(torch.ones(1).expand(2, 2, DIM))
    embedding(keys_of([[0, 1], [2, 0]])).transpose(0, 1).contiguous().double().mul(2).sum().backward()
    np.testing.assert_array_equal(moved(local, table, rows)[:4, 0], [6, 3, 3, 0])
    slanted = keys_of([[0, 1], [2, 0]]).t()
    np.testing.assert_array_equal(embedding(slanted).detach().numpy(), table.pull(UNIQUE)[[[0, 2], [1, 0]]])


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_wrong_arguments_are_named(local, name):
    table = local.table(name, dim=2)
    embedding, bag = shoal.torch.Embedding(table), shoal.torch.EmbeddingBag(table)
    keys = torch.tensor([1, 2, 3])
    for call, error, says in [
        (lambda: shoal.torch.Embedding("user"), TypeError, "needs a table"),
        (lambda: shoal.torch.EmbeddingBag(table, mode="median"), ValueError, "median"),
        (lambda: embedding(keys.int()), TypeError, "int64 or uint64 tensor, got torch.int32"),
        (lambda: embedding(keys.float()), TypeError, "float32"),
        (lambda: embedding([1, 2]), TypeError, "got list"),
        (lambda: embedding(keys.to("meta")), ValueError, "meta"),
        (lambda: embedding(keys.to_sparse()), ValueError, "layout torch.sparse_coo: pass a dense tensor"),
        (lambda: shoal.torch.accumulate(table).__enter__(), TypeError, "gradients of a Table cannot be accumulated"),
        (
            lambda: shoal.torch.pull_together((embedding, keys)),
            TypeError,
            "pass a list of tuples, each of an embedding",
        ),
        (lambda: shoal.torch.pull_together([(table, keys)]), TypeError, "a request is "),
        (lambda: shoal.torch.inputs([1, 2], 2), TypeError, "batch is a list: pass a shoal.Batch"),
        (lambda: shoal.torch.tables(table), TypeError, "store is a Table: pass a store"),
        (
            lambda: shoal.torch.tables(local, rules={"a": {}}),
            TypeError,
            "of table 'a' is {}: pass a TableRule",
        ),
        (lambda: shoal.torch.TableRule(frozen="no"), TypeError, "frozen is 'no': pass True or False"),
        (lambda: local.table("x", expire=9), TypeError, "table 'x' expires rows by rules such as"),
        (lambda: shoal.torch.tables(local, expire=9)("x", 2), TypeError, "table 'x' expires rows by rules such as"),
        (lambda: shoal.torch.Features(["a"], labels=["y"]), TypeError, r"labels is \['y'\]: pass a mapping"),
        (
            lambda: shoal.torch.Features(["a"], labels={"y": 3}),
            TypeError,
            "label 'y' is 3: pass the name of",
        ),
        (lambda: shoal.torch.Recipe(loss=None), TypeError, "loss is None: pass a name"),
        (lambda: bag(keys), ValueError, "offsets"),
        (lambda: bag(keys.view(1, 1, 3)), ValueError, r"\[1, 1, 3\]"),
        (lambda: bag(keys.view(1, 3), torch.tensor([0])), ValueError, "pass no offsets"),
        (lambda: bag(keys, torch.tensor([0.0])), TypeError, "float32"),
        (lambda: bag(keys, torch.tensor([1, 2])), ValueError, "begin with 0"),
        (lambda: bag(keys, torch.tensor([0, 2, 1])), ValueError, "falls at position 2"),
        (lambda: bag(keys, torch.tensor([0, 4])), ValueError, "from 4 to the number of keys, 3"),
        (lambda: bag(keys, torch.tensor([], dtype=torch.int64)), ValueError, "begin with 0"),
        (lambda: bag(keys, torch.tensor([0]), torch.ones(2)), ValueError, r"\[3\], got \[2\]"),
        (lambda: bag(keys, torch.tensor([0]), torch.ones(3).double()), TypeError, "float64"),
        (
            lambda: shoal.torch.EmbeddingBag(table, include_last_offset=True)(keys, torch.tensor([0, 2])),
            ValueError,
            "3",
        ),
    ]:
        with pytest.raises(error, match=says):
            call()
    assert table.stats().step == 0


class Failing:
    """A push that fails, when it is told to end."""

    def __init__(self, error):
        self.error, self.has_ended = error, False

    def done(self):
        return self.has_ended

    def result(self, timeout=None):
        if not self.has_ended:
            raise shoal.DeadlineExceededError("not yet")
        raise self.error


@pytest.mark.parametrize("dim", [1, 16])
def test_rows_found_ahead_may_move_go_and_come_before_they_are_read_and_pushed(dim, tmp_path):
    rng = np.random.default_rng(dim)
    batches = [rng.integers(0, 400 * (i + 1), (200, 3)) for i in range(12)]
    outs = []
    for ahead in (False, True):
        with shoal.local(threads=2, slots=4) as store:
            table = store.table("t", dim=dim, optimizer=shoal.Adagrad(lr=0.1), init=shoal.Normal(0.1, seed=3))
            embedding = shoal.torch.Embedding(table)
            found = []
            for i, batch in enumerate(batches):
                if ahead and i % 4 == 0:
                    for later in batches[i : i + 4]:
                        embedding.sort_ahead(torch.from_numpy(later))
                out = embedding(torch.from_numpy(batch))
                found.append(out.detach().clone())
                if i % 5 == 1:
                    table.erase(batch[:50].ravel())  # between a pull and its push
                if i == 6:
                    store.save(tmp_path / str(ahead))
                    table.push(batch.ravel(), np.ones((batch.size, dim), np.float32))
                    store.load(tmp_path / str(ahead))  # other rows, in other places
                (out * (1 + torch.arange(dim))).sum().backward()
            assert embedding.drop_prefetched() == 0
            held = sorted((int(k), r.tobytes()) for chunk in table.items() for k, r in zip(*chunk, strict=True))
            outs.append((found, held))
    assert all(torch.equal(a, b) for a, b in zip(outs[0][0], outs[1][0], strict=True))
    assert outs[0][1] == outs[1][1]


def test_a_failed_push_is_raised_by_the_next_forward_that_finds_it_done(local, name, monkeypatch):
    table = local.table(name, dim=2)
    embedding = shoal.torch.Embedding(table)
    keys = torch.tensor([1])
    failing = Failing(shoal.ServerLostError("the server is gone"))
    with monkeypatch.context() as patch:
        patch.setattr(table, "push_per_key", lambda batch, grads, locations: shoal.Future(failing, lambda: None))
        embedding(keys).sum().backward()
    embedding(keys)  # it is under way
    failing.has_ended = True
    with pytest.raises(shoal.ServerLostError, match="the server is gone"):
        embedding(keys)
    embedding(keys)  # told once


@pytest.mark.parametrize("teller", ["forward", "flush"])
def test_a_push_that_no_server_took_is_told(teller):
    with (
        cluster(1, 1) as made,
        shoal.connect(made.address, threads=1, consistency=shoal.ASP(), timeout=TIMEOUT) as store,
        contextlib.suppress(shoal.ShoalError),  # closing finds nobody
    ):
        embedding = shoal.torch.Embedding(store.table("t", dim=2))
        out = embedding(torch.tensor([1]))
        lost = shoal.ServerLostError("server 0 is gone, they say")
        store.channel.fail(lost)
        out.sum().backward()  # the push is only begun
        with pytest.raises(shoal.ServerLostError, match="they say"):
            embedding(torch.tensor([1])) if teller == "forward" else store.flush()


def test_a_forked_child_is_told_whose_store_it_is(store, name):
    table = store.table(name, dim=2)
    embedding, bag = shoal.torch.Embedding(table), shoal.torch.EmbeddingBag(table)
    keys = torch.tensor([[1, 2]])
    out = embedding(keys)

    def child():
        reported = []
        for call in (lambda: embedding(keys), lambda: bag(keys), lambda: embedding.prefetch(keys), out.sum().backward):
            try:
                call()
            except shoal.errors.WrongProcessError:
                reported.append("wrong process")
        return reported

    assert in_child(child) == str(["wrong process"] * 4)


# ---- state -----------------------------------------------------------------------------------------------------------


def test_state_dict_names_the_table_and_holds_no_rows(local, name):
    model = torch.nn.Sequential(shoal.torch.Embedding(local.table(name, dim=2)), torch.nn.Linear(2, 1))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert set(state) == {"0._extra_state", "1.weight", "1.bias"}
    assert state["0._extra_state"] == {"version": 1, "table": name, "rows": 0}
    model.load_state_dict(state)
    other = torch.nn.Sequential(shoal.torch.Embedding(local.table(name + " 2", dim=2)), torch.nn.Linear(2, 1))
    with pytest.raises(ValueError, match=r"store\.save"):
        other.load_state_dict(state)
    assert [parameter for parameter in model.parameters() if parameter.numel()] == [*model[1].parameters()]
    assert not [*model.buffers()]


def test_a_state_that_had_rows_warns_of_an_empty_table(local, name, caplog, tmp_path):
    table = local.table(name, dim=2)
    table.push(np.arange(3, dtype=np.uint64), np.ones((3, 2), np.float32)).result()
    state = torch.nn.Sequential(shoal.torch.Embedding(table)).state_dict()
    local.save(tmp_path / "rows")
    with shoal.local() as other:
        model = torch.nn.Sequential(shoal.torch.Embedding(other.table(name, dim=2)))
        model.load_state_dict(state)
        (record,) = caplog.records
        assert f"table {name!r} had 3 rows when this state was taken, and has none now" in record.message
        other.load(tmp_path / "rows")
        model.load_state_dict(state)
        assert len(caplog.records) == 1
    assert model.state_dict()["0._extra_state"]["rows"] == 0  # the store was closed: nothing can be counted


def test_a_module_is_neither_copied_nor_pickled(local, name):
    model = torch.nn.Sequential(shoal.torch.Embedding(local.table(name, dim=2)))
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(model)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(model)
    assert name in repr(model)


# ---- ahead of forward ------------------------------------------------------------------------------------------------


def test_a_prefetch_reads_the_rows_of_its_moment(store, name):
    table = store.table(name, dim=1, optimizer=shoal.SGD(lr=1.0))
    embedding = shoal.torch.Embedding(table)
    keys, others = torch.tensor([7, 3, 7]), torch.tensor([3, 7, 7])
    embedding.prefetch(keys)
    embedding.prefetch(keys.clone())
    table.push(keys.numpy(), np.ones((3, 1), np.float32)).result()
    with torch.no_grad():
        assert embedding(others).ravel().tolist() == [-1, -2, -2]  # of other keys
        assert embedding(keys).ravel().tolist() == [0, 0, 0]
        assert embedding(keys).ravel().tolist() == [0, 0, 0]
        assert embedding(keys).ravel().tolist() == [-2, -1, -2]
    embedding.prefetch(keys)
    embedding.drop_prefetched()
    table.push(keys.numpy(), np.ones((3, 1), np.float32)).result()
    assert embedding(keys).ravel().tolist() == [-4, -2, -4]


def test_sorting_ahead_pulls_nothing(store, name):
    table = store.table(name, dim=1, optimizer=shoal.SGD(lr=1.0))
    embedding = shoal.torch.EmbeddingBag(table)
    keys = torch.tensor([[7, 3, 7]])
    embedding.sort_ahead(keys)
    table.push(keys.numpy()[0], np.ones((3, 1), np.float32)).result()
    embedding(keys).sum().backward()
    store.flush()
    assert table.pull(np.array([7, 3], np.uint64)).ravel().tolist() == [-4, -2]
    embedding.sort_ahead(keys)
    embedding.prefetch(keys)  # of the keys that were sorted
    table.push(keys.numpy()[0], np.ones((3, 1), np.float32)).result()
    assert embedding(keys).tolist() == [[-10]]


def test_keys_that_changed_in_place_are_not_mistaken(local, name):
    table = local.table(name, dim=1)
    embedding = shoal.torch.Embedding(table)
    array = np.array([1, 2, 3])
    table.assign(np.array([1, 2, 3, 4], np.uint64), np.array([1, 2, 3, 4], np.float32))
    keys = torch.from_numpy(array)
    embedding.prefetch(keys)
    array[2] = 4
    assert embedding(keys).ravel().tolist() == [1, 2, 4]


def test_tables_are_pulled_together_and_sort_their_keys_once(store, name, rng, monkeypatch):
    rows = weights(rng)
    deep, wide = filled(store, name, rows), filled(store, name + " wide", rows[:, :1])
    embedding, bag = shoal.torch.Embedding(deep), shoal.torch.EmbeddingBag(wide)
    keys = keys_of(rng.integers(0, 8, (5, 3)))
    sorts = []
    for table in (deep, wide):
        sort = table.key_batch
        monkeypatch.setattr(table, "key_batch", lambda *given, sort=sort: sorts.append(1) or sort(*given))
    a, b, c = shoal.torch.pull_together([(embedding, keys), (bag, keys), (bag, keys.view(-1), torch.tensor([0, 4]))])
    assert len(sorts) == 1
    assert torch.equal(a, embedding(keys))
    assert torch.equal(b, bag(keys))
    assert torch.equal(c, bag(keys.view(-1), torch.tensor([0, 4])))
    assert len(sorts) == 1
    (a.sum() + b.sum()).backward()
    store.flush()
    assert (deep.stats().step, wide.stats().step) == (1, 1)


def test_a_store_that_is_gone_leaves_nothing_behind():
    with shoal.local(threads=2) as store:
        embedding = shoal.torch.Embedding(store.table("t", dim=2))
        embedding(torch.tensor([1, 2])).sum().backward()
        workers = weakref.ref(store.workers)
    del store, embedding
    gc.collect()
    assert workers() is None


# ---- torch.compile ---------------------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    def __init__(self, store, name):
        super().__init__()
        how = {"optimizer": shoal.SGD(lr=0.5), "init": shoal.Normal(0.5, seed=3)}
        self.deep = shoal.torch.Embedding(store.table(name + " deep", dim=4, **how))
        self.wide = shoal.torch.EmbeddingBag(store.table(name + " wide", dim=1, **how))
        self.tags = shoal.torch.EmbeddingBag(store.table(name + " tags", dim=4, **how), mode="max")
        self.linear = torch.nn.Linear(3 * 4 + 4, 1)
        torch.nn.init.constant_(self.linear.weight, 0.25)
        torch.nn.init.zeros_(self.linear.bias)

    def forward(self, keys, tags, offsets, values):
        deep = self.deep(keys).flatten(1)
        return self.linear(torch.cat([deep, self.tags(tags, offsets)], 1)) + self.wide(keys, None, values)


def batches(rng):
    for n in (6, 6, 9):
        yield (
            torch.from_numpy(rng.integers(0, 20, (n, 3))),
            torch.from_numpy(rng.integers(0, 20, 2 * n)).view(torch.uint64),
            torch.arange(n) * 2,
            torch.from_numpy(rng.normal(size=(n, 3)).astype(np.float32)).requires_grad_(),
        )


@pytest.mark.slow
@pytest.mark.parametrize("backend", long_after(1, ["eager", "aot_eager"]))
def test_a_compiled_model_is_the_same_without_graph_breaks(store, name, backend):
    torch.compiler.reset()
    runs = []
    for kind in ("plain", "compiled"):
        model = Model(store, f"{name} {kind}")
        call = model if kind == "plain" else torch.compile(model, fullgraph=True, backend=backend)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rng, seen = np.random.default_rng(5), []
        for *given_keys, values in batches(rng):
            out = call(*given_keys, values)
            optimizer.zero_grad()
            out.square().mean().backward()
            optimizer.step()
            seen += [out.detach().numpy(), values.grad.numpy()]
            with torch.no_grad():
                seen.append(call(*given_keys, values).numpy())
        store.flush()
        model.eval()
        out = call(*given_keys, values.detach().requires_grad_())
        with pytest.raises(RuntimeError, match="would not learn: forward was called in eval mode"):
            out.sum().backward()
        seen.append(out.detach().numpy())
        tables = [module.table for module in (model.deep, model.wide, model.tags)]
        assert [table.stats().step for table in tables] == [3, 3, 3]
        runs.append(seen + [table.pull(np.arange(20, dtype=np.uint64)) for table in tables])
    for a, b in zip(*runs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_what_is_pulled_together_is_compiled_too(local, name):
    torch.compiler.reset()
    how = {"dim": 2, "optimizer": shoal.SGD(lr=1.0)}
    deep, wide = local.table(name, **how), local.table(name + " wide", **how)
    embedding, bag = shoal.torch.Embedding(deep), shoal.torch.EmbeddingBag(wide)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def loss(keys):
        rows, pooled = shoal.torch.pull_together([(embedding, keys), (bag, keys)])
        return rows.sum() + pooled.sum()

    with shoal.torch.accumulate(embedding, bag):
        for _ in range(2):
            loss(torch.tensor([[7, 3], [7, 7]])).backward()
    for table in (deep, wide):
        assert table.stats().step == 1
        assert table.pull(np.array([7, 3], np.uint64)).tolist() == [[-6, -6], [-2, -2]]


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles with g++")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # torch's own, of itself
def test_inductor_compiles_a_model(local, name, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)
    monkeypatch.setattr("torch._inductor.config.cpp_cache_precompile_headers", False)  # it pays from two kernels on
    monkeypatch.setattr("torch._inductor.config.cpp.vec_isa_ok", True)  # else it compiles a program to find out
    torch.compiler.reset()
    table = local.table(name, dim=4, optimizer=shoal.SGD(lr=1.0))
    model = torch.nn.Sequential(shoal.torch.Embedding(table), torch.nn.Flatten())
    torch.compile(model, fullgraph=True)(torch.tensor([[7, 3], [7, 5]])).square().add(1).mul(2).sum().backward()
    assert table.stats().step == 1
    torch.compile(lambda keys: model(keys).sum(), fullgraph=True)(torch.tensor([[7, 3]])).backward()
    assert table.pull(np.array([7, 3, 5], np.uint64))[:, 0].tolist() == [-1, -1, 0]

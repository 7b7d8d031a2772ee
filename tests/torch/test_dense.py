"""A module's parameters on servers against torch's own optimizers, in one process and shared by two workers."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import shoal
from cluster_fakes import TIMEOUT
from cluster_standin import cluster
from stores import joined, together

torch = pytest.importorskip("torch", reason="torch is an extra")

from shoal.torch.dense import DenseParameters  # noqa: E402

BATCH, STEPS = 32, 12

# The rule of the servers, the same of torch, and how far apart weights of about 1 may be after the steps below. Both
# compute in float32; a concatenated batch is summed in another order than two halves. Adam divides a gradient by its
# own size, and torch's has eps at another place: one that is hardly more than rounding may move a weight as far as any.
RULES = {
    "sgd": (shoal.SGD(lr=0.3), lambda p: torch.optim.SGD(p, lr=0.3), 2e-6),
    "momentum": (shoal.Momentum(lr=0.1, mu=0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 3e-6),
    "adagrad": (shoal.Adagrad(lr=0.1), lambda p: torch.optim.Adagrad(p, lr=0.1), 2e-5),
    "adam": (shoal.Adam(lr=0.01), lambda p: torch.optim.Adam(p, lr=0.01), 1e-3),
}


DRAWING = threading.Lock()  # workers are threads here, and torch draws from one generator


def tower(seed=0):
    with DRAWING:
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(6, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1))


def batches(count=STEPS):
    random = np.random.default_rng(5)
    x = torch.from_numpy(random.normal(size=(count, BATCH, 6)).astype(np.float32))
    y = torch.from_numpy((random.random((count, BATCH)) < 0.4).astype(np.float32))
    return list(zip(x, y, strict=True))


def loss_of(module, x, y):
    return torch.nn.functional.binary_cross_entropy_with_logits(module(x).squeeze(1), y)


def weights_of(module):
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()]).numpy().copy()


def plain(make):
    """What torch makes of the whole batches."""
    module = tower()
    optimizer = make(module.parameters())
    for x, y in batches():
        optimizer.zero_grad()
        loss_of(module, x, y).backward()
        optimizer.step()
    return weights_of(module)


def learn(store, rule, seed=0):
    """What a worker does with its share of each batch."""
    module = tower(seed)
    dense = DenseParameters(store, module, optimizer=rule, block=64)
    for x, y in batches():
        dense.pull()
        module.zero_grad()
        mine = slice(store.rank, None, store.num_workers)
        loss_of(module, x[mine], y[mine]).backward()
        dense.push()
        store.tick()
    dense.pull()
    store.barrier()
    return weights_of(module)


@pytest.mark.parametrize("name", RULES)
def test_one_process_takes_the_steps_of_torchs_optimizer(name):
    rule, make, near = RULES[name]
    with shoal.local(threads=1) as store:
        found = learn(store, rule)
    np.testing.assert_allclose(found, plain(make), rtol=near, atol=near)


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_two_workers_at_half_batches_take_the_steps_of_torch_on_whole_ones(name):
    """Whatever the second worker drew for its own, it begins with the numbers of the first."""
    rule, make, near = RULES[name]
    found = []
    for servers in (1, 2):
        with cluster(servers, 1) as made:
            found += together(
                made.address,
                2,
                lambda store: learn(store, rule, seed=store.rank),
                consistency=shoal.BSP(reduce="mean"),
            )
    np.testing.assert_allclose(found[0], plain(make), rtol=near, atol=near)
    assert len({one.tobytes() for one in found}) == 1  # the same bits in both workers, on one server and on two


def test_pushes_of_workers_are_summed_without_the_mean():
    def work(store):
        module = torch.nn.Linear(3, 1, bias=False)
        with torch.no_grad():
            module.weight.fill_(1.0)
        dense = DenseParameters(store, module, optimizer=shoal.SGD(lr=0.5))
        module.weight.grad = torch.full((1, 3), 2.0 + store.rank)
        dense.push().result()
        store.tick()
        dense.pull()
        store.barrier()
        return module.weight.tolist()

    with cluster(1, 1) as made:
        assert together(made.address, 2, work) == [[[1 - 0.5 * 5] * 3]] * 2


def test_parameters_come_back_in_their_order_shapes_and_layouts():
    module = torch.nn.Module()
    module.a = torch.nn.Parameter(torch.arange(6.0).view(2, 3).t())  # not contiguous
    module.frozen = torch.nn.Parameter(torch.full((5,), 9.0), requires_grad=False)
    module.scalar = torch.nn.Parameter(torch.tensor(7.0))
    module.empty = torch.nn.Parameter(torch.empty(0, 4))
    module.tied = module.a
    with shoal.local(threads=1) as store:
        dense = DenseParameters(store, module, optimizer=shoal.SGD(lr=1.0), block=4)
        assert dense.size == 7
        assert dense.table.pull().tolist() == [0, 3, 1, 4, 2, 5, 7]
        module.a.grad = torch.ones(3, 2)
        dense.push()
        before = module.a.data_ptr()
        dense.pull()
    assert module.a.data_ptr() == before
    assert module.a.tolist() == [[-1, 2], [0, 3], [1, 4]]
    assert module.scalar.item() == 7  # no gradient: zero
    assert module.frozen.tolist() == [9.0] * 5
    assert module.tied is module.a


def test_a_checkpoint_brings_numbers_and_momentum_back(tmp_path):
    rule = shoal.Momentum(lr=0.1)

    def step(store, dense, module):
        dense.pull()
        module.zero_grad()
        loss_of(module, *batches(1)[0]).backward()
        dense.push()

    with shoal.local() as store:
        module = tower()
        dense = DenseParameters(store, module, optimizer=rule)
        step(store, dense, module)
        store.save(tmp_path / "c")
        step(store, dense, module)
        dense.pull()
        expected = weights_of(module)
    with shoal.local() as store:
        store.load(tmp_path / "c")
        module = tower(seed=7)
        dense = DenseParameters(store, module, optimizer=rule)
        step(store, dense, module)
        dense.pull()
    assert weights_of(module).tobytes() == expected.tobytes()


def test_assign_sets_what_the_servers_have():
    with shoal.local() as store:
        module = tower()
        dense = DenseParameters(store, module)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(0.25)
        dense.assign()
        assert set(dense.table.pull().tolist()) == {0.25}
        with torch.no_grad():
            module[0].bias.fill_(np.nan)
        with pytest.raises(ValueError, match="finite"):
            dense.assign()
        assert set(dense.table.pull().tolist()) == {0.25}


def test_what_does_not_fit_is_refused():
    with shoal.local() as store:
        with pytest.raises(ValueError, match="no parameter that requires a gradient"):
            DenseParameters(store, torch.nn.ReLU())
        with pytest.raises(ValueError, match=r"parameter 'weight' is torch.bfloat16"):
            DenseParameters(store, torch.nn.Linear(2, 2, dtype=torch.bfloat16))
        DenseParameters(store, torch.nn.Linear(10, 10), name="a", block=16)
        with pytest.raises(ValueError, match="table 'a' has more blocks than"):
            DenseParameters(store, torch.nn.Linear(5, 5), name="a", block=16)
        with pytest.raises(ValueError, match="table 'a' holds 7 blocks, and this module has 27"):
            DenseParameters(store, torch.nn.Linear(20, 20), name="a", block=16)
        sparse = torch.nn.Embedding(4, 2, sparse=True)
        dense = DenseParameters(store, sparse, name="b", optimizer=shoal.SGD(lr=1.0))
        before = dense.table.pull().tolist()
        sparse(torch.tensor([1])).sum().backward()
        with pytest.raises(ValueError, match="parameter 'weight' has a sparse gradient"):
            dense.push()
        assert dense.table.pull().tolist() == before
        assert repr(dense) == "DenseParameters('b', 1 parameters, 8 numbers)"


def test_a_worker_waits_for_the_first_ones_numbers_and_says_so_when_they_do_not_come():
    with cluster(1, 1) as made, joined(made.address, 2, consistency=shoal.ASP()) as stores:
        with pytest.raises(shoal.DeadlineExceededError, match=r"worker 0 has not set dense table 'dense' in 0.05 s"):
            DenseParameters(stores[1], tower(), timeout=0.05)
        found = []
        waiting = threading.Thread(
            target=lambda: found.append(DenseParameters(stores[1], tower(3), timeout=TIMEOUT).table.pull())
        )
        waiting.start()
        DenseParameters(stores[0], tower(0))
        waiting.join(TIMEOUT)
        assert found[0].tobytes() == weights_of(tower(0)).tobytes()

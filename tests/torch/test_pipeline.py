"""The pipeline: the bits of the plain loop, exactly so stale as was asked for, and nothing of it left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal
from cluster_fakes import TIMEOUT
from cluster_standin import cluster
from stores import KINDS, opened, together
from tiers import rounds

torch = pytest.importorskip("torch", reason="torch is an extra")

from shoal.torch import BatchLoader, Embedding, EmbeddingBag, Pipeline  # noqa: E402

SHARED = 2**63 + 5  # a key that every batch has


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    deadline = time.monotonic() + TIMEOUT
    while left := [thread.name for thread in threading.enumerate() if thread.name == "shoal pipeline"]:
        assert time.monotonic() < deadline, left
        gc.collect()
        time.sleep(0.01)


def made(count, rows=20, *, seed=3):
    """Batches of keys int64[rows, 3], some of them seen before, and labels."""
    random = np.random.default_rng(seed)
    keys = random.integers(-(2**63), 2**63, size=40, dtype=np.int64)
    keys[:2] = 0, -1
    return [
        (torch.from_numpy(random.choice(keys, size=(rows, 3))), torch.from_numpy(random.random(rows, np.float32)))
        for _ in range(count)
    ]


class Wide(torch.nn.Module):
    """Two tables with the same keys, one of them looked up by two modules, and a dense part."""

    def __init__(self, store):
        super().__init__()
        torch.manual_seed(1)
        init = shoal.Uniform(0.1, seed=2)
        self.wide = EmbeddingBag(store.table("wide", dim=1, optimizer=shoal.FTRL(alpha=0.5, l1=0.01)))
        self.deep = Embedding(store.table("deep", dim=4, optimizer=shoal.Adagrad(lr=0.1), init=init))
        self.again = Embedding(store.table("deep", dim=4, optimizer=shoal.Adagrad(lr=0.1), init=init))
        self.mlp = torch.nn.Linear(16, 1)

    def forward(self, keys):
        deep = torch.cat([self.deep(keys).flatten(1), self.again(keys[:, 1])], dim=1)
        return (self.wide(keys) + self.mlp(deep)).squeeze(1)

    def asks(self):
        return {
            self.wide: lambda batch: batch[0],
            self.deep: lambda batch: batch[0],
            self.again: lambda batch: [batch[0][:, 1]],
        }


def learn(store, batches, *, tick=False):
    """Train over ``batches``, made of a model: what was learned, to the bit."""
    model = Wide(store)
    optimizer = torch.optim.SGD(model.mlp.parameters(), lr=0.1)
    for keys, labels in batches(model):
        optimizer.zero_grad()
        torch.nn.functional.binary_cross_entropy_with_logits(model(keys), labels).backward()
        optimizer.step()
        if tick:
            store.tick()
    if not isinstance(store, shoal.Store):
        store.barrier()
    rows = [
        (keys.tobytes(), *(column.tobytes() for column in table.state(keys).values()))
        for table in (model.wide.table, model.deep.table)
        for keys in [np.unique(np.concatenate([batch[0].numpy().ravel() for batch in made(12)]))]
    ]
    assert all(not module._lookups for module in (model.wide, model.deep, model.again))
    return rows, [parameter.detach().numpy().tobytes() for parameter in model.mlp.parameters()]


@pytest.mark.parametrize("kind", KINDS)
def test_without_staleness_the_bits_are_those_of_the_plain_loop(kind):
    with opened(kind) as store:
        plain = learn(store, lambda model: made(12))
    with opened(kind) as store:
        found = learn(store, lambda model: Pipeline(made(12), model.asks(), ahead=3))
    assert found == plain


def test_without_staleness_forward_sees_what_the_body_did_before_it():
    key = np.array([SHARED], np.uint64)
    with shoal.local(threads=1) as store:
        module = Embedding(store.table("t", optimizer=shoal.SGD(lr=1.0)))
        for i, keys in enumerate(Pipeline([shared_and(i) for i in range(5)], {module: lambda keys: keys})):
            module.table.assign(key, np.array([[i + 0.5]], np.float32))
            assert module(keys)[0].item() == i + 0.5


def test_under_bsp_the_bits_are_those_of_the_plain_loop_and_the_pipeline_ticks():
    found = []
    for batches, tick in [
        (lambda store: lambda model: made(12), True),
        (lambda store: lambda model: Pipeline(made(12), model.asks(), store=store), False),
    ]:
        with cluster(2, 1) as servers:
            found += together(servers.address, 1, lambda store, b=batches, t=tick: learn(store, b(store), tick=t))
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [1, 3])
def test_a_run_with_staleness_has_the_same_bits_every_time_and_on_a_cluster_under_bsp(staleness):
    def slowly(batches):
        for i, batch in enumerate(batches):
            time.sleep(0.002 * (i * 7 % 3))
            yield batch

    def pipeline(model, batches=None, **more):
        return Pipeline(made(12) if batches is None else batches, model.asks(), staleness=staleness, **more)

    found, under_bsp = [], []
    for servers, batches in [(1, None), (2, slowly(made(12)))]:
        with shoal.local(threads=servers) as store:
            found.append(learn(store, lambda model, b=batches: pipeline(model, b)))
    for servers, batches in [(1, None), (2, slowly(made(12)))]:
        with cluster(servers, 1) as running:
            under_bsp += together(
                running.address,
                1,
                lambda store, b=batches: learn(store, lambda model: pipeline(model, b, store=store)),
            )
    with shoal.local() as store:
        plain = learn(store, lambda model: made(12))
    assert found[0] == found[1] != plain
    assert under_bsp[0] == under_bsp[1]


# ---- which pushes a pull has seen, counted: SGD with a rate of 1, and each body pushes a gradient of 1 ---------------


def counted(where, batches, **how):
    """Pushes to the shared key that the forward of each batch had seen."""
    module = Embedding(where.table("count", optimizer=shoal.SGD(lr=1.0)))
    seen = []
    for keys in Pipeline(batches, {module: lambda keys: keys}, **how):
        rows = module(keys)
        seen.append(-rows[0].item())
        rows.sum().backward()
    return seen


def shared_and(*others):
    return torch.tensor([np.int64(np.uint64(SHARED)), *others])


@settings(max_examples=rounds(30), deadline=None)
@given(st.integers(0, 4), st.integers(0, 9), st.integers(1, 4), st.booleans())
def test_a_pull_in_one_process_sees_the_pushes_up_to_its_staleness_and_no_more(staleness, count, ahead, alike):
    batches = [shared_and(0 if alike else i) for i in range(count)]
    with shoal.local(threads=1, slots=4) as store:
        seen = counted(store, batches, staleness=staleness, ahead=ahead)
        assert seen == [max(0, i - staleness) for i in range(count)]
        assert -store.tables["count"].pull(np.array([SHARED], np.uint64))[0, 0] == count


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_under_bsp_a_pull_sees_all_workers_up_to_its_staleness_and_no_more(staleness):
    batches = [shared_and(i) for i in range(8)]

    def work(store):
        seen = counted(store, batches, staleness=staleness, store=store)
        store.barrier()
        return seen

    with cluster(2, 1) as servers:
        found = together(servers.address, 2, work)
    assert found == [[2 * max(0, i - staleness) for i in range(8)]] * 2


@pytest.mark.parametrize("consistency", [shoal.SSP(staleness=2), shoal.ASP()], ids=str)
@pytest.mark.parametrize("staleness", [0, 2])
def test_under_ssp_the_two_bounds_add_up(consistency, staleness):
    """Each worker pushes to a key of its own: how many of whose pushes were seen is counted apart."""
    batches = [torch.tensor([1, 2]) for _ in range(10)]

    def work(store):
        module = Embedding(store.table("count", optimizer=shoal.SGD(lr=1.0)))
        mine = torch.tensor([[1.0], [0.0]]) if store.rank == 0 else torch.tensor([[0.0], [1.0]])
        seen = []
        for keys in Pipeline(batches, {module: lambda keys: keys}, staleness=staleness, store=store):
            rows = module(keys)
            seen.append((-rows.detach().flatten()).tolist())
            rows.backward(mine)
            time.sleep(0.002 * store.rank)
        store.barrier()
        return seen

    with cluster(1, 2) as servers:
        found = together(servers.address, 2, work, consistency=consistency)
    bound = staleness + consistency.waits if isinstance(consistency, shoal.SSP) else 10
    for rank, seen in enumerate(found):
        for i, counts in enumerate(seen):
            assert i - staleness <= counts[rank] <= i
            assert counts[1 - rank] >= i - bound


@pytest.mark.combined
@pytest.mark.parametrize("consistency", [shoal.BSP(), shoal.SSP(staleness=1), shoal.ASP()], ids=str)
@pytest.mark.parametrize("staleness", [0, 2])
def test_workers_with_unequal_numbers_of_batches_end_a_pass_together(consistency, staleness):
    counts = [2, 7, 0]

    def work(store):
        for _ in range(2):
            counted(
                store,
                [shared_and(i) for i in range(counts[store.rank])],
                staleness=staleness,
                store=store,
            )
        store.barrier()
        return store.clock, -store.tables["count"].pull(np.array([SHARED], np.uint64))[0, 0]

    with cluster(2, 1) as servers:
        found = together(servers.address, 3, work, consistency=consistency)
    assert [pushes for _, pushes in found] == [2 * sum(counts)] * 3
    if consistency.is_bulk:
        assert len({clock for clock, _ in found}) == 1


def test_in_a_loop_over_splits_nobody_waits_for_batches_of_others(tmp_path):
    lines = [f"1 {i}:1\n" for i in range(60)]
    (tmp_path / "a.svm").write_text("".join(lines))
    reader = shoal.read_libsvm(tmp_path / "a.svm", batch_size=5)

    def work(store):
        module = Embedding(store.table("t", optimizer=shoal.SGD(lr=1.0)))
        for split in store.splits(reader, split_bytes=40):
            for batch in Pipeline(split, {module: keys_of}, staleness=1, store=store):
                module(keys_of(batch)).sum().backward()
        store.barrier()
        return module.table.pull(np.arange(60, dtype=np.uint64)).sum()

    with cluster(1, 1) as servers:
        assert together(servers.address, 2, work) == [-60.0, -60.0]


def keys_of(batch):
    return torch.from_numpy(batch.keys.view(np.int64))


# ---- errors ----------------------------------------------------------------------------------------------------------


def train(module, batches, done, **how):
    """Note the second key of each batch, and train on it."""
    for keys in Pipeline(batches, {module: lambda keys: keys}, **how):
        done.append(int(keys[1]))
        module(keys).sum().backward()


def failing(at, error):
    for i in range(10):
        if i == at:
            raise error
        yield shared_and(i)


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("at", [0, 1, 5])
def test_an_error_of_reading_comes_behind_the_batches_before_it(staleness, at):
    with shoal.local(threads=1) as store:
        module = Embedding(store.table("t", optimizer=shoal.SGD(lr=1.0)))
        given_ = []
        with pytest.raises(OSError, match="the disk is gone"):
            train(module, failing(at, OSError("the disk is gone")), given_, staleness=staleness)
        assert given_ == list(range(at))
        assert not module._lookups


@pytest.mark.parametrize("staleness", [0, 2])
def test_an_error_of_prepare_or_of_telling_keys_comes_behind_the_batches_before_it(staleness):
    def prepare(i):
        if i == 3:
            raise LookupError("no such user")
        return shared_and(i)

    with shoal.local(threads=1) as store:
        module = Embedding(store.table("t"))
        given_ = []
        with pytest.raises(LookupError):
            train(module, range(9), given_, prepare=prepare, staleness=staleness)
        with pytest.raises(TypeError, match="float32"):
            train(module, [k if k[1] != 3 else k.float() for k in map(shared_and, range(9))], given_)
        assert given_ == [0, 1, 2, 0, 1, 2]
        assert not module._lookups


class Broken:
    """A shard that cannot pull a certain key."""

    def __init__(self, shard, key):
        self._shard = shard
        self._hash = shoal.data.mix(np.array([key], np.uint64))[0]

    def __getattr__(self, name):
        return getattr(self._shard, name)

    def make_locations(self, batch):
        return None

    def pull(self, batch, rows, locations=None):
        if self._hash in batch.hashes:
            raise shoal.ServerLostError("server 1 is lost")
        return self._shard.pull(batch, rows)


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_an_error_of_a_pull_that_was_begun_ahead_comes_at_its_batch(staleness):
    with shoal.local(threads=1) as store:
        table = store.table("t", optimizer=shoal.SGD(lr=1.0))
        module = Embedding(table)
        table.replace_shard(Broken(table.shard, 4))
        done = []
        with pytest.raises(shoal.ServerLostError):
            train(module, [shared_and(i) for i in range(9)], done, staleness=staleness)
        assert done[:4] == [0, 1, 2, 3]
        assert len(done) == (4 if staleness else 5)  # in place of its body, or in it
        assert not module._lookups


def test_a_server_that_is_lost_while_pulls_are_under_way_is_told_by_the_body():
    def work(store):
        module = Embedding(store.table("t", optimizer=shoal.SGD(lr=1.0)))
        done = []

        def lose(keys):
            if len(done) == 2:
                store.channel.fail(shoal.ServerLostError("server 0 is lost"))

        module.register_forward_pre_hook(lambda module, keys: lose(keys))
        with pytest.raises(shoal.ServerLostError):
            train(module, [shared_and(i) for i in range(9)], done, staleness=1)
        assert len(done) in {2, 3}  # the pull that was begun ahead may have been answered
        assert not module._lookups
        raise shoal.ServerLostError("the end")  # so that the store is closed without waiting

    with cluster(1, 1) as servers, pytest.raises(shoal.ServerLostError, match="the end"):
        together_failing(servers.address, work)


def together_failing(address, work):
    with shoal.connect(address, workers=1, rank=0, threads=1, timeout=TIMEOUT) as store:
        work(store)


# ---- how a pass ends -------------------------------------------------------------------------------------------------


def endless():
    i = 0
    while True:
        yield shared_and(i)
        i += 1


@pytest.mark.parametrize("staleness", [0, 2])
def test_leaving_the_loop_ends_the_thread_and_leaves_no_lookup(staleness):
    closed = threading.Event()

    def source():
        try:
            yield from endless()
        finally:
            closed.set()

    with shoal.local(threads=1) as store:
        module = Embedding(store.table("t", optimizer=shoal.SGD(lr=1.0)))
        for _ in Pipeline(source(), {module: lambda k: k}, staleness=staleness):
            break
        assert closed.wait(TIMEOUT)
        assert not module._lookups
        closed.clear()

        def body():
            for keys in Pipeline(source(), {module: lambda k: k}, staleness=staleness):
                module(keys).sum().backward()
                raise LookupError

        with pytest.raises(LookupError):
            body()
        assert closed.wait(TIMEOUT)
        assert not module._lookups


def test_ctrl_c_ends_a_wait_for_data_that_do_not_come():
    waits, comes = threading.Event(), threading.Event()
    done = []

    def source():
        yield shared_and(0)
        waits.set()
        comes.wait(TIMEOUT)

    def interrupt():
        waits.wait(TIMEOUT)
        deadline = time.monotonic() + TIMEOUT
        while not done and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        comes.set()

    with shoal.local(threads=1) as store:
        module = Embedding(store.table("t", optimizer=shoal.SGD(lr=1.0)))
        interrupting = threading.Thread(target=interrupt)
        interrupting.start()
        with pytest.raises(KeyboardInterrupt):
            train(module, source(), done)
        interrupting.join()
    assert done == [0]


def test_a_worker_that_leaves_early_is_not_waited_for_at_the_end_of_a_pass():
    left = threading.Event()

    def work(store):
        module = Embedding(store.table("t", optimizer=shoal.SGD(lr=1.0)))
        pipeline = Pipeline([shared_and(i) for i in range(6)], {module: lambda k: k}, staleness=1, store=store)
        with contextlib.suppress(LookupError):
            for i, keys in enumerate(pipeline):
                module(keys).sum().backward()
                if store.rank == 1 and i == 2:
                    raise LookupError
        if store.rank == 1:
            left.set()
        return store.clock

    def one(rank):
        with shoal.connect(servers.address, workers=2, rank=rank, threads=1, timeout=TIMEOUT) as store:
            return work(store)

    with cluster(1, 1) as servers, ThreadPoolExecutor(2) as pool:
        clocks = list(pool.map(one, range(2)))
    assert left.is_set()
    assert clocks[1] == 2
    assert clocks[0] >= 6


@pytest.mark.slow
def test_a_pass_that_could_not_begin_because_others_were_late_is_begun_again():
    failed = threading.Event()

    def work(rank, timeout):
        with shoal.connect(servers.address, workers=2, rank=rank, threads=1, timeout=timeout) as store:
            module = Embedding(store.table("t", optimizer=shoal.SGD(lr=1.0)))
            pipeline = Pipeline([shared_and(i) for i in range(2 + 3 * rank)], {module: lambda k: k}, store=store)
            if rank == 0:
                with pytest.raises(shoal.DeadlineExceededError, match="waiting for all workers"):
                    next(iter(pipeline))
                failed.set()
            assert failed.wait(TIMEOUT)
            given = 0
            for keys in pipeline:
                module(keys).sum().backward()
                given += 1
            return given

    with cluster(1, 1) as servers, ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, range(2), [3.0, TIMEOUT])) == [2, 5]


def test_a_batch_that_the_model_was_not_called_with_leaves_no_lookup_and_is_told_once(caplog):
    with shoal.local(threads=1) as store:
        module = Embedding(store.table("t", optimizer=shoal.SGD(lr=1.0)))
        seen = []
        for i, keys in enumerate(Pipeline([shared_and(0)] * 8, {module: lambda k: k}, staleness=1)):
            if i % 2:
                continue
            rows = module(keys)
            seen.append(-rows[0].item())
            rows.sum().backward()
        assert not module._lookups
    assert seen == [0, 1, 2, 3]  # batch 2 was pulled between the bodies 0 and 1, of which 0 pushed; and so on
    assert len([one for one in caplog.records if "without a forward" in one.message]) == 1


def test_an_evaluation_in_between_sees_what_there_is_and_takes_nothing_away():
    with shoal.local(threads=1) as store:
        module = Embedding(store.table("t", optimizer=shoal.SGD(lr=1.0)))
        probe = torch.tensor([np.int64(np.uint64(SHARED))])
        seen, probed = [], []
        for keys in Pipeline([shared_and(i) for i in range(5)], {module: lambda k: k}, staleness=2):
            module.eval()
            probed.append(-module(probe).item())
            module.train()
            rows = module(keys)
            seen.append(-rows[0].item())
            rows.sum().backward()
    assert probed == [0, 1, 2, 3, 4]
    assert seen == [0, 0, 0, 1, 2]


def test_each_for_is_a_pass():
    with shoal.local(threads=1) as store:
        module = Embedding(store.table("t"))
        pipeline = Pipeline([shared_and(i) for i in range(4)], {module: lambda k: k}, staleness=1)
        for _ in range(2):
            given_ = []
            for keys in pipeline:
                module(keys)
                given_.append(int(keys[1]))
            assert given_ == [0, 1, 2, 3]


# ---- where the batches come from -------------------------------------------------------------------------------------


@pytest.fixture
def reader(tmp_path):
    (tmp_path / "a.svm").write_text("".join(f"{i % 2} {i}:1\n" for i in range(300)))
    return shoal.read_libsvm(tmp_path / "a.svm", batch_size=32)


FORKS = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # of Python 3.12, beside threads


@pytest.mark.slow
@pytest.mark.combined
@FORKS
@pytest.mark.parametrize("processes", [None, 0, 2])
@pytest.mark.parametrize("staleness", [0, 3])
def test_a_pass_goes_on_from_the_batch_that_was_given_last_however_far_reading_was(reader, processes, staleness):
    def source():
        return reader if processes is None else BatchLoader(reader, num_workers=processes)

    def resumed(position):
        if processes is None:
            return reader.resume(position)
        loader = source()
        loader.load_state_dict(position)
        return loader

    whole = [batch.keys.tolist() for batch in source()]
    with shoal.local(threads=1) as store:
        bag = EmbeddingBag(store.table("t"))
        pipeline = Pipeline(source(), {bag: keys_of}, staleness=staleness)
        assert pipeline.position() is None
        given_ = []
        for batch in pipeline:
            bag(batch)
            given_.append(batch.keys.tolist())
            if len(given_) == 4:
                break
        rest = Pipeline(resumed(pipeline.position()), {bag: keys_of}, staleness=staleness)
        for batch in rest:
            bag(batch)
            given_.append(batch.keys.tolist())
        assert given_ == whole


@pytest.mark.slow
@FORKS
def test_a_data_loader_with_processes_is_read_ahead(reader):
    loader = torch.utils.data.DataLoader(made(6), batch_size=None, num_workers=2)
    with shoal.local(threads=1) as store:
        model = Wide(store)
        seen = [keys for keys, _ in Pipeline(loader, None, ahead=1)]
        for keys, _ in Pipeline(loader, model.asks(), staleness=1):
            model(keys)
    assert [keys.tolist() for keys in seen] == [keys.tolist() for keys, _ in made(6)]


def test_what_does_not_fit_is_refused():
    with shoal.local(threads=1) as store:
        module = Embedding(store.table("t"))
        with pytest.raises(TypeError, match="a Linear pulls no rows"):
            Pipeline([], {torch.nn.Linear(1, 1): keys_of})
        for name, value, least in (("staleness", -1, 0), ("ahead", 0, 1)):
            with pytest.raises(ValueError, match=f"{name} is {value}: pass {least} or more"):
                Pipeline([], {module: keys_of}, **{name: value})
        assert list(Pipeline([], {module: keys_of}, staleness=2)) == []
        with pytest.raises(TypeError, match="not iterable"):
            list(Pipeline(7))
        for given, says in (
            ({"modules": [module]}, "modules is a list: pass {embedding: function"),
            ({"modules": {module: [1]}}, "modules has a list for table 't'"),
            ({"prepare": "tensors"}, "prepare is a str: pass a function"),
            ({"store": module.table}, "store is a Table: pass that of the tables"),
        ):
            with pytest.raises(TypeError, match=says):
                Pipeline([], **given)

"""Keys that an adversary has chosen so that their hashes collide: slower at most, and never wrong."""

import numpy as np
import pytest

import shoal
from oracle.hashing import keys_of, one_slot

# More colliding hashes than an insert passes before it scrambles its slot, whatever the row's width.
COUNT = 6000


def colliding(count: int) -> np.ndarray:
    """Return keys with one home in one slot, and equal last bits in their hashes, which choose the second bucket."""
    return keys_of((0x1234 << 48) + 64 * i for i in range(count))


def train(store: shoal.Store, keys: np.ndarray, dim: int) -> None:
    table = store.table("rows", dim=dim, optimizer=shoal.Adagrad(lr=0.1), init=shoal.Uniform(0.1, seed=3))
    random = np.random.default_rng(7)
    for _ in range(3):
        batch = random.choice(keys, len(keys))
        table.push(batch, random.normal(size=(len(batch), dim)).astype(np.float32)).result()
    table.erase(keys[::5])


@pytest.mark.parametrize("dim", [1, 16])
def test_colliding_keys_get_the_bits_of_a_table_that_is_cut_otherwise(dim, tmp_path):
    keys = np.concatenate([colliding(COUNT), one_slot(500), np.arange(500, dtype=np.uint64)])
    with shoal.local() as store, shoal.local(slots=16384, threads=2) as other:
        for one in (store, other):
            train(one, keys, dim)
        assert np.array_equal(store.tables["rows"].pull(keys), other.tables["rows"].pull(keys))
        assert np.array_equal(store.tables["rows"].contains(keys), other.tables["rows"].contains(keys))

        store.save(tmp_path / "save")
        store.export(tmp_path / "export")
        with shoal.local() as loaded, shoal.export.open(tmp_path / "export") as export:
            loaded.load(tmp_path / "save")
            for column, values in store.tables["rows"].state(keys).items():
                assert np.array_equal(loaded.tables["rows"].state(keys)[column], values)
            assert np.array_equal(export.tables["rows"].pull(keys), store.tables["rows"].pull(keys))


def test_a_delta_of_colliding_keys_has_what_changed(tmp_path):
    keys = colliding(COUNT)
    with shoal.local() as store:
        train(store, keys, 1)
        store.save(tmp_path / "base", track=True)
        table = store.tables["rows"]
        table.push(keys[:100], np.ones((100, 1), np.float32)).result()
        table.erase(keys[100:200])
        store.save(tmp_path / "delta", since=tmp_path / "base", track=True)
        with shoal.local() as loaded:
            loaded.load(tmp_path / "delta")
            assert np.array_equal(loaded.tables["rows"].pull(keys), table.pull(keys))
            assert np.array_equal(loaded.tables["rows"].contains(keys), table.contains(keys))


def test_colliding_keys_that_wait_for_admission_are_counted_exactly():
    keys = colliding(COUNT)
    with shoal.local() as store:
        table = store.table("rows", admit=shoal.AfterCount(3))
        ones = np.ones((len(keys), 1), np.float32)
        for expected in (0, 0, COUNT):
            table.push(keys, ones).result()
            assert len(table) == expected

"""Examples of any length as tensors of fixed fields."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="inputs of models are tensors")

import shoal  # noqa: E402
from shoal.data.hashing import MISSING_TEXT  # noqa: E402
from shoal.torch.fields import Fields, inputs, to_json  # noqa: E402
from shoal.torch.finite import largest_value  # noqa: E402

LIBFFM = "1 0:3:1 2:9:1 7:17:0.5 2:8:1\n0 9:1:1 7:18446744073709551615:2\n0 0:0:4\n"


@pytest.fixture
def batch(tmp_path):
    path = tmp_path / "data.ffm"
    path.write_text(LIBFFM)
    (batch,) = shoal.read_libffm(path).with_fields()
    return batch


def missing(field: int) -> int:
    return int(shoal.hash_strings([MISSING_TEXT], field)[0])


def unsigned(tensor) -> list:
    return tensor.numpy().view(np.uint64).tolist()


def test_features_go_to_their_fields_in_the_order_asked_for(batch):
    fields = Fields(names=["7", "0"], form="libffm")
    x = fields.inputs(batch)
    assert unsigned(x.keys) == [[17, 3], [2**64 - 1, missing(0)], [missing(7), 0]]
    assert x.values.tolist() == [[0.5, 1.0], [2.0, 1.0], [1.0, 4.0]]
    assert x.history is None
    assert x.dense is None
    assert fields.missing.tolist() == [missing(7), missing(0)]
    assert len(fields) == 2


def test_a_history_is_jagged_and_keeps_its_order(batch):
    x = Fields(names=["0"], form="libffm", history="2", item="0").inputs(batch)
    keys, offsets = x.history
    assert unsigned(keys) == [9, 8]
    assert offsets.tolist() == [0, 2, 2, 2]
    assert x.history_values is None


def test_the_values_of_a_history_are_how_often_its_items_count(tmp_path):
    (tmp_path / "x.vw").write_text("1 |ad a1 |hist a1:50 a2\n0 |ad a2 |hist a1:1\n")
    (batch,) = shoal.read_vw(tmp_path / "x.vw").with_fields()
    fields = Fields(names=["ad"], form="vw", history="hist", item="ad")
    x = fields.inputs(batch)
    assert x.history_values.tolist() == [50, 1, 1]
    assert largest_value(x, fields) == ""
    large = x._replace(history_values=torch.tensor([50.0, 1.0, -1e30]))
    assert largest_value(large, fields) == "field 'hist' is 1e+30 in its example 1"


@pytest.mark.parametrize("log", [False, True])
def test_dense_columns_are_numbers_and_0_where_there_is_none(batch, log):
    x = Fields(names=["0"], form="libffm", dense=["7", "9"], log=log).inputs(batch)
    expected = np.array([[0.5, 0], [2, 1], [0, 0]], np.float32)
    np.testing.assert_array_equal(x.dense.numpy(), np.log1p(expected) if log else expected)


def test_values_that_are_all_1_are_left_out(batch):
    assert Fields(names=["9"], form="libffm").inputs(batch).values is None


def test_groups_are_keys_of_a_field_that_need_not_be_a_feature(batch):
    fields = Fields(names=["0"], form="libffm", group="7")
    assert fields.groups(batch).tolist() == [17, 2**64 - 1, missing(7)]
    with pytest.raises(ValueError, match="more than one feature of '2'"):
        Fields(names=["0"], form="libffm", group="2").groups(batch)
    with pytest.raises(ValueError, match="no field is the group"):
        Fields(names=["0"], form="libffm").groups(batch)


def test_a_column_of_text_has_the_keys_of_its_reader(tmp_path):
    path = tmp_path / "ads.csv"
    path.write_text("click,site,price,ad\n1,a,0.5,7\n0,,2,8\n")
    (batch,) = shoal.read_csv(path, label="click", numeric=["price"]).with_fields()
    x = Fields(names=["ad", "site"], dense=["price"]).inputs(batch)
    ad, site = (int(shoal.hash_strings([name])[0]) for name in ("ad", "site"))
    assert unsigned(x.keys[:, 0]) == shoal.hash_strings(["7", "8"], ad).tolist()
    assert unsigned(x.keys[:, 1]) == [int(shoal.hash_strings(["a"], site)[0]), missing(site)]
    assert x.dense.tolist() == [[0.5], [2.0]]


def test_rows_of_one_length_need_no_fields():
    batch = shoal.Batch(np.ones(2, np.float32), np.array([0, 2, 4]), np.array([1, 2, 2**64 - 1, 0], np.uint64), None)
    x = inputs(batch, 2)
    assert unsigned(x.keys) == [[1, 2], [2**64 - 1, 0]]
    assert x.values is None


def test_no_examples_are_no_rows(batch):
    empty = shoal.data.rebatch.rows_of(batch, 0, 0)
    x = Fields(names=["0", "7"], form="libffm", history="2", item="0", dense=["9"]).inputs(empty)
    assert x.keys.shape == (0, 2)
    assert x.dense.shape == (0, 1)
    assert x.history[1].tolist() == [0]


def test_a_slow_twin_agrees_on_random_rows(rng):
    fields = Fields(names=["5", "1", "3"], form="libffm", history="4", item="1", dense=["2"])
    for n in (1, 7, 64):
        lengths, keys, values, reported = [], [], [], []
        for _ in range(n):
            mine = [f for f in (0, 1, 2, 3, 5) if rng.random() < 0.7] + [4] * int(rng.integers(0, 4))
            rng.shuffle(mine)
            lengths.append(len(mine))
            reported += mine
            keys += rng.integers(0, 50, len(mine)).tolist()
            values += rng.random(len(mine)).tolist()
        batch = shoal.Batch(
            np.zeros(n, np.float32),
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            np.array(keys, np.uint64),
            np.array(values, np.float32),
            None,
            np.array(reported, np.uint64),
        )
        x = fields.inputs(batch)
        for row in range(n):
            mine = range(batch.indptr[row], batch.indptr[row + 1])
            of = {int(batch.fields[i]): i for i in mine}
            expected = [int(batch.keys[of[f]]) if f in of else missing(f) for f in (5, 1, 3)]
            assert unsigned(x.keys[row]) == expected
            values = [1, 1, 1] if x.values is None else x.values[row].tolist()
            assert values == [batch.values[of[f]] if f in of else 1 for f in (5, 1, 3)]
            assert x.dense[row].item() == (batch.values[of[2]] if 2 in of else 0)
            begin, end = x.history[1][row], x.history[1][row + 1]
            assert unsigned(x.history[0][begin:end]) == [int(batch.keys[i]) for i in mine if batch.fields[i] == 4]


def test_fields_go_through_json():
    fields = Fields(names=["I1", "C3"], form="criteo", group="C1")
    assert Fields(**to_json(fields)) == fields
    assert hash(fields) == hash(Fields(**to_json(fields)))


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"names": []}, "names is empty"),
        ({"names": ["a", "a"]}, "'a' has two roles"),
        ({"names": ["a"], "dense": ["a"]}, "'a' has two roles"),
        ({"names": ["a"], "history": "h"}, "a history needs the item"),
        ({"names": ["a"], "history": "h", "item": "b"}, "item is 'b', none of the fixed fields"),
        ({"names": ["I1", "1"], "form": "criteo"}, "are the same field"),
        ({"names": ["C27"], "form": "criteo"}, "'C27' is not a feature column"),
        ({"names": ["a"], "form": "libsvm"}, "'libsvm' is not a format with fields"),
    ],
)
def test_fields_that_make_no_sense_are_told(how, says):
    with pytest.raises(ValueError, match=says):
        Fields(**how)


def test_a_single_text_is_no_list_of_fields():
    with pytest.raises(TypeError, match="names is 'site': pass a list"):
        Fields(names="site")


def test_what_does_not_fit_fixed_fields_is_told(batch):
    with pytest.raises(ValueError, match="example 0 has 2 features of '2', and a fixed field has one"):
        Fields(names=["0", "2"], form="libffm").inputs(batch)
    with pytest.raises(ValueError, match=r"example 0 has 4 features, and the model 2 fields: .*with_fields"):
        inputs(batch, 2)
    plain = shoal.Batch(batch.labels, batch.indptr, batch.keys, None)
    with pytest.raises(ValueError, match="has no fields for its features"):
        Fields(names=["0"], form="libffm").inputs(plain)
    untold = shoal.Batch(batch.labels, batch.indptr, batch.keys, None, None, batch.fields)
    with pytest.raises(ValueError, match="dense columns are numbers"):
        Fields(names=["0"], form="libffm", dense=["7"]).inputs(untold)

"""Features described once, and examples of any length as tensors of them."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="inputs of models are tensors")

import shoal  # noqa: E402
from shoal.data.hashing import MISSING_TEXT  # noqa: E402
from shoal.models.features import Features  # noqa: E402
from shoal.torch.finite import largest_value  # noqa: E402
from shoal.torch.inputs import inputs  # noqa: E402

HISTORY = {"type": "sequence", "share": "0"}
EVERY = [
    "user",
    "ad",
    {"name": "age", "type": "bucket", "edges": [18, 30.5]},
    {"name": "years", "column": "age", "type": "number", "log": True},
    {"name": "price", "type": "number", "embed": True},
    {"name": "pair", "type": "cross", "of": ["user", "age"]},
    {"name": "likes", "type": "cross", "of": ["tags", "ad"], "pooling": "sum"},
    {"name": "tags", "type": "list", "weights": "scores", "pooling": "sqrtn"},
    {
        "name": "seen",
        "type": "sequence",
        "share": "ad",
        "side": {"kinds": "kinds"},
        "side_numeric": ["dwell", "hour"],
        "max_len": 2,
    },
    {"name": "image", "type": "vector", "size": 3},
]
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
    fields = Features(["7", "0"], form="libffm")
    x = inputs(batch, fields)
    assert unsigned(x.keys) == [[17, 3], [2**64 - 1, missing(0)], [missing(7), 0]]
    assert x.values.tolist() == [[0.5, 1.0], [2.0, 1.0], [1.0, 4.0]]
    assert not x.sequences
    assert x.dense is None
    assert fields.missing.tolist() == [missing(7), missing(0)]
    assert len(fields) == 2


def test_a_history_is_jagged_and_keeps_its_order(batch):
    items = inputs(batch, Features(["0", HISTORY | {"name": "2"}], form="libffm")).sequences["2"]
    assert unsigned(items.keys) == [9, 8]
    assert items.offsets.tolist() == [0, 2, 2, 2]
    assert items.weights is None


def test_the_values_of_a_history_are_how_often_its_items_count(tmp_path):
    (tmp_path / "x.vw").write_text("1 |ad a1 |hist a1:50 a2\n0 |ad a2 |hist a1:1\n")
    (batch,) = shoal.read_vw(tmp_path / "x.vw").with_fields()
    features = Features(["ad", {"name": "hist", "type": "sequence", "share": "ad"}], form="vw")
    x = inputs(batch, features)
    assert x.sequences["hist"].weights.tolist() == [50, 1, 1]
    assert largest_value(x, features) == ""
    large = x.sequences["hist"]._replace(weights=torch.tensor([50.0, 1.0, -1e30]))
    large = x._replace(sequences={"hist": large})
    assert largest_value(large, features) == "feature 'hist' is 1e+30 in its example 1"


@pytest.mark.parametrize("log", [False, True])
def test_dense_columns_are_numbers_and_0_where_there_is_none(batch, log):
    numbers = [{"name": name, "type": "number", "log": log} for name in ("7", "9")]
    x = inputs(batch, Features(["0", *numbers], form="libffm"))
    expected = np.array([[0.5, 0], [2, 1], [0, 0]], np.float32)
    np.testing.assert_array_equal(x.dense.numpy(), np.log1p(expected) if log else expected)


def test_values_that_are_all_1_are_left_out(batch):
    assert inputs(batch, Features(["9"], form="libffm")).values is None


def test_groups_are_keys_of_a_field_that_need_not_be_a_feature(batch):
    fields = Features(["0"], form="libffm", group="7")
    assert fields.groups(batch).tolist() == [17, 2**64 - 1, missing(7)]
    with pytest.raises(ValueError, match="more than one feature of '2'"):
        Features(["0"], form="libffm", group="2").groups(batch)
    with pytest.raises(ValueError, match="no field is the group"):
        Features(["0"], form="libffm").groups(batch)


def test_a_column_of_text_has_the_keys_of_its_reader(tmp_path):
    path = tmp_path / "ads.csv"
    path.write_text("click,site,price,ad\n1,a,0.5,7\n0,,2,8\n")
    (batch,) = shoal.read_csv(path, label="click", numeric=["price"]).with_fields()
    x = inputs(batch, Features(["ad", "site", {"name": "price", "type": "number"}]))
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
    features = ["0", "7", HISTORY | {"name": "2"}, {"name": "9", "type": "number"}]
    x = inputs(empty, Features(features, form="libffm"))
    assert x.keys.shape == (0, 2)
    assert x.dense.shape == (0, 1)
    assert x.sequences["2"].offsets.tolist() == [0]


def test_a_slow_twin_agrees_on_random_rows(rng):
    history = {"name": "4", "type": "sequence", "share": "1"}
    fields = Features(["5", "1", "3", history, {"name": "2", "type": "number"}], form="libffm")
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
        x = inputs(batch, fields)
        for row in range(n):
            mine = range(batch.indptr[row], batch.indptr[row + 1])
            of = {int(batch.fields[i]): i for i in mine}
            expected = [int(batch.keys[of[f]]) if f in of else missing(f) for f in (5, 1, 3)]
            assert unsigned(x.keys[row]) == expected
            values = [1, 1, 1] if x.values is None else x.values[row].tolist()
            assert values == [batch.values[of[f]] if f in of else 1 for f in (5, 1, 3)]
            assert x.dense[row].item() == (batch.values[of[2]] if 2 in of else 0)
            begin, end = x.sequences["4"].offsets[row : row + 2]
            assert unsigned(x.sequences["4"].keys[begin:end]) == [
                int(batch.keys[i]) for i in mine if batch.fields[i] == 4
            ]


def test_features_go_through_json():
    features = Features(["I1", "C3"], form="criteo", group="C1")
    assert Features.from_json(features.to_json()) == features
    assert hash(features) == hash(Features.from_json(features.to_json()))
    every = Features(EVERY, labels={"ctr": "click", "cvr": {"column": "conv", "mask": "ctr", "weight": 0.5}})
    assert Features.from_json(json.loads(json.dumps(every.to_json()))) == every


@pytest.mark.parametrize(
    ("described", "how", "says"),
    [
        ([], {}, "features is empty"),
        (["a", "a"], {}, "feature 'a' is there twice"),
        ([{"name": "a", "type": "lists"}], {}, r"\[\[features\]\] a type is 'lists': did you mean 'list'"),
        ([{"name": "a", "poolin": "sum"}], {}, "has no key 'poolin': did you mean 'pooling'"),
        ([{"name": "a", "pooling": "sum"}], {}, "'a' of type category has pooling, which is for list"),
        (
            [{"name": "h", "type": "sequence", "share": "advert"}, "adverts"],
            {},
            "names .advert., none of .*did you mean .adverts.",
        ),
        (
            [{"name": "h", "type": "list", "share": "p"}, {"name": "p", "type": "number"}],
            {},
            "which has none of its own",
        ),
        ([{"name": "x", "type": "cross", "of": ["a"]}, "a"], {}, "name two features or more"),
        (
            [{"name": "x", "type": "cross", "of": ["a", "p"]}, "a", {"name": "p", "type": "number"}],
            {},
            "of 'p', a number",
        ),
        ([{"name": "b", "type": "bucket"}], {}, "needs edges, or a number of quantiles"),
        ([{"name": "b", "type": "bucket", "edges": [2, 1]}], {}, "they must ascend"),
        ([{"name": "v", "type": "vector"}], {}, "has no size"),
        (["I1", "1"], {"form": "criteo"}, "are the same field"),
        (["C27"], {"form": "criteo"}, "'C27' is not a feature column"),
        (["a"], {"form": "libsvm"}, "'libsvm' is not a format with fields"),
        (["a"], {"labels": {"cvr": {"column": "conv", "mask": "ctr"}}}, "the mask of label 'cvr' is 'ctr', none of"),
        (["a"], {"labels": {"cvr": {"columnx": "conv"}}}, "did you mean 'column'"),
    ],
)
def test_features_that_make_no_sense_are_told(described, how, says):
    with pytest.raises(ValueError, match=says):
        Features(described, **how)


def test_a_single_text_is_no_list_of_features():
    with pytest.raises(TypeError, match="features is 'site': pass a list"):
        Features("site")
    with pytest.raises(TypeError, match="features is None: pass a list"):
        Features(None)
    with pytest.raises(TypeError, match="3 is no feature"):
        Features([3])


def test_a_number_of_features_is_one_that_a_model_can_have():
    with pytest.raises(TypeError, match="features is True: pass features, or how many"):
        Features.numbered(True)
    with pytest.raises(ValueError, match="pass at most 65536"):
        Features.numbered(10**30)


def test_one_column_is_read_in_one_way():
    with pytest.raises(ValueError, match="column 'age' is read as categorical and as numeric"):
        _ = Features(["age", {"name": "years", "column": "age", "type": "number"}]).columns
    both = [{"name": "b", "column": "age", "type": "bucket", "edges": [18]}, {"name": "age", "type": "number"}]
    assert Features(both).columns["numeric"] == ["age"]


def test_what_does_not_fit_fixed_fields_is_told(batch):
    with pytest.raises(ValueError, match="example 0 has 2 features of '2', and a category has one"):
        inputs(batch, Features(["0", "2"], form="libffm"))
    with pytest.raises(ValueError, match=r"example 0 has 4 features, and the model 2 fields: .*with_fields"):
        inputs(batch, 2)
    plain = shoal.Batch(batch.labels, batch.indptr, batch.keys, None)
    with pytest.raises(ValueError, match="has no fields for its features"):
        inputs(plain, Features(["0"], form="libffm"))
    untold = shoal.Batch(batch.labels, batch.indptr, batch.keys, None, None, batch.fields)
    with pytest.raises(ValueError, match="dense columns are numbers"):
        inputs(untold, Features(["0", {"name": "7", "type": "number"}], form="libffm"))


def jagged(rng, n: int, most: int) -> np.ndarray:
    return rng.integers(0, most + 1, n)


def test_a_slow_twin_agrees_on_every_type_of_feature(rng):
    """Cells of each column are drawn, written as features of a batch, and read back one by one."""
    features = Features(EVERY, labels={"ctr": "click", "cvr": {"column": "conv", "mask": "ctr"}})
    number = {name: int(shoal.hash_strings([name])[0]) for name in (*features.places, "user/age", "tags/ad")}

    def key(column: str, text: str) -> int:
        return int(shoal.hash_strings([text], number[column])[0])

    def crossed(first: int, second: int) -> int:
        both = np.array([first, second], np.uint64)
        made = shoal._core.interact(
            np.array([0, 2]), both, None, np.array([0, 1], np.uint64), np.array([0, 1], np.uint64)
        )
        return int(made[1][-1])

    for n in (0, 1, 5, 60):
        rows, lengths, flat = [], [], []
        for _ in range(n):
            row = {name: f"{name}{rng.integers(4)}" for name in ("user", "ad") if rng.random() < 0.8}
            row |= {
                name: float(np.float32(rng.random() * 40)) for name in ("age", "price", "conv") if rng.random() < 0.8
            }
            count = int(rng.integers(0, 5))
            row["tags"] = [f"t{rng.integers(5)}" for _ in range(count)]
            row["scores"] = [float(np.float32(rng.random())) for _ in range(count)]
            count = int(rng.integers(0, 5))
            row["seen"] = [f"ad{rng.integers(4)}" for _ in range(count)]
            row["kinds"] = [f"k{rng.integers(3)}" for _ in range(count)]
            row |= {side: [float(np.float32(rng.random())) for _ in range(count)] for side in ("dwell", "hour")}
            row["image"] = [1.5, 2.5, 3.5] if rng.random() < 0.7 else []
            cells = []
            for name, cell in row.items():
                hashed = "ad" if name == "seen" else name
                cells.append(
                    [
                        (
                            number[name],
                            key(hashed, one) if isinstance(one, str) else 0,
                            1.0 if isinstance(one, str) else one,
                        )
                        for one in (cell if isinstance(cell, list) else [cell])
                    ]
                )
            rng.shuffle(cells)
            found = [one for cell in cells for one in cell] + [(12345, 6, 7.0)]
            rows.append(row)
            lengths.append(len(found))
            flat += found
        fields, keys, values = (list(one) for one in zip(*flat, strict=True)) if flat else ([], [], [])
        indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        batch = shoal.Batch(
            np.zeros(n, np.float32), indptr, np.array(keys, np.uint64), np.array(values, np.float32), None,
            np.array(fields, np.uint64),
        )  # fmt: skip
        x = inputs(batch, features)
        assert [one.name for one in features.fixed] == ["user", "ad", "age", "price", "pair"]
        for i, row in enumerate(rows):
            user = key("user", row["user"]) if "user" in row else missing(number["user"])
            ad = key("ad", row["ad"]) if "ad" in row else missing(number["ad"])
            age = missing(number["age"])
            if "age" in row:
                age = key("age", str(sum(row["age"] >= edge for edge in (18, 30.5))))
            price = 0 if "price" in row else missing(number["price"])
            pair = crossed(user, age) if {"user", "age"} <= row.keys() else missing(number["user/age"])
            assert unsigned(x.keys[i]) == [user, ad, age, price, pair]
            factors = [1, 1, 1, row.get("price", 1.0), 1]
            assert (x.values[i].tolist() if x.values is not None else [1] * 5) == factors
            years = np.log1p(np.float32(row.get("age", 0)))
            np.testing.assert_allclose(x.dense[i].numpy(), [years, *(row["image"] or [0, 0, 0])], rtol=1e-6)
            tags = [key("tags", one) for one in row["tags"]]
            got = x.lists["tags"]
            begin, end = got.offsets[i : i + 2].tolist()
            assert unsigned(got.keys[begin:end]) == tags
            assert got.weights[begin:end].tolist() == row["scores"]
            likes = x.lists["likes"]
            begin, end = likes.offsets[i : i + 2].tolist()
            assert unsigned(likes.keys[begin:end]) == ([crossed(tag, ad) for tag in tags] if "ad" in row else [])
            got = x.sequences["seen"]
            begin, end = got.offsets[i : i + 2].tolist()
            assert unsigned(got.keys[begin:end]) == [key("ad", one) for one in row["seen"][-2:]]
            assert unsigned(got.side["kinds"][begin:end]) == [key("kinds", one) for one in row["kinds"][-2:]]
            dwell = list(zip(row["dwell"][-2:], row["hour"][-2:], strict=True))
            assert [tuple(one) for one in got.numeric[begin:end].tolist()] == dwell
            label = x.labels["cvr"][i].item()
            assert label == row["conv"] if "conv" in row else np.isnan(label)


def test_items_are_padded_with_their_last_ones(tmp_path):
    (tmp_path / "x.vw").write_text("1 |s a b c |k x y z |d :1 :2 :3\n0 |o 1\n1 |s c |k z |d :9\n")
    (batch,) = shoal.read_vw(tmp_path / "x.vw").with_fields()
    described = {"name": "s", "type": "sequence", "side": ["k"], "side_numeric": ["d"]}
    items = inputs(batch, Features([described], form="vw")).sequences["s"]
    assert items.lengths.tolist() == [3, 0, 1]
    got = items.padded(2)
    assert got.mask.tolist() == [[True, True], [False, False], [True, False]]
    assert got.keys.tolist() == [items.keys[1:3].tolist(), [0, 0], [items.keys[3].item(), 0]]
    assert got.side["k"].tolist() == [items.side["k"][1:3].tolist(), [0, 0], [items.side["k"][3].item(), 0]]
    assert got.numeric.squeeze(2).tolist() == [[2, 3], [0, 0], [9, 0]]
    assert items._replace(keys=items.keys[:0], side={}, numeric=None, offsets=items.offsets[:1]).padded(
        2
    ).keys.shape == (0, 2)


@pytest.mark.parametrize("keep", ["first", "last"])
def test_a_list_is_cut_from_either_end(tmp_path, keep):
    (tmp_path / "x.vw").write_text("1 |s a b c d\n0 |s e\n")
    (batch,) = shoal.read_vw(tmp_path / "x.vw").with_fields()
    whole, cut = (
        inputs(batch, Features([{"name": "s", "type": "list", **more}], form="vw")).lists["s"].keys.tolist()
        for more in ({}, {"max_len": 3, "keep": keep})
    )
    assert cut == (whole[:3] if keep == "first" else whole[1:4]) + whole[4:]


def test_columns_beside_a_sequence_have_a_cell_for_each_item(tmp_path):
    (tmp_path / "x.vw").write_text("1 |s a b |k x\n")
    (batch,) = shoal.read_vw(tmp_path / "x.vw").with_fields()
    with pytest.raises(ValueError, match="example 0 has 2 items in 's' and 1 in 'k', which has one for each"):
        inputs(batch, Features([{"name": "s", "type": "sequence", "side": ["k"]}], form="vw"))
    (tmp_path / "y.vw").write_text("1 |s a:2 b\n")
    (batch,) = shoal.read_vw(tmp_path / "y.vw").with_fields()
    with pytest.raises(ValueError, match="example 0 has 2 numbers in vector 's', whose size is 3"):
        inputs(batch, Features([{"name": "s", "type": "vector", "size": 3}], form="vw"))


def test_buckets_by_quantiles_are_found_in_the_first_examples(tmp_path, rng):
    numbers = rng.permutation(1000)
    path = tmp_path / "x.csv"
    path.write_text("y,age\n" + "".join(f"1,{age}\n" for age in numbers))
    features = Features([{"name": "age", "type": "bucket", "quantiles": 4}])
    reader = shoal.read_csv(path, label="y", numeric=["age"], batch_size=100).with_fields()
    with pytest.raises(ValueError, match=r"not known: call features.fitted"):
        inputs(next(iter(reader)), features)
    found = features.fitted(reader)
    assert found["age"].edges == (249.0, 499.0, 749.0)
    assert Features.from_json(found.to_json()) == found
    assert found.fitted([]) is found
    x = [inputs(batch, found).keys for batch in reader]
    counts = np.unique(torch.cat(x).numpy(), return_counts=True)[1]
    assert sorted(counts) == [249, 250, 250, 251]
    first = features.fitted(reader, examples=100)["age"].edges
    assert first == tuple(np.quantile(numbers[:100], [0.25, 0.5, 0.75], method="inverted_cdf"))
    with pytest.raises(ValueError, match="the first 0 examples have no number"):
        features.fitted([])

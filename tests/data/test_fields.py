"""Batches that tell the field of each feature, whatever they are read from."""

import numpy as np
import pytest

import shoal
from shoal.data.readers import field_number
from shoal.data.rebatch import joined, rows_of
from shoal.models.preprocessing import Sampling, take

CSV = "click,site,price,ad\n1,a,0.5,7\n0,,2,8\n0,b,NA,9\n1,a,1,7\n"


def named(*columns: str) -> list[int]:
    return [field_number("csv", name) for name in columns]


def reported(reader) -> list[list[int]]:
    """The fields of each example."""
    return [
        batch.fields[begin:end].tolist()
        for batch in reader
        for begin, end in zip(batch.indptr[:-1], batch.indptr[1:], strict=True)
    ]


@pytest.fixture
def ads(tmp_path):
    path = tmp_path / "ads.csv"
    path.write_text(CSV)
    return path


@pytest.mark.parametrize("batch_size", [1, 3, 100])
@pytest.mark.parametrize("threads", [1, 2])
def test_csv_tells_columns(ads, batch_size, threads):
    reader = shoal.read_csv(ads, label="click", numeric=["price"], batch_size=batch_size, reader_threads=threads)
    site, price, ad = named("site", "price", "ad")
    expected = [[site, price, ad], [price, ad], [site, ad], [site, price, ad]]
    assert reported(reader.with_fields()) == expected
    assert all(batch.fields is None for batch in reader)
    plain, fielded = list(reader), list(reader.with_fields())
    for a, b in zip(plain, fielded, strict=True):
        assert np.array_equal(a.keys, b.keys)
        assert np.array_equal(a.values, b.values)
        assert np.array_equal(a.indptr, b.indptr)


def test_arrow_and_parquet_tell_the_fields_of_csv(ads, tmp_path):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    frame = pandas.read_csv(ads)
    frame.to_parquet(tmp_path / "ads.parquet")
    how = {"label": "click", "numeric": ["price"], "batch_size": 3}
    expected = reported(shoal.read_csv(ads, **how).with_fields())
    assert reported(shoal.read_arrow(frame, **how).with_fields()) == expected
    assert reported(shoal.read_parquet(tmp_path / "ads.parquet", **how).with_fields()) == expected


def test_libffm_criteo_and_vw_tell_theirs(tmp_path):
    path = tmp_path / "data"
    path.write_text("1 0:3:1 7:17:0.5\n0 18446744073709551615:4:1\n")
    assert reported(shoal.read_libffm(path).with_fields()) == [[0, 7], [2**64 - 1]]
    path.write_text("1\t20" + "\t" * 12 + "\t68fd1e64" + "\t" * 25 + "\n")
    assert reported(shoal.read_criteo(path).with_fields()) == [[1, 14]]
    path.write_text("1 |user ann bob |price:2 x\n")
    user, price = (field_number("vw", name) for name in ("user", "price"))
    assert reported(shoal.read_vw(path).with_fields()) == [[user, user, price]]


def test_names_and_fields_go_together(ads):
    names = shoal.data.FeatureNames()
    reader = shoal.read_csv(ads, label="click", numeric=["price"], names=names)
    assert reported(reader.with_fields()) == reported(
        shoal.read_csv(ads, label="click", numeric=["price"]).with_fields()
    )
    assert sorted(names.values()) == ["ad=7", "ad=8", "ad=9", "price", "site=a", "site=b"]


def test_a_resumed_reader_and_a_split_go_on_telling(ads):
    reader = shoal.read_csv(ads, label="click", numeric=["price"], batch_size=2).with_fields()
    first = next(iter(reader))
    rest = reported(reader.resume(reader.position()))
    assert first.fields is not None
    assert rest == reported(reader)[2:]
    assert reported(reader.split(0, 2)) + reported(reader.split(1, 2)) == reported(reader)


def test_what_makes_batches_of_batches_keeps_fields(ads):
    (whole,) = shoal.read_csv(ads, label="click", numeric=["price"]).with_fields()
    field_of = {(key, i): field for i, (key, field) in enumerate(zip(whole.keys, whole.fields, strict=True))}
    assert len(field_of) == whole.nnz
    some = take(whole, np.array([3, 1]))
    assert np.array_equal(some.fields, np.concatenate([whole.fields[7:10], whole.fields[3:5]]))
    assert np.array_equal(rows_of(whole, 1, 3).fields, whole.fields[3:7])
    assert np.array_equal(joined([rows_of(whole, 0, 1), rows_of(whole, 1, 4)]).fields, whole.fields)
    kept = Sampling(0.5, 3).apply(whole, 0)
    assert len(kept.fields) == kept.nnz


def test_batches_with_and_without_fields_are_not_put_together(ads):
    reader = shoal.read_csv(ads, label="click", numeric=["price"])
    with pytest.raises(ValueError, match="some batches have the fields"):
        joined([*reader, *reader.with_fields()])


def test_fields_are_as_many_as_keys():
    with pytest.raises(ValueError, match=r"fields is uint64\[1\]: pass uint64\[2\]"):
        shoal.Batch(
            np.ones(1, np.float32), np.array([0, 2]), np.zeros(2, np.uint64), None, None, np.zeros(1, np.uint64)
        )


def test_where_there_are_no_fields_it_is_told(ads, tmp_path):
    path = tmp_path / "data"
    path.write_text("1 3:1\n")
    with pytest.raises(ValueError, match="libsvm has no fields"):
        shoal.read_libsvm(path).with_fields()
    with pytest.raises(ValueError, match="an interaction belongs to no field"):
        shoal.read_csv(ads, label="click", interactions=["site", "ad"]).with_fields()
    with pytest.raises(ValueError, match="'libsvm' is not a format with fields: these are libffm, vw"):
        field_number("libsvm", "0")
    with pytest.raises(ValueError, match="'x' is not a field of libffm"):
        field_number("libffm", "x")

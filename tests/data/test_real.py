"""Real files: as many rows, features and clicks as they are known to have."""

from __future__ import annotations

import numpy as np
import pytest

from shoal import FTRL, LogisticRegression
from shoal.data import read_arrow, read_csv, read_libsvm, read_parquet, read_vw
from tiers import long_after


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rows", "features", "positive"),
    [
        ("a9a.xz", 32_561, 451_592, 7_841),
        ("a9a.t.xz", 16_281, 225_731, 3_846),
        ("agaricus.txt.train.xz", 6_513, 143_286, 3_140),
        ("agaricus.txt.test.xz", 1_611, 35_442, 776),
        pytest.param("ijcnn1.trn.bz2", 49_990, 649_870, 4_853, marks=pytest.mark.long),
        pytest.param("reuters_moneyfx.trn.bz2", 7_770, 339_837, 538, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("num_splits", long_after(1, [3, 1]))
def test_a_real_file_has_its_rows_features_and_positive_labels(shoal_data, name, rows, features, positive, num_splits):
    path = shoal_data / "libsvm" / name
    if not path.exists():
        pytest.skip(f"SHOAL_DATA has no libsvm/{name}")
    reader = read_libsvm(path)
    batches = [batch for rank in range(num_splits) for batch in reader.split(rank, num_splits)]
    assert sum(map(len, batches)) == rows
    assert sum(batch.nnz for batch in batches) == features
    assert sum(batch.labels.sum() for batch in batches) == positive
    if name.startswith("a9a"):
        assert {int(key) for batch in batches for key in batch.keys} <= set(range(1, 124))


@pytest.mark.parametrize(
    ("name", "rows", "features", "positive"),
    [("rcv1_small.vw.dat.xz", 1000, 77_739, 459), ("rcv1_small_test.vw.data.xz", 500, 39_448, 245)],
)
def test_a_real_file_of_vowpal_wabbit_has_its_rows_features_and_positive_labels(
    shoal_data, name, rows, features, positive
):
    path = shoal_data / "libsvm" / name
    if not path.exists():
        pytest.skip(f"SHOAL_DATA has no libsvm/{name}")
    batches = list(read_vw(path))
    assert sum(map(len, batches)) == rows
    assert sum(batch.nnz for batch in batches) == features
    assert sum(batch.labels.sum() for batch in batches) == positive


@pytest.mark.slow
def test_a_real_table_of_text_has_its_rows_and_a_key_for_each_different_cell(shoal_data):
    pandas = pytest.importorskip("pandas")
    path = shoal_data / "movielens_tags" / "movielenslatest_x1_test.csv.xz"
    if not path.exists():
        pytest.skip("SHOAL_DATA has no movielens_tags")
    frame = pandas.read_csv(path)
    batches = list(read_csv(path, label="label"))
    assert sum(map(len, batches)) == len(frame) == 200_686
    assert sum(batch.nnz for batch in batches) == 3 * len(frame)
    assert sum(batch.labels.sum() for batch in batches) == frame["label"].sum()
    keys = np.unique(np.concatenate([batch.keys for batch in batches]))
    assert len(keys) == frame[["user_id", "item_id", "tag_id"]].nunique().sum()
    again = np.concatenate([batch.keys for batch in read_arrow(frame, label="label")])
    assert np.array_equal(again, np.concatenate([batch.keys for batch in batches]))


@pytest.mark.slow
def test_a_real_file_of_parquet_has_its_rows_and_a_model_of_it_the_auc_of_the_reference(shoal_data):
    pytest.importorskip("pyarrow")
    folder = shoal_data / "criteo_attribution"
    if not folder.is_dir():
        pytest.skip("SHOAL_DATA has no criteo_attribution")
    asked = {"label": "click", "categorical": ["cat1", "cat4", "cat6", "cat8", "cat9"], "batch_size": 256}
    train, valid = (read_parquet(folder / f"small_{part}.parquet", **asked) for part in ("train", "valid"))
    with LogisticRegression(FTRL(alpha=0.1)) as model:
        model.fit(train, epochs=10, shuffle=True, progress=False)
        assert model.examples == 10 * 115_382
        metrics = model.evaluate(valid)
    assert metrics.examples == 49_770
    assert metrics.auc > 0.6511 - 0.001  # scikit-learn's logistic regression
    assert metrics.logloss < 0.6192 + 0.001

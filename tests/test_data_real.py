"""Real files: as many rows, features and clicks as they are known to have."""

from __future__ import annotations

import pytest

from shoal.data import read_libsvm, read_vw


@pytest.mark.parametrize(
    ("name", "rows", "features", "positive"),
    [
        ("a9a.xz", 32_561, 451_592, 7_841),
        ("a9a.t.xz", 16_281, 225_731, 3_846),
        ("agaricus.txt.train.xz", 6_513, 143_286, 3_140),
        ("agaricus.txt.test.xz", 1_611, 35_442, 776),
        ("ijcnn1.trn.bz2", 49_990, 649_870, 4_853),
        ("reuters_moneyfx.trn.bz2", 7_770, 339_837, 538),
    ],
)
@pytest.mark.parametrize("shards", [1, 3])
def test_a_real_file_has_its_rows_features_and_positive_labels(shoal_data, name, rows, features, positive, shards):
    path = shoal_data / "libsvm" / name
    if not path.exists():
        pytest.skip(f"SHOAL_DATA has no libsvm/{name}")
    reader = read_libsvm(path)
    batches = [batch for rank in range(shards) for batch in reader.shard(rank, shards)]
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

"""Real data: shoal's logistic regression is worth what scikit-learn's is.

Settings are those that bench/bench_quality.py found on a part of the training examples.
"""

import numpy as np
import pytest
from scipy.sparse import csr_matrix
from sklearn.linear_model import LogisticRegression

import shoal


def read(shoal_data, name, batch_size):
    path = shoal_data / "libsvm" / name
    if not path.is_file():
        pytest.skip(f"SHOAL_DATA has no libsvm/{name}")
    return list(shoal.read_libsvm(path, batch_size=batch_size))


def matrix(batches):
    whole = shoal.models.preprocessing.joined(batches)
    return csr_matrix((whole.values, whole.keys.astype(np.int64), whole.indptr), shape=(len(whole), 124)), whole.labels


@pytest.mark.long
@pytest.mark.parametrize(
    ("train", "test", "optimizer", "batch_size", "passes", "c"),
    [
        ("a9a.xz", "a9a.t.xz", shoal.FTRL(alpha=0.1), 256, 19, 0.1),
        ("ijcnn1.trn.bz2", "ijcnn1.tst.bz2", shoal.FTRL(alpha=1.0, l2=10.0), 256, 23, 30.0),
    ],
)
def test_it_is_worth_what_the_optimum_of_the_loss_is(shoal_data, train, test, optimizer, batch_size, passes, c):
    learn, seen = read(shoal_data, train, batch_size), read(shoal_data, test, 8192)
    optimum = LogisticRegression(C=c, max_iter=1000).fit(*matrix(learn))
    features, labels = matrix(seen)
    margins = optimum.decision_function(features)
    with shoal.LogisticRegression(optimizer) as model:
        model.fit(learn, epochs=passes, shuffle=len(learn), progress=False)
        measured = model.evaluate(seen)
    assert measured.auc >= shoal.metrics.auc(labels, margins) - 0.001
    assert measured.logloss <= shoal.metrics.logloss(labels, margins) + 0.001

"""What people write first, and is refused: the error names the remedy, and not another thing."""

import numpy as np
import pytest

import shoal
from shoal import LogisticRegression
from shoal.base.suggest import nearest
from shoal.models import Callback

X, Y = np.eye(4, dtype=np.float32), [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("word", "words", "meant"),
    [
        ("--epoch", ["--epochs", "--output"], "--epochs"),
        ("--prot", ["--port", "--host"], "--port"),
        ("evaluat", ["predict", "evaluate"], "evaluate"),
        ("--lr", ["--l2", "--alpha"], "--alpha"),
        ("--learning-rate", ["--l2", "--lr"], "--lr"),
        ("learning_rate", ["l2", "hidden"], None),
        ("Batch-Size", ["batch_size"], "batch_size"),
        ("embedding_dim", ["hidden", "dim"], "dim"),
        ("optimiser", ["optimizer", "init"], "optimizer"),
        ("interactions", ["train", "valid"], None),
        ("batch_norm", ["hidden", "dim"], None),
        ("--model", ["--delay", "--threads"], None),
        ("l3", ["l1", "l2"], None),
        ("", ["a"], None),
        ("x", [], None),
    ],
)
def test_the_nearest_word_is_near_or_there_is_none(word, words, meant):
    assert nearest(word, words) == meant


def test_a_tensor_as_data_is_refused_with_how_to_convert_it():
    torch = pytest.importorskip("torch")
    with LogisticRegression() as model:
        for call in (lambda data: model.fit(data, Y, progress=False), lambda data: model.partial_fit(data, Y)):
            with pytest.raises(TypeError, match=r"the data is a Tensor: pass an array, as Tensor\.numpy\(force=True\)"):
                call(torch.from_numpy(X))
        model.fit(X, torch.tensor(Y), progress=False)
        with pytest.raises(TypeError, match="Tensor"):
            model.predict(torch.from_numpy(X))
        assert len(model.predict(torch.from_numpy(X).requires_grad_().numpy(force=True))) == 4


def test_a_lazy_frame_is_refused_with_how_to_compute_it():
    polars = pytest.importorskip("polars")
    frame = polars.DataFrame({"a": [1.0, 2.0], "y": [0, 1]})
    with LogisticRegression() as model, pytest.raises(TypeError, match=r"pass LazyFrame\.collect\(\)"):
        model.fit(frame.lazy(), progress=False)
    with pytest.raises(TypeError, match=r"pass LazyFrame\.collect\(\)"):
        shoal.read_arrow(frame.lazy(), label="y")


def test_labels_of_several_classes_name_the_option(tmp_path):
    (tmp_path / "three.csv").write_text("y,a\n0,x\n1,x\n2,z\n")
    with LogisticRegression() as model, pytest.raises(ValueError, match=r"line 4.*or train with --classes"):
        model.fit(shoal.read_csv(tmp_path / "three.csv", label="y"), progress=False)


@pytest.mark.parametrize("name", ["on_epoch_end", "on_train_begin", "batchdone", "fit_end", "pass_don"])
def test_a_method_of_a_callback_that_nobody_calls_is_refused(name):
    made = type("Mine", (Callback,), {name: lambda self, progress: None})()
    with LogisticRegression() as model, pytest.raises(TypeError, match=f"Mine.{name} is never called: a callback has"):
        model.fit(X, Y, progress=False, callbacks=made)


def test_a_callback_may_have_methods_of_its_own():
    made = type("Mine", (Callback,), {"summary": lambda self: None, "_on_end": lambda self: None, "only": True})
    with LogisticRegression() as model, pytest.raises(TypeError, match="Mine has no method that is called: a callback"):
        model.fit(X, Y, progress=False, callbacks=made())
    seen = []
    made.pass_done = lambda self, progress: seen.append(progress.pass_number)
    with LogisticRegression() as model:
        model.fit(X, Y, progress=False, callbacks=made())
    assert seen


def test_an_object_that_is_called_is_no_callback_with_methods():
    made = type("Mine", (), {"__call__": lambda self, progress: None, "batch_done": lambda self, progress: None})()
    with LogisticRegression() as model, pytest.raises(TypeError, match=r"Mine.batch_done is never called: derive Mine"):
        model.fit(X, Y, progress=False, callbacks=made)


@pytest.mark.parametrize(
    ("offsets", "last", "says"),
    [
        ([1, 2], False, "offsets must begin with 0, got 1"),
        ([], False, "offsets must begin with 0, got none"),
        ([0, -1], False, "offsets falls at position 1: from 0 to -1"),
        ([0, 9], False, "offsets falls at position 2: from 9 to the number of keys, 4"),
        ([0, 2, 3], True, "offsets must end with the number of keys, 4, got 3"),
        ([0, 5, 4], True, "offsets falls at position 2: from 5 to 4"),
    ],
)
def test_errors_of_bags_speak_of_offsets(offsets, last, says):
    torch = pytest.importorskip("torch")
    with shoal.local() as store:
        bag = shoal.torch.EmbeddingBag(store.table("t", dim=2), include_last_offset=last)
        with pytest.raises(ValueError, match=says):
            bag(torch.arange(4), torch.tensor(offsets, dtype=torch.int64))

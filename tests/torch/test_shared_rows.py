"""A fit warns of histories that share no row with their item."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="click models are torch modules")

import shoal  # noqa: E402
from shoal.models.features import Features  # noqa: E402
from shoal.torch.models import DeepFM  # noqa: E402

FEATURES = Features(["user", "ad", {"name": "seen", "type": "sequence", "share": "ad"}])


def write_log(path, spelled: str, examples: int = 1200) -> None:
    random = np.random.default_rng(1)
    lines = ["click,user,ad,seen"]
    for i in range(examples):
        seen = "|".join(spelled.format(x) for x in random.integers(0, 30, 2)) if i % 3 else "|"
        lines.append(f"{i % 2},u{i % 7},{f'a{random.integers(0, 30)}' if i % 5 else ''},{seen}")
    path.write_text("\n".join(lines) + "\n")


def fit(path, caplog, *, names=None, **how) -> list[str]:
    with shoal.local() as store:
        module = DeepFM(shoal.torch.tables(store), FEATURES, dim=2, hidden=[2])
        model = shoal.torch.ClickModel(module, store=store)
        reader = shoal.read_csv(path, **COLUMNS, names=names, **how)
        model.fit(reader, epochs=2, progress=False)
    return [record.message for record in caplog.records if "shares the rows" in record.message]


COLUMNS = {"label": "click", "categorical": ["user", "ad"], "lists": {"seen": "ad"}}


@pytest.mark.parametrize("batch_size", [100, 4096])
def test_a_history_spelled_in_another_way_is_warned_of_once(tmp_path, caplog, batch_size):
    write_log(tmp_path / "log.csv", "ad-{}")
    (said,) = fit(tmp_path / "log.csv", caplog, batch_size=batch_size)
    first = "1,000" if batch_size == 100 else "1,200"
    assert (
        f"'seen' shares the rows of 'ad', and the columns have no text in common in the first {first} examples" in said
    )


def test_the_warning_has_an_example_of_each_if_names_are_known(tmp_path, caplog):
    write_log(tmp_path / "log.csv", "ad-{}")
    (said,) = fit(tmp_path / "log.csv", caplog, names=shoal.data.FeatureNames(), batch_size=1000)
    assert "('ad-" in said
    assert "' and 'a" in said


@pytest.mark.slow
def test_a_history_of_its_items_is_not_warned_of(tmp_path, caplog):
    write_log(tmp_path / "log.csv", "a{}")
    assert fit(tmp_path / "log.csv", caplog, batch_size=100) == []


def test_few_examples_are_not_judged(tmp_path, caplog):
    write_log(tmp_path / "log.csv", "ad-{}", examples=600)
    assert fit(tmp_path / "log.csv", caplog, batch_size=100) == []

"""A trial of Ray Tune that fits a `ShoalTrainer`: the example of docs/ray.md."""

import numpy as np
import pytest

pytest.importorskip("ray.tune", reason="ray is an extra: pip install 'shoal[ray]'")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

from ray_nodes import PATIENCE, page_names, run_page_block  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings(r"ignore::Warning:ray\..*")]


@pytest.mark.long
def test_a_trial_reports_what_its_workers_report(ray_cluster, tmp_path):
    rng = np.random.default_rng(1)
    site, user = rng.integers(0, 20, (2, 6000))
    click = rng.random(6000) < 1 / (1 + np.exp(-3 * np.sin(site)))
    columns = {"click": click.astype(int), "site": site, "user": user, "price": rng.random(6000)}
    pq.write_table(pa.table(columns), tmp_path / "ads_0.parquet")
    names = page_names()
    tuning = f"run_config=tune.RunConfig(storage_path={str(tmp_path / 'tune')!r}, verbose=0), tune_config"
    changes = {
        '"ads_0.parquet"': repr(str(tmp_path / "ads_0.parquet")),
        "loop,": f"loop, shoal_config=shoal.ray.ShoalConfig(timeout={PATIENCE}),",
        "RunConfig(": f"RunConfig(storage_path={str(tmp_path / 'runs')!r}, ",
        "[0.03, 0.1, 0.3]": "[0.2]",
        "tune_config": tuning,
    }
    run_page_block("tune.Tuner(", names, changes)
    (result,) = names["results"]
    assert result.error is None
    best = names["results"].get_best_result()
    assert best.config["alpha"] == 0.2
    assert 0.3 < best.metrics["logloss"] < 0.65

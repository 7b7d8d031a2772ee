"""The results of ``shoal train``: lines for people, and facts for ``--json``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shoal.base.plural import counted
from shoal.cli.answers import Answer

if TYPE_CHECKING:
    from shoal.data import Reader
    from shoal.models import GridResult
    from shoal.models.predictor import Predictor
    from shoal.store.base import Store
    from shoal.table.stats import TableStats


def is_click(model: Any) -> bool:
    """Whether a model is a click model in PyTorch, which has a dense part."""
    return hasattr(model, "dense_parameters")


def finished_already(model: Predictor, directory: str) -> Answer:
    """Return the answer of a command that resumes a fit that has finished."""
    return Answer(
        f"the fit in {directory} has finished already, after {counted(model.examples, 'example')}: nothing was trained",
        {"model": directory, "interrupted": False, "over": True, "examples": model.examples},
    )


def pass_lines(model: Predictor) -> list[str]:
    """Return a line for each pass of a model, and one for the pass whose weights were kept."""
    lines = []
    history = model.history
    # A pass over examples that were not learned from before is measured as it goes, each before it is learned from.
    progressive = {fit.first_pass for fit in history.fits}
    # A batch solver makes hundreds of passes over the same examples: only the last one matters.
    for done in history.passes if getattr(model, "solved", None) is None else history.passes[-1:]:
        rate = done.metrics.examples / max(done.seconds, 1e-9)
        kind, note = (f"pass {done.number}", ", of examples seen before")
        if done.number in progressive:
            kind, note = "progressive", ""
        lines.append(f"{kind:<12} {done.metrics}{note}, {rate:,.0f} examples/s")
        if done.skipped:
            lines.append(f"{'skipped':<12} {counted(done.skipped, 'malformed line')}")
        if done.late:
            lines.append(f"{'late':<12} {counted(done.late, 'example')}")
        if done.valid is not None:
            lines.append(f"{'valid':<12} {done.valid}")
        if done.grouped is not None:
            of = f"{done.grouped.groups:,} groups, {done.grouped.left_out:,} with one class skipped"
            lines.append(f"{'':<12} GAUC {done.grouped.gauc:.6f}  ({of})")
    if history.best_pass is not None:
        lines.append(
            f"{'kept':<12} the weights of pass {history.best_pass} of {len(history.passes)}, the best on --valid"
        )
    if model.calibration is not None:
        lines.append(f"{'calibrated':<12} on --valid by {model.calibration}; the figures above are uncalibrated")
    return lines


def solver_summary(model: Any) -> tuple[list[str], dict[str, Any]]:
    """Return the result of the batch solver, as lines and as facts."""
    solved = getattr(model, "solved", None)
    if solved is None:
        return [], {}
    how = "converged" if solved.converged else "stopped before convergence"
    return [
        f"{'solver':<12} {how}, after {counted(solved.passes, 'pass')}, "
        f"KKT violation {solved.violation:.3g} of the first; {solved.sent:,} keys sent, "
        f"{solved.passed_over:,} skipped by the filter"
    ], {"solved": solved._asdict()}


def filter_summary(store: Store) -> tuple[list[str], dict[str, Any]]:
    """Return the bytes that the filters of this worker saved, as lines and as facts."""
    metrics: dict[str, dict[str, float]] = getattr(store, "filter_metrics", dict)()
    if not metrics:
        return [], {}
    kinds = ("key", "gradient", "weight")
    saved = {kind: sum(table.get(f"{kind}_bytes_saved", 0) for table in metrics.values()) for kind in kinds}
    total = ", ".join(f"{saved[kind] / 1e6:.1f} MB of {kind}s" for kind in kinds)
    return [f"{'filters':<12} saved {total} for this worker"], {"filters": metrics}


def rows_of(stats: TableStats, dim: int) -> str:
    """Describe the rows of a table; for few rows the bytes of the whole table, which are mostly its index."""
    size = f"{stats.bytes_per_row:.1f} bytes each" if stats.rows >= _MANY_ROWS else f"{stats.bytes:,} bytes in all"
    return f"{counted(stats.rows, 'row')} of {dim}, {size}"


_MANY_ROWS = 10_000


def model_summary(model: Any) -> tuple[list[str], dict[str, Any]]:
    """Describe the tables and the weights of a model, as lines and as the facts of the worker that saves it."""
    stats = [(table, table.stats()) for table in model.tables]
    facts = fit_facts(model) | {"bytes": sum(one.bytes for _, one in stats)}
    if not is_click(model):
        weights = model.count_nonzero()
        facts |= model.kind_settings | {
            "rows": stats[0][1].rows,
            "nonzero_weights": weights,
            "bias": model.bias.tolist() if model.is_multiclass else model.bias,
            "calibration": None if model.calibration is None else model.calibration.to_dict()["kind"],
        }
        lines = [f"{'table':<12} {rows_of(one, table.dim)}" for table, one in stats]
        bias = f", of {model.num_classes:,} classes" if model.is_multiclass else f", bias {model.bias:.4f}"
        return [*lines, f"{'weights':<12} {weights:,} are not zero{bias}"], facts
    kind = model.made_by["model"]["name"]
    facts |= {
        "kind": kind,
        "rows": {table.name: len(table) for table, _ in stats},
        "dense_parameters": model.dense_parameters,
    }
    lines = [f"{'table':<12} {table.name}: {rows_of(one, table.dim)}" for table, one in stats]
    return [*lines, f"{'dense':<12} {model.dense_parameters:,} parameters of {kind}"], facts


def count_names(train: Reader) -> int | None:
    """Return the number of collected feature names; ``None``: they were not requested."""
    return None if train.names is None else len(train.names)


def name_lines(train: Reader) -> list[str]:
    """Describe the collected feature names."""
    if train.names is None:
        return []
    full = ", the maximum" if train.names.full else ""
    return [f"{'names':<12} {len(train.names):,} features{full}"]


def fit_facts(model: Predictor) -> dict[str, Any]:
    """Return the facts of a fit that every worker has."""
    return {
        "examples": model.examples,
        "fits": model.history.fits,
        "passes": model.history.passes,
        "best_pass": model.history.best_pass,
    }


def grid_lines(results: Sequence[GridResult[Any]]) -> list[str]:
    """Return the results as a table, the best first; its last column has the size of each model."""
    is_dense = is_click(results[0].model)
    column = "dense parameters" if is_dense else "weights"
    names = list(results[0].settings)
    rows = [[*names, "logloss", "AUC", "valid logloss", "valid AUC", column]]
    for result in results:
        valid = ["", ""] if result.valid is None else [f"{result.valid.logloss:.6f}", f"{result.valid.auc:.6f}"]
        rows.append(
            [
                *(_short(value) for value in result.settings.values()),
                f"{result.progressive.logloss:.6f}",
                f"{result.progressive.auc:.6f}",
                *valid,
                f"{result.model.dense_parameters if is_dense else result.model.count_nonzero():,}",
            ]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def settings_name(settings: dict[str, Any]) -> str:
    """Return settings as one word: alpha=0.05,l1=1."""
    return ",".join(f"{name}={_short(value)}" for name, value in settings.items())


def _short(value: Any) -> str:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return short_number(value) if is_number else str(value).replace(" ", "").replace("/", "_")


def short_number(value: float) -> str:
    """Write a number as short as it stays exact."""
    short = f"{value:g}"
    return short if float(short) == value else repr(value)

"""Reports: what a model learned, from what and how well it predicts, as one HTML file to look at.

    model directory --> history, settings, counts, largest weights --+--> page.py --> report.html
    held-out data ----> margins --> metrics, deciles, ROC -----------+      |
                                                                          svg.py

Threads: `report` makes a store of its own; any thread may call it.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shoal import checkpoint
from shoal.data import Batch
from shoal.models import LogisticRegression, files
from shoal.reports.page import Facts, HeldOut, page
from shoal.sealed import write_atomically
from shoal.store import local

__all__ = ["report"]

FILE = "report.html"
TOP = 30


def report(
    model_dir: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    data: Iterable[Batch] | None = None,
    *,
    data_name: str | None = None,
    names: Mapping[int, str] | None = None,
    top: int = TOP,
    threads: int | None = None,
) -> Path:
    """Write a report of a model: one HTML file that needs nothing else and loads nothing.

    Parameters
    ----------
    model_dir : path
        As written by `LogisticRegression.save`.
    out : path, optional
        The file; ``report.html`` in the model's directory if not given. What is there is replaced, by one rename.
    data : Reader or iterable of Batch, optional
        Held-out examples of the model's format, measured exactly. Without them the report shows what the model
        recorded about its validation data.
    data_name : str, optional
        What to call them; the name of the reader's file, or "held out", if not given.
    names : mapping of int to str, optional
        Names of features by their keys. Others show as numbers.
    top : int
        How many of the largest weights to show; 0 for none.
    threads : int, optional
        Of the store; all cores if not given.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    CorruptionError
        A file of the model is missing, cut short or changed.
    ValueError
        ``out`` is a directory, ``top`` is negative, or the data is of another format.
    OSError
        The file cannot be written.

    Notes
    -----
    Reads the whole model into memory, and keeps 12 bytes for each example of ``data``, more while sorting.
    """
    directory = Path(model_dir)
    target = directory / FILE if out is None else Path(out)
    if top < 0:
        raise ValueError(f"top is {top}: pass 0 or more")
    if target.is_dir():
        raise ValueError(f"{target} is a directory: name a file")
    with local(threads=threads) as store:
        model = LogisticRegression.load(directory, store=store)
        held_out = None if data is None else _held_out(model, data, data_name)
        facts = _facts(directory, model, held_out, names or {}, top)
    write_atomically(target, page(facts).encode())
    return target


def _held_out(model: LogisticRegression, data: Iterable[Batch], name: str | None) -> HeldOut:
    metrics, curves = model.measure(data)
    path = getattr(data, "path", None)
    return HeldOut(name=name or (Path(path).name if path is not None else "held out"), metrics=metrics, curves=curves)


def _facts(
    directory: Path, model: LogisticRegression, held_out: HeldOut | None, names: Mapping[int, str], top: int
) -> Facts:
    stats = model.table.stats()
    manifest = checkpoint.read_manifest(directory / files.read(directory).checkpoint)
    on_disk = sum(file.bytes for table in manifest.tables for file in table.files)
    optimizer = type(model.optimizer).__name__
    params = model.optimizer.params()
    passes = model.history.passes
    skipped = sum(done.skipped for done in passes)
    seconds = sum(done.seconds for done in passes)
    settings = [
        ("model", files.LOGISTIC),
        ("optimizer", optimizer),
        *((name, f"{value:g}") for name, value in params.items()),
        ("bias", f"yes, {model.bias:.4f}" if model.has_bias else "no"),
        ("seed", str(model.table.seed)),
        ("table", f"{model.table.name!r}, {model.table.spec.dtype}, {manifest.slots:,} slots"),
        ("format", model.format or "not told"),
    ]
    data = [
        ("examples learned from", f"{model.examples:,}"),
        ("passes", f"{len(passes)}"),
        ("malformed lines skipped", f"{skipped:,}"),
        ("time of the passes", f"{seconds:,.1f} s"),
        ("rows", f"{stats.rows:,}"),
        ("in memory", f"{stats.bytes:,} bytes" + (f", {stats.bytes_per_row:.1f} a row" if stats.rows else "")),
        ("on disk", f"{on_disk:,} bytes" + (f", {on_disk / stats.rows:.1f} a row" if stats.rows else "")),
    ]
    if held_out is not None:
        data.append(("held out", f"{held_out.name}, {held_out.metrics.examples:,} examples"))
    keys, weights = model.weights()
    return Facts(
        title=directory.resolve().name or str(directory),
        subtitle=f"{files.LOGISTIC}, {optimizer}({', '.join(f'{name}={value:g}' for name, value in params.items())}), "
        f"{model.examples:,} examples in {len(passes)} {'pass' if len(passes) == 1 else 'passes'}",
        rows=stats.rows,
        nonzero=len(weights),
        history=model.history,
        held_out=held_out,
        settings=settings,
        data=data,
        weights=_largest(keys, weights, names, top),
        version=importlib.metadata.version("shoal"),
    )


def _largest(
    keys: npt.NDArray[np.uint64], weights: npt.NDArray[np.float32], names: Mapping[int, str], top: int
) -> list[tuple[str, float]]:
    """Return the ``top`` weights of largest size, the largest first, under their names."""
    size = np.abs(weights)
    some = np.argpartition(-size, top)[:top] if top < len(weights) else np.arange(len(weights))
    some = some[np.lexsort((keys[some], -size[some]))]
    return [(names.get(key, str(key)), w) for key, w in zip(keys[some].tolist(), weights[some].tolist(), strict=True)]

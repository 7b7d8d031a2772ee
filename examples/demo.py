"""A click log from a known model, a model trained on it, and the gap to the best log-loss: what `make demo` runs.

    python examples/demo.py --output demo
    python examples/demo.py --output small --examples 20000 --seed 7
    python examples/demo.py --output mine --data day_0.tsv --format criteo

    planted model --draws--> planted_train.tsv --fit--> model ----evaluate on planted_test.tsv---> reached log-loss
          |                                                                                              | gap
          '---- its own probabilities of the same examples ------------------------------------> best reachable log-loss

Without --data a log in Criteo's format is drawn from a known model, so the best possible log-loss is known. The last
tenth of a real file is held out, unless --valid names another file.
"""

import argparse
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shoal.data import Batch, Reader, read_criteo
from shoal.data.readers import READERS
from shoal.metrics import Metrics, measure, probabilities
from shoal.models import History, LogisticRegression, files
from shoal.optim import FTRL
from shoal.storage.output import check_output
from shoal.store.local import local
from shoal.tools.planted import Floats, PlantedModel, write_log
from shoal.tools.reports import charts

LogLine = Callable[[str], None]

# Small batches learn more from one pass of a short log, see docs/training.md.
BATCH_SIZE = 1024
OPTIMIZER = FTRL(alpha=0.08, beta=1.0, l1=1.0)


# ---- a real file -----------------------------------------------------------------------------------------------------


class _Chunk:
    """The batches [begin, end) of a reader, as something to fit or evaluate on."""

    def __init__(self, reader: Reader, begin: int, end: int) -> None:
        self._reader = reader
        self._begin = begin
        self._end = end
        self._at = 0

    @property
    def format(self) -> str:
        """Name of the reader's format."""
        return self._reader.format

    @property
    def skipped(self) -> int:
        return self._reader.skipped

    def progress(self) -> float:
        return max(0, self._at - self._begin) / (self._end - self._begin)

    def __iter__(self) -> Iterator[Batch]:
        batches = iter(self._reader)
        try:
            for self._at, batch in enumerate(batches, 1):
                if self._at > self._begin:
                    yield batch
                if self._at == self._end:
                    return
        finally:
            batches.close()  # type: ignore[attr-defined]


# ---- the demonstration -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoReport:
    """Results of the demonstration.

    Attributes
    ----------
    train : Metrics
        Progressive: every batch as predicted before it was learned from.
    held_out : Metrics
        Of examples that were not learned from.
    best : Metrics or None
        Of the planted model on the same held-out examples; None of a real file.
    entropy : float or None
        Mean entropy of the planted probabilities of the held-out examples: what ``best.logloss`` is on average.
    seconds, examples_per_second : float
        Of the training pass, reading included.
    rows, table_bytes, nonzero : int
        Of the table of weights.
    peak_rss_bytes : int
        The most memory that the process held, all of Python included.
    model, picture, data : str or None
        Paths of the results; no picture without matplotlib.
    """

    train: Metrics
    held_out: Metrics
    best: Metrics | None
    entropy: float | None
    seconds: float
    examples_per_second: float
    rows: int
    table_bytes: int
    nonzero: int
    peak_rss_bytes: int
    model: str
    picture: str | None
    data: dict[str, str]


def run(
    out: Path,
    *,
    data: str | None = None,
    data_format: str = "criteo",
    valid: str | None = None,
    examples: int = 300_000,
    seed: int = 0,
    overwrite: bool = False,
    threads: int | None = None,
    progress: bool = True,
    log_line: LogLine,
) -> DemoReport:
    """Draw a log (or take a real one), train one pass on it, measure, draw the learning curve.

    Parameters
    ----------
    out : Path
        Folder of the results: ``model``, ``learning_curve.png`` and, unless ``data`` is given, ``planted_train.tsv``
        and ``planted_test.tsv``. Created if it does not exist.
    data : str, optional
        A real file. Without ``valid`` its last tenth is held out, cut between batches.
    data_format : str
        "criteo" or "libsvm"; of ``data`` and ``valid``.
    valid : str, optional
        The held-out file of a real one.
    examples : int
        How many to draw for training; a sixth as many more are held out.
    seed : int
        Of the planted model and of the table.
    overwrite : bool
        Whether to replace the log, the model and the picture of an earlier run.
    threads : int, optional
        Of the store.
    progress : bool
        Show a bar on standard error.
    log_line : callable
        Called with each line of the results.

    Returns
    -------
    DemoReport
    """
    if data is None and examples < BATCH_SIZE:
        raise ValueError(f"examples is {examples}: draw {BATCH_SIZE} or more")
    _check_outputs(out, overwrite=overwrite, draws=data is None)
    out.mkdir(parents=True, exist_ok=True)
    truth: tuple[npt.NDArray[np.uint8], Floats] | None = None
    train: Reader | _Chunk
    held_out: Reader | _Chunk
    if data is None:
        train, held_out, truth = _planted(out, examples, seed, log_line)
        sources = {"train": str(out / "planted_train.tsv"), "held_out": str(out / "planted_test.tsv")}
    else:
        train, held_out, sources = _real(data, data_format, valid, log_line)

    with local(threads=threads) as store:
        model = LogisticRegression(OPTIMIZER, store=store, seed=seed)
        log_line(
            f"training: FTRL(alpha={OPTIMIZER.alpha:g}, beta={OPTIMIZER.beta:g}, l1={OPTIMIZER.l1:g}), one pass in "
            f"batches of {BATCH_SIZE:,}"
        )
        model.fit(train, progress=progress)
        reached = model.evaluate(held_out)
        path = model.save(out / "model", overwrite=True)
        stats = model.table.stats()
        nonzero = model.count_nonzero()
        history = model.history
    (trained,) = history.passes
    best = measure(*truth) if truth else None
    entropy = _entropy(truth[1]) if truth else None
    picture = draw(out / "learning_curve.png", history, reached, best)
    report = DemoReport(
        train=trained.metrics,
        held_out=reached,
        best=best,
        entropy=entropy,
        seconds=trained.seconds,
        examples_per_second=trained.metrics.examples / trained.seconds,
        rows=stats.rows,
        table_bytes=stats.bytes,
        nonzero=nonzero,
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
        model=str(path),
        picture=None if picture is None else str(picture),
        data=sources,
    )
    for line in account(report, history, data_format):
        log_line(line)
    return report


def _check_outputs(out: Path, *, overwrite: bool, draws: bool) -> None:
    """Raise ValueError if something that is written exists and may not be replaced."""
    files.check_target(out / "model", overwrite=overwrite)
    for name in ("learning_curve.png", *(("planted_train.tsv", "planted_test.tsv") if draws else ())):
        check_output(out / name, overwrite=overwrite)


def _planted(
    out: Path, examples: int, seed: int, log_line: LogLine
) -> tuple[Reader, Reader, tuple[npt.NDArray[np.uint8], Floats]]:
    begin = time.perf_counter()
    held_out = max(1, examples // 6)
    log_line(f"drawing {examples:,} + {held_out:,} examples from a planted model, as Criteo text")
    planted = PlantedModel(seed)
    train_path, test_path = out / "planted_train.tsv", out / "planted_test.tsv"
    write_log(train_path, planted, examples, 0)
    truth = write_log(test_path, planted, held_out, 1 << 40)
    size = train_path.stat().st_size + test_path.stat().st_size
    log_line(f"    {size / 1e6:,.0f} MB in {time.perf_counter() - begin:.1f} s: {train_path}, {test_path}")
    return read_criteo(train_path, batch_size=BATCH_SIZE), read_criteo(test_path, batch_size=8 * BATCH_SIZE), truth


def _real(
    data: str, data_format: str, valid: str | None, log_line: LogLine
) -> tuple[Reader | _Chunk, Reader | _Chunk, dict[str, str]]:
    read = READERS[data_format]
    reader = read(data, batch_size=BATCH_SIZE)
    if valid is not None:
        log_line(f"training on {data}, holding out {valid}")
        return reader, read(valid, batch_size=BATCH_SIZE), {"train": data, "held_out": valid}
    sizes = [len(batch) for batch in reader]
    if len(sizes) < 2:
        raise ValueError(
            f"{data} has {sum(sizes)} examples: the demonstration needs more than {BATCH_SIZE}, or --valid"
        )
    ends = np.cumsum(sizes)
    cut = 1 + int(np.argmin(np.abs(ends[:-1] - 0.9 * ends[-1])))  # the batch boundary nearest to nine tenths
    said = f"the last {sum(sizes[cut:]):,} of {sum(sizes):,} examples"
    log_line(f"training on the beginning of {data}, holding out {said}")
    return (
        _Chunk(reader, 0, cut),
        _Chunk(reader, cut, len(sizes)),
        {"train": data, "held_out": f"{said} of {data}"},
    )


def _entropy(margins: Floats) -> float:
    p, q = probabilities(margins), probabilities(-margins)
    return float(np.mean(p * np.logaddexp(0, -margins) + q * np.logaddexp(0, margins)))


def account(report: DemoReport, history: History, data_format: str) -> Iterator[str]:
    """Yield the results as lines."""
    yield ""
    yield "progressive: each batch is predicted before it is learned from"
    yield f"    {'examples':>12}  {'logloss so far':>14}  {'in the window':>13}  {'AUC so far':>10}"
    for point in charts.widened(history.points, 16):
        yield f"    {point.examples:>12,}  {point.logloss:>14.4f}  {point.window_logloss:>13.4f}  {point.auc:>10.4f}"
    yield ""
    yield f"held out: {report.held_out.examples:,} examples, {100 * report.held_out.base_rate:.1f} % positive"
    yield f"    {'':<30}  {'logloss':>8}  {'AUC':>8}  {'calibration':>11}"
    rows = [("reached", report.held_out)] + ([("best reachable (planted model)", report.best)] if report.best else [])
    for name, m in rows:
        yield f"    {name:<30}  {m.logloss:>8.4f}  {m.auc:>8.4f}  {m.calibration:>11.4f}"
    if report.best is not None and report.entropy is not None:
        gap = report.held_out.logloss - report.best.logloss
        always = _always(report.held_out)
        share = (always - report.held_out.logloss) / (always - report.best.logloss)
        yield f"    {'gap':<30}  {gap:>8.4f}  {report.held_out.auc - report.best.auc:>8.4f}"
        yield (
            f"    {100 * share:.1f} % of what can be gained over always predicting the base rate ({always:.4f});"
            f" entropy of the planted probabilities {report.entropy:.4f}"
        )
    yield ""
    yield (
        f"speed     {report.examples_per_second:,.0f} examples/s ({report.train.examples:,} in {report.seconds:.2f} s,"
        " reading and parsing included)"
    )
    yield (
        f"table     {report.rows:,} rows, {report.table_bytes / 1e6:.1f} MB, "
        f"{report.table_bytes / report.rows:.1f} bytes a key; "
        f"{report.nonzero:,} weights are not zero (l1 = {OPTIMIZER.l1:g})"
    )
    yield f"memory    {report.peak_rss_bytes / 1e6:,.0f} MB at most, Python included"
    yield f"model     {report.model}"
    yield f"picture   {report.picture or 'none: matplotlib is not installed (pip install shoal[plot])'}"
    yield ""
    yield "try next"
    yield f"    shoal inspect {report.model}"
    if report.best is not None:
        yield f"    shoal evaluate {report.model} --data {report.data['held_out']}"
        yield "    make demo DATA=your_clicks.tsv FORMAT=criteo"
    else:
        yield f"    shoal predict {report.model} --data {report.data['train']} --output -"
    yield f"    shoal train lr --data {report.data['train']} --format {data_format} --output other --alpha 0.1 --l1 2"


def _always(m: Metrics) -> float:
    """Log-loss of always predicting the base rate."""
    return m.logloss / m.normalized_entropy


# ---- the picture -----------------------------------------------------------------------------------------------------


def draw(path: Path, history: History, reached: Metrics, best: Metrics | None) -> Path | None:
    """Draw the learning curve as a PNG; None without matplotlib."""
    try:
        figure, axes = charts.figure(2, width=9, height=6.5)
    except ImportError:
        return None
    examples = history.points[-1].examples
    figure.suptitle(f"Logistic regression, one pass over {examples:,} examples", x=0.01, ha="left", fontweight="bold")
    always = [("always the base rate", _always(reached), charts.GREY)]
    for each, which in zip(axes, ("logloss", "auc"), strict=True):
        limit = [] if best is None else [("best reachable", getattr(best, which), charts.GREEN)]
        levels = [*(always if which == "logloss" else []), *limit]
        charts.learning(each, history, which, levels=levels, checks=[(examples, getattr(reached, which))])
        each.legend(frameon=False, fontsize=9)
    axes[0].set_xlabel("")
    figure.savefig(path, dpi=150)
    return path


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="of the log, the model and the picture"
    )
    parser.add_argument("--data", metavar="FILE", help="a real click log (default: draw one)")
    parser.add_argument("--format", choices=["criteo", "libffm", "libsvm", "vw"], help="of --data")
    parser.add_argument("--valid", metavar="FILE", help="held-out examples (default: the last tenth of --data)")
    parser.add_argument("--examples", type=int, default=300_000, metavar="N", help="to draw (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the drawn log (default: %(default)s)")
    parser.add_argument("--threads", type=int, metavar="N", help="threads that compute (default: all cores)")
    parser.add_argument("--overwrite", action="store_true", help="replace the log, the model and the picture")
    arguments = parser.parse_args()
    if arguments.data is not None and arguments.format is None:
        parser.error("--data requires --format: criteo, libffm, libsvm or vw")
    if arguments.data is None and arguments.valid is not None:
        parser.error("--valid requires --data: the drawn log has held-out examples of its own")
    if arguments.seed < 0:
        parser.error(f"--seed is {arguments.seed}: pass 0 or more")
    try:
        run(
            arguments.output,
            data=arguments.data,
            data_format=arguments.format or "criteo",
            valid=arguments.valid,
            examples=arguments.examples,
            seed=arguments.seed,
            overwrite=arguments.overwrite,
            threads=arguments.threads,
            log_line=lambda line: print(line, flush=True),
        )
    except (ValueError, OSError) as error:
        sys.exit(f"demo: {error}")


if __name__ == "__main__":
    main()

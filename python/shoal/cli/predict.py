"""``shoal predict`` and ``shoal evaluate``: write predictions of a model, and measure them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Annotated, Any

from shoal.base.machine import local_path
from shoal.base.plural import counted
from shoal.base.streams import escape_text
from shoal.cli.answers import Answer, naming, warn
from shoal.cli.options import Command
from shoal.cli.reading import ReadingForModel, Segments, columns_of, opened_model
from shoal.config import File, Name

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from shoal.data import Batch, Reader
    from shoal.metrics import GroupedAUC, Metrics
    from shoal.models.predictor import Predictor
    from shoal.models.segments import Segment

PREDICT_EXAMPLES = """\
examples:
  $ shoal predict ctr --data day_1.tsv --output day_1.probabilities
  $ shoal predict ctr --data day_1.tsv --output - | head -3

The output has one probability of label 1 per example, in the order of the data, with all digits of a float64; of a
model of several classes the probabilities of all classes, separated by tabs. The file appears when it is complete; an
existing one is replaced only with --overwrite. The data has the model's format. Labels are ignored and may be missing:
the label column of csv and parquet, the first column of criteo, the first word of libsvm and libffm, the text before
the bar of vw.
"""

EVALUATE_EXAMPLES = """\
examples:
  $ shoal evaluate ctr --data day_1.tsv
  $ shoal evaluate small --data test.libsvm --json
  $ shoal evaluate ads --data ads_1.csv --group user
  $ shoal evaluate ads --data ads_1.csv --segments site,user

  logloss      mean negative log-likelihood, in nats per example
  AUC          share of (positive, negative) pairs in the right order; ties count half
  calibration  positives divided by predicted positives: 1 is perfect
  NE           normalized entropy: logloss divided by that of always predicting the share of positives
  GAUC         with --group: mean of the AUC within groups, by their numbers of examples
  accuracy     of several classes: share of the examples whose likeliest class is their own
"""


class Predict(ReadingForModel, frozen=True, kw_only=True):
    """The options of ``shoal predict``."""

    output: Annotated[File, "file of the probabilities; - is standard output"]
    overwrite: Annotated[bool, "replace an existing file"] = False
    task: Annotated[Name | None, "task of a click model with several labels (default: the first)"] = None


class Evaluate(ReadingForModel, frozen=True, kw_only=True):
    """The options of ``shoal evaluate``."""

    group: Annotated[
        Name | None,
        "column, namespace or field whose text is the group of an example: print GAUC, the mean AUC within groups",
    ] = None
    segments: Segments = ()


def predict(options: Predict) -> Answer:
    """Write one probability per line."""
    import numpy as np

    from shoal.storage.output import check_output

    if options.output == "-" and options.json:
        raise ValueError("--output - and --json both use standard output: name a file")
    with opened_model(options) as (model, reader):
        examples = 0
        called = "standard output" if options.output == "-" else options.output
        if options.output not in ("", "-"):
            check_output(options.output, overwrite=options.overwrite, inputs=reader.paths)
        with naming(called), _output(options.output) as file:
            for batch in reader.unlabelled():
                p = model.probabilities(batch) if options.task is None else _of_task(model, options.task, batch)
                if not np.isfinite(p).all():  # a sum of a dense part that overflows
                    bad = examples + int(np.argwhere(~np.isfinite(p))[0][0])
                    raise ValueError(
                        f"the prediction of example {bad} (the first is 0) is not finite, as its values are too large: "
                        "leave it out, or scale its values like those that the model was trained on"
                    )
                if p.ndim == 2:  # of several classes
                    file.write("".join(["\t".join(map(repr, row)) + "\n" for row in p.tolist()]))
                else:
                    file.write("".join([f"{x!r}\n" for x in p.tolist()]))
                examples += len(p)
        skipped = f"{counted(reader.skipped, 'malformed line')} skipped, without output"
        note = f", {skipped}" if reader.skipped else ""
        text = "" if options.output == "-" else f"{examples:,} probabilities in {options.output}{note}"
        if note and options.output == "-":
            warn(skipped)
        return Answer(text, {"examples": examples, "skipped": reader.skipped, "output": options.output})


def _of_task(model: Any, task: str, batch: Batch) -> NDArray[np.float64]:
    """Compute what a task of a click model predicts."""
    found: dict[str, NDArray[np.float64]] = model.predict_tasks(batch) if hasattr(model, "predict_tasks") else {}
    if task not in found:
        raise ValueError(f"--task {task}: this model has the tasks {', '.join(found) or 'of one label'}")
    return found[task]


def evaluate(options: Evaluate) -> Answer:
    """Measure predictions against the labels."""
    note = ""
    with opened_model(options) as (model, reader):
        metrics, grouped, segments = _measured(options, model, reader)
        if grouped is not None:
            note = (
                f"\nGAUC {grouped.gauc:.6f}  ({grouped.groups:,} groups, {grouped.left_out:,} with one class skipped)"
            )
        note += f"\n{counted(reader.skipped, 'malformed line')} skipped" if reader.skipped else ""
        facts: dict[str, Any] = {
            "model": options.model,
            "data": reader.path,
            "logloss": metrics.logloss,
            "examples": metrics.examples,
            "weight": metrics.weight,
            "skipped": reader.skipped,
        }
        if metrics.accuracy is not None:
            facts["accuracy"] = metrics.accuracy
        else:
            facts |= {
                "auc": metrics.auc,
                "calibration": metrics.calibration,
                "base_rate": metrics.base_rate,
                "normalized_entropy": metrics.normalized_entropy,
                "gauc": None if grouped is None else grouped.gauc,
            }
        tasks = getattr(model, "tasks", ())
        by_task = bool(tasks) or getattr(model, "has_own_metrics", False)
        if by_task and not reader.repeatable:
            what = f"this is {tasks[0]}: the other tasks" if tasks else "the model's own metrics"
            note += f"\n{what} are measured on files, which can be read twice"
        elif by_task:
            from msgspec import to_builtins

            found = model.evaluate_tasks(reader)  # type: ignore[attr-defined]
            note += "".join(f"\n{name:<12} {its}" for name, its in found.items())
            facts["tasks"] = {name: to_builtins(its) for name, its in found.items()}
        if segments:
            note += "".join(f"\n{line}" for column, some in segments.items() for line in _segment_lines(column, some))
            facts["segments"] = {
                column: [{"text": one.text, "others": one.others, **_as_facts(one.metrics)} for one in some]
                for column, some in segments.items()
            }
        return Answer(f"{metrics}{note}", facts)


def _as_facts(metrics: Metrics) -> dict[str, Any]:
    names = ("logloss", "auc", "calibration", "base_rate", "examples", "weight")
    return {name: getattr(metrics, name) for name in names}


def _measured(
    options: Evaluate, model: Predictor, reader: Reader
) -> tuple[Metrics, GroupedAUC | None, dict[str, list[Segment]]]:
    """Measure a model, also within groups and by segment, whose columns are read in a pass of their own."""
    from shoal.metrics import gauc
    from shoal.models.evaluation import measure, measure_with_predictions
    from shoal.models.segments import by_segment

    group = [] if options.group is None else [options.group]
    if not (group or options.segments):
        metrics, _, grouped = measure([model], reader)[0]
        return metrics, grouped, {}
    option = "--group" if group else "--segments"
    if model.is_multiclass:
        raise ValueError(f"{option} measures by groups of examples, which is of two classes: leave it out")
    if not reader.repeatable or options.on_error == "skip":
        raise ValueError(f"{option} reads the data twice: write a stream to a file, and leave out --on-error skip")
    (metrics, _, grouped), found = measure_with_predictions(model, reader)
    columns = list(dict.fromkeys([*group, *options.segments]))
    by = columns_of(options.data, options, reader, columns, option)
    if options.group is not None:
        grouped = gauc(found.labels, found.margins[0], by[options.group].number, found.weights)
    return metrics, grouped, {column: by_segment(by[column], found) for column in options.segments}


def _segment_lines(column: str, segments: Sequence[Segment]) -> list[str]:
    """Return the metrics of segments as a table."""
    from shoal.models.segments import title

    rows = [[column, "examples", "logloss", "AUC", "calibration"]]
    for one in segments:
        m = one.metrics
        rows.append(
            [escape_text(title(one)), f"{m.examples:,}", f"{m.logloss:.6f}", f"{m.auc:.6f}", f"{m.calibration:.4f}"]
        )
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return ["", *("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows)]


@contextmanager
def _output(path: str) -> Iterator[IO[str]]:
    """Open standard output for ``-``, otherwise a file that replaces ``path`` when it is complete."""
    from shoal.storage.output import replacing

    if path == "-":
        yield sys.stdout
        sys.stdout.flush()
        return
    if not path:
        raise ValueError("--output is empty: name a file, or - for standard output")
    target = local_path(path)
    if target.is_dir():
        raise ValueError(f"{path} is a directory: name a file, or - for standard output")
    if target.exists() and not target.is_file():  # a pipe, a device: nothing to replace
        with target.open("w", encoding="ascii") as file:
            yield file
        return
    if not target.parent.is_dir():
        raise ValueError(f"{path} cannot be written: there is no directory {target.parent}")
    with replacing(target) as temporary, temporary.open("w", encoding="ascii") as file:
        yield file


COMMANDS = (
    Command("predict", "Write the predicted probabilities of examples.", PREDICT_EXAMPLES, Predict, predict),
    Command("evaluate", "Measure a model on labelled examples.", EVALUATE_EXAMPLES, Evaluate, evaluate),
)

"""The command ``shoal``: train, predict, evaluate, report, inspect, demo.

Every command is a function of parsed arguments that returns what it has to say: text for people, one JSON object for
machines (``--json``). Results go to standard output; bars, notes and errors to standard error.

    exit status   0   done
                  1   it failed: a damaged model, a full disk
                  2   the input is wrong: arguments, a missing file, a malformed line
                130   Ctrl-C; ``train`` has then saved what it had learned

Expected errors are one line, never a traceback. This module alone prints. Heavy imports wait for a command that needs
them.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.data import Reader
    from shoal.models import LogisticRegression

FORMATS = ("libsvm", "criteo")

DONE, FAILED, WRONG_INPUT, INTERRUPTED = 0, 1, 2, 130


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command has to say: ``text`` for people, or ``facts`` as JSON; and the exit status."""

    text: str
    facts: dict[str, Any]
    status: int = DONE


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Parameters
    ----------
    argv : sequence of str, optional
        Without the program's name; those of the process if not given.

    Returns
    -------
    int
        The exit status.
    """
    arguments = _parser().parse_args(argv)
    try:
        answer: Answer = arguments.run(arguments)
        _tell(answer, arguments)
    except KeyboardInterrupt:
        _complain("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has gone. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (ValueError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
        _complain(_one_line(error))
        return WRONG_INPUT
    except Exception as error:
        from shoal.errors import ShoalError

        if not isinstance(error, ShoalError | OSError | MemoryError):
            raise
        _complain(_one_line(error))
        return FAILED
    return answer.status


def _tell(answer: Answer, arguments: argparse.Namespace) -> None:
    if arguments.json:
        import msgspec

        print(msgspec.json.encode(answer.facts).decode(), flush=True)
    elif answer.text and not arguments.quiet:
        print(answer.text, flush=True)


def _complain(what: str) -> None:
    print(f"shoal: {what}", file=sys.stderr, flush=True)


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


# ---- train -----------------------------------------------------------------------------------------------------------


def train_lr(arguments: argparse.Namespace) -> Answer:
    """Train a logistic regression and save it."""
    from shoal.models import LogisticRegression, files
    from shoal.optim import FTRL
    from shoal.store import local

    target = Path(arguments.model)
    files.check_target(target, overwrite=arguments.overwrite)
    optimizer = FTRL(alpha=arguments.alpha, beta=arguments.beta, l1=arguments.l1, l2=arguments.l2)
    train = _reader(arguments.train, arguments.format, arguments)
    valid = None if arguments.valid is None else _reader(arguments.valid, arguments.format, arguments)
    target.mkdir(parents=True, exist_ok=True)  # before hours of training, not after
    with local(threads=arguments.threads, slots=arguments.slots) as store:
        model = LogisticRegression(optimizer, store, seed=arguments.seed)
        interrupted = False
        try:
            progress = arguments.progress if arguments.progress is not None else not arguments.quiet
            model.fit(train, epochs=arguments.epochs, valid=valid, progress=progress)
        except KeyboardInterrupt:
            interrupted = True
        if model.examples == 0:
            raise KeyboardInterrupt if interrupted else ValueError(f"{train.path} has no examples: nothing was learned")
        model.save(target, overwrite=arguments.overwrite)
        if interrupted:
            _complain(f"interrupted after {model.examples:,} examples; the model of that moment is in {target}")
        return _trained(model, target, interrupted)


def _trained(model: LogisticRegression, target: Path, interrupted: bool) -> Answer:
    stats = model.table.stats()
    nonzero = len(model.weights()[0])
    lines = []
    for done in model.history.passes:
        rate = done.metrics.examples / max(done.seconds, 1e-9)
        kind = "progressive" if done.number == 1 else f"pass {done.number}"
        lines.append(f"{kind:<12} {done.metrics}, {rate:,.0f} examples/s")
        if done.skipped:
            lines.append(f"{'skipped':<12} {done.skipped:,} malformed lines")
        if done.valid is not None:
            lines.append(f"{'valid':<12} {done.valid}")
    per_row = f", {stats.bytes_per_row:.1f} bytes each" if stats.rows else ""
    lines.append(f"{'table':<12} {stats.rows:,} rows{per_row}; {nonzero:,} weights are not zero, bias {model.bias:.4f}")
    lines.append(f"{'model':<12} {target}")
    facts = {
        "model": str(target),
        "interrupted": interrupted,
        "examples": model.examples,
        "passes": model.history.passes,
        "rows": stats.rows,
        "bytes": stats.bytes,
        "nonzero_weights": nonzero,
        "bias": model.bias,
    }
    return Answer("\n".join(lines), facts, INTERRUPTED if interrupted else DONE)


# ---- predict, evaluate -----------------------------------------------------------------------------------------------


def predict(arguments: argparse.Namespace) -> Answer:
    """Write one probability a line."""
    if arguments.output == "-" and arguments.json:
        raise ValueError("--output - and --json both want standard output: name a file")
    with _loaded(arguments) as (model, reader):
        examples = 0
        with _output(arguments.output) as file:
            for batch in reader:
                p = model.predict_proba(batch).tolist()
                file.write("".join([f"{x!r}\n" for x in p]))
                examples += len(p)
        note = (
            f", {reader.skipped:,} malformed lines skipped: they have no line in the output" if reader.skipped else ""
        )
        text = "" if arguments.output == "-" else f"{examples:,} probabilities in {arguments.output}{note}"
        if note and arguments.output == "-":
            _complain(f"{reader.skipped:,} malformed lines skipped: they have no line in the output")
        return Answer(text, {"examples": examples, "skipped": reader.skipped, "output": arguments.output})


def evaluate(arguments: argparse.Namespace) -> Answer:
    """Measure predictions against the labels."""
    with _loaded(arguments) as (model, reader):
        metrics = model.evaluate(reader)
        note = f"\n{reader.skipped:,} malformed lines skipped" if reader.skipped else ""
        facts = {
            "model": arguments.model,
            "data": arguments.data,
            "logloss": metrics.logloss,
            "auc": metrics.auc,
            "calibration": metrics.calibration,
            "examples": metrics.examples,
            "weight": metrics.weight,
            "base_rate": metrics.base_rate,
            "normalized_entropy": metrics.normalized_entropy,
            "skipped": reader.skipped,
        }
        return Answer(f"{metrics}{note}", facts)


@contextmanager
def _loaded(arguments: argparse.Namespace) -> Iterator[tuple[LogisticRegression, Reader]]:
    """Load the model, and the data in the model's format."""
    from shoal.models import LogisticRegression
    from shoal.store import local

    with local(threads=arguments.threads) as store:
        if not Path(arguments.model).exists():
            raise ValueError(f"{arguments.model}: there is no such model")
        model = LogisticRegression.load(arguments.model, store=store)
        form = arguments.format or model.format
        if form is None:
            raise ValueError(f"{arguments.model} does not tell the format that it was trained on: pass --format")
        if model.format not in (None, form):
            raise ValueError(
                f"{arguments.model} was trained on {model.format}, its keys mean nothing for {form}: leave --format out"
            )
        yield model, _reader(arguments.data, form, arguments)


@contextmanager
def _output(path: str) -> Iterator[IO[str]]:
    """Open standard output for ``-``, else a file that takes the place of ``path`` when it is complete."""
    if path == "-":
        yield sys.stdout
        sys.stdout.flush()
        return
    target = Path(path)
    if target.is_dir():
        raise ValueError(f"{path} is a directory: name a file, or - for standard output")
    if target.exists() and not target.is_file():  # a pipe, a device: nothing to replace
        with target.open("w", encoding="ascii") as file:
            yield file
        return
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("x", encoding="ascii") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _reader(path: str, form: str, arguments: argparse.Namespace) -> Reader:
    from shoal.data import read_criteo, read_libsvm

    read = {"libsvm": read_libsvm, "criteo": read_criteo}[form]
    return read(path, batch_size=arguments.batch_size, on_error=arguments.on_error)


# ---- report ----------------------------------------------------------------------------------------------------------


def report(arguments: argparse.Namespace) -> Answer:
    """Write what there is to see of a model as one HTML file."""
    from shoal import reports
    from shoal.models import files

    directory = Path(arguments.directory)
    if not directory.exists():
        raise ValueError(f"{directory}: there is no such model")
    form = arguments.format or files.read(directory).format
    valid = None
    if arguments.valid is not None:
        if form is None:
            raise ValueError(f"{directory} does not tell the format that it was trained on: pass --format")
        valid = _reader(arguments.valid, form, arguments)
    out = reports.report(directory, arguments.out, valid, top=arguments.top, threads=arguments.threads)
    return Answer(f"{'report':<12} {out}", {"model": str(directory), "report": str(out)})


# ---- inspect ---------------------------------------------------------------------------------------------------------


def inspect(arguments: argparse.Namespace) -> Answer:
    """Tell what is in a model or a checkpoint, and check every byte of it."""
    from shoal import checkpoint
    from shoal.models import files

    directory = Path(arguments.directory)
    if not directory.is_dir():
        raise ValueError(f"{directory}: there is no such directory")
    facts: dict[str, Any] = {"directory": str(directory)}
    lines = []
    if files.is_model(directory) or not (directory / checkpoint.MANIFEST).exists():
        described = files.read(directory)
        facts |= {
            "kind": described.model,
            "trained_on": described.format,
            "examples": described.examples,
            "bias": described.bias,
            "passes": described.history.passes,
        }
        lines.append(f"{directory}: {described.model}, trained on {described.examples:,} examples")
        lines.append(f"    format      {described.format or 'not told'}")
        lines.append(f"    bias        {'yes' if described.bias else 'no'}")
        for done in described.history.passes:
            cut = "" if done.complete else " (interrupted)"
            lines.append(f"    pass {done.number:<6} {done.metrics}{cut}")
            if done.valid is not None:
                lines.append(f"    {'valid':<11} {done.valid}")
        directory = directory / described.checkpoint
    else:
        facts["kind"] = "checkpoint"
    manifest = checkpoint.verify(directory)
    tables = []
    lines.append(f"{directory}: checkpoint of {len(manifest.tables)} table(s) in {manifest.slots:,} slots")
    for table in manifest.tables:
        size = sum(file.bytes for file in table.files)
        tables.append(
            {
                "name": table.name,
                "dim": table.dim,
                "dtype": table.dtype,
                "optimizer": table.optimizer,
                "params": table.params,
                "init": table.init,
                "seed": table.seed,
                "step": table.step,
                "rows": table.rows,
                "bytes": size,
                "files": table.files,
            }
        )
        params = ", ".join(f"{name}={value:g}" for name, value in table.params.items())
        per_row = f" ({size / table.rows:.1f} a row)" if table.rows else ""
        lines.append(
            f"    table {table.name!r}: {table.rows:,} rows, dim {table.dim}, {table.dtype}, seed {table.seed}"
        )
        lines.append(f"        {table.optimizer}({params}), initial rows {table.init}, {table.step:,} pushes")
        lines.append(f"        {size:,} bytes{per_row} in {len(table.files)} file(s)")
        lines += [f"            {file.name}  {file.bytes:,} bytes" for file in table.files]
    facts |= {"checkpoint": str(directory), "slots": manifest.slots, "tables": tables, "verified": True}
    lines.append("every checksum matches")
    return Answer("\n".join(lines), facts)


# ---- demo ------------------------------------------------------------------------------------------------------------


def demo(arguments: argparse.Namespace) -> Answer:
    """Train on a planted or a real click log and tell how it went."""
    from shoal import demo

    def say(line: str) -> None:
        if not (arguments.json or arguments.quiet):
            print(line, flush=True)

    if arguments.data is not None and arguments.format is None:
        raise ValueError("--data needs --format: libsvm or criteo")
    if arguments.data is None and arguments.valid is not None:
        raise ValueError("--valid goes with --data: the planted log has a held-out part of its own")
    report = demo.run(
        Path(arguments.out),
        data=arguments.data,
        data_format=arguments.format or "criteo",
        valid=arguments.valid,
        examples=arguments.examples,
        seed=arguments.seed,
        threads=arguments.threads,
        progress=not arguments.quiet,
        say=say,
    )
    import msgspec

    return Answer("", msgspec.to_builtins(report))


# ---- arguments -------------------------------------------------------------------------------------------------------

EXAMPLES = {
    "shoal": """\
examples:
  $ shoal demo --out demo                   # watch it train on a log whose truth is known
  $ shoal train lr --train day_0.tsv --format criteo --model ctr
  $ shoal evaluate --model ctr --data day_1.tsv
""",
    "train": """\
examples:
  $ shoal train lr --train train.libsvm --format libsvm --model first
  $ shoal train lr --help                   # all settings of logistic regression
""",
    "train lr": """\
examples:
  one pass over a click log, as is customary, measured on the next day:
  $ shoal train lr --train day_0.tsv --format criteo --valid day_1.tsv --alpha 0.05 --l1 1 --model ctr

  a small file in small batches, several passes (.gz, .bz2 and .xz are read as they are):
  $ shoal train lr --train train.libsvm.gz --format libsvm --epochs 5 --batch-size 256 --model small

  with the progressive loss at the powers of two, as Vowpal Wabbit prints it, in place of the bar:
  $ shoal train lr --train train.libsvm --format libsvm --progress 2.0 --model told

  in place of the model that is there, leaving out malformed lines, for a script:
  $ shoal train lr --train day_0.tsv --format criteo --on-error skip --overwrite --model ctr --json --quiet

Ctrl-C saves what has been learned up to then, and ends with status 130. A model that is there is refused unless
--overwrite is given, and is then replaced at the very end, by one rename; any other directory is never written to.
""",
    "predict": """\
examples:
  $ shoal predict --model ctr --data day_1.tsv --output day_1.probabilities
  $ shoal predict --model ctr --data day_1.tsv --output - | head -3

One probability of label 1 for each line of the data, in its order, with all digits of a float64. The file appears when
it is complete. The data has the model's format, labels included; they are not looked at.
""",
    "evaluate": """\
examples:
  $ shoal evaluate --model ctr --data day_1.tsv
  $ shoal evaluate --model small --data test.libsvm --json

  logloss      mean negative log-likelihood, in nats per example
  AUC          share of (positive, negative) pairs that are in the right order, ties half
  calibration  positives over predicted positives: 1 is right
  NE           logloss over that of always predicting the share of positives
""",
    "report": """\
examples:
  $ shoal report ctr                        # ctr/report.html, with what training recorded
  $ shoal report ctr --valid day_1.tsv --out ctr.html

One HTML file with the learning curve, calibration and ROC on the held-out file (without one, on the --valid of the
training), settings, counts and the largest weights. It loads nothing from anywhere.
""",
    "inspect": """\
examples:
  $ shoal inspect ctr
  $ shoal inspect ctr/checkpoint-* --json

Reads every byte. What is damaged is named, and the status is 1.
""",
    "demo": """\
examples:
  $ shoal demo --out demo
  $ shoal demo --out demo --examples 20000 --seed 7
  $ shoal demo --out mine --data day_0.tsv --format criteo

Without --data it draws a log of Criteo's form from a planted model, so that the best reachable log-loss is known.
Of a real file the last tenth is held out, unless --valid names another one.
""",
}


def _parser() -> argparse.ArgumentParser:
    parser = _command(None, "shoal", "A sparse parameter server: train, use and look at models.")
    parser.add_argument("--version", action="version", version=f"shoal {importlib.metadata.version('shoal')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    train = _command(commands, "train", "Train a model on a file of examples.")
    models = train.add_subparsers(title="models", metavar="MODEL", required=True)
    lr = _command(models, "train lr", "Train logistic regression by FTRL-Proximal and save it.", train_lr)
    lr.add_argument("--train", required=True, metavar="FILE", help="what to learn from")
    lr.add_argument("--format", required=True, choices=FORMATS, help="of the files")
    lr.add_argument("--valid", metavar="FILE", help="measured after every pass")
    lr.add_argument("--model", required=True, metavar="DIR", help="where the model goes")
    lr.add_argument("--overwrite", action="store_true", help="replace a model that is there")
    lr.add_argument("--alpha", type=float, default=0.1, help="learning rate (default: %(default)s)")
    lr.add_argument("--beta", type=float, default=1.0, help="slows the first steps (default: %(default)s)")
    lr.add_argument("--l1", type=float, default=0.0, help="weights with less evidence are 0 (default: %(default)s)")
    lr.add_argument("--l2", type=float, default=0.0, help="shrinks all weights (default: %(default)s)")
    lr.add_argument("--epochs", type=int, default=1, metavar="N", help="passes over the data (default: %(default)s)")
    lr.add_argument(
        "--progress",
        type=_step,
        metavar="STEP",
        help="lines in place of the bar: 100000 is every so many examples, 2.0 at the powers of two",
    )
    lr.add_argument("--seed", type=int, default=0, help="of the rounding of accumulators (default: %(default)s)")
    lr.add_argument("--slots", type=int, default=1024, help="parts of the table; any gives equal bits (default: 1024)")
    _reading(lr)
    _machine(lr)

    one = _command(commands, "predict", "Write the probabilities of a file's examples.", predict)
    one.add_argument("--output", required=True, metavar="FILE", help="where the probabilities go; - is standard output")
    two = _command(commands, "evaluate", "Measure a model on a file of labelled examples.", evaluate)
    for command in (one, two):
        command.add_argument("--model", required=True, metavar="DIR", help="the model")
        command.add_argument("--data", required=True, metavar="FILE", help="the examples")
        command.add_argument("--format", choices=FORMATS, help="of the data (default: what the model was trained on)")
        _reading(command)
        _machine(command)

    seen = _command(commands, "report", "Write an HTML page with all there is to see of a model.", report)
    seen.add_argument("directory", metavar="DIR", help="the model")
    seen.add_argument("--out", metavar="FILE", help="where the page goes (default: DIR/report.html)")
    seen.add_argument("--valid", metavar="FILE", help="held-out examples to measure")
    seen.add_argument("--format", choices=FORMATS, help="of the file (default: what the model was trained on)")
    seen.add_argument("--top", type=int, default=30, metavar="N", help="weights to list (default: %(default)s)")
    _reading(seen)
    _machine(seen)

    look = _command(commands, "inspect", "Tell what is in a model or a checkpoint, and verify it.", inspect)
    look.add_argument("directory", metavar="DIR", help="a model or a checkpoint")
    _machine(look, threads=False)

    show = _command(commands, "demo", "Watch a model train, and see how near it comes to the truth.", demo)
    show.add_argument("--out", required=True, metavar="DIR", help="where log, model and picture go")
    show.add_argument("--data", metavar="FILE", help="a real file (default: draw one)")
    show.add_argument("--format", choices=FORMATS, help="of the real file")
    show.add_argument("--valid", metavar="FILE", help="its held-out file (default: the last tenth)")
    show.add_argument("--examples", type=int, default=300_000, metavar="N", help="to draw (default: %(default)s)")
    show.add_argument("--seed", type=int, default=0, help="of the planted model (default: %(default)s)")
    _machine(show)
    return parser


def _command(
    among: Any, name: str, what: str, run: Callable[[argparse.Namespace], Answer] | None = None
) -> argparse.ArgumentParser:
    """Make the parser of a command: its help ends with worked examples."""
    described: dict[str, Any] = {
        "description": what,
        "epilog": EXAMPLES[name],
        "formatter_class": argparse.RawDescriptionHelpFormatter,
        "allow_abbrev": False,
    }
    if among is None:
        return argparse.ArgumentParser(prog=name, **described)
    parser: argparse.ArgumentParser = among.add_parser(name.split()[-1], help=what, **described)
    parser.set_defaults(run=run)
    return parser


def _step(text: str) -> int | float:
    """Read an int or, with a point in it, a float that may be passed to `shoal.metrics.Progressive`."""
    from shoal.metrics import Progressive

    step = float(text) if "." in text else int(text)
    try:
        Progressive(step)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return step


def _reading(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch-size", type=int, default=1024, metavar="N", help="examples (default: %(default)s)")
    parser.add_argument(
        "--on-error", choices=("raise", "skip"), default="raise", help="what a malformed line does (default: raise)"
    )


def _machine(parser: argparse.ArgumentParser, *, threads: bool = True) -> None:
    if threads:
        parser.add_argument("--threads", type=int, metavar="N", help="default: all cores")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output, nothing else there")
    parser.add_argument("--quiet", action="store_true", help="neither bar nor text")

"""The options of ``shoal train`` that several kinds of models share, and the parsers of their values."""

from __future__ import annotations

import argparse
import tomllib
from typing import TYPE_CHECKING, Any

from shoal.cli.arguments import FORMATS, admission, count, expiry, overwriting, workers_number

if TYPE_CHECKING:
    from shoal.consistency import Consistency


def add_resume_options(parser: argparse.ArgumentParser) -> None:
    """Add what happens to a model or a checkpoint that is there."""
    parser.add_argument(
        "--resume", action="store_true", help="continue the fit whose checkpoint is in DIR, if there is one"
    )
    parser.add_argument(
        "--allow-appended",
        action="store_true",
        help="with --resume: accept files that have grown, and further files after them, since the fit started",
    )
    overwriting(parser, "model")


def add_fit_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a fit: its data, its passes and its output."""
    parser.add_argument(
        "--data", required=True, nargs="+", metavar="FILE", help="training examples: files, patterns, URLs, or -"
    )
    parser.add_argument(
        "--format", choices=FORMATS, help="format of the files (default: detected from the first line and the name)"
    )
    parser.add_argument("--valid", nargs="+", metavar="FILE", help="validation examples, evaluated after every pass")
    parser.add_argument(
        "--output",
        required=True,
        metavar="DIR",
        help="directory of the model, a path or s3://...; created if it does not exist",
    )
    parser.add_argument(
        "--checkpoint-every",
        type=int,
        metavar="N",
        help="write a checkpoint to DIR after every N batches and after every pass",
    )
    add_resume_options(parser)
    parser.add_argument(
        "--names", action="store_true", help="save the text of each feature with the model; report and inspect show it"
    )
    parser.add_argument(
        "--epochs", type=int, default=1, metavar="N", help="maximum number of passes (default: %(default)s)"
    )
    parser.add_argument(
        "--shuffle",
        type=int,
        nargs="?",
        const=True,
        default=False,
        metavar="K",
        help="shuffle within a buffer of K batches in memory (default K: 16)",
    )
    parser.add_argument(
        "--negative-rate",
        type=float,
        default=1.0,
        metavar="R",
        help="share of the negative examples to train on (default: all)",
    )
    parser.add_argument(
        "--no-warm-up",
        action="store_true",
        help="use batches as read; by default the first ones are split, which suits an untrained model",
    )
    parser.add_argument(
        "--patience", type=int, metavar="N", help="stop after N consecutive passes without an improvement on --valid"
    )
    parser.add_argument(
        "--min-delta",
        type=float,
        default=0.0,
        metavar="D",
        help="smallest change that counts as an improvement (default: 0)",
    )
    parser.add_argument(
        "--metric",
        choices=("logloss", "auc", "accuracy"),
        default="logloss",
        help="metric that --patience compares (default: logloss); accuracy is of several classes",
    )
    parser.add_argument(
        "--calibrate",
        choices=("isotonic", "platt"),
        help="calibrate the probabilities on --valid after training, and save the calibration with the model",
    )
    add_progress_option(parser)
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of shuffling, sampling and stochastic rounding (default: %(default)s)"
    )
    parser.add_argument(
        "--table",
        metavar="NAME",
        help="name of the table, by which a cluster's readers find it (default: lr, fm, or multiclass)",
    )
    parser.add_argument(
        "--expected-keys",
        type=count,
        metavar="N",
        help="make room for the rows of N different features at the beginning, such as 5e6: new rows take half of the "
        "time",
    )
    parser.add_argument(
        "--slots",
        type=int,
        default=1024,
        help="slots of the table; results do not depend on the number (default: 1024)",
    )


def add_progress_option(parser: argparse.ArgumentParser) -> None:
    """Add the option that replaces the progress bar by lines."""
    parser.add_argument(
        "--progress",
        type=parse_progress,
        metavar="STEP",
        help="print lines instead of a progress bar: every STEP examples (100000), or at powers of STEP (2.0)",
    )


def add_tracking_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of experiment tracking."""
    group = parser.add_argument_group("tracking")
    group.add_argument("--tensorboard", metavar="DIR", help="write TensorBoard event files into DIR/OUTPUT-1, ...")
    group.add_argument("--mlflow", metavar="URI", help="write an MLflow run: tracking URI, or a folder for a database")
    group.add_argument("--experiment", metavar="NAME", help="MLflow experiment (default: shoal)")
    group.add_argument(
        "--register", metavar="NAME", help="make the model the next version of this registered model of MLflow"
    )
    group.add_argument(
        "--no-log-model",
        dest="log_model",
        action="store_const",
        const=False,
        help="do not store the model and its report as artifacts of the MLflow run",
    )
    group.add_argument("--log-every", type=int, metavar="N", help="batches between two log entries (default: 100)")


def add_ftrl_options(parser: argparse.ArgumentParser) -> None:
    """Add the settings of FTRL."""
    parser.add_argument("--alpha", type=float, default=0.1, help="learning rate (default: %(default)s)")
    parser.add_argument(
        "--beta",
        type=float,
        default=1.0,
        help="smoothing of the learning rate: larger means smaller first steps (default: %(default)s)",
    )
    parser.add_argument("--l1", type=float, default=0.0, help="L1 penalty (default: %(default)s)")
    parser.add_argument("--l2", type=float, default=0.0, help="L2 penalty (default: %(default)s)")


def add_normalized_option(parser: argparse.ArgumentParser) -> None:
    """Add the option that normalizes feature values."""
    parser.add_argument(
        "--normalized",
        action=argparse.BooleanOptionalAction,
        help="divide each value by the root mean square of its feature, which is learned and saved with the model "
        "(default: if there are --numeric columns)",
    )


def add_class_options(parser: argparse.ArgumentParser) -> None:
    """Add the number of classes, and the loss of several."""
    group = parser.add_argument_group(
        "several classes",
        "Labels are numbers of classes: 0, 1, ..., K - 1. FTRL has a weight for each class and feature.",
    )
    group.add_argument("--classes", type=int, metavar="K", help="number of classes, 3 or more")
    group.add_argument(
        "--multi-class",
        choices=("multinomial", "ovr"),
        help="loss: cross-entropy of softmax (multinomial, the default), or a binary regression for each class against "
        "the others (ovr)",
    )


def add_solver_options(parser: argparse.ArgumentParser) -> None:
    """Add the choice of the solver, and the settings of the batch solver."""
    group = parser.add_argument_group(
        "solver",
        "dbpg holds the examples in memory and minimizes the sum of their losses plus l1 times the sum of the absolute "
        "weights; --alpha, --beta, --l2, --epochs, --shuffle and --patience do not apply to it.",
    )
    group.add_argument(
        "--solver",
        choices=("online", "dbpg"),
        default="online",
        help="online (FTRL) or batch (dbpg) training (default: %(default)s)",
    )
    group.add_argument("--blocks", type=int, metavar="N", help="dbpg: number of feature blocks (default: 128)")
    group.add_argument(
        "--delay", type=int, metavar="N", help="dbpg: number of blocks by which a gradient may lag (default: 0)"
    )
    group.add_argument(
        "--slack",
        type=float,
        metavar="S",
        help="dbpg: slack of the KKT filter, 0 to 1 (default: 0.1); negative: no filter",
    )
    group.add_argument(
        "--tolerance",
        type=float,
        metavar="T",
        help="dbpg: stop when the KKT violation has fallen to this share of the first (default: 0.001)",
    )
    group.add_argument(
        "--passes", type=int, metavar="N", help="dbpg: maximum number of passes over all blocks (default: 100)"
    )


def add_lifecycle_options(parser: argparse.ArgumentParser) -> None:
    """Add the admission and expiry policies."""
    parser.add_argument(
        "--admit",
        type=admission,
        metavar="RULE",
        help="admission: create the row of a key after N occurrences (count:N, bloom:N:CAPACITY), or at each "
        "with probability P (probability:P)",
    )
    parser.add_argument(
        "--expire",
        action="append",
        default=[],
        type=expiry,
        metavar="RULE",
        help="expiry: after each pass remove the rows not used for C batches (ttl:C), beyond the N best (rows:N), with "
        "a norm below F (norm:F), or with a decayed count below F (score:DECAY:F); repeatable",
    )


def add_factor_options(parser: argparse.ArgumentParser) -> None:
    """Add the settings of the factors and of their Adagrad."""
    parser.add_argument("--dim", type=int, default=8, metavar="D", help="factors per key (default: %(default)s)")
    parser.add_argument(
        "--factors-lr",
        type=float,
        default=0.02,
        metavar="LR",
        help="learning rate of the factors (default: %(default)s)",
    )
    parser.add_argument(
        "--factors-n0",
        type=float,
        default=1.0,
        metavar="N0",
        help="initial sum of squares: larger means smaller first steps (default: %(default)s)",
    )
    parser.add_argument(
        "--factors-l2", type=float, default=0.0, metavar="L2", help="L2 penalty of the factors (default: %(default)s)"
    )
    parser.add_argument(
        "--init-std",
        type=float,
        default=0.01,
        metavar="S",
        help="standard deviation of the initial factors (default: 0.01)",
    )


def add_cluster_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that place the tables on a cluster."""
    group = parser.add_argument_group("cluster", "Each worker runs this command and trains on its split of the files.")
    group.add_argument(
        "--cluster",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="tcp://HOST:PORT of the scheduler; its servers hold the tables (without ADDRESS: from the environment)",
    )
    group.add_argument(
        "--consistency",
        type=parse_consistency,
        metavar="RULE",
        help="bsp (default): synchronous steps; ssp:N: workers at most N batches apart; asp: asynchronous",
    )
    group.add_argument(
        "--workers",
        type=workers_number,
        metavar="N[:M]",
        help="number of workers, or the least and the greatest one (default: from the environment)",
    )
    group.add_argument(
        "--job",
        metavar="NAME",
        help="join the job of this name, which runs on the cluster at the same time as others; jobs whose tables have "
        "one name share their weights",
    )
    group.add_argument("--curve", metavar="DIR", help="directory of the cluster's keys")
    group.add_argument(
        "--tracing",
        action="store_const",
        const=True,
        help="trace calls with OpenTelemetry, exported as its environment variables say (default: SHOAL_TRACING)",
    )
    group.add_argument(
        "--no-shared-storage",
        dest="shared_storage",
        action="store_const",
        const=False,
        help="servers cannot reach the files of this machine: the worker reads and writes all rows itself",
    )
    group.add_argument(
        "--cache",
        type=parse_cache,
        metavar="ROWS:STALENESS[:sums]",
        help="keep up to ROWS rows of each table at the worker, make the optimizer's steps in them, and hold back what "
        "changes for up to STALENESS clocks; with --consistency ssp:N or asp. :sums sends sums of gradients instead: "
        "fewer bytes, but a model learns less",
    )
    group.add_argument(
        "--filter",
        action="append",
        type=parse_filter,
        metavar="NAME[=VALUE],...",
        help="compress messages; exact: key-caching, zeros; unbiased: gradients=bfloat16 or float16, weights=bfloat16 "
        "or float16, threshold=T",
    )


def parse_cache(text: str) -> tuple[int, int, bool]:
    """Read ROWS:STALENESS, such as 1000000:8, or ROWS:STALENESS:sums: the last is whether workers make local steps."""
    numbers = text.split(":")
    local_steps = numbers[2:] != ["sums"]
    if not local_steps:
        numbers.pop()
    if len(numbers) != 2 or not all(number.isascii() and number.isdigit() for number in numbers):
        raise argparse.ArgumentTypeError(f"{text!r} is not ROWS:STALENESS, such as 1000000:8, or ROWS:STALENESS:sums")
    return int(numbers[0]), int(numbers[1]), local_steps


def parse_filter(text: str) -> list[tuple[str, str]]:
    """Read key-caching,zeros,gradients=bfloat16,threshold=0.1."""
    pairs = []
    for each in text.split(","):
        name, equals, value = each.partition("=")
        if bool(equals) != (name in ("gradients", "weights", "threshold")) or name not in FILTERS:
            raise argparse.ArgumentTypeError(
                f"{each!r} is not a filter: pass key-caching, zeros, gradients=bfloat16, weights=bfloat16 or "
                "threshold=0.1"
            )
        pairs.append((name.replace("-", "_"), value))
    return pairs


FILTERS = ("key-caching", "zeros", "gradients", "weights", "threshold")


def parse_consistency(text: str) -> Consistency:
    """Read bsp, ssp:4 or asp."""
    from shoal.consistency import ASP, BSP, SSP

    name, colon, staleness = text.partition(":")
    if (name, colon) in (("bsp", ""), ("asp", "")):
        return BSP() if name == "bsp" else ASP()
    if (name, colon) == ("ssp", ":") and staleness.isascii() and staleness.isdigit():
        return SSP(int(staleness))
    raise argparse.ArgumentTypeError(f"{text!r} is not a consistency: write bsp, ssp:N (such as ssp:4) or asp")


def parse_progress(text: str) -> int | float:
    """Read an int or, with a decimal point, a float, as `shoal.metrics.Progressive` accepts it."""
    from shoal.metrics import Progressive

    try:
        step = float(text) if "." in text else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number: pass 100000, or a factor as 2.0") from None
    try:
        Progressive(step)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return step


def parse_grid(text: str) -> tuple[str, list[float]]:
    """Read alpha=0.05,0.1."""
    name, equals, values = text.partition("=")
    try:
        if not (name and equals):
            raise ValueError
        return name, [float(value) for value in values.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a setting with numbers: write it as alpha=0.05,0.1"
        ) from None


def parse_model_grid(text: str) -> tuple[str, list[Any]]:
    """Read model.dim=8,16: values as in TOML, where words need no quotation marks."""
    name, equals, values = text.partition("=")
    if not (name and equals and values):
        raise argparse.ArgumentTypeError(f"{text!r} is not a setting with values: write it as model.dim=8,16")
    try:
        found: list[Any] = tomllib.loads(f"values = [{values}]")["values"]
    except tomllib.TOMLDecodeError:
        found = [value.strip() for value in values.split(",")]
    return name, found

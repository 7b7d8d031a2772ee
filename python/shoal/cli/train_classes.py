"""``shoal train lr --classes K``: train a logistic regression of several classes, and save it."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from shoal.base.plural import counted
from shoal.cli.answers import Answer, warn
from shoal.cli.train_run import check_learned, exit_status, make_room, saving, training_data
from shoal.cli.train_summary import rows_of

if TYPE_CHECKING:
    from shoal.models import MulticlassRegression

# Options that have no meaning for several classes, or are not implemented for them, and their defaults.
_OTHERS: dict[str, Any] = {
    "solver": "online",
    "grid": [],
    "save_all": False,
    "normalized": False,
    "admit": None,
    "expire": [],
    "positive": None,
    "names": False,
    "negative_rate": 1.0,
    "patience": None,
    "metric": "logloss",
    "calibrate": None,
    "checkpoint_every": None,
    "resume": False,
    "tensorboard": None,
    "mlflow": None,
    "progress": None,
    "cluster": None,
    "table": None,
}


def train_classes(arguments: argparse.Namespace) -> Answer:
    """Train a logistic regression of several classes."""
    from shoal.base.logs import is_json
    from shoal.models import MulticlassRegression
    from shoal.optim import FTRL
    from shoal.store.local import local

    if arguments.classes < 3:
        raise ValueError(f"--classes is {arguments.classes}: pass 3 or more, or leave it out for labels of 0 and 1")
    for name, usual in _OTHERS.items():
        if getattr(arguments, name) != usual:
            raise ValueError(f"--{name.replace('_', '-')} does not apply to --classes: leave it out")
    train, how = training_data(arguments, [arguments.output])
    interrupted: KeyboardInterrupt | None = None
    with (
        local(threads=arguments.threads, slots=arguments.slots) as store,
        MulticlassRegression(
            arguments.classes,
            FTRL(alpha=arguments.alpha, beta=arguments.beta, l1=arguments.l1, l2=arguments.l2),
            store,
            loss=arguments.multi_class or "multinomial",
            seed=arguments.seed,
        ) as model,
    ):
        make_room(arguments, store)
        try:
            model.fit(
                train,
                progress=not (arguments.quiet or is_json()),
                **{name: how[name] for name in ("valid", "epochs", "shuffle", "warm_up", "seed")},
            )
        except KeyboardInterrupt as interrupt:
            interrupted = interrupt
        check_learned(model.examples, train, interrupted)
        with saving(interrupted) as stopped:
            target = model.save(arguments.output, overwrite=arguments.overwrite)
        if interrupted:
            warn(f"interrupted after {counted(model.examples, 'example')}; the model as trained so far is in {target}")
        stats = model.table.stats()
        lines = [*_pass_lines(model), f"{'table':<12} {rows_of(stats, model.table.dim)}", f"{'model':<12} {target}"]
        facts = {
            "model": str(target),
            "interrupted": interrupted is not None,
            "classes": model.classes,
            "loss": model.loss,
            "examples": model.examples,
            "passes": [dataclasses.asdict(done) for done in model.passes],
            "rows": stats.rows,
            "bytes": stats.bytes,
        }
        return Answer("\n".join(lines), facts, exit_status(stopped()))


def _pass_lines(model: MulticlassRegression) -> list[str]:
    """Return the lines of the passes of a fit."""
    lines = []
    for done in model.passes:
        rate = done.metrics.examples / max(done.seconds, 1e-9)
        kind = "progressive" if done.number == 1 else f"pass {done.number}"
        lines.append(f"{kind:<12} {done.metrics}, {rate:,.0f} examples/s")
        if done.skipped:
            lines.append(f"{'skipped':<12} {counted(done.skipped, 'malformed line')}")
        if done.valid is not None:
            lines.append(f"{'valid':<12} {done.valid}")
    return lines

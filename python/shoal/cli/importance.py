"""``shoal importance``: measure how much a model relies on its features."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from shoal.base.settings import Setting
from shoal.base.streams import escape_text
from shoal.cli.answers import Answer
from shoal.cli.options import Command
from shoal.cli.reading import ReadingForModel, opened_model
from shoal.config import Count

EXAMPLES = """\
examples:
  $ shoal importance ctr --data day_1.tsv
  $ shoal importance ctr --data day_1.tsv --metric auc --repeats 10 --json

The cells of a feature are exchanged among the examples of a block of 100,000, and the model predicts again: how much
the log-loss rises, or the AUC falls, is what the model loses without this feature.
"""


class Importance(ReadingForModel, frozen=True, kw_only=True):
    """The options of the command."""

    repeats: Annotated[Count, "permutations of each feature in each block"] = 5
    metric: Annotated[Literal["logloss", "auc"], "what is to get worse"] = "logloss"
    seed: Annotated[int, "seed of the permutations", Setting(ge=0, metavar="N")] = 0


def importance(options: Importance) -> Answer:
    """Measure the permutation importance of each feature."""
    from shoal.tools.permutation import as_text
    from shoal.tools.permutation import importance as measure

    with opened_model(options) as (model, reader):
        found = measure(
            model,
            reader,
            repeats=options.repeats,
            metric=options.metric,
            seed=options.seed,
            progress=not (options.quiet or options.json),
        )
    facts = {"model": options.model, "data": reader.path, **msgspec.to_builtins(found)}
    return Answer("\n".join(map(escape_text, as_text(found).splitlines())), facts)


COMMANDS = (
    Command("importance", "Measure how much a model relies on each feature.", EXAMPLES, Importance, importance),
)

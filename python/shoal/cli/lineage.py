"""``shoal explain``, ``bisect``, ``forget`` and ``replay``: where weights come from, and what others would be."""

from __future__ import annotations

import math
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec

from shoal.base.plural import counted
from shoal.base.settings import Setting
from shoal.base.streams import escape_text
from shoal.cli.answers import Answer, warn
from shoal.cli.options import Command, Output
from shoal.config import Count, Dir, File

if TYPE_CHECKING:
    from shoal.lineage import RowLife, Sighting

_KEPT = "The fit has to have kept its checkpoints (shoal train --keep-checkpoints), and its data to be unchanged."

EXPLAIN_EXAMPLES = f"""\
examples:
  $ shoal train lr --data day_*.csv --format csv --label click --output ads --checkpoint-every 1000 --keep-checkpoints
  $ shoal explain ads ad=a3                # where it was seen, which batches moved its weight
  $ shoal explain ads ad=a3 user=u17 --steps 20 --json

Parts of the fit in which the features occur are made again. {_KEPT}
"""

BISECT_EXAMPLES = f"""\
examples:
  which batch made the log-loss on a held-out day worse than 0.5?
  $ shoal bisect --good ads/kept-000001000000 --bad ads --test './is_good.sh {{}}'

The command of --test gets the path of a model in place of {{}}; status 0 says that the model is good. It is run for
about as many models as the binary logarithm of the number of batches.
{_KEPT}
"""

FORGET_EXAMPLES = f"""\
examples:
  the model that training without a user's examples gives, and a certificate of it:
  $ shoal forget ads --where user=u17 --output ads-without
  without some lines, written as shoal explain names them, and without the files of an hour:
  $ shoal forget ads --examples lines.txt --output ads-without
  $ shoal forget ads --files '2026-11-29T12/*' --output ads-without

Made again is the part of the fit from the checkpoint before the first such example on. {_KEPT}
"""

REPLAY_EXAMPLES = """\
examples:
  $ shoal launch --servers 2 --workers 3 --consistency asp -- \\
        shoal train lr --data day_*.csv --format csv --label click --output ads --record ads-record
  $ shoal replay ads-record --output ads-again
  $ shoal diff ads ads-again                # the same bits
  $ shoal replay ads-record --checkpoint ads/kept-000000080000 --output ads-again --overwrite --servers 3

The data of the fit has to be where it was, unchanged, and the version of shoal the same.
"""

_Place = Annotated[str, "directory of the model", Setting(metavar="MODEL", positional=True)]


# ---- explain ---------------------------------------------------------------------------------------------------------


class Explain(Output, frozen=True, kw_only=True):
    """The options of the command."""

    model: _Place
    features: Annotated[
        tuple[str, ...],
        "features: COLUMN=TEXT, a column of numbers, or the number of a key",
        Setting(metavar="FEATURE", positional=True, several=True),
    ]
    steps: Annotated[Count, "how many of the largest steps of each row to list"] = 5


def explain(options: Explain) -> Answer:
    """Find out where rows come from."""
    from shoal.lineage import explain as explained

    found = explained(options.model, options.features, steps=options.steps)
    text = "\n\n".join("\n".join(_life(one)) for one in found)
    return Answer(text, {"model": options.model, "rows": msgspec.to_builtins(found)})


def _life(one: RowLife) -> list[str]:
    seen = counted(sum(its.examples for its in one.files), "example")
    lines = [
        f"{escape_text(one.feature)}: key {one.key}, {seen} in {counted(len(one.files), 'file')}",
        f"    first seen  {_where(one.first)}",
        f"    last seen   {_where(one.last)}",
    ]
    width = max(len(its.file) for its in one.files)
    lines += [
        f"    {escape_text(its.file):<{width}}  {counted(its.examples, 'example')}, {its.positives:,} positive"
        for its in one.files
    ]
    lines.append("    weights, by the examples that the model had learned from")
    lines += [f"    {examples:>15,}  {_weights(weights)}" for examples, weights in one.weights]
    lines.append("    largest steps")
    lines += [
        f"    {step.begin:>15,} to {step.end:,}, pass {step.epoch}: {_weights(step.before)} -> {_weights(step.after)}, "
        f"{counted(step.examples, 'example')}, {step.positives:,} positive"
        for step in one.steps
    ]
    return lines


def _where(one: Sighting) -> str:
    line = "" if one.line is None else f":{one.line}"
    return f"{escape_text(one.file)}{line}, example {one.example:,}, label {one.label:g}"


def _weights(rows: Mapping[str, Sequence[float]]) -> str:
    """Write the weights of a row: one number, or the norm of several."""
    if not rows:
        return "no row"
    several = len(rows) > 1
    return ", ".join(
        (f"{name} " if several else "")
        + (f"{row[0]:.6g}" if len(row) == 1 else f"norm {math.hypot(*row):.6g} of {len(row)}")
        for name, row in rows.items()
    )


# ---- bisect ----------------------------------------------------------------------------------------------------------


class Bisect(Output, frozen=True, kw_only=True):
    """The options of the command."""

    good: Annotated[Dir, "a kept checkpoint that passes the test"]
    bad: Annotated[Dir, "the model, or a later kept checkpoint, that does not"]
    test: Annotated[str, "command, with {} for a model; status 0: it is good", Setting(metavar="COMMAND")]


def bisect(options: Bisect) -> Answer:
    """Find the batch that broke a test."""
    from shoal.lineage import bisect as searched

    if "{}" not in options.test:
        raise ValueError(f"--test {options.test!r} has no {{}}, which the directory of a model takes the place of")

    def is_good(model: str) -> bool:
        command = options.test.replace("{}", shlex.quote(model))
        ended = subprocess.run(command, shell=True, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        if ended.returncode in _NOT_RUN:
            said = ended.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise ValueError(f"--test cannot be run, status {ended.returncode}: {escape_text(said)}")
        return ended.returncode == 0

    found = searched(options.good, options.bad, is_good, say=lambda line: None if options.quiet else warn(line))
    lines = [f"broken by the batch of examples {found.begin:,} to {found.end:,}, pass {found.epoch}"]
    lines += [
        f"    {escape_text(one.file)}" + (f", examples {one.first:,} to {one.last:,}" if one.last else "")
        for one in found.spans
    ]
    return Answer("\n".join(lines), {"bad": options.bad, **msgspec.to_builtins(found)})


_NOT_RUN = (126, 127)  # by the shell: it is no program, there is none


# ---- forget ----------------------------------------------------------------------------------------------------------


class Forget(Output, frozen=True, kw_only=True):
    """The options of the command."""

    model: _Place
    where: Annotated[
        tuple[str, ...], "leave out the examples that have this feature; repeatable", Setting(metavar="FEATURE")
    ] = ()
    examples: Annotated[
        File | None, "leave out the examples that this file names, one on each line: FILE:LINE or FILE:FIRST-LAST"
    ] = None
    files: Annotated[
        tuple[str, ...],
        "leave out the files of the data that have this name or match this pattern; repeatable",
        Setting(metavar="GLOB"),
    ] = ()
    output: Annotated[Dir, "directory of the model without them; created if it does not exist"]
    overwrite: Annotated[bool, "replace a model that is there"] = False


def forget(options: Forget) -> Answer:
    """Train a model without some examples, from the checkpoint before the first of them on."""
    from shoal.data.places import read_places
    from shoal.lineage import forget as forgotten

    if not (options.where or options.examples or options.files):
        raise ValueError("say what is to be forgotten: --where FEATURE, --examples FILE or --files GLOB")
    examples = [*([] if options.examples is None else read_places(options.examples)), *options.files]
    made = forgotten(options.model, options.where, options.output, examples=examples, overwrite=options.overwrite)
    was = f"{made.examples_before:,}"
    if made.examples_after > made.examples_before:
        was += ", when the fit was interrupted: this one is whole"
    lines = [
        f"left out      {counted(made.examples_left_out, 'example')} in each pass",
        f"made again    from {made.made_again_from:,} examples on, to {made.examples_after:,}; before {was}",
        f"model         {options.output}",
        f"certificate   {options.output}/certificate.json",
        f"to check      {made.to_check}",
    ]
    return Answer("\n".join(lines), {"output": options.output, **msgspec.to_builtins(made)})


# ---- replay ----------------------------------------------------------------------------------------------------------


class Replay(Output, frozen=True, kw_only=True):
    """The options of the command."""

    record: Annotated[str, "directory of the record", Setting(metavar="RECORD", positional=True)]
    output: Annotated[Dir, "directory of the model; created if it does not exist"]
    checkpoint: Annotated[
        Dir | None, "a kept checkpoint of the fit to begin with (default: the model before its first batch)"
    ] = None
    servers: Annotated[Count | None, "have so many servers on this machine hold the rows (default: this process)"] = (
        None
    )
    overwrite: Annotated[bool, "replace a model that is there"] = False


def replay(options: Replay) -> Answer:
    """Make a recorded fit again."""
    import contextlib

    from shoal.cluster.launch.local_cluster import launch
    from shoal.consistency import ASP
    from shoal.lineage import replay as replayed
    from shoal.lineage.order import slots_of
    from shoal.storage.open import open_dir

    with contextlib.ExitStack() as held:
        store = None
        if options.servers is not None:
            slots = slots_of(open_dir(options.record))
            store = held.enter_context(launch(options.servers, consistency=ASP(), slots=slots))
        made = replayed(
            options.record,
            options.output,
            checkpoint=options.checkpoint,
            store=store,
            overwrite=options.overwrite,
            progress=not options.quiet,
        )
    if not made.is_whole:
        warn(f"the record ends after {made.end:,} examples: {made.why}")
    lines = [
        f"made again    examples {made.begin:,} to {made.end:,} of {counted(made.workers, 'worker')}",
        f"in order      {counted(made.messages, 'message')}",
        f"model         {options.output}",
    ]
    return Answer("\n".join(lines), {"output": options.output, **msgspec.to_builtins(made)})


COMMANDS = (
    Command("explain", "Show where the weights of features come from.", EXPLAIN_EXAMPLES, Explain, explain),
    Command("bisect", "Find the batch whose training broke a test.", BISECT_EXAMPLES, Bisect, bisect),
    Command("forget", "Train a model without some examples, with a certificate.", FORGET_EXAMPLES, Forget, forget),
    Command("replay", "Make a recorded fit under SSP or ASP again, bit for bit.", REPLAY_EXAMPLES, Replay, replay),
)

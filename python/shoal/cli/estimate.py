"""``shoal estimate``: memory, servers, disk and time of a planned table."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from shoal.base.machine import local_path
from shoal.cli.answers import Answer
from shoal.cli.arguments import command, count, machine, size

if TYPE_CHECKING:
    from shoal.optim import Optimizer
    from shoal.tools.sizing import Estimate, Rates, TierEstimate

EXAMPLES = """\
examples:
  $ shoal estimate --keys 2e9 --dim 16 --optimizer adagrad
  $ shoal estimate --keys 1e9 --examples 4e9 --features 39 --memory 64GiB
  $ shoal estimate --keys 1e9 --dim 16 --servers 6 --replicas 1
  $ shoal estimate --keys 1e9 --dim 16 --optimizer adagrad --tier 16GiB
  $ shoal estimate --keys 1e8 --json > rates.json; shoal estimate --keys 1e9 --rates rates.json

Memory and the size of checkpoints are computed. Times are computed from rates, which the command measures on this
machine in a few seconds, or takes from an earlier estimate.
"""


def add(commands: Any) -> None:
    """Add the command."""
    plan = command(
        commands,
        "estimate",
        "Estimate the memory, servers, disk space and time of a planned table.",
        EXAMPLES,
        estimate,
    )
    add_table_options(plan, required=True)
    plan.add_argument(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        default="float32",
        help="type of the weights (default: float32)",
    )
    plan.add_argument("--slots", type=int, default=1024, metavar="N", help="slots of the store (default: %(default)s)")
    where = plan.add_mutually_exclusive_group()
    where.add_argument("--memory", type=size, metavar="SIZE", help="memory of a server (default: that of this machine)")
    where.add_argument("--servers", type=int, metavar="N", help="number of servers")
    plan.add_argument(
        "--tier",
        type=size,
        metavar="SIZE",
        help="memory of each server's tier, such as 8GiB: rows that do not fit are on its disk; no times are estimated",
    )
    plan.add_argument(
        "--replicas", type=int, default=0, metavar="N", help="copies of each slot on other servers (default: 0)"
    )
    plan.add_argument("--examples", type=count, default=0, metavar="N", help="examples per pass, such as 4e9")
    plan.add_argument(
        "--features", type=int, default=39, metavar="N", help="features per example (default: %(default)s)"
    )
    rates = plan.add_mutually_exclusive_group()
    rates.add_argument("--rates", metavar="FILE", help="take the rates from an earlier estimate (the output of --json)")
    rates.add_argument("--no-measure", action="store_true", help="do not measure rates, and estimate no times")
    plan.add_argument(
        "--dir", metavar="DIR", help="directory on the disk of the checkpoints (default: that of temporary files)"
    )
    machine(plan)


def add_table_options(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Add the description of a planned table."""
    parser.add_argument("--keys", type=count, required=required, metavar="N", help="number of rows, such as 2e9")
    parser.add_argument("--dim", type=int, default=1, metavar="N", help="weights per row (default: %(default)s)")
    parser.add_argument(
        "--optimizer", type=_optimizer, default="ftrl", metavar="NAME", help="optimizer: ftrl (default), adam, ..."
    )


def estimate(arguments: argparse.Namespace) -> Answer:
    """Estimate the needs of a planned table."""
    from shoal.tools import sizing

    table: dict[str, Any] = {"dim": arguments.dim, "optimizer": arguments.optimizer, "dtype": arguments.dtype}
    memory = arguments.memory
    if memory is None and arguments.servers is None and arguments.tier is None:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    job = {
        "slots": arguments.slots,
        "memory": memory,
        "servers": arguments.servers,
        "replicas": arguments.replicas,
        "examples": arguments.examples,
        "features": arguments.features,
        "tier": arguments.tier,
    }
    plan = sizing.estimate(arguments.keys, **table, **job)  # bad arguments are reported before anything is measured
    rates = None
    if arguments.rates is not None:
        rates = _rates_of(arguments.rates)
    elif not arguments.no_measure and arguments.tier is None:
        if arguments.dir is not None and not local_path(arguments.dir).is_dir():
            raise ValueError(f"--dir {arguments.dir}: there is no such directory")
        rates = sizing.measure_rates(**table, threads=arguments.threads, directory=arguments.dir)
    if rates is not None:
        plan = sizing.estimate(arguments.keys, **table, **job, rates=rates)
    return Answer(_summary(plan, arguments, memory), _facts(plan, memory))


def _facts(plan: Estimate, memory: int | None) -> dict[str, Any]:
    import dataclasses

    return dataclasses.asdict(plan) | {"memory": memory}


def _summary(plan: Estimate, arguments: argparse.Namespace, memory: int | None) -> str:
    rule = type(arguments.optimizer).__name__
    weights = "one weight" if arguments.dim == 1 else f"{arguments.dim} weights"
    servers = f"{plan.servers:,} server{'s' * (plan.servers > 1)}"
    of = f" of {memory / 2**30:,.1f} GiB" if memory is not None else ""
    copies = f", copies included (replicas={plan.replicas})" if plan.replicas else ""
    lines = [
        f"{plan.keys:,} keys, {weights} in {arguments.dtype} under {rule}: {plan.row_bytes} bytes per row, "
        f"{plan.bytes_per_key:.1f} with its hash and spare capacity",
        f"    memory      {_bytes(plan.table_bytes)} in {servers}{of}: {_bytes(plan.server_bytes)} in the largest"
        f"{copies}",
        f"    checkpoint  {_bytes(plan.checkpoint_bytes)}",
    ]
    if plan.tier is not None:
        lines[1] = (
            f"    memory      {_bytes(plan.server_bytes)} in the largest of {servers}{copies}; "
            f"{_bytes(plan.table_bytes)} in all without a tier"
        )
        lines += _tier_lines(plan, plan.tier)
    if plan.rates is not None:
        assert plan.fill_seconds is not None
        assert plan.pass_seconds is not None
        assert plan.save_seconds is not None
        assert plan.load_seconds is not None
        lines.append(
            f"    time        {_time(plan.fill_seconds)} to insert every key, {_time(plan.save_seconds)} to save, "
            f"{_time(plan.load_seconds)} to load"
        )
        if arguments.examples:
            lines.append(
                f"                {_time(plan.pass_seconds)} per pass of {arguments.examples:,} examples with "
                f"{arguments.features} features, without reading and network"
            )
        lines.append(
            f"    rates       per server: {plan.rates.inserts_per_second / 1e6:.1f} M new keys/s, "
            f"{plan.rates.pulls_per_second / 1e6:.1f} M pulled, {plan.rates.pushes_per_second / 1e6:.1f} M pushed; "
            f"{plan.rates.save_bytes_per_second / 1e9:.2f} GB/s saved, "
            f"{plan.rates.load_bytes_per_second / 1e9:.2f} loaded"
        )
    return "\n".join(lines)


def _tier_lines(plan: Estimate, tier: TierEstimate) -> list[str]:
    from shoal.tools import sizing

    lines = [
        f"    tier        {_bytes(tier.disk_bytes)} on {'disks' if plan.servers > 1 else 'disk'}; "
        f"{_bytes(tier.memory_bytes)} of memory: {_bytes(tier.index_bytes)} index, and {tier.rows_in_memory:,} rows, "
        f"{tier.share_in_memory:.1%} of all",
        f"                uniform keys, the worst case: {tier.reads_per_second(1e5):,.0f} reads/s for 100,000 "
        f"different keys a second, {tier.written_per_changed:.1f} bytes written for each byte changed",
    ]
    if not sizing.tier_pays(plan):
        lines.append(
            f"                rows of {plan.row_bytes} bytes are too narrow for a tier to pay: have keys admitted "
            "(shoal.AfterCount), drop rows (shoal.TimeToLive), or buy memory"
        )
    elif tier.share_in_memory == 1.0:
        lines.append("                all rows fit in memory: leave the tier out")
    return lines


def _bytes(count: int) -> str:
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if count >= unit:
            return f"{count / unit:,.1f} {name}"
    return f"{count:,} bytes"


def _time(seconds: float) -> str:
    for unit, name in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:,.1f} {name}"
    return f"{seconds:.1f} s"


def _optimizer(text: str) -> Optimizer:
    from shoal import optim

    rules = {
        name.lower(): rule
        for name, rule in vars(optim).items()
        if isinstance(rule, type) and issubclass(rule, optim.Optimizer) and rule not in (optim.Optimizer, optim.Add)
    }
    rule = rules.get(text.lower().replace("-", "").replace("_", ""))
    if rule is None:
        raise argparse.ArgumentTypeError(f"unknown optimizer {text!r}; choose from {', '.join(sorted(rules))}")
    return rule()


def _rates_of(file: str) -> Rates:
    import msgspec

    from shoal.tools.sizing import Rates

    try:
        facts = msgspec.json.decode(local_path(file).read_bytes())
        return Rates(**facts["rates"])
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{file} has no rates ({error}): write it with `shoal estimate --keys N --json`") from None

"""``shoal estimate``: memory, servers, disk and time of a planned table, and the rate of a job that trains it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from shoal.base.defaults import BATCH_SIZE
from shoal.base.machine import local_path
from shoal.base.plural import counted
from shoal.base.settings import Setting
from shoal.base.sizes import memory_bytes, parse_bandwidth
from shoal.cli.answers import Answer
from shoal.cli.options import Command, Output
from shoal.config import Count, Dir, File, Number, Replicas, Size, Slots, Threads

if TYPE_CHECKING:
    from shoal.optim import Optimizer
    from shoal.tools.jobs import JobEstimate, JobRates
    from shoal.tools.sizing import Estimate as Plan
    from shoal.tools.sizing import TierEstimate

EXAMPLES = """\
examples:
  $ shoal estimate --keys 2e9 --dim 16 --optimizer adagrad
  $ shoal estimate --keys 1e9 --examples 4e9 --features 39 --memory 64GiB
  $ shoal estimate --keys 1e9 --dim 16 --servers 6 --replicas 1
  $ shoal estimate --keys 1e9 --dim 16 --optimizer adagrad --tier 16GiB
  $ shoal estimate --keys 1e8 --servers 2 --workers 8 --batch-size 4096 --consistency ssp:2 --network 10Gbit
  $ shoal estimate --keys 1e8 --json > rates.json; shoal estimate --keys 1e9 --rates rates.json

Memory and the size of checkpoints are computed. Times are computed from rates, which the command measures on this
machine in a few seconds, or takes from an earlier estimate.
"""


def optimizer_of(name: str) -> Optimizer:
    """Return an optimizer, by its name in any case; ValueError if there is none."""
    from shoal import optim

    rules = {
        name.lower(): rule
        for name, rule in vars(optim).items()
        if isinstance(rule, type) and issubclass(rule, optim.Optimizer) and rule not in (optim.Optimizer, optim.Add)
    }
    rule = rules.get(name.lower().replace("-", "").replace("_", ""))
    if rule is None:
        raise ValueError(f"unknown optimizer {name!r}; choose from {', '.join(sorted(rules))}")
    return rule()


OptimizerName = Annotated[
    str, "optimizer: ftrl, adam, ...", Setting(metavar="NAME", check="shoal.cli.estimate:optimizer_of")
]
Keys = Annotated[int, "number of rows, such as 2e9", Setting(ge=0, le=10**15, metavar="N")]
Dim = Annotated[Count, "weights per row"]
Consistency = Annotated[str, "bsp, ssp:N or asp", Setting(metavar="RULE", check="shoal.consistency:parse_consistency")]
Network = Annotated[
    str | None,
    "rate of each process's connection, such as 10Gbit (default: the network takes no time)",
    Setting(metavar="RATE", check="shoal.base.sizes:parse_bandwidth"),
]
Directory = Annotated[Dir | None, "directory on the disk of the checkpoints (default: that of temporary files)"]


class Estimate(Output, frozen=True, kw_only=True):
    """The options of the command."""

    keys: Keys
    dim: Dim = 1
    optimizer: OptimizerName = "ftrl"
    dtype: Annotated[Literal["float32", "float16", "bfloat16"], "type of the weights"] = "float32"
    slots: Slots = 1024
    memory: Annotated[Size | None, "memory of a server (default: that of this machine)"] = None
    servers: Annotated[Count | None, "number of servers, instead of their memory"] = None
    tier: Annotated[
        Size | None,
        "memory of each server's tier, such as 8GiB: rows that do not fit are on its disk; no times are estimated",
    ] = None
    replicas: Replicas = 0
    examples: Annotated[int, "examples per pass, such as 4e9", Setting(ge=0, le=10**15, metavar="N")] = 0
    features: Annotated[Number, "features per example"] = 39
    rates: Annotated[File | None, "take the rates from an earlier estimate (the output of --json)"] = None
    measure: Annotated[
        bool, "whether to measure rates", Setting(negated="do not measure rates, and estimate no times")
    ] = True
    dir: Directory = None
    threads: Threads = None
    workers: Annotated[
        Count | None, "estimate the rate of a job that trains a linear model with so many workers on text"
    ] = None
    batch_size: Annotated[Count, "examples of a worker's batch"] = BATCH_SIZE
    consistency: Consistency = "bsp"
    distinct: Annotated[
        float, "share of a batch's features that are different keys", Setting(gt=0, le=1, metavar="SHARE")
    ] = 1.0
    network: Network = None
    cores: Annotated[Count | None, "cores that all processes share (default: every thread has one)"] = None


_BOUNDS = {
    "parsing": "parsing at the workers",
    "sorting": "sorting at the workers",
    "learning": "learning at the workers",
    "servers": "the servers",
    "network": "the network",
    "cores": "the cores",
    "chain": "that the steps of a clock follow one another",
}


def estimate(options: Estimate) -> Answer:
    """Estimate the needs of a planned table."""
    from shoal.tools import sizing

    if options.memory is not None and options.servers is not None:
        raise ValueError("--memory and --servers: the number of servers follows from their memory, pass one of them")
    rule = optimizer_of(options.optimizer)
    table: dict[str, Any] = {"dim": options.dim, "optimizer": rule, "dtype": options.dtype}
    memory = None if options.memory is None else memory_bytes(options.memory)
    if memory is None and options.servers is None and options.tier is None:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    job: dict[str, Any] = {
        "slots": options.slots,
        "memory": memory,
        "servers": options.servers,
        "replicas": options.replicas,
        "examples": options.examples,
        "features": options.features,
        "tier": None if options.tier is None else memory_bytes(options.tier),
    }
    plan = sizing.estimate(options.keys, **table, **job)  # bad arguments are reported before anything is measured
    _check_job(options)
    rates = None
    if options.rates is not None:
        from shoal.tools.sizing import Rates

        rates = _rates_of(options.rates, Rates, "rates")
    elif options.measure and options.tier is None:
        if options.dir is not None and not local_path(options.dir).is_dir():
            raise ValueError(f"--dir {options.dir}: there is no such directory")
        rates = sizing.measure_rates(**table, threads=options.threads, directory=options.dir)
    if rates is not None:
        plan = sizing.estimate(options.keys, **table, **job, rates=rates)
    told, facts = _summary(plan, options, memory), {**msgspec.to_builtins(plan), "memory": memory}
    if options.workers is not None:
        job_plan = _job(options, rule, plan.servers)
        told, facts = f"{told}\n{_job_summary(job_plan, options, plan.servers)}", facts | {"job": job_plan}
    return Answer(told, msgspec.to_builtins(facts))


def _check_job(options: Estimate) -> None:
    """Raise ValueError if no rate can be estimated of the job that the options describe."""
    if options.workers is None:
        for name in ("network", "cores"):
            if getattr(options, name) is not None:
                raise ValueError(f"--{name} describes a job: pass --workers, too")
    elif options.dim != 1 or options.tier is not None:
        raise ValueError(
            "--workers: the rate of a job is estimated for linear models in memory: leave out --dim, --tier"
        )
    elif options.rates is None and not options.measure:
        raise ValueError("--workers: the rate of a job follows from measured rates: leave out --no-measure")


def _job(options: Estimate, rule: Optimizer, servers: int) -> JobEstimate:
    from shoal.tools import jobs

    assert options.workers is not None
    shape: dict[str, Any] = {name: getattr(options, name) for name in ("batch_size", "features", "distinct")}
    if options.rates is not None:
        rates: JobRates = _rates_of(options.rates, jobs.JobRates, "job", "rates")
    else:
        rates = jobs.measure_job_rates(optimizer=rule, **shape)
    return jobs.estimate_job(
        rates,
        workers=options.workers,
        servers=servers,
        consistency=options.consistency,
        examples=options.examples,
        keys=options.keys,
        bandwidth=None if options.network is None else parse_bandwidth(options.network),
        cores=options.cores,
        **shape,
    )


def _job_summary(job: JobEstimate, options: Estimate, servers: int) -> str:
    assert options.workers is not None
    workers, wanted = counted(options.workers, "worker"), job.servers_wanted
    keep_up = (
        "batches are too small for servers to keep up with"
        if wanted is None
        else (f"{counted(wanted, 'server')} {'keeps' if wanted == 1 else 'keep'} up with")
    )
    shares = job.worker_share, job.server_share, job.network_share
    where = f"{workers} and {counted(servers, 'server')} under {options.consistency}"
    clock = f"{1e3 * job.clock_seconds:,.1f} ms a clock"
    return (
        f"    job         {job.examples_per_second:,.0f} examples/s with {where}, {clock}\n"
        f"                {keep_up} {workers}; the bound is {_BOUNDS[job.bound]}\n"
        f"                what follows one another: {shares[0]:.0%} learning, {shares[1]:.0%} servers, "
        f"{shares[2]:.0%} network"
    )


def _summary(plan: Plan, options: Estimate, memory: int | None) -> str:
    rule = type(optimizer_of(options.optimizer)).__name__
    weights = "one weight" if options.dim == 1 else f"{options.dim} weights"
    servers = f"{plan.servers:,} server{'s' * (plan.servers > 1)}"
    of = f" of {memory / 2**30:,.1f} GiB" if memory is not None else ""
    copies = f", copies included (replicas={plan.replicas})" if plan.replicas else ""
    lines = [
        f"{plan.keys:,} keys, {weights} in {options.dtype} under {rule}: {plan.row_bytes} bytes per row, "
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
        if options.examples:
            lines.append(
                f"                {_time(plan.pass_seconds)} per pass of {options.examples:,} examples with "
                f"{options.features} features, without reading and network"
            )
        lines.append(
            f"    rates       per server: {plan.rates.inserts_per_second / 1e6:.1f} M new keys/s, "
            f"{plan.rates.pulls_per_second / 1e6:.1f} M pulled, {plan.rates.pushes_per_second / 1e6:.1f} M pushed; "
            f"{plan.rates.save_bytes_per_second / 1e9:.2f} GB/s saved, "
            f"{plan.rates.load_bytes_per_second / 1e9:.2f} loaded"
        )
    return "\n".join(lines)


def _tier_lines(plan: Plan, tier: TierEstimate) -> list[str]:
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


def _rates_of(file: str, kind: Any, *names: str) -> Any:
    try:
        facts = msgspec.json.decode(local_path(file).read_bytes())
        for name in names:
            facts = facts[name]
        return kind(**facts)
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        with_workers = " --workers N" if "job" in names else ""
        raise ValueError(
            f"{file} has no rates{' of a job' if with_workers else ''} ({error}): write it with "
            f"`shoal estimate --keys N{with_workers} --json`"
        ) from None


COMMANDS = (
    Command(
        "estimate",
        "Estimate the memory, servers, disk space and time of a planned table, and the rate of a job.",
        EXAMPLES,
        Estimate,
        estimate,
    ),
)

"""Examination of a machine: what slows or stops shoal here, and the remedy for each finding.

    versions    the libraries that are loaded           processor   instructions, cores, quota
    memory      of the machine or its container, huge pages, swap
    limits      of files                                clock       its source, whether it is synchronized
    disk        free bytes, speed of writes, time of an fsync
    job         memory, checkpoints and disk of a planned table (sizing.py)

What is read are files of Linux below ``root``, which tests replace; where there are none, nothing is found.

Threads: no state.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from shoal import _core
from shoal.base.machine import ROOT, available_bytes, cores, meminfo, read_text
from shoal.optim import FTRL, Optimizer
from shoal.tools import sizing

_FILES = 4096  # open files that a server of a large cluster may need
_SLOW_DISK = 100e6  # bytes per second
_SLOW_SYNC = 0.05  # seconds
_DISK_BYTES = 256 << 20  # that are written to measure a disk
_UNSYNCHRONIZED = 5  # TIME_ERROR of adjtimex
_BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # of /proc/cpuinfo; the last one on ARM


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One finding."""

    # What was examined.
    topic: str
    # A note is slow or risky; a problem stops or endangers a job.
    level: Literal["ok", "note", "problem"]
    # What was found.
    text: str
    # What to do; empty if nothing has to be done.
    remedy: str = ""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A planned table."""

    keys: int
    dim: int = 1
    optimizer: Optimizer = msgspec.field(default_factory=FTRL)
    # Each on a machine like this one.
    servers: int = 1
    replicas: int = 0


def versions() -> list[Finding]:
    """Name the versions of Python and the libraries."""
    names = ("numpy", "pyzmq", "torch", "ray")
    found = [f"shoal {importlib.metadata.version('shoal')}", f"Python {platform.python_version()}"]
    for name in names:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    findings = [Finding(topic="versions", level="ok", text=", ".join(found))]
    build = _core.build_info()
    if build["checked"] or build["build_type"] != "Release":
        how = "with its invariants checked" if build["checked"] else f"as {build['build_type']}"
        findings.append(
            Finding(
                topic="versions",
                level="note",
                text=f"the engine was compiled {how}, which is slow",
                remedy="install a wheel, or build with CMAKE_BUILD_TYPE=Release",
            )
        )
    return findings


def processor(root: Path = ROOT) -> list[Finding]:
    """Examine the processor's instructions, and how many cores this process may use."""
    features = _core.build_info()["cpu_features"]
    usable, all_cores = cores(), os.cpu_count() or 1
    text = f"{platform.machine()} with {', '.join(features) or 'baseline instructions'}; {usable} of {all_cores} cores"
    findings = [Finding(topic="processor", level="ok", text=text)]
    if platform.machine() == "x86_64" and "avx2" not in features:
        findings.append(
            Finding(
                topic="processor",
                level="note",
                text="there is no AVX2: sorting, tables and optimizers are slower",
                remedy="use a machine with AVX2 (since 2013), or let the hypervisor pass it on (CPU model host)",
            )
        )
    flags = set(read_text(root / "proc/cpuinfo").split())
    if rounded := sorted(flags & _BFLOAT16_FLAGS):
        text = f'bfloat16 by {", ".join(rounded)}: click models train faster with [train] precision = "bfloat16"'
        findings.append(Finding(topic="processor", level="ok", text=text))
    words = read_text(root / "sys/fs/cgroup/cpu.max").split()
    if len(words) == 2 and words[0] != "max":
        quota = int(words[0]) / int(words[1])
        if quota < usable:
            findings.append(
                Finding(
                    topic="processor",
                    level="note",
                    text=f"the container may use the time of {quota:g} of {usable} cores: more threads are stopped",
                    remedy=f"pass --threads {max(1, int(quota))}, or raise the CPU limit of the container",
                )
            )
    return findings


def memory(root: Path = ROOT) -> list[Finding]:
    """Examine memory, huge pages and swap."""
    known = meminfo(root)
    if not known:
        return []
    free = available_bytes(root)
    text = f"{free / 2**30:.1f} GiB available of {known.get('MemTotal', 0) / 2**30:.1f} GiB"
    limit = read_text(root / "sys/fs/cgroup/memory.max").strip()
    if limit.isdigit() and int(limit) < known.get("MemTotal", 0):
        text += f", the container is limited to {int(limit) / 2**30:.1f} GiB"
    findings = [Finding(topic="memory", level="ok", text=text)]
    pages = read_text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    if "[never]" in pages:
        findings.append(
            Finding(
                topic="memory",
                level="note",
                text="transparent huge pages are off: lookups in large tables miss the TLB more often",
                remedy="echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
            )
        )
    used = known.get("SwapTotal", 0) - known.get("SwapFree", 0)
    if used > known.get("MemTotal", 0) // 100:
        findings.append(
            Finding(
                topic="memory",
                level="note",
                text=f"{used / 2**30:.1f} GiB are swapped out: rows that are swapped out make pulls wait for the disk",
                remedy="end other processes, set --memory below what is available, or turn swap off: sudo swapoff -a",
            )
        )
    return findings


def limits() -> list[Finding]:
    """Examine the limits of this process."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{files:,} open files"
    if files != resource.RLIM_INFINITY and files < _FILES:
        return [
            Finding(
                topic="limits",
                level="note",
                text=f"{text}: a server opens one for each connection, and refuses workers when none is left",
                remedy=f"ulimit -n {most if 0 < most < 65536 else 65536}, or LimitNOFILE=65536 in the unit of systemd",
            )
        ]
    return [Finding(topic="limits", level="ok", text=text)]


def clock(root: Path = ROOT) -> list[Finding]:
    """Examine the clock: what it costs to read, and whether it is synchronized."""
    source = read_text(root / "sys/devices/system/clocksource/clocksource0/current_clocksource").strip()
    if not source:
        return []
    findings = []
    if source in ("hpet", "acpi_pm", "jiffies"):
        findings.append(
            Finding(
                topic="clock",
                level="note",
                text=f"the clock is {source}, which is slow to read, and servers read it for each request",
                remedy="boot with clocksource=tsc (tsc=reliable) if the processor's counter is constant",
            )
        )
    if _is_unsynchronized():
        findings.append(
            Finding(
                topic="clock",
                level="note",
                text="the clock is not synchronized: times in logs of several machines do not compare",
                remedy="run chrony or systemd-timesyncd; deadlines and heartbeats do not depend on it",
            )
        )
    return findings or [Finding(topic="clock", level="ok", text=f"{source}, synchronized")]


def disk(directory: Path) -> tuple[list[Finding], float]:
    """Measure the disk of a directory; returns its speed in bytes per second too.

    Writes 256 MiB to a temporary file there, as far as there is room, and removes it.
    """
    state = os.statvfs(directory)
    free = state.f_bavail * state.f_frsize
    piece = np.random.default_rng(1).bytes(8 << 20)  # that no file system compresses
    count = max(1, min(_DISK_BYTES, free // 4) // len(piece))
    syncs = []
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".shoal-doctor-", buffering=0) as file:
        begin = time.perf_counter()
        for _ in range(count):
            file.write(piece)
        os.fsync(file.fileno())
        speed = count * len(piece) / (time.perf_counter() - begin)
        for _ in range(10):
            file.write(piece[:4096])
            begin = time.perf_counter()
            os.fsync(file.fileno())
            syncs.append(time.perf_counter() - begin)
    sync = statistics.median(syncs)
    text = f"{directory}: {speed / 1e6:,.0f} MB/s written, {1e3 * sync:.1f} ms for an fsync, {free / 1e9:,.1f} GB free"
    findings = [Finding(topic="disk", level="ok", text=text)]
    if speed < _SLOW_DISK:
        findings = [
            Finding(
                topic="disk",
                level="note",
                text=f"{text}: checkpoints take long",
                remedy="save to a local disk or an object store (--output s3://...)",
            )
        ]
    if sync > _SLOW_SYNC:
        findings.append(
            Finding(
                topic="disk",
                level="note",
                text=f"an fsync takes {1e3 * sync:.0f} ms, and a scheduler waits for one per change of its journal",
                remedy="put --journal on a local SSD: failovers take as much longer",
            )
        )
    return findings, speed


def job(plan: Job, *, free_bytes: int, disk_bytes: int, disk_speed: float) -> list[Finding]:
    """Compare what a planned table needs with this machine; each of its servers is on one like it."""
    needs = sizing.estimate(
        plan.keys, dim=plan.dim, optimizer=plan.optimizer, servers=plan.servers, replicas=plan.replicas
    )
    share = needs.checkpoint_bytes / plan.servers
    what = f"{plan.keys:,} keys of {plan.dim} on {plan.servers} server{'s' * (plan.servers > 1)}"
    text = (
        f"{what}: {needs.server_bytes / 1e9:,.1f} GB of memory each, checkpoints of "
        f"{needs.checkpoint_bytes / 1e9:,.1f} GB, which take {share / disk_speed:,.0f} s at the speed of this disk"
    )
    findings = []
    if free_bytes and needs.server_bytes > free_bytes:
        fewest = next(
            (
                count
                for count in range(plan.servers + 1, 16 * plan.servers + 1)
                if sizing.estimate(
                    plan.keys, dim=plan.dim, optimizer=plan.optimizer, servers=count, replicas=plan.replicas
                ).server_bytes
                <= free_bytes
            ),
            None,
        )
        more = f"--servers {fewest} would fit" if fewest else f"more than {16 * plan.servers} servers would be needed"
        findings.append(
            Finding(
                topic="job",
                level="problem",
                text=f"{text}; only {free_bytes / 1e9:,.1f} GB are available here",
                remedy=f"{more}; a smaller dim, dtype float16, --admit and --expire also help",
            )
        )
    if 2 * needs.checkpoint_bytes > disk_bytes:  # the old one stays until the new one is complete
        findings.append(
            Finding(
                topic="job",
                level="problem",
                text=f"two checkpoints of {needs.checkpoint_bytes / 1e9:,.1f} GB do not fit on the disk, which has "
                f"{disk_bytes / 1e9:,.1f} GB free: the old one is there until the new one is complete",
                remedy="save to another disk (--dir) or an object store",
            )
        )
    return findings or [Finding(topic="job", level="ok", text=text)]


def _is_unsynchronized() -> bool:
    """Whether the kernel says that nothing adjusts its clock."""
    if not sys.platform.startswith("linux"):
        return False
    buffer = ctypes.create_string_buffer(512)  # struct timex, zeros: nothing is changed
    return int(ctypes.CDLL(None).adjtimex(buffer)) == _UNSYNCHRONIZED

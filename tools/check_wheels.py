"""Test wheels where no compiler is, each with its version of Python.

    python tools/check_wheels.py [WHEEL ...] [--fast] [--cpp ARCH ...]

A wheel for this machine is installed into an environment of its own, whose PATH has no compiler and where pip may not
build anything. Its module must report the instruction sets that the kernel lists: else it would run slow code. The
tests that cibuildwheel runs (pyproject.toml) must pass; with ``--fast`` those of ``make fast``, with the packages of
requirements/dev.txt. A wheel for the other architecture runs tests/support/wheel_smoke.py under qemu-user, with a
Python that tools/get_python has fetched; the weights that it trains must have the bits of those trained here.
``--cpp`` runs the C++ tests as tools/build_wheels.py compiles them, under qemu-user if they are for the other
architecture.

Exit status 1: a test failed, or a wheel could not be tested; which, and what is missing, is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import build_wheels
from build_wheels import ROOT

_WORK = ROOT / "build" / "wheels" / "tests"
_SMOKE = ROOT / "tests" / "support" / "wheel_smoke.py"
_TIMEOUT_SECONDS = 3600
# By the name that a module reports: that of /proc/cpuinfo.
_FLAGS = {name: name for name in ("avx2", "avx512f", "avx512bw", "avx512vl")} | {
    "avx512vbmi2": "avx512_vbmi2",
    "sse4.2": "sse4_2",
}
_COMPILERS = re.compile(
    r"(.*-)?(cc|c\+\+|[gc]?cpp|gcc|g\+\+|clang|clang\+\+|c89|c99|ld|as|zig|cmake|ninja|make)(-[\d.]+)?|python.*|pip.*"
)


class FeaturesError(Exception):
    """A module does not use this machine's instruction sets; names those that it does not report."""


class UntestedError(Exception):
    """A wheel cannot be tested here; names what is missing and the remedy."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel by its name.

    Attributes
    ----------
    path : Path
    minor : int
        Of CPython 3.
    arch : str
    """

    path: Path
    minor: int
    arch: str

    @classmethod
    def of(cls, path: Path) -> Wheel:
        """Read a name.

        Raises
        ------
        ValueError
            There is no such file, or build_wheels.py gives no wheel such a name.
        """
        match = re.fullmatch(r"shoal-[^-]+-cp3(\d+)-cp3\1-manylinux\w*_(x86_64|aarch64)\.whl", path.name)
        if not match or not path.exists():
            raise ValueError(f"{path} is not a wheel that make wheel has built")
        return cls(path.resolve(), int(match[1]), match[2])


def cibuildwheel() -> tuple[list[str], list[str]]:
    """Read what cibuildwheel installs for the tests, and the test files that it runs."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]
    return table["test-requires"], re.findall(r"\{project\}/(\S+)", table["test-command"])


def commands_but_compilers(folder: Path) -> Path:
    """Fill a folder with links to this machine's commands, compilers and Pythons apart."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for command in Path("/usr/bin").iterdir():
        if not _COMPILERS.fullmatch(command.name):
            (folder / command.name).symlink_to(command)
    return folder


def unreported(features: Sequence[str], cpuinfo: str) -> list[str]:
    """Name the instruction sets of x86-64 that ``/proc/cpuinfo`` lists and a module does not report."""
    flags = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    listed = flags[1].split() if flags else []
    return [name for name, flag in _FLAGS.items() if flag in listed and name not in features]


def run(*command: str | Path, **environment: str) -> str:
    """Run a command; return what it prints.

    Raises
    ------
    subprocess.SubprocessError
        It failed, and its output has been printed, or it took too long.
    """
    done = subprocess.run(
        [str(word) for word in command], cwd=ROOT, env={**os.environ, **environment},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_TIMEOUT_SECONDS,
    )  # fmt: skip
    if done.returncode != 0:
        print(done.stdout[-8000:], flush=True)
        done.check_returncode()
    return done.stdout


def install(wheel: Wheel, venv: Path, *requirements: str) -> Path:
    """Make an environment with a wheel; return its interpreter."""
    found = build_wheels.find(wheel.minor)
    if found is None:
        raise UntestedError(f"CPython 3.{wheel.minor} is not here: {build_wheels.remedy(wheel.minor)}")
    run(found.executable, "-m", "venv", "--clear", "--without-pip", venv)
    python = venv / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "-qq", "--only-binary", ":all:",
        *requirements, wheel.path)  # fmt: skip
    return python


def check_here(wheel: Wheel, fast: bool) -> dict[str, Any]:
    """Run the tests with a wheel for this machine; return what the smoke test measures."""
    packages, files = cibuildwheel()
    chosen = ["-m", "not slow", "-n", "2"] if fast else files
    venv = _WORK / f"cp3{wheel.minor}"
    python = install(wheel, venv, *(["-r", "requirements/dev.txt"] if fast else packages))
    path = f"{venv / 'bin'}:{commands_but_compilers(_WORK / 'commands')}"
    measured = dict(json.loads(run(python, _SMOKE, PATH=path).splitlines()[-1]))
    missed = unreported(measured["cpu_features"], Path("/proc/cpuinfo").read_text())
    if missed:
        raise FeaturesError(f"its module does not use {', '.join(missed)}, which this machine has")
    # From a folder without a checkout's package, and with no compiler to be found.
    said = run(
        python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen, PATH=path, CC="/bin/false", CXX="/bin/false"
    )
    print(f"    {said.splitlines()[-1]}")
    return measured


def emulated(minor: int, arch: str) -> list[str | Path]:
    """Give the command of a Python of another architecture.

    Raises
    ------
    UntestedError
        qemu or the interpreter is missing.
    """
    qemu = shutil.which(f"qemu-{arch}") or shutil.which(f"qemu-{arch}-static")
    if qemu is None:
        raise UntestedError(f"qemu-{arch} is not here (Debian: apt install qemu-user)")
    python = build_wheels.fetched(minor, arch)
    if not python.exists():
        raise UntestedError(f"CPython 3.{minor} for {arch} is not here: {build_wheels.remedy(minor, arch)}")
    return [qemu, "-L", python.parent.parent.parent, python]


def check_emulated(wheel: Wheel) -> dict[str, Any]:
    """Import and train with a wheel for another architecture; return what the smoke test measures."""
    command = emulated(wheel.minor, wheel.arch)
    site = _WORK / f"cp3{wheel.minor}-{wheel.arch}"
    shutil.rmtree(site, ignore_errors=True)
    platforms = [f"manylinux_2_{minor}_{wheel.arch}" for minor in (28, 27, 26, 24, 17)] + [
        f"manylinux2014_{wheel.arch}"
    ]
    run(sys.executable, "-m", "pip", "install", "-qq", "--target", site, "--only-binary", ":all:",
        "--implementation", "cp", "--python-version", f"3.{wheel.minor}",
        *(f"--platform={name}" for name in platforms), wheel.path)  # fmt: skip
    return dict(json.loads(run(*command, _SMOKE, PYTHONPATH=str(site)).splitlines()[-1]))


def check_cpp(arch: str, jobs: int) -> str:
    """Compile the C++ tests for an architecture and run them; return the last line of what they print."""
    runner: list[str | Path] = []
    if arch != platform.machine():
        here = [minor for minor in build_wheels.VERSIONS if build_wheels.fetched(minor, arch).exists()]
        runner = emulated((here or build_wheels.FETCHABLE)[0], arch)[:-1]
    environment = {"SHOAL_EMULATED": "1"} if runner else {}
    return run(*runner, build_wheels.Builder(arch, jobs).tests(), **environment).splitlines()[-1]


def parser() -> argparse.ArgumentParser:
    """Describe the command."""
    whole = argparse.ArgumentParser(prog="check_wheels.py", description=__doc__.splitlines()[0])
    whole.add_argument("wheels", nargs="*", type=Path, metavar="WHEEL", help="default: those of dist")
    whole.add_argument("--fast", action="store_true", help="the tests of make fast, with the wheels for this machine")
    whole.add_argument("--cpp", nargs="+", metavar="ARCH", choices=build_wheels.ARCHITECTURES, default=[],
                       help="the C++ tests, too")  # fmt: skip
    whole.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="compilers at the same time")
    return whole


def main(arguments: Sequence[str] | None = None) -> int:
    """Test the wheels."""
    whole = parser()
    given = whole.parse_args(arguments)
    try:
        wheels = [Wheel.of(path) for path in given.wheels or sorted((ROOT / "dist").glob("*-manylinux_*.whl"))]
    except ValueError as error:
        whole.error(str(error))
    if not wheels and not given.cpp:
        whole.error("no wheels in dist: run make wheel, or name them")
    failed = []
    weights: dict[str, list[str]] = {}
    for wheel in sorted(wheels, key=lambda wheel: wheel.arch != platform.machine()):
        print(f"{wheel.path.name} ({wheel.path.stat().st_size / 1e6:.2f} MB)", flush=True)
        try:
            measured = check_here(wheel, given.fast) if wheel.arch == platform.machine() else check_emulated(wheel)
        except (FeaturesError, UntestedError, subprocess.SubprocessError) as error:
            print(f"    {error}", flush=True)
            failed.append(wheel.path.name)
            continue
        imports = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in measured["import_cpu_seconds"].items())
        print(f"    Python {measured['python']} on {measured['machine']}; CPU time of imports: {imports}", flush=True)
        print(f"    instruction sets: {', '.join(measured['cpu_features']) or 'baseline'}", flush=True)
        weights.setdefault(json.dumps(measured["weights"], sort_keys=True), []).append(wheel.path.name)
    for arch in given.cpp:
        try:
            print(f"C++ tests for {arch}: {check_cpp(arch, given.jobs)}", flush=True)
        except (UntestedError, subprocess.SubprocessError) as error:
            print(f"C++ tests for {arch}: {error}", flush=True)
            failed.append(f"C++ tests for {arch}")
    if len(weights) > 1:
        print(f"these wheels have trained different weights: {json.dumps(weights, indent=1)}")
        failed.append("equal weights")
    if failed:
        print(f"failed or not tested: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())

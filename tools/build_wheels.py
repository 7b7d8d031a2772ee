"""Build wheels for x86-64 and ARM machines with glibc 2.28 or later, without containers.

    python tools/build_wheels.py [--arch ARCH ...] [--python PYTHON ...] [--output DIR] [--jobs N]

The compiler is the clang of the package ziglang, which has the symbols of older versions of glibc for each architecture
and links its C++ runtime statically. The engine is compiled once per architecture, the two modules once per version of
Python. Of a Python only the headers and the interpreter of this machine are needed, for both architectures. auditwheel
decides whether a wheel deserves its tag; what is built is in ``build/wheels``. tools/check_wheels.py tests the result.

Without ``--python``, each version in VERSIONS is looked up as ``python3.N``, below ``$PYENV_ROOT`` and in
``build/pythons``, where tools/get_python puts Debian's; one that is not found is named and left out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = (11, 12, 13, 14)  # minor versions of CPython 3
FETCHABLE = (11, 13, 14)  # those that tools/get_python finds
GLIBC = (2, 28)
# By architecture: the number of the ELF header's e_machine.
ARCHITECTURES = {"x86_64": 62, "aarch64": 183}
_MACHINE_OFFSET = 18  # of e_machine in an ELF header
# Debian's pyconfig.h includes one of its architecture from a folder next to the other headers.
_QUERY = """
import json, os, sys, sysconfig
headers = sysconfig.get_path("include")
multiarch = sysconfig.get_config_var("MULTIARCH") or ""
config = os.path.join(os.path.dirname(headers), multiarch, os.path.basename(headers), "pyconfig.h")
print(json.dumps({
    "executable": sys.executable, "version": sys.version_info[:2], "implementation": sys.implementation.name,
    "free_threaded": bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
    "headers": os.path.exists(os.path.join(headers, "Python.h")),
    "config": config if multiarch and os.path.exists(config) else None,
}))
"""
# auditwheel examines a wheel of any architecture, but accepts a --plat of the one that it runs on only.
_AUDITWHEEL = """
import platform, sys
platform.machine = lambda: {!r}
from auditwheel.main import main
sys.exit(main())
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """A CPython of this machine that can build the modules: its headers serve every architecture.

    Attributes
    ----------
    executable : Path
    minor : int
        Of version 3.
    config : Path or None
        Debian's pyconfig.h of this machine's architecture.
    """

    executable: Path
    minor: int
    config: Path | None = None

    @property
    def tag(self) -> str:
        """Its tag in the names of wheels."""
        return f"cp3{self.minor}"


def platform_tag(arch: str) -> str:
    """Name the platform of a wheel."""
    return f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{arch}"


def target(arch: str) -> str:
    """Name what the compiler compiles for."""
    return f"{arch}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"


def module_suffix(minor: int, arch: str) -> str:
    """Name the end of the modules' file names."""
    return f".cpython-3{minor}-{arch}-linux-gnu.so"


def refusal(answer: dict[str, Any]) -> str:
    """Say why a Python cannot build wheels, or nothing; ``answer`` is what _QUERY prints."""
    major, minor = answer["version"]
    if answer["implementation"] != "cpython":
        return f"is {answer['implementation']}, CPython is needed"
    if (major, minor) < (3, VERSIONS[0]):
        return f"is {major}.{minor}, 3.{VERSIONS[0]} or later is needed"
    if answer["free_threaded"]:
        return "is free-threaded, which the modules do not support"
    if not answer["headers"]:
        return "has no headers (Debian: apt install python3-dev)"
    return ""


def ask(python: str) -> Interpreter:
    """Examine an interpreter.

    Raises
    ------
    ValueError
        It does not run, or cannot build wheels; says why.
    """
    try:
        done = subprocess.run([python, "-c", _QUERY], capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise ValueError(f"{python} does not run: {error}") from None
    answer = json.loads(done.stdout)
    if why := refusal(answer):
        raise ValueError(f"{python} {why}")
    config = Path(answer["config"]) if answer["config"] else None
    return Interpreter(executable=Path(answer["executable"]), minor=answer["version"][1], config=config)


def fetched(minor: int, arch: str = platform.machine()) -> Path:
    """Name where tools/get_python puts the interpreter of a version."""
    return ROOT / "build" / "pythons" / f"3.{minor}-{arch}" / "usr" / "bin" / f"python3.{minor}"


def remedy(minor: int, arch: str = platform.machine()) -> str:
    """Say how to get an interpreter of a version."""
    if minor not in FETCHABLE:
        native = arch == platform.machine()
        elsewhere = "--python names one of yours" if native else f"test its wheel on an {arch} machine"
        return f"Debian has no 3.{minor}; {elsewhere}"
    folder = fetched(minor, arch).parent.parent.parent.relative_to(ROOT)
    return f"tools/get_python 3.{minor} {arch} {folder} fetches Debian's, without root"


def candidates(minor: int) -> Iterator[str]:
    """Name the commands that may be a version of Python."""
    if on_path := shutil.which(f"python3.{minor}"):
        yield on_path
    yield str(fetched(minor))
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from map(str, sorted(pyenv.glob(f"versions/3.{minor}.*/bin/python3.{minor}"), reverse=True))


def find(minor: int) -> Interpreter | None:
    """Find a Python of one version on this machine."""
    for python in candidates(minor):
        try:
            found = ask(python)
        except ValueError:
            continue  # a launcher of a version that is not there, or one without headers
        if found.minor == minor:
            return found
    return None


def problems(wheel: Path, minor: int, arch: str) -> list[str]:
    """Name what is wrong with a finished wheel: its modules, their machine, licences and bill of materials."""
    wrong = []
    with zipfile.ZipFile(wheel) as files:
        names = files.namelist()
        for module in ("_core", "_reader"):
            name = f"shoal/{module}{module_suffix(minor, arch)}"
            if name not in names:
                wrong.append(f"{name} is not in it")
                continue
            with files.open(name) as file:
                head = file.read(_MACHINE_OFFSET + 2)
            machine = int.from_bytes(head[_MACHINE_OFFSET:], "little")
            if head[:4] != b"\x7fELF" or machine != ARCHITECTURES[arch]:
                wrong.append(f"{name} is not a library for {arch}: machine {machine}, not {ARCHITECTURES[arch]}")
    ends = ("licenses/LICENSE", "licenses/licenses/pybind11.txt", "licenses/licenses/LLVM.txt", "sboms/shoal.cdx.json")
    wrong += [
        f"no {end} in its metadata" for end in ends if not any(name.endswith(f".dist-info/{end}") for name in names)
    ]
    wrong += [f"{name} is bundled" for name in names if ".libs/" in name]
    return wrong


def parser() -> argparse.ArgumentParser:
    """Describe the command."""
    whole = argparse.ArgumentParser(prog="build_wheels.py", description=__doc__.splitlines()[0])
    whole.add_argument(
        "--arch", nargs="+", choices=ARCHITECTURES, default=[platform.machine()], help="default: this machine's"
    )
    whole.add_argument("--python", nargs="+", metavar="PYTHON", help="interpreters with headers (default: all found)")
    whole.add_argument(
        "--output", type=Path, default=ROOT / "dist", metavar="DIR", help="of the wheels (default: dist)"
    )
    whole.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="compilers at the same time")
    return whole


class Builder:
    """Builds the wheels of one architecture.

    Parameters
    ----------
    arch : str
    jobs : int
    """

    def __init__(self, arch: str, jobs: int) -> None:
        self.arch = arch
        self._directory = ROOT / "build" / "wheels" / arch
        self._jobs = jobs
        self._tools = self._directory / "bin"

    def write_tools(self) -> None:
        """Write the commands that CMake runs: it takes one word for each."""
        import ziglang

        zig = Path(ziglang.__file__).parent / "zig"
        self._tools.mkdir(parents=True, exist_ok=True)
        for name, options in {
            "c++": ["-target", target(self.arch), "-fno-sanitize=undefined", "-g0"],
            "ar": [],
            "ranlib": [],
        }.items():
            words = shlex.join([str(zig), name, *options])
            text = f'#!/bin/sh\nexec {words} "$@"\n'
            tool = self._tools / name
            if not tool.exists() or tool.read_text() != text:  # a new date would compile everything again
                tool.write_text(text)
                tool.chmod(0o755)

    def engine(self) -> Path:
        """Compile the engine; return its library."""
        build = self._directory / "engine"
        self.configure(build, SHOAL_TESTS="OFF", SHOAL_CPU_MODEL="ON")  # the runtime of zig reports no instruction sets
        self._run("cmake", "--build", build, "--parallel", str(self._jobs), "--target", "shoal_core")
        return build / "libshoal_core.a"

    def tests(self) -> Path:
        """Compile the C++ tests; return their program."""
        engine, build = self.engine(), self._directory / "tests"
        self.configure(build, SHOAL_TESTS="ON", SHOAL_ENGINE=str(engine))
        self._run("cmake", "--build", build, "--parallel", str(self._jobs), "--target", "shoal_tests")
        return build / "tests" / "cpp" / "shoal_tests"

    def configure(self, build: Path, **definitions: str) -> None:
        """Configure a build without Python."""
        self.write_tools()
        defined = {**self._definitions(), "CMAKE_BUILD_TYPE": "Release", "SHOAL_PYTHON": "OFF", **definitions}
        self._run(
            "cmake", "-G", "Ninja", "-S", ROOT, "-B", build, "--log-level=WARNING",
            *(f"-D{name}={value}" for name, value in defined.items()),
        )  # fmt: skip

    def wheel(self, python: Interpreter, engine: Path, output: Path) -> Path:
        """Build one wheel; return its file, which auditwheel has accepted."""
        venv = ROOT / "build" / "wheels" / f"{python.tag}-venv"
        pip = (sys.executable, "-m", "pip", "--python", venv / "bin" / "python")
        if not (venv / "bin" / "ninja").exists():
            self._run(python.executable, "-m", "venv", "--clear", "--without-pip", venv)
            self._run(*pip, "install", "-qq", "-r", ROOT / "requirements" / "build.txt")
        raw = self._directory / "raw" / python.tag
        shutil.rmtree(raw, ignore_errors=True)
        definitions = {**self._definitions(), "SHOAL_ENGINE": str(engine), "SHOAL_LINKED_RUNTIME": self._runtime()}
        if python.config:  # the same on each architecture of 64 bits
            include = self._directory / f"{python.tag}-include"
            folder = include / f"{self.arch}-linux-gnu" / f"python3.{python.minor}"
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy2(python.config, folder)
            definitions["CMAKE_CXX_FLAGS"] = f"-I{include}"
        self._run(
            *pip, "wheel", "-qq", "--no-deps", "--no-build-isolation",
            f"--config-settings=build-dir={self._directory / python.tag}",
            "--config-settings=install.strip=false",  # the linker does: this machine's strip knows its own files only
            *(f"--config-settings=cmake.define.{name}={value}" for name, value in definitions.items()),
            "--wheel-dir", raw, ROOT,
            _PYTHON_HOST_PLATFORM=f"linux-{self.arch}",
            SETUPTOOLS_EXT_SUFFIX=module_suffix(python.minor, self.arch),
            PATH=f"{venv / 'bin'}:{os.environ['PATH']}",
        )  # fmt: skip
        (built,) = raw.glob("*.whl")
        plat = platform_tag(self.arch)
        audit = _AUDITWHEEL.format(self.arch)
        self._run(sys.executable, "-c", audit, "repair", "--plat", plat, "--only-plat", "-w", output, built)
        (wheel,) = output.glob(f"{built.name.split('-cp')[0]}-{python.tag}-{python.tag}-{plat}.whl")
        return wheel

    def _definitions(self) -> dict[str, str]:
        tools = {name: str(self._tools / tool) for name, tool in
                 (("CMAKE_CXX_COMPILER", "c++"), ("CMAKE_AR", "ar"), ("CMAKE_RANLIB", "ranlib"))}  # fmt: skip
        tools["CMAKE_MODULE_LINKER_FLAGS"] = "-s"
        if self.arch != platform.machine():
            tools |= {"CMAKE_SYSTEM_NAME": "Linux", "CMAKE_SYSTEM_PROCESSOR": self.arch}
        return tools

    def _runtime(self) -> str:
        """Name the C++ runtime that is linked: its version is the compiler's."""
        said = subprocess.run([self._tools / "c++", "--version"], capture_output=True, text=True, check=True).stdout
        return f"libc++ {said.split('clang version ')[1].split()[0]}"

    def _run(self, *command: str | Path, **environment: str) -> None:
        words = [str(word) for word in command]
        done = subprocess.run(
            words, cwd=ROOT, env={**os.environ, "CMAKE_BUILD_PARALLEL_LEVEL": str(self._jobs), **environment}
        )
        if done.returncode != 0:
            raise SystemExit(f"build_wheels.py: {shlex.join(words[:4])} ... ended with code {done.returncode}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the wheels."""
    whole = parser()
    given = whole.parse_args(arguments)
    if given.jobs < 1:
        whole.error(f"--jobs must be at least 1, got {given.jobs}")
    try:
        pythons = [ask(python) for python in given.python or []]
    except ValueError as error:
        whole.error(str(error))
    if not given.python:
        found = {minor: find(minor) for minor in VERSIONS}
        pythons = [python for python in found.values() if python is not None]
        for minor, python in found.items():
            if python is None:
                print(f"left out: CPython 3.{minor}, which is not here with its headers: {remedy(minor)}")
        if not pythons:
            whole.error("no Python with headers was found: install python3-dev, or name one by --python")
    given.output.mkdir(parents=True, exist_ok=True)
    wrong = []
    for arch in dict.fromkeys(given.arch):
        builder = Builder(arch, given.jobs)
        print(f"{arch}: the engine", flush=True)
        engine = builder.engine()
        for python in pythons:
            print(f"{arch}: {python.tag} by {python.executable}", flush=True)
            wheel = builder.wheel(python, engine, given.output.resolve())
            print(f"{arch}: {wheel.name}, {wheel.stat().st_size / 1e6:.2f} MB", flush=True)
            wrong += [f"{wheel.name}: {problem}" for problem in problems(wheel, python.minor, arch)]
    for problem in wrong:
        print(problem, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())

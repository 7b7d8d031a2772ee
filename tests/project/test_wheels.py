"""tools/build_wheels.py, tools/check_wheels.py and tools/get_python, without a build and without a network."""

import json
import platform
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import build_wheels
import check_wheels
from paths import ROOT, SUPPORT


def wheel(path: Path, *, machine: int = 183, leave_out: str = "", also: str = "") -> Path:
    """Write what looks like a wheel of CPython 3.12 for ARM."""
    elf = b"\x7fELF" + bytes(14) + machine.to_bytes(2, "little")
    suffix = ".cpython-312-aarch64-linux-gnu.so"
    metadata = "shoal-1.0.dist-info"
    files = {f"shoal/_core{suffix}": elf, f"shoal/_reader{suffix}": elf}
    files |= {f"{metadata}/licenses/LICENSE": b"", f"{metadata}/sboms/shoal.cdx.json": b""}
    files |= {f"{metadata}/licenses/licenses/{name}.txt": b"" for name in ("pybind11", "LLVM")}
    if also:
        files[also] = b""
    with zipfile.ZipFile(path, "w") as target:
        for name, content in files.items():
            if not leave_out or leave_out not in name:
                target.writestr(name, content)
    return path


def test_a_wheel_is_named_after_its_oldest_glibc_and_compiled_for_it():
    assert build_wheels.platform_tag("aarch64") == "manylinux_2_28_aarch64"
    assert build_wheels.target("x86_64") == "x86_64-linux-gnu.2.28"
    assert build_wheels.module_suffix(14, "aarch64") == ".cpython-314-aarch64-linux-gnu.so"


def test_a_wheel_with_everything_for_its_machine_has_no_problems(tmp_path):
    assert build_wheels.problems(wheel(tmp_path / "a.whl"), 12, "aarch64") == []


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        ({"machine": 62}, "not a library for aarch64: machine 62, not 183"),
        ({"leave_out": "_reader"}, "shoal/_reader.cpython-312-aarch64-linux-gnu.so is not in it"),
        ({"leave_out": "pybind11"}, "no licenses/licenses/pybind11.txt in its metadata"),
        ({"leave_out": "sboms"}, "no sboms/shoal.cdx.json in its metadata"),
        ({"also": "shoal.libs/libstdc++-1.so.6"}, "shoal.libs/libstdc++-1.so.6 is bundled"),
    ],
)
def test_what_is_wrong_with_a_wheel_is_named(tmp_path, made, problem):
    (found, *_) = build_wheels.problems(wheel(tmp_path / "a.whl", **made), 12, "aarch64")
    assert problem in found


def test_an_interpreter_that_cannot_build_is_refused_with_the_reason():
    good = {"version": [3, 12], "implementation": "cpython", "free_threaded": False, "headers": True}
    assert build_wheels.refusal(good) == ""
    assert "pypy" in build_wheels.refusal({**good, "implementation": "pypy"})
    assert "3.11 or later" in build_wheels.refusal({**good, "version": [3, 10]})
    assert "free-threaded" in build_wheels.refusal({**good, "free_threaded": True})
    assert "python3-dev" in build_wheels.refusal({**good, "headers": False})


def test_an_interpreter_is_asked_for_its_version():
    assert build_wheels.ask(sys.executable).minor == sys.version_info.minor
    with pytest.raises(ValueError, match="/no/such/python does not run"):
        build_wheels.ask("/no/such/python")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--jobs", "0"], "--jobs must be at least 1, got 0"),
        (["--arch", "riscv64"], "invalid choice: 'riscv64'"),
        (["--python", "/no/such/python"], "/no/such/python does not run"),
    ],
)
def test_mistakes_in_the_arguments_are_named_before_anything_is_built(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        build_wheels.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_the_versions_and_architectures_are_those_of_the_published_wheels():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    built = project["tool"]["cibuildwheel"]
    assert built["build"] == [f"cp3{minor}-manylinux_*" for minor in build_wheels.VERSIONS]
    for arch in build_wheels.ARCHITECTURES:
        assert build_wheels.platform_tag(arch).startswith(built[f"manylinux-{arch}-image"])


def test_the_remedy_for_a_missing_interpreter_is_a_command_or_names_who_has_one():
    assert build_wheels.remedy(14, "aarch64").startswith("tools/get_python 3.14 aarch64 build/pythons/3.14-aarch64 ")
    assert "Debian has no 3.12" in build_wheels.remedy(12, "aarch64")
    script = (ROOT / "tools" / "get_python").read_text()
    versions = [int(version) for version in re.findall(r"^    3\.(\d+)\) suite=", script, re.MULTILINE)]
    assert versions == list(build_wheels.FETCHABLE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "usage: tools/get_python VERSION ARCH DIR"),
        (["3.12", "x86_64", "there"], "Debian has 3.11, 3.13 and 3.14, not 3.12"),
        (["3.14", "riscv64", "there"], "x86_64 and aarch64, not riscv64"),
    ],
)
def test_get_python_names_mistakes_before_it_fetches_anything(arguments, message, tmp_path):
    done = subprocess.run([ROOT / "tools" / "get_python", *arguments], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_wheels_are_recognized_by_their_names(tmp_path):
    path = wheel(tmp_path / "shoal-0.1.0-cp314-cp314-manylinux_2_28_aarch64.whl")
    found = check_wheels.Wheel.of(path)
    assert (found.minor, found.arch) == (14, "aarch64")
    for name in ("shoal-0.1.0-cp314-cp314-linux_x86_64.whl", "numpy-1.0-cp314-cp314-manylinux_2_28_x86_64.whl"):
        with pytest.raises(ValueError, match="is not a wheel that make wheel has built"):
            check_wheels.Wheel.of(wheel(tmp_path / name))
    with pytest.raises(ValueError, match="is not a wheel"):
        check_wheels.Wheel.of(tmp_path / "shoal-0.1.0-cp311-cp311-manylinux_2_28_x86_64.whl")


def test_wheels_are_tested_where_no_compiler_is(tmp_path):
    commands = check_wheels.commands_but_compilers(tmp_path / "bin")
    assert shutil.which("sh", path=str(commands))
    for compiler in ("cc", "c++", "gcc", "g++", "g++-12", "clang", "x86_64-linux-gnu-gcc", "ld", "cmake", "python3"):
        assert shutil.which(compiler, path=str(commands)) is None


def test_a_wheel_whose_module_does_not_use_the_instruction_sets_of_this_machine_fails_the_check(
    tmp_path, monkeypatch, capsys
):
    arch = platform.machine()
    path = wheel(tmp_path / f"shoal-0.1.0-cp312-cp312-manylinux_2_28_{arch}.whl")
    measured = {"cpu_features": ["sse4.2"], "python": "3.12.0", "machine": arch, "weights": {}}
    monkeypatch.setattr(check_wheels, "_WORK", tmp_path)
    monkeypatch.setattr(check_wheels, "install", lambda *_: Path(sys.executable))
    monkeypatch.setattr(check_wheels, "run", lambda *_, **__: json.dumps(measured))
    monkeypatch.setattr(Path, "read_text", lambda self, *_: "flags\t\t: fpu sse4_2 avx avx2 bmi1\n")
    monkeypatch.setattr(check_wheels, "cibuildwheel", lambda: ([], []))
    assert check_wheels.main([str(path)]) == 1
    output = capsys.readouterr()
    assert "its module does not use avx2, which this machine has" in output.out
    assert f"failed or not tested: {path.name}" in output.err


def test_instruction_sets_are_compared_by_the_names_of_the_kernel():
    everything = ["avx2", "avx512f", "avx512bw", "avx512vl", "avx512vbmi2", "sse4.2"]
    cpuinfo = "processor\t: 0\nflags\t\t: fpu sse4_2 avx2 avx512f avx512bw avx512vl avx512_vbmi2\nprocessor\t: 1\n"
    assert check_wheels.unreported(everything, cpuinfo) == []
    assert check_wheels.unreported([], cpuinfo) == everything
    assert check_wheels.unreported(["sse4.2"], "flags\t: fpu sse4_2\n") == []
    assert check_wheels.unreported([], "Features\t: fp asimd crc32\n") == []


def test_each_instruction_set_that_the_engine_asks_for_is_detected_where_the_runtime_detects_none():
    asked = {
        name
        for path in (ROOT / "csrc").rglob("*")
        if path.suffix in (".h", ".cc")
        for name in re.findall(r'__builtin_cpu_supports\("([^"]+)"\)', path.read_text())
    }
    detected = re.findall(r"^  k(\w+) = \d+,$", (ROOT / "csrc/base/cpu_model.cc").read_text(), re.MULTILINE)
    assert "avx2" in asked
    assert {name.replace(".", "") for name in asked} <= {name.lower() for name in detected}


def test_what_cibuildwheel_tests_is_what_check_wheels_does():
    packages, files = check_wheels.cibuildwheel()
    assert "pytest" in packages
    assert files
    assert all((ROOT / file).exists() for file in files)


def test_a_wheel_that_cannot_be_tested_fails_the_check_and_says_what_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    other = next(arch for arch in build_wheels.ARCHITECTURES if arch != platform.machine())
    path = wheel(tmp_path / f"shoal-0.1.0-cp312-cp312-manylinux_2_28_{other}.whl")
    assert check_wheels.main([str(path)]) == 1
    output = capsys.readouterr()
    assert f"qemu-{other} is not here (Debian: apt install qemu-user)" in output.out
    assert f"failed or not tested: {path.name}" in output.err


@pytest.mark.slow
def test_the_smoke_test_trains_the_same_weights_twice():
    def weights() -> dict[str, str]:
        script = [sys.executable, SUPPORT / "wheel_smoke.py"]
        done = subprocess.run(script, capture_output=True, text=True, check=True, timeout=120)
        return dict(json.loads(done.stdout)["weights"])

    assert weights() == weights()


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(
    ("variables", "options"),
    [([], ""), (["WHEELS=a.whl", "FAST=1", "CPP_ARCH=aarch64"], "a.whl --fast --cpp aarch64")],
)
def test_make_passes_the_options_of_check_wheels_and_no_others(variables, options):
    """In a dry run, without the tools that the target needs."""
    done = subprocess.run(
        ["make", "--dry-run", "check-wheels", *variables], cwd=ROOT, capture_output=True, text=True, check=True
    )
    command = re.sub(r" --jobs \d+", "", done.stdout.splitlines()[-1])
    assert command.split()[1:] == ["tools/check_wheels.py", *options.split()]

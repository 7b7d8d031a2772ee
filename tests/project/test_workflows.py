"""The workflows of .github: their schema, and what they name."""

import re
import subprocess
import sys
import tomllib

import pytest

from paths import ROOT

yaml = pytest.importorskip("yaml")

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.slow
def test_the_workflows_have_their_schema():
    pytest.importorskip("check_jsonschema")
    assert {path.stem for path in WORKFLOWS} == {"nightly", "release", "tests"}
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
    done = subprocess.run([*command, *map(str, WORKFLOWS)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_name_versions_targets_and_files_that_exist(path):
    text = path.read_text()
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {"contents": "read"}  # what a job needs beyond it, the job states
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    targets |= {"fuzz-wire", "fuzz-service", "fuzz-copies", "asan", "tsan"}
    for name, job in workflow["jobs"].items():
        assert "timeout-minutes" in job, name
        for step in job["steps"]:
            if "uses" in step:
                assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+\.\d+\.\d+", step["uses"]), step["uses"]
            for line in re.findall(r"make ([^$\n]*?)(?: \w+=.*)?$", step.get("run", ""), re.MULTILINE):
                assert set(line.split()) <= targets, line
    for name in re.findall(r"target: ([\w-]+)", text):
        assert name in targets


def test_only_the_job_that_publishes_may_sign_and_it_waits_for_every_build():
    release = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    publish = release["jobs"].pop("publish")
    assert publish["permissions"] == {"id-token": "write"}
    assert set(publish["needs"]) == set(release["jobs"])
    assert publish["if"] == "startsWith(github.ref, 'refs/tags/v')"
    assert not any("permissions" in job for job in release["jobs"].values())


def test_the_versions_of_python_are_the_same_in_every_place():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    versions = ["3.11", "3.12", "3.13", "3.14"]
    assert project["project"]["requires-python"] == f">={versions[0]}"
    built = project["tool"]["cibuildwheel"]["build"]
    assert built == [f"cp{version.replace('.', '')}-manylinux_*" for version in versions]
    images = {key: value for key, value in project["tool"]["cibuildwheel"].items() if key.endswith("-image")}
    assert images == {f"manylinux-{arch}-image": "manylinux_2_28" for arch in ("x86_64", "aarch64")}
    tests = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())
    assert tests["jobs"]["test"]["strategy"]["matrix"]["python"] == versions

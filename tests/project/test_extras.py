"""Optional dependencies: where all tests are to run, all of them are there."""

import importlib.metadata
import os
import tomllib

import pytest

from paths import ROOT

PYPROJECT = ROOT / "pyproject.toml"


def test_no_extra_is_missing_where_none_may_be():
    if not os.environ.get("SHOAL_ALL_EXTRAS"):
        pytest.skip("SHOAL_ALL_EXTRAS is not set: tests of missing extras are skipped")
    requirements = pytest.importorskip("packaging.requirements")
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    for extra, needed in extras.items():
        for one in map(requirements.Requirement, needed):
            # The size of torch is a choice: see requirements/torch.txt.
            if one.name in ("shoal", "torch") or (one.marker is not None and not one.marker.evaluate()):
                continue
            assert one.specifier.contains(importlib.metadata.version(one.name)), f"{extra}: {one}"

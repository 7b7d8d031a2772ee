"""The examples in the docstrings of the installed package run and print what they say."""

import doctest
import importlib
import pkgutil
import warnings

import numpy as np
import pytest

import shoal

MODULES = ["shoal", *(m.name for m in pkgutil.walk_packages(shoal.__path__, "shoal.") if m.name != "shoal.__main__")]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_run(name, tmp_path, monkeypatch):
    if name.startswith("shoal.torch"):
        pytest.importorskip("torch", reason="torch is an extra")
    if name.startswith("shoal.ray"):
        pytest.importorskip("ray", reason="ray is an extra")
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        if name.startswith("shoal.ray"):
            warnings.simplefilter("ignore")  # of pydantic, about Ray
        module = importlib.import_module(name)
    output: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for test in doctest.DocTestFinder().find(module, extraglobs={"np": np, "shoal": shoal}):
        runner.run(test, out=output.append)
    assert runner.failures == 0, "".join(output)

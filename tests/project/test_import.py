"""What ``import shoal`` gives, and what it does not load."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import shoal


def test_importing_the_package_loads_none_of_its_modules():
    code = "import sys, shoal; print([m for m in sys.modules if m.startswith(('shoal.', 'numpy', 'zmq', 'msgspec'))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "['shoal.base', 'shoal.base.lazy']\n", done.stderr


@pytest.mark.slow
def test_a_store_loads_neither_models_nor_the_cluster():
    code = (
        "import sys, shoal; shoal.local().close(); "
        "print(sorted({m.split('.')[1] for m in sys.modules if m.startswith('shoal.')}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "'store'" in done.stdout, done.stderr
    assert not {"cluster", "models", "torch", "serve", "data", "cli"} & set(ast.literal_eval(done.stdout))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        ("cli.cluster cluster.launch.local_cluster cluster.launch.workers", {"numpy", "zmq"}),
        ("cluster.launch.roles cluster.scheduler.scheduler", {"numpy"}),
    ],
)
def test_a_launcher_and_a_scheduler_start_without_what_they_do_not_need(modules, absent):
    code = f"import sys, {', '.join(f'shoal.{one}' for one in modules.split())}; print([*sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert not absent & set(ast.literal_eval(done.stdout)), done.stderr


def test_type_checkers_and_the_interpreter_find_each_name_in_the_same_module():
    tree = ast.parse(Path(shoal.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imported = {
        alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    imported = {name: module for name, module in imported.items() if name not in shoal._MODULES.split()}
    assert imported == {name: module for module, names in shoal._NAMES_OF.items() for name in names.split()}


@pytest.mark.parametrize("name", [*shoal.__all__, *shoal._MODULES.split()])
def test_each_name_is_there(name):
    if name in ("ray", "sklearn", "torch"):
        pytest.importorskip(name)
    assert name in dir(shoal)
    assert getattr(shoal, name) is getattr(shoal, name)


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'shoal' has no attribute 'Tables'"):
        shoal.Tables  # noqa: B018

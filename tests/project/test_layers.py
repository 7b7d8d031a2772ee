"""tools/check_layers.py finds what it is there to find."""

import pytest

import check_layers
from paths import ROOT


@pytest.fixture
def tree(tmp_path):
    """A tree that obeys every rule; each test plants one violation."""
    good = {
        "csrc/base/mix.h": '#include <cstdint>\n#include "base/check.h"\n',
        "csrc/base/memory.cc": "void* p = mmap(nullptr, n);\n",
        "csrc/base/threads.cc": "std::thread t;\n",
        "csrc/shard/shard.h": '#include "table/slot_table.h"\n#include "optim/rule.h"\n',
        "csrc/bind/module.cc": '#include <pybind11/pybind11.h>\n#include "shard/shard.h"\n',
        "python/shoal/__init__.py": "from shoal.store.local import local\n",
        "python/shoal/_reader.pyx": 'cdef extern from "text/libsvm.h" nogil:\n    pass\n',
        "python/shoal/store/local.py": "from shoal import _core\nfrom .table import Table\nimport numpy\n",
        "python/shoal/models/lr.py": "from ..store import local\nfrom . import plot\nimport shoal.data.batch\n",
        "python/shoal/data/batch.py": "",
        "python/shoal/data/rows.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import batch\n",
        "python/shoal/data/table.py": "# Over 600 lines: one list.\n" + "x = 1\n" * 700,
        "python/shoal/models/plot.py": "def draw():\n    import matplotlib.pyplot\n",
    }
    for name, text in good.items():
        plant(tmp_path, name, text)
    assert check_layers.check(tmp_path) == []
    return tmp_path


def plant(root, name, text):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        (
            "csrc/base/a.h",
            '\n#include "table/slot_table.h"\n',
            "a.h:2: base may not include table/slot_table.h",
        ),
        ("csrc/table/a.cc", '#include "optim/ftrl.h"\n', "table may not include optim/ftrl.h"),
        ("csrc/batch/a.cc", '#  include "bind/array.h"\n', "batch may not include bind/array.h"),
        ("csrc/shard/a.cc", "#include <pybind11/numpy.h>\n", "is for bind only"),
        ("csrc/shard/a.cc", "#include <Python.h>\n", "is for bind only"),
        ("csrc/base/a.cc", '#include "mix.h"\n', "write"),
        ("csrc/extra/a.cc", "", "csrc/extra is not in the table"),
        ("csrc/base/deep/a.cc", "", "csrc/base/deep is not in the table"),
        ("csrc/a.cc", "", "is not in the table"),
        ("csrc/table/a.cc", "auto* p = ::mmap (nullptr);\n", "mmap belongs in base/memory.cc"),
        ("csrc/base/memory.h", "inline void* p = mmap(nullptr);\n", "mmap belongs in base/memory.cc"),
        ("csrc/shard/a.cc", "/* two\nlines */ std::jthread t;\n", "csrc/shard/a.cc:2: a thread start belongs"),
        ("csrc/shard/a.cc", "pthread_create(&t);\n", "a thread start belongs"),
        ("csrc/shard/a.cc", 'const char* home = std::getenv("HOME");\n', "reading the environment"),
        ("python/shoal/_reader.pyx", 'cdef extern from "shard/shard.h":\n    pass\n', "the reader may not include"),
        ("python/shoal/lines.h", '#include "table/slot_table.h"\n', "the reader may not include"),
        ("python/shoal/errors.py", "from shoal.store.local import local\n", "errors may not import store"),
        ("python/shoal/table/table.py", "from .. import store\n", "table may not import store"),
        ("python/shoal/table/table.py", "import shoal\n", "table may not import __init__"),
        (
            "python/shoal/table/table.py",
            "def f():\n    import shoal.store.local\n",
            "table.py:2: table may not import store",
        ),
        ("python/shoal/data/text.py", "from ..models.lr import fit\n", "data may not import models"),
        ("python/shoal/data/text.py", "from shoal.models import lr\n", "data may not import models"),
        ("python/shoal/_core.pyi", "from shoal.table.table import Table\n", "_core may not import table"),
        ("python/shoal/extra.py", "", "shoal.extra is not in the table"),
        ("python/shoal/extra/a.py", "", "shoal.extra is not in the table"),
        (
            "python/shoal/data/batch.py",
            "def f():\n    from shoal.data import rows\n",
            "a circle of imports: data.batch, data.rows",
        ),
        ("python/shoal/data/long.py", "x = 1\n" * 601, "601 lines: split it"),
        ("csrc/table/long.h", "// x\n" * 601, "601 lines: split it"),
        ("python/shoal/optim.py", "import torch\n", "import torch inside the function"),
        (
            "python/shoal/optim.py",
            "try:\n    import x\nexcept E:\n    from sklearn.svm import SVC\n",
            "optim.py:4: import",
        ),
        ("python/shoal/sklearn.py", "import sklearn\nimport torch\n", "sklearn.py:2: import torch inside the function"),
        ("python/shoal/optim.py", "from shoal.sklearn import A\n", "optim may not import sklearn"),
        ("python/shoal/models/a.py", "class A:\n    import pyarrow\n", "import pyarrow inside the function"),
    ],
)
def test_a_planted_violation_is_found(tree, name, text, complaint):
    plant(tree, name, text)
    (found,) = check_layers.check(tree)
    assert complaint in found


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "csrc/base/a.cc",
            '// #include "shard/shard.h" and mmap(\n/* std::thread */ const char* s = "//"; int std_thread;\n',
        ),
        ("csrc/shard/a.cc", "std::this_thread::yield();\nauto n = std::thread::hardware_concurrency();\n"),
        ("python/shoal/optim.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n"),
        ("python/shoal/__main__.py", "from shoal.cli import main\n"),
        ("python/shoal/sklearn.py", "import scipy\nfrom sklearn.base import BaseEstimator\n"),
    ],
)
def test_what_only_looks_like_a_violation_passes(tree, name, text):
    plant(tree, name, text)
    assert check_layers.check(tree) == []


@pytest.mark.slow
def test_this_repository_keeps_its_layers():
    assert check_layers.check(ROOT) == []

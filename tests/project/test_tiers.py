"""Which combinations of parameters are left to the long tests."""

import pytest

pytest_plugins = ["pytester"]

CONFTEST = """
from tiers import mark_combinations

def pytest_configure(config):
    for name in ("combined", "long"):
        config.addinivalue_line("markers", name)

def pytest_collection_modifyitems(items):
    mark_combinations(items)
"""
TESTS = """
import pytest

@pytest.mark.{mark}
@pytest.mark.parametrize("a", [1, 2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("b", ["x", "y"])
@pytest.mark.parametrize("c", [True, False])
def test(a, b, c): pass
"""


@pytest.mark.parametrize(
    ("mark", "kept"),
    [
        ("combined", ["True-x-1", "False-y-2"]),
        ("combined(2)", ["True-x-1", "True-y-2", "False-x-2", "False-y-1"]),
        ("combined(3)", [f"{c}-{b}-{a}" for c in (True, False) for b in "xy" for a in (1, 2)]),
        ("long", []),
    ],
)
def test_every_value_of_a_short_combination_is_kept(pytester: pytest.Pytester, mark: str, kept: list[str]) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(TESTS.format(mark=mark))
    items, _ = pytester.inline_genitems()
    assert len(items) == 12
    assert [item.name for item in items if item.get_closest_marker("long") is None] == [
        f"test[{name}]" for name in kept
    ]

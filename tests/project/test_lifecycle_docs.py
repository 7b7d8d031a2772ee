"""docs/lifecycle.md says what the package does: its example prints what stands there, its rules are read as it says."""

from __future__ import annotations

import contextlib
import io
import re

import pytest

import shoal
from paths import ROOT
from shoal.lifecycle import parse_admission, parse_expiry

DOCUMENT = ROOT / "docs" / "lifecycle.md"


@pytest.fixture(scope="module")
def text() -> str:
    return DOCUMENT.read_text(encoding="utf-8")


def test_the_example_prints_what_stands_behind_it(text: str) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    behind = text[text.index(code) + len(code) :].lstrip("`\n")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    expected = [line[4:] for line in behind.splitlines()[: len(printed.getvalue().splitlines())]]
    assert printed.getvalue().splitlines() == expected


def test_rules_are_read_from_text_as_the_document_says(text: str) -> None:
    rows = re.findall(r"^\| `([a-z]+:[^`]+)` \| `(\w+\([^`]*\))` \|$", text, re.MULTILINE)
    assert len(rows) == 10
    for written, rule in rows:
        expected = eval(f"shoal.{rule}", {"shoal": shoal})
        parse = parse_expiry if isinstance(expected, shoal.lifecycle.Expiry) else parse_admission
        assert parse(written) == expected


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ("", "one of count:N"),
        ("count", "one of count:N"),
        ("count:2:3", "one of count:N"),
        ("count:within=3:2", "one of count:N"),
        ("count:x", "could not convert"),
        ("count:1.5", "n is a whole number, got 1.5"),
        ("count:0", "n"),
        ("count:2:speed=3", "speed"),
        ("bloom:2", "bloom:N:CAPACITY"),
        ("probability:2", "p"),
        ("ttl:9", "one of count:N"),
    ],
)
def test_text_that_is_no_rule_is_refused_with_all_forms(written: str, why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)) as caught:
        parse_admission(written)
    assert repr(written) in str(caught.value)
    with pytest.raises(ValueError, match="one of ttl:CLOCKS, score:DECAY:FLOOR, norm:FLOOR, rows:ROWS"):
        parse_expiry("count:2")

"""What the fuzzer found worth keeping, read by the fast and the slow parsers: tests/fuzz/README.md."""

from __future__ import annotations

import pytest

from fuzzing.compare import FORMATS, check
from paths import ROOT

CORPUS = ROOT / "tests" / "fuzz" / "corpus"
# What can be wrong with a line of a format, as the slow parsers call it.
WRONG = {
    "libsvm": {"label", "key", "no value", "value"},
    "libffm": {"label", "field", "no value", "value"},
    "vw": {"label", "no label", "importance", "initial", "bar", "value"},
    "csv": {"label", "importance", "value", "cells", "quote", "behind a quote", "missing"},
    "criteo": {"first column", "integer", "columns"},
}


@pytest.mark.parametrize("name", FORMATS)
def test_the_corpus_comes_to_what_the_slow_parser_says(name):
    for path in sorted((CORPUS / name).iterdir()):
        try:
            check(name, path.read_bytes())
        except AssertionError as error:
            error.add_note(str(path))
            raise


@pytest.mark.parametrize("name", FORMATS)
def test_the_corpus_has_good_lines_and_all_that_can_be_wrong(name):
    read = [check(name, path.read_bytes()) for path in sorted((CORPUS / name).iterdir())]
    assert sum(len(text.rows) for text in read) >= 10
    assert {wrong.what for text in read for _, wrong in text.faults} == WRONG[name]


def test_the_corpus_is_small():
    files = [path for path in CORPUS.rglob("*") if path.is_file()]
    assert {path.parent.name for path in files} == set(FORMATS)
    assert len(files) <= 200
    assert sum(path.stat().st_size for path in files) <= 300 * 1024

"""Names from data in what commands print: no name moves the cursor, turns text around or makes a line of its own."""

from __future__ import annotations

import json
import re

import msgspec
import numpy as np
import pytest

import shoal
from shoal.base.streams import escape_json, escape_lines, escape_text
from shoal.cli import main
from shoal.cli.answers import Answer, emit
from shoal.cli.cluster_status import _text
from status_example import STATUS

EVIL = "a\x1b]0;title\x07\x1b[2J\r\nevery checksum matches\x9b31m\u202eb\u2028c"
ALLOWED = {"\n"}


def unsafe(text: str) -> set[str]:
    """Return the characters of a text that a terminal acts upon."""
    return {c for c in text if not c.isprintable() and c not in ALLOWED}


@pytest.mark.parametrize("evil", [EVIL, "\x00", "\x7f", "\u0085", "\u2067x\u2069", "\x1b[1A\x1b[2K"])
def test_escaped_text_is_printable_and_names_what_was_there(evil):
    assert not unsafe(escape_text(evil))
    assert "\n" not in escape_text(evil)
    assert not unsafe(escape_lines(evil))
    assert escape_lines(evil).count("\n") == evil.count("\n")
    raw = json.dumps({evil: [evil]}, ensure_ascii=False)
    assert json.loads(escape_json(raw)) == {evil: [evil]}
    assert not unsafe(escape_json(raw))
    assert escape_text("Käse, 中文, \U0001f600") == "Käse, 中文, \U0001f600"


@pytest.mark.parametrize("is_json", [False, True])
def test_inspect_prints_names_of_features_and_tables_in_one_line_each(tmp_path, capsys, is_json):
    column = EVIL.partition("\r")[0]
    (tmp_path / "log.csv").write_text(f"click,{column}\n1,{column}\n0,b\n")
    how = ["--data", str(tmp_path / "log.csv"), "--format", "csv", "--label", "click", "--categorical", column]
    assert main(["train", "lr", *how, "--names", "--output", str(tmp_path / "m")]) == 0
    with shoal.local() as store:
        store.table(EVIL).assign(np.array([1], np.uint64), np.ones(1, np.float32))
        store.save(tmp_path / "c")
        store.export(tmp_path / "e")
    capsys.readouterr()
    for path, more in (("m", ["--top", "5"]), ("c", []), ("e", [])):
        assert main(["inspect", str(tmp_path / path), *more, *(["--json"] if is_json else [])]) == 0
        reported = capsys.readouterr().out
        assert not unsafe(reported)
        if is_json:
            assert json.loads(reported)
        else:
            assert "\\x1b]0;title\\x07" in reported
            assert sum(line == "every checksum matches" for line in reported.splitlines()) == 1


def test_train_prints_names_of_columns_in_one_line_each(tmp_path, capsys):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    reported = []
    for name in ("x", EVIL):
        parquet.write_table(pa.table({"click": [1, 0] * 200, name: ["a", "b"] * 200}), tmp_path / "log.parquet")
        how = ["--data", str(tmp_path / "log.parquet"), "--label", "click", "--overwrite"]
        assert main(["train", "lr", *how, "--output", str(tmp_path / "m")]) == 0
        reported.append(capsys.readouterr())
    assert not unsafe(reported[1].out)
    assert not unsafe(re.sub(r"(?m)^.*\r|\x1b\[A", "", reported[1].err))  # a progress bar
    assert "columns: " in reported[1].err
    assert reported[0].out.count("\n") == reported[1].out.count("\n")


def test_the_status_of_a_cluster_prints_what_its_members_say_in_one_line_each():
    (server, *others) = STATUS.servers
    evil = msgspec.structs.replace(
        STATUS,
        tables=(EVIL,),
        lost=EVIL,
        servers=(msgspec.structs.replace(server, about=EVIL, host=EVIL), *others),
        job=msgspec.structs.replace(STATUS.job, name=EVIL),
    )
    text, plain = _text("tcp://a:1", evil), _text("tcp://a:1", msgspec.structs.replace(STATUS, lost="x"))
    assert not unsafe(text)
    assert len(text.splitlines()) == len(plain.splitlines())


def test_no_answer_and_no_warning_controls_the_terminal(capsys):
    emit(Answer(EVIL, {}), json=False, quiet=False)
    assert main(["inspect", f"no\x1b[2J\x9b{EVIL[:8]}"]) != 0
    reported = capsys.readouterr()
    assert not unsafe(reported.out)
    assert not unsafe(reported.err)

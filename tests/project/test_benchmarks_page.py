"""The pictures of docs/benchmarks.md have the figures of its tables."""

import re
import runpy

from paths import ROOT

PAGE = ROOT / "docs" / "benchmarks.md"


def test_the_pictures_have_the_rows_and_ratios_of_the_tables():
    page = PAGE.read_text(encoding="utf-8")
    tables = runpy.run_path(str(ROOT / "bench" / "draw_benchmarks.py"))["tables"](page)
    assert list(tables) == re.findall(r"\((\S+\.svg)\)", page)
    for picture, bars in tables.items():
        texts = re.findall(r">([^<>]+)</text>", (PAGE.parent / picture).read_text(encoding="utf-8"))
        assert [text for text in texts if text in {bar.name for bar in bars}] == [bar.name for bar in bars]
        assert [text for text in texts if re.fullmatch(r"[\d.]+", text)][-len(bars) :] == [f"{b.ratio:g}" for b in bars]

"""Runs the blocks of a page of the documentation in their order, in the current folder.

    python tests/support/documents.py docs/training.md

Blocks, by the word behind their fence:

    python    run, all of a page in one namespace; with ``>>>`` in it as a doctest
    sh        run by bash, which stops at the first command that fails
    console   the lines behind ``$`` are run, and print what stands below them
    toml      written to the file that a comment before the block names

`shoal` runs in forks of one process (preloaded.py), which lack the modules that the page's environment lacks.

Everything else is a picture. A comment before a block, which pages do not show, says what is particular:

    <!-- not run: why -->           the block is not run; what it calls is still checked
    <!-- file: NAME -->             the block is the content of a file
    <!-- launched: ARGUMENTS -->    a Python block that `shoal launch ARGUMENTS` runs
    <!-- prints other numbers -->   of a console: what it prints is as long, with numbers of its own
    <!-- before: CODE -->           Python that stands for what the reader has already
"""

from __future__ import annotations

import contextlib
import doctest
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paths import ROOT
from preloaded import preloaded

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN = ("python", "sh", "console", "toml")
PORT = "8080"  # in the pages; SHOAL_DOCUMENTS_PORT takes its place

_MARK = re.compile(r"<!-- (not run|file|launched|before|prints other numbers)(?::\s(.*?))?\s*-->", re.DOTALL)
# What makes a picture a block that should have been one of RUN.
_COMMAND = re.compile(
    r"\bshoal (?:train|evaluate|predict|report|inspect|compact|export|serve|convert|audit|scheduler|server|launch"
    r"|keygen|estimate)(?=[ \n])|^\s*\$ |^(?:make|pip|python|\.venv/bin/\w+|mpirun|srun|curl) |\bshoal\.\w+\(",
    re.MULTILINE,
)


@dataclass
class Block:
    """A block of a page: ``kind`` is the word behind its fence, "" of none and of indented lines."""

    kind: str
    text: str
    line: int
    marks: dict[str, str] = field(default_factory=dict)

    @property
    def is_command(self) -> bool:
        """Whether the block is a picture that holds what a reader would run."""
        return self.kind not in RUN and _COMMAND.search(self.text) is not None


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page, in its order."""
    found: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    marks: dict[str, str] = {}
    i = 0
    while i < len(lines):
        line = lines[i]
        begin = i
        if line.lstrip().startswith("<!--"):
            while "-->" not in lines[i]:
                i += 1
            comment = "\n".join(lines[begin : i + 1]).strip()
            mark = _MARK.fullmatch(comment)
            if mark is not None:  # other comments are the page's own
                marks[mark[1]] = textwrap.dedent(mark[2] or "").strip()
            i += 1
            continue
        if line.lstrip().startswith("```"):
            indent = len(line) - len(line.lstrip())
            i += 1
            while not lines[i].lstrip().startswith("```"):
                i += 1
            text = "\n".join(inner[indent:] for inner in lines[begin + 1 : i])
            found.append(Block(line.strip()[3:].strip(), text + "\n", begin + 2, marks))
            marks = {}
        elif line.startswith("    ") and (begin == 0 or not lines[begin - 1].strip()):
            while i + 1 < len(lines) and (lines[i + 1].startswith("    ") or not lines[i + 1].strip()):
                i += 1
            found.append(Block("", textwrap.dedent("\n".join(lines[begin : i + 1])).strip() + "\n", begin + 1, marks))
            marks = {}
        elif line.strip() and marks:
            raise ValueError(f"{page.name}, line {begin + 1}: a mark belongs directly before its block")
        i += 1
    return found


def commands(block: Block) -> list[list[str]]:
    """Return the commands ``shoal ...`` of a shell block, as lists of words."""
    text = block.text
    if block.kind == "console":
        text = "\n".join(command for command, _ in console(block))
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        words: list[str] = []
        for word in [*shlex.split(line, comments=True), ";"]:
            if word in (";", "|", "&&", "&", ">", "<<'END'") or word.endswith(";"):
                if word.endswith(";") and word != ";":
                    words.append(word[:-1])
                if words[:1] == ["shoal"]:
                    found.append(words[1:])
                words = []
            else:
                words.append(word)
    return found


def console(block: Block) -> list[tuple[str, str]]:
    """Return the commands of a console, each with what stands below it."""
    found: list[tuple[str, str]] = []
    lines = iter(block.text.splitlines())
    for line in lines:
        if line.startswith("$ "):
            command = line[2:]
            while command.endswith("\\"):
                command += "\n" + next(lines)
            found.append((command, ""))
        elif line.strip():
            found[-1] = (found[-1][0], found[-1][1] + line + "\n")
    return found


# ---- running a page --------------------------------------------------------------------------------------------------


def _with_port(text: str) -> str:
    return text.replace(PORT, os.environ.get("SHOAL_DOCUMENTS_PORT", PORT))


def _shell(text: str, where: str) -> str:
    """Run commands, and end what they leave running; returns what they print."""
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        shell = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", _with_port(text)],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        try:
            status = shell.wait(timeout=200)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
        stdout.seek(0)
        stderr.seek(0)
        out, errors = stdout.read(), stderr.read()
    if status != 0 or "Traceback" in errors:
        raise SystemExit(f"{where}: status {status} of\n{text}\n{out}\n{errors}")
    return out


def _console(block: Block, where: str) -> None:
    between = "\x1e"
    steps = console(block)
    script = "".join(f"{command}\nprintf '{between}'\n" for command, _ in steps)
    for (command, expected), printed in zip(steps, _shell(script, where).split(between), strict=False):
        if expected:
            given, wanted = printed.split(), expected.split()
            if "prints other numbers" in block.marks:
                given, wanted = ([re.sub(r"\d[\d,.]*(e[+-]?\d+)?", "N", word) for word in x] for x in (given, wanted))
            if given != wanted:
                raise SystemExit(f"{where}: {command}\nprinted\n{printed}\nin place of\n{expected}")


def _python(block: Block, namespace: dict[str, Any], page: Path, where: str) -> None:
    _unblock()
    if ">>>" in block.text:
        test = doctest.DocTestParser().get_doctest(block.text, {}, page.name, str(page), block.line)
        test.globs = namespace
        messages: list[str] = []
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
        runner.run(test, out=messages.append, clear_globs=False)
        if runner.failures:
            raise SystemExit(f"{where}: {''.join(messages)}")
        return
    # Blank lines before it: a traceback names the page's line.
    exec(compile("\n" * (block.line - 1) + _with_port(block.text), str(page), "exec"), namespace)


def _unblock() -> None:
    """Have what a `pip install` of the page has brought; see BLOCKER."""
    blocked = os.environ.get("SHOAL_DOCUMENTS_BLOCKED")
    if blocked:
        wanted = set(Path(blocked).read_text().split())
        for name in [name for name, module in sys.modules.items() if module is None and name not in wanted]:
            del sys.modules[name]


def _quicken() -> None:
    """Have rates be measured on a small sample: a page shows how, not how high they are."""
    from shoal.tools import jobs, sizing

    jobs._SAMPLE_FEATURES = 1_000_000
    sizing.measure_rates.__kwdefaults__["sample_bytes"] = 8 << 20


def _prepare() -> None:
    """Have a command be that of the page: with the page's modules, and soon done."""
    _unblock()
    if "shoal.tools.jobs" in sys.modules:
        _quicken()


# Of an environment without some extras: Python's start reads which modules there are not.
BLOCKER = """\
import os, sys
with open(os.environ["SHOAL_DOCUMENTS_BLOCKED"]) as _file:
    sys.modules |= dict.fromkeys(_file.read().split())
"""


def run(page: Path) -> int:
    """Run the blocks of a page; returns how many there were."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    ran = 0
    for block in blocks(page):
        where = f"{page.name}, line {block.line}"
        if block.is_command and "not run" not in block.marks:
            raise SystemExit(f"{where}: a reader would run this, and it is neither marked nor of {', '.join(RUN)}")
        if block.kind not in RUN or "not run" in block.marks:
            continue
        if "before" in block.marks and "launched" not in block.marks:
            exec(compile(block.marks["before"], f"{where}, what comes before", "exec"), namespace)
        if "file" in block.marks:
            Path(block.marks["file"]).write_text(block.text)
        elif block.kind == "toml":
            raise SystemExit(f"{where}: which file is it? <!-- file: NAME -->")
        elif "launched" in block.marks:
            Path("launched.py").write_text(block.marks.get("before", "") + "\n" + block.text)
            _shell(f"shoal launch {block.marks['launched']} launched.py", where)
        elif block.kind == "sh":
            _shell(block.text, where)
        elif block.kind == "console":
            _console(block, where)
        else:
            _python(block, namespace, page, where)
        ran += 1
    return ran


def _main(page: Path) -> None:
    ran = [block for block in blocks(page) if block.kind in RUN and "not run" not in block.marks]
    called = [words for block in ran if block.kind in ("sh", "console") for words in commands(block)]
    modules = ["shoal.cli", "shoal.models"]
    if ["train", "ctr"] in [words[:2] for words in called] and sys.modules.get("torch", True):
        modules += ["shoal.torch.config", "torch._dynamo"]
    if "estimate" in [words[0] for words in called]:
        modules.append("shoal.tools.jobs")
    with preloaded(modules, _prepare) if called else contextlib.nullcontext():
        print(f"{run(page)} blocks ran")


if __name__ == "__main__":
    _main(Path(sys.argv[1]).resolve())

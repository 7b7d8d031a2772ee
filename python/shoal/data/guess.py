"""Guessing the format of a file: by its first line, and where that fits several formats, by its name.

    PAR1...                                      parquet
    0 or 1, then 39 columns between tabs         criteo
    label 3:1 7:0.5                              libsvm
    label 0:3:1 1:7:0.5                          libffm
    label |namespace name:value                  vw
    cells between tabs, or between commas        tsv, csv: with a header

A guess is for interactive use; a format that was named is never overridden.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from shoal.data.files import File, Wheres, files_of
from shoal.data.source import LINE_LIMIT_BYTES, Lines, LineTooLongError

_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_BY_NAME = {
    ".libsvm": "libsvm",
    ".svm": "libsvm",
    ".svmlight": "libsvm",
    ".libffm": "libffm",
    ".ffm": "libffm",
    ".vw": "vw",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".pq": "parquet",
}
_NUMBER = rb"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_LIBSVM = re.compile(rb"%s(?: +\d+:%s)+ *(?:#.*)?" % (_NUMBER, _NUMBER))
_LIBFFM = re.compile(rb"%s(?: +\d+:\d+:%s)+ *" % (_NUMBER, _NUMBER))
_VW = re.compile(rb"(?:%s(?: +%s)*)? *(?:'?[^|\s,]+)?\|[^,]*" % (_NUMBER, _NUMBER))
_CRITEO = re.compile(rb"[01]?\t(?:-?\d*\t){13}(?:[0-9a-fA-F]*\t){25}[0-9a-fA-F]*")


def guess_format(where: Wheres, options: Mapping[str, Any] | None = None) -> str:
    r"""Guess the format of a file, the first one of several.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "train.txt")
    ...     _ = path.write_text("1 3:1 7:0.5\n")
    ...     guess_format(path)
    'libsvm'
    """
    file = files_of(where, options)[0]
    if not file.seekable:
        raise ValueError(f"{file.name} is a stream, whose format cannot be detected: name it, as in format='libsvm'")
    by_name = _by_name(file.name)
    with file.open() as opened:
        if by_name == "parquet" or opened.read(4) == b"PAR1":
            return "parquet"
    found = _by_line(_first_line(file), by_name)
    if found is None:
        raise ValueError(
            f"{file.name} has no recognizable format, neither by its first line nor by its name: name it, as in "
            "format='libsvm'"
        )
    return found


def _by_name(name: str) -> str | None:
    path = PurePosixPath(name.lower())
    return _BY_NAME.get(PurePosixPath(path.stem if path.suffix in _COMPRESSED else path.name).suffix)


def _first_line(file: File) -> bytes:
    try:
        for block in Lines(file, line_limit_bytes=LINE_LIMIT_BYTES):
            for line in bytes(block.text).splitlines():
                if line.strip():
                    return line.strip(b"\r\n ")
    except LineTooLongError:
        pass
    return b""


def _by_line(line: bytes, by_name: str | None) -> str | None:
    """Return the format that a first line has, or that it leaves to the name."""
    for form, pattern in (("criteo", _CRITEO), ("libsvm", _LIBSVM), ("libffm", _LIBFFM)):
        if pattern.fullmatch(line):
            return form
    if by_name is not None:
        return by_name
    if _VW.fullmatch(line):
        return "vw"
    is_text = not any(byte < 32 and byte != 9 for byte in line)
    if is_text and (b"\t" in line or b"," in line):
        return "tsv" if line.count(b"\t") > line.count(b",") else "csv"
    return None

"""``shoal-config``: the flags with which programs in C, C++ and Rust are built on the prediction library."""

from __future__ import annotations

import argparse
import shlex
import sys
from importlib import metadata
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent
_LIBRARY = "libshoal_predict.so"
_EXAMPLES = """\
examples:
  $ cc predict.c $(shoal-config --cflags --libs) -o predict
  $ c++ predict.cc $(shoal-config --cflags --libs) -o predict
  $ rustc predict.rs $(shoal-config --rustc) -o predict

docs/c-library.md documents the library.
"""


def main(words: list[str] | None = None) -> None:
    """Print the flags that are asked for."""
    parser = argparse.ArgumentParser(
        prog="shoal-config",
        description="Print the flags with which programs are built on shoal/predict.h and its library.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cflags", action="store_true", help="flags to compile with")
    parser.add_argument("--libs", action="store_true", help="flags to link with; the program finds the library there")
    parser.add_argument("--rustc", action="store_true", help="flags for rustc")
    parser.add_argument("--prefix", action="store_true", help="the folder of include and lib")
    parser.add_argument("--version", action="version", version=metadata.version("shoal"))
    asked = parser.parse_args(words)
    if not (asked.cflags or asked.libs or asked.rustc or asked.prefix):
        parser.print_help(sys.stderr)
        raise SystemExit(2)
    library = _PACKAGE / "lib" / _LIBRARY
    if not library.exists():
        raise SystemExit(f"shoal-config: {library} is not there: install shoal with pip, which builds it")
    folder = str(library.parent)
    flags: list[str] = []
    if asked.prefix:
        flags.append(str(_PACKAGE))
    if asked.cflags:
        flags.append(f"-I{_PACKAGE / 'include'}")
    if asked.libs:
        flags += [f"-L{folder}", f"-Wl,-rpath,{folder}", "-lshoal_predict"]
    if asked.rustc:
        flags += ["-L", folder, "-C", f"link-arg=-Wl,-rpath,{folder}"]
    sys.stdout.write(shlex.join(flags) + "\n")


if __name__ == "__main__":
    main()

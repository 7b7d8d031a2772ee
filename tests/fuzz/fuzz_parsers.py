"""Fuzz the parsers of text against their slow references: see README.md here.

make fuzz FORMAT=vw SECONDS=60              # builds the package first; all formats without FORMAT

python tests/fuzz/fuzz_parsers.py vw [options and folders of libFuzzer]
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from fuzzing.compare import FORMATS, check


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in FORMATS:
        sys.exit(f"usage: {sys.argv[0]} {'|'.join(FORMATS)} [options and folders of libFuzzer]")
    script, name, *options = sys.argv

    def one(data: bytes) -> None:
        check(name, data)

    # libFuzzer starts itself by this command, to merge folders.
    atheris.Setup([shlex.join([sys.executable, script, name]), *options], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()

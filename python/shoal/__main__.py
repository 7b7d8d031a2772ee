"""``python -m shoal`` is the command ``shoal``."""

import sys

from shoal.cli import run

if __name__ == "__main__":
    sys.exit(run())

"""Where things are in the source tree."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"  # files that every later version must read
SUPPORT = Path(__file__).parent

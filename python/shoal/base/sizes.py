"""Sizes in bytes and rates of networks, as people write them.

Threads: no state.
"""

import re

from shoal.base.scalars import plain

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(?:([kmgt])(?:i?b)?|b)?", re.IGNORECASE)
_BITS = re.compile(r"(\d+(?:\.\d+)?) ?([kmg])bit(?:/s)?", re.IGNORECASE)


def memory_bytes(memory: object) -> int:
    """Return a number of bytes that is given as a number, or as text such as "8GiB"."""
    found = parse_size(memory) if isinstance(memory, str) else plain(memory)
    if isinstance(found, bool) or not isinstance(found, int) or not 0 < found < 2**63:
        raise ValueError(f"memory must be a number of bytes above 0, or a size such as '8GiB', got {memory!r}")
    return found


def check_size(size: int | str) -> None:
    """Raise ValueError unless a number of bytes above 0 is given, or text of one."""
    if (parse_size(size) if isinstance(size, str) else size) < 1:
        raise ValueError(f"{size!r} is not a size above 0: write it as 8GiB, 512M or 100000")


def parse_size(text: str) -> int:
    """Parse a number of bytes: 8GiB, 8G, 1.5g, 512 MB or 100000; units are powers of 1024."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not a size: write it as 8GiB, 512M or 100000")
    number, unit = found.groups()
    return int(float(number) * 1024 ** (" kmgt".index((unit or " ").lower())))


def parse_bandwidth(text: str) -> float:
    """Parse the rate of a network into bytes a second: 10Gbit, 1.5 Gbit/s or 100Mbit; units are powers of 1000."""
    found = _BITS.fullmatch(text.strip())
    if found is None or float(found[1]) == 0:
        raise ValueError(f"{text!r} is not the rate of a network: write it as 10Gbit or 100Mbit")
    return float(found[1]) * 1000.0 ** (" kmg".index(found[2].lower())) / 8

"""Sizes in bytes, as people write them.

Threads: no state.
"""

import re

__all__ = ["parse_size"]

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(?:([kmgt])(?:i?b)?|b)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Parse a number of bytes: 8GiB, 8G, 1.5g, 512 MB or 100000; units are powers of 1024.

    Raises
    ------
    ValueError
        The text is something else.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not a size: write it as 8GiB, 512M or 100000")
    number, unit = found.groups()
    return int(float(number) * 1024 ** (" kmgt".index((unit or " ").lower())))

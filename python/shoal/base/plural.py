"""Numbers with their nouns, for messages: 1 worker, 2 workers."""


def counted(number: int, noun: str) -> str:
    """Return a number with thousands separators and its noun, in the plural if needed.

    Examples
    --------
    >>> counted(1, "worker"), counted(12_000, "pass")
    ('1 worker', '12,000 passes')
    """
    ending = "" if number == 1 else "es" if noun.endswith(("s", "x", "ch")) else "s"
    return f"{number:,} {noun}{ending}"

"""The key of a feature by its name, as a user writes it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from shoal.data.criteo import INTEGER_COLUMNS, integer_key
from shoal.data.hashing import hash_cells, hash_strings
from shoal.data.interactions import combined_key
from shoal.data.readers import field_number
from shoal.data.rows import CRITEO, LIBFFM, LIBSVM, VW


def key_of_name(form: str, name: str, schema: Mapping[str, Any] | None = None) -> int:
    """Return the key of a feature by its name.

    Parameters
    ----------
    form : str
        The format of the data, such as "csv": `Reader.format`.
    name : str
        COLUMN=TEXT, a numeric COLUMN, FIRST * SECOND, or the number of a key. COLUMN is a column, I1 to C26 of
        Criteo's logs, a namespace of Vowpal Wabbit, or a field of libffm.
    schema : mapping, optional
        `Reader.schema`, where a column of lists shares the keys of another one.

    Returns
    -------
    int

    Raises
    ------
    ValueError
        The format has no columns, and the name is no number.

    Examples
    --------
    >>> key_of_name("csv", "user=u17") == int(hash_cells(["u17"], field_number("csv", "user"))[0])
    True
    """
    if name.isdecimal():
        if int(name) >= 2**64:
            raise ValueError(f"{name} is no key: keys are whole numbers from 0 to 2**64 - 1")
        return int(name)
    if " * " in name:
        return functools.reduce(combined_key, (key_of_name(form, one, schema) for one in name.split(" * ")))
    column, is_text, text = name.partition("=")
    column = (schema or {}).get("lists", {}).get(column, column)
    if form in ("", LIBSVM.name):
        raise ValueError(f"{name!r} is no number, and there are no columns to find its key by: pass the key")
    field = field_number(form, column)
    if form == LIBFFM.name:
        if not text.isdecimal():
            raise ValueError(f"{name!r} is not FIELD=KEY, two numbers")
        return int(text)
    if form == VW.name or (form == CRITEO.name and field > INTEGER_COLUMNS):
        return int(hash_strings([text], field)[0])
    if form == CRITEO.name:
        return integer_key(field, text)
    return int((hash_cells([text], field) if is_text else hash_strings([""], field))[0])
